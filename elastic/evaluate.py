"""Evaluation: exact metrics over parts of any size, each sample counted once.

Promises: every rank evaluates its own contiguous part, and what is added up are sums and counts, so
that the result does not depend on the number of ranks; with `fixed` batches not even its bits do. A
signal is noticed within two batches and agreed by all ranks; the mode of every module, every buffer and
the random streams are left as they were found.
"""

import contextlib
import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from elastic.errors import StartError
from elastic.sampler import part
from elastic.seeding import kept_random_state, mix, seed_all
from elastic.world import Pending, World
from jobs.job import Job, Mean, Metric

__all__ = ["Evaluation"]

_EVAL_KEY: Final = 0xE7A1
_MOST_GROUPS: Final = 512

Totals = dict[str, list[float]]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Share:
    """What one rank evaluates of a set."""

    groups: list[list[range]]
    """Batches; the sums of each group are added up by themselves."""
    first: int
    """The number of the first batch, by which the model's draws are seeded."""
    rounds: int
    """Batches of the rank that has the most."""

    @property
    def batches(self) -> list[range]:
        return [batch for group in self.groups for batch in group]


def _share(n: int, batch: int, rank: int, ranks: int, *, fixed: bool) -> _Share:
    """Cut n items: into ranks' parts and those into batches, or `fixed` batches shared out to ranks.

    Fixed batches are the same in every world, and so are the groups in which they are added.
    """
    if not fixed:
        start, stop = part(0, n, rank, ranks)
        # The largest part decides for all, since every round has one exchange of flags.
        most = part(0, n, 0, ranks)
        own = [range(at, min(at + batch, stop)) for at in range(start, stop, batch)]
        return _Share(groups=[own], first=0, rounds=-(-(most[1] - most[0]) // batch))
    batches = -(-n // batch)
    groups = min(batches, _MOST_GROUPS)

    def of(number: int) -> list[list[range]]:
        numbers = [
            part(0, batches, group, groups) for group in range(*part(0, groups, number, ranks))
        ]
        return [
            [range(at * batch, min((at + 1) * batch, n)) for at in range(*group)]
            for group in numbers
        ]

    mine = of(rank)
    return _Share(
        groups=mine,
        first=mine[0][0].start // batch if mine else 0,
        rounds=sum(len(group) for group in of(0)),
    )


class Evaluation:
    """Evaluates a job's model on its evaluation sets."""

    def __init__(
        self,
        job: Job,
        sets: Mapping[str, Dataset[Any]],
        world: World,
        *,
        batch_size: int,
        context: contextlib.AbstractContextManager[Any],
        fixed: bool = False,
    ) -> None:
        """Cut each set into this rank's part; `context` is the autocast of the run.

        With `fixed` batches the metrics have the same bits in every world.

        Raises:
            StartError: A set has no length or no items.
        """
        self._job, self._world, self._context = job, world, context
        self._fixed = fixed
        self._loaders: dict[str, tuple[DataLoader[Any], _Share]] = {}
        for name, dataset in sets.items():
            n = _length(name, dataset)
            share = _share(n, batch_size, world.rank, world.world_size, fixed=fixed)
            loader: DataLoader[Any] = DataLoader(
                _ByIndex(dataset),
                batch_sampler=share.batches,  # type: ignore[arg-type]  # ranges are lists of indices
                collate_fn=job.collate,
                generator=torch.Generator(),
            )
            self._loaders[name] = (loader, share)

    def run(self, model: nn.Module, *, leaving: Callable[[], bool]) -> dict[str, float] | None:
        """Evaluate; None where the ranks agreed to leave in the middle. Collective.

        `leaving()` tells whether this rank was told to leave. Names of several sets become
        prefixes: `test/accuracy`.
        """
        # Of each module, since a frozen part is in eval mode while the rest trains.
        with _evaluating(model), kept_random_state(self._world.device):
            return self._evaluate_all(model, leaving)

    def names(self, model: nn.Module) -> list[str] | None:
        """The names of the metrics, from one batch of the primary's; None where a job's `summarize` makes others. Collective.

        It is asked of a bystander, so that no job counts it as an evaluation.
        """
        if type(self._job).summarize is not Job.summarize:
            return None
        job = _bystander(self._job)
        found: list[str] = []
        with _evaluating(model), kept_random_state(self._world.device):
            for name, (loader, _) in self._loaders.items() if self._world.is_primary else ():
                with torch.no_grad(), self._context:
                    moved = job.to_device(next(iter(loader)), self._world.device)
                    prefix = f"{name}/" if name else ""
                    found += [f"{prefix}{key}" for key in job.metrics(model, moved)]
        told = self._world.broadcast(found)
        return [str(name) for name in told]

    def _evaluate_all(
        self, model: nn.Module, leaving: Callable[[], bool]
    ) -> dict[str, float] | None:
        results: dict[str, float] = {}
        for name, (loader, share) in self._loaders.items():
            totals = self._evaluate(model, loader, share, leaving)
            if totals is None:
                return None
            figures = self._job.summarize(self._add_up(totals))
            prefix = f"{name}/" if name else ""
            results.update({f"{prefix}{k}": float(v) for k, v in figures.items()})
        return results

    def _evaluate(
        self,
        model: nn.Module,
        loader: DataLoader[Any],
        share: _Share,
        leaving: Callable[[], bool],
    ) -> list[Totals] | None:
        totals: list[Totals] = [{} for _ in share.groups]
        groups = [group for group, batches in enumerate(share.groups) for _ in batches]
        batches = iter(loader)
        pending: Pending | None = None
        for number in range(share.rounds):
            if pending is not None and pending.wait():
                return None
            pending = self._world.flags_async(int(leaving()))
            address = (share.first + number,) if self._fixed else (self._world.rank, number)
            seed_all(mix(_EVAL_KEY, *address), self._world.device)
            batch = next(batches, None)
            if batch is None:
                continue
            with torch.no_grad(), self._context:
                moved = self._job.to_device(batch, self._world.device)
                _add(totals[groups[number]], self._job.metrics(model, moved))
            self._world.enter("evaluate")
        if pending is not None and pending.wait():
            return None
        return totals

    def _add_up(self, own: Sequence[Totals]) -> dict[str, Metric]:
        """Add the groups' sums in the order of the ranks, so that all hold the same bits."""
        summed: Totals = {}
        for group in (group for told in self._world.gather(list(own)) for group in told):
            for name, values in group.items():
                have = summed.setdefault(name, [0.0] * len(values))
                summed[name] = [a + b for a, b in zip(have, values, strict=True)]
        return _metrics(summed)


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """The model in eval mode; afterwards each module's mode and each buffer that is saved is what it was.

    How many batches a rank evaluates depends on the world, so that what they leave in a buffer would, too. What is no part
    of the state, or has grown, is a cache that its module looks after.
    """
    # Of each module, since a frozen part is in eval mode while the rest trains.
    was_training = {module: module.training for module in model.modules()}
    buffers = [
        (module, name, buffer.detach().clone())
        for module in was_training
        for name, buffer in module._buffers.items()  # noqa: SLF001  # as nn.Module keeps them
        if buffer is not None and name not in module._non_persistent_buffers_set  # noqa: SLF001
    ]
    model.eval()
    try:
        yield
    finally:
        for module, mode in was_training.items():
            module.training = mode
        with torch.no_grad():
            for module, name, value in buffers:
                now = module._buffers.get(name)  # noqa: SLF001
                if now is not None and now.shape == value.shape:
                    now.copy_(value)


def _bystander(job: Job) -> Job:
    """A copy of a job that may count what it is asked, without the job's own knowing."""
    found = copy.copy(job)
    for name, value in vars(job).items():
        if isinstance(value, list | dict | set | deque):
            setattr(found, name, copy.copy(value))
        elif isinstance(value, nn.Module) and not any(True for _ in value.parameters()):
            setattr(found, name, copy.deepcopy(value))  # a metric that adds up
    return found


class _ByIndex(Dataset[Any]):
    """A dataset that is asked for items by index, whatever kind torch would take it for."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self._dataset = dataset
        if hasattr(dataset, "__getitems__"):
            self.__getitems__ = dataset.__getitems__

    def __getitem__(self, index: int) -> Any:
        return self._dataset[index]


def _metrics(totals: Totals) -> dict[str, Metric]:
    """Sums as the job gave them: two halves are a Mean."""
    return {
        name: Mean(torch.tensor(v[0], dtype=torch.float64), v[1]) if len(v) == 2 else v[0]
        for name, v in totals.items()
    }


def _add(totals: Totals, metrics: Mapping[str, Metric]) -> None:
    for name, metric in metrics.items():
        if isinstance(metric, Mean):
            values = [float(metric.sum), float(metric.count)]
        else:
            values = [float(metric.detach() if isinstance(metric, Tensor) else metric)]
        have = totals.setdefault(name, [0.0] * len(values))
        totals[name] = [a + b for a, b in zip(have, values, strict=True)]


def _length(name: str, dataset: Dataset[Any]) -> int:
    if getattr(type(dataset), "__getitem__", Dataset.__getitem__) is Dataset.__getitem__:
        raise StartError(
            f"eval_dataset {name}: found {type(dataset).__name__}, which only iterates, expected a map-style dataset, with "
            "__len__ and __getitem__(index); index what it reads, as docs/data.md shows under Streams"
        )
    try:
        n = len(dataset)  # type: ignore[arg-type]  # checked right here
    except TypeError as error:
        raise StartError(
            f"eval_dataset {name}: found {type(dataset).__name__} without a length, expected a "
            "map-style dataset"
        ) from error
    if n < 1:
        raise StartError(f"eval_dataset {name}: found no items, expected at least 1, or None")
    return n
