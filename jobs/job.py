"""The Job base class: what a user writes so that the runner can train it, and nothing more.

A job names its dataset, model, optimizer and loss; everything else has a default that fits most.
Promises: the runner calls nothing of a job but what stands here, and says of each method who calls
it and when. A job knows no ranks: what it returns has to be the same on every rank, and is checked.
"""

# ruff: noqa: ARG002, B027 - an optional method's default does nothing with what it is given.

from __future__ import annotations

import abc
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from jobs.errors import JobError

if TYPE_CHECKING:
    from torch.utils.data import Dataset

    from jobs.sampling import Sampling

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Mean:
    """A weighted mean that is still open: `sum / count`, added exactly over micro-batches and ranks.

    As a loss: the sum over all items (tokens, pixels) and how many there were, so that the step is
    the mean over the items of the whole global batch. As a metric: likewise over the evaluation set.
    """

    sum: Tensor
    """The sum of all items; for a loss it carries the gradient. A plain number is taken as well."""

    count: Tensor | int | float
    """The number, or total weight, of the items; at least 0, and it never carries a gradient."""

    def __post_init__(self) -> None:
        """Check both halves.

        Raises:
            JobError: `sum` or `count` is no single number, `count` is negative or carries a gradient.
        """
        if isinstance(self.sum, int | float):
            object.__setattr__(self, "sum", torch.tensor(float(self.sum), dtype=torch.float64))
        for name, value in (("sum", self.sum), ("count", self.count)):
            if not _is_scalar(value):
                raise JobError(f"Mean.{name}: found {_describe(value)}, expected a single number")
        if isinstance(self.count, Tensor):
            if self.count.requires_grad:
                raise JobError("Mean.count: found a tensor with a gradient, expected a plain count")
        elif not (self.count >= 0 and math.isfinite(self.count)):
            raise JobError(f"Mean.count: found {self.count}, expected a finite number, at least 0")

    @property
    def value(self) -> float:
        """`sum / count` as a number, nan where nothing was counted; waits for the device."""
        count = float(self.count)
        return float(self.sum.detach()) / count if count else math.nan


Loss: TypeAlias = Tensor | Mean
Metric: TypeAlias = Mean | Tensor | float
Optimizers: TypeAlias = Optimizer | dict[str, Optimizer]
Schedule: TypeAlias = LRScheduler | tuple[LRScheduler, str]


class JobRun(Protocol):
    """What a hook sees of the run."""

    @property
    def step(self) -> int:
        """Steps of the run that are done."""

    @property
    def epoch(self) -> int:
        """The epoch, counted from 0."""

    @property
    def generation(self) -> int:
        """The number of this start of the workers."""

    @property
    def device(self) -> torch.device:
        """The device of this rank."""

    @property
    def is_primary(self) -> bool:
        """Whether this is rank 0."""

    def log(self, *args: Any, **values: Any) -> None:
        """Write named numbers into the run's journal."""

    def stop(self, *args: Any, **kwargs: Any) -> None:
        """Ask for an early, orderly end of the run."""

    def alive(self) -> None:
        """Say that what takes long here goes on well, so that it is not taken for hung."""


class Job(abc.ABC):
    """What is trained; subclass it and write `dataset`, `model`, `optimizer` and `loss`.

    The constructor's arguments are the config's `args`; keep it cheap, it runs on every rank at
    every restart, before the ranks know of each other.
    """

    collate: Callable[[list[Any]], Any] | None = None
    """Turns a list of items into a batch, as a DataLoader's `collate_fn`; None: torch's default."""

    def prepare(self) -> None:
        """Download, unpack, tokenise. Called once per node at each start, before the ranks meet."""

    @abc.abstractmethod
    def dataset(self) -> Dataset[Any]:
        """The training set, map-style (`len` and `[i]`), the same on every rank."""

    @abc.abstractmethod
    def model(self) -> nn.Module:
        """The architecture alone: no device, no wrapper. Called on every rank at every restart."""

    def initialize(self, model: nn.Module) -> None:
        """Set first weights, for instance pretrained ones; primary only, once in the whole run."""

    @abc.abstractmethod
    def optimizer(self, model: nn.Module) -> Optimizers:
        """The optimizer, or with several phases `{"disc": optimizer, "gen": optimizer}`."""

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        """The mean loss over the batch, or `Mean(sum, count)` where items differ in weight.

        Raises:
            NotImplementedError: The job has neither `loss` nor `losses`.
        """
        raise NotImplementedError(f"{type(self).__name__} has neither loss() nor losses()")

    def losses(self) -> Mapping[str, Callable[[nn.Module, Any], Loss]] | None:
        """The phases of a step in order, each a loss with the optimizer of that name; None: `loss`."""
        return None

    def scheduler(
        self, optimizer: Optimizers, total_steps: int
    ) -> Schedule | Mapping[str, Schedule] | None:
        """A scheduler, stepped after each step; `(scheduler, "epoch")`: after each epoch; several by name."""
        return None

    def to_device(self, batch: Any, device: torch.device) -> Any:
        """Move a batch to the device of the rank; keeps the shape of nested containers."""
        return _move(batch, device)

    def sampling(self, dataset: Dataset[Any]) -> Sampling | None:
        """How often each sample is wanted: Weighted or Mixture; None: in each epoch exactly once."""
        return None

    def fingerprint(self, dataset: Dataset[Any]) -> str | None:
        """A text that differs where the data differs; None: the runner probes length and items."""
        return None

    def eval_dataset(self) -> Dataset[Any] | Mapping[str, Dataset[Any]] | None:
        """The evaluation set, several by name, or None; every rank evaluates a part of it."""
        return None

    def metrics(self, model: nn.Module, batch: Any) -> Mapping[str, Metric]:
        """Metrics of one evaluation batch, added exactly over batches and ranks.

        A Mean is added by its halves and shown as their quotient; anything else is a plain sum.
        The default is the loss.
        """
        phases = self.losses() or {"loss": self.loss}
        return {name: _as_mean(phase(model, batch), batch) for name, phase in phases.items()}

    def summarize(self, totals: Mapping[str, Metric]) -> dict[str, float]:
        """The figures of an evaluation, from the metrics summed over the whole evaluation set."""
        return {
            name: total.value if isinstance(total, Mean) else float(total)
            for name, total in totals.items()
        }

    def on_step(self, run: JobRun) -> None:
        """Called on the primary only, after each step; randomness is restored behind it."""

    def on_epoch(self, run: JobRun) -> None:
        """Called on the primary only, at the end of each epoch; randomness is restored behind it."""

    def on_eval(self, run: JobRun, metrics: Mapping[str, float]) -> None:
        """Called on the primary only, after an evaluation; randomness is restored behind it."""

    def on_end(self, run: JobRun) -> None:
        """Called on the primary only, when the training is over and the last state is saved."""

    def state_dict(self) -> dict[str, Any]:
        """State of the job's own, of tensors and JSON values; it is saved with each checkpoint."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the state of `state_dict` back, after `model` and `optimizer` were made."""
        if state:
            logger.warning(
                "%s has no load_state_dict: the checkpoint's job state (%s) is left aside",
                type(self).__name__,
                ", ".join(sorted(state)),
            )


def read_loss(value: object) -> Loss:
    """Check what `loss` returned: a scalar tensor or a Mean; a plain pair of the two halves is taken.

    A `(loss, logits)` tuple is never read as `(sum, count)`.

    Raises:
        JobError: The value is neither.
    """
    if isinstance(value, Mean):
        _check_floating(value.sum)
        return value
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise JobError(
                f"loss returned {_describe(value)}, expected a single number: "
                "its mean, or Mean(sum, count)"
            )
        _check_floating(value)
        return value.reshape(())
    pair = _open_mean(value)
    if pair is not None:
        _check_floating(pair.sum)
        return pair
    raise JobError(
        f"loss returned {_describe(value)}, expected a scalar tensor (the mean over the batch) or "
        "Mean(sum, count); return the loss alone"
    )


def _open_mean(value: object) -> Mean | None:
    """Read a plain pair as (sum, count), where it can mean nothing else."""
    if not (isinstance(value, tuple | list) and len(value) == 2 and all(map(_is_scalar, value))):
        return None
    total, count = value
    if not isinstance(total, Tensor) or (isinstance(count, Tensor) and count.requires_grad):
        return None
    return Mean(total, count)


def _is_scalar(value: object) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_floating(value: Tensor) -> None:
    if not value.is_floating_point():
        raise JobError(f"loss returned {_describe(value)}, expected a floating type")


def _describe(value: object) -> str:
    """Say in a few words what a value is, without its numbers."""
    if isinstance(value, Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {tuple(value.shape)}"
    if isinstance(value, tuple | list) and value:
        inside = ", ".join(map(_describe, value[:4])) + (", ..." if len(value) > 4 else "")
        return f"a {type(value).__name__} ({inside})"
    if isinstance(value, Mapping):
        return (
            f"a {type(value).__name__} with keys {', '.join(map(str, list(value)[:4])) or '(none)'}"
        )
    return f"a {type(value).__name__}" if value is not None else "None"


def _as_mean(loss: object, batch: Any) -> Mean:
    """Make the loss of a batch addable: a plain mean counts as often as the batch has samples."""
    checked = read_loss(loss)
    if isinstance(checked, Mean):
        return Mean(checked.sum.detach(), checked.count)
    samples = count_samples(batch)
    return Mean(checked.detach() * samples, samples)


def count_samples(batch: Any) -> int:
    """The number of samples of a batch: the first length found in it.

    Raises:
        JobError: The batch holds nothing that has a length.
    """
    if isinstance(batch, Tensor) and batch.ndim:
        return len(batch)
    parts: Sequence[Any] = ()
    if isinstance(batch, Mapping):
        parts = list(batch.values())
    elif isinstance(batch, tuple | list):
        if batch and not isinstance(batch[0], Tensor | Mapping | tuple | list):
            return len(batch)
        parts = batch
    elif is_dataclass(batch) and not isinstance(batch, type):
        parts = [getattr(batch, field.name) for field in fields(batch)]
    for part in parts:
        if isinstance(part, Tensor | Mapping | tuple | list):
            return count_samples(part)
    raise JobError(
        f"metrics: found {_describe(batch)} as batch, expected something with a length; "
        "write the job's own metrics()"
    )


def _move(value: Any, device: torch.device) -> Any:
    """Move every tensor inside nested containers, dataclasses and objects that have `to`."""
    moved: Any = value
    if isinstance(value, Tensor):
        # Towards the host a copy that is not waited for could be read too early.
        moved = value.to(device, non_blocking=device.type == "cuda")
    elif isinstance(value, Mapping):
        plain = {key: _move(item, device) for key, item in value.items()}
        kind: Any = type(value)
        moved = plain if kind is dict else kind(plain)
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        moved = type(value)(*(_move(item, device) for item in value))
    elif isinstance(value, tuple | list):
        moved = type(value)(_move(item, device) for item in value)
    elif callable(getattr(value, "to", None)):
        moved = value.to(device)
    elif is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in fields(value) if field.init]
        moved = replace(value, **{name: _move(getattr(value, name), device) for name in names})
    return moved
