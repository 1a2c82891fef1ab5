"""The phases of a step: losses in order, each with the optimizer, rates and scaler that follow it.

Most jobs have one loss and one optimizer, which are one phase. What a job returns is checked here, so
that the loop and the step know no other form than a list of phases.
"""

import inspect
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

from elastic.errors import StartError
from jobs.job import Job, Loss, Optimizers

__all__ = ["Phase", "Schedules", "by_phase", "make_optimizers", "make_scaler", "phases_of"]

Scaler = torch.amp.GradScaler


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """A loss of a step and the optimizer that follows it."""

    name: str
    loss: Callable[[nn.Module, Any], Loss]
    optimizer: Optimizer

    @property
    def parameters(self) -> list[nn.Parameter]:
        """What its optimizer changes."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]


def make_optimizers(job: Job, model: nn.Module) -> Optimizers:
    """The job's optimizer, or several by name.

    Raises:
        StartError: It is neither, changes what is not the model's, or wants more than gradients.
    """
    found: Any = job.optimizer(model)
    wrong = [type(o).__name__ for o in by_phase(found).values() if not isinstance(o, Optimizer)]
    if wrong or (isinstance(found, Mapping) and not found):
        raise StartError(
            f"{type(job).__name__}.optimizer: found {wrong[0] if wrong else 'an empty dict'}, expected "
            "a torch Optimizer, or a dict with one for each name of losses()"
        )
    own, kind = set(model.parameters()), type(job).__name__
    for optimizer in by_phase(found).values():
        if not _wants_nothing(optimizer.step):
            raise StartError(
                f"{kind}.optimizer: found {type(optimizer).__name__}, whose step() wants a closure, expected one whose step() "
                "follows the gradients alone"
            )
        _check_parameters(optimizer, own, kind)
    return dict(found) if isinstance(found, Mapping) else cast("Optimizer", found)


def _check_parameters(optimizer: Optimizer, own: set[nn.Parameter], kind: str) -> None:
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            if parameter not in own:
                raise StartError(
                    f"{kind}.optimizer: found a parameter that is not the model's (group {number}, place {place}, shape "
                    f"{tuple(parameter.shape)}), expected model.parameters() alone: it would be neither summed over the "
                    "ranks nor saved; make it part of model()"
                )


def by_phase(given: Any) -> dict[str, Any]:
    """What a job gave for one phase, or for several by name, always by name."""
    return dict(given) if isinstance(given, Mapping) else {"main": given}


def phases_of(job: Job, optimizers: Optimizer | Mapping[str, Optimizer]) -> list[Phase]:
    """The phases of a job's step, in order.

    Raises:
        StartError: Losses and optimizers do not belong together.
    """
    losses, kind = job.losses(), type(job).__name__
    if losses is None:
        if isinstance(optimizers, Optimizer):
            return [Phase(name="loss", loss=job.loss, optimizer=optimizers)]
        raise StartError(
            f"{kind}.optimizer: found {_names(optimizers)}, expected one optimizer, or losses() with a "
            "loss for each of these names"
        )
    if isinstance(optimizers, Optimizer) or set(optimizers) != set(losses):
        found = "one without a name" if isinstance(optimizers, Optimizer) else _names(optimizers)
        raise StartError(
            f"{kind}.losses: found losses {_names(losses)} and optimizer {found}, expected an "
            "optimizer of the same name for each"
        )
    return [
        Phase(name=name, loss=loss, optimizer=optimizers[name]) for name, loss in losses.items()
    ]


def _names(named: Mapping[str, object]) -> str:
    return "{" + ", ".join(named) + "}"


def make_scaler(
    optimizers: Optimizers, precision: str, device: torch.device
) -> Scaler | dict[str, Scaler] | None:
    """With fp16 a gradient scaler for each phase: what overflows in one tells nothing of another."""
    if precision != "fp16":
        return None
    if isinstance(optimizers, Mapping):
        return {name: _ready_scaler(device) for name in optimizers}
    return _ready_scaler(device)


def _ready_scaler(device: torch.device) -> Scaler:
    """A scaler that has its numbers: torch makes them at the first loss, and a rank without micro-batch has none."""
    scaler = torch.amp.GradScaler(device.type)
    scaler.scale(torch.zeros((), device=device))
    return scaler


def _wants_nothing(call: Callable[..., Any]) -> bool:
    try:
        inspect.signature(call).bind()
    except TypeError:
        return False
    return True


def _checked(scheduler: Any, unit: object) -> tuple[Any, object]:
    """A scheduler and its unit, both such as the loop can step."""
    kind = type(scheduler).__name__
    if unit not in {"step", "epoch"}:
        raise StartError(f"scheduler: found ({kind}, {unit!r}), expected 'step' or 'epoch' there")
    step = getattr(scheduler, "step", None)
    if not callable(step):
        raise StartError(f"scheduler: found {kind}, expected one of torch.optim.lr_scheduler's")
    if not _wants_nothing(step):
        raise StartError(
            f"scheduler: found {kind}, whose step() wants a metric, expected one whose step() wants nothing: a rate that "
            "follows the step or the epoch"
        )
    return scheduler, unit


class Schedules:
    """The job's schedulers, each stepped with each step or at each epoch's end."""

    def __init__(self, given: Any) -> None:
        """Take what `Job.scheduler` gave: one, `(one, "epoch")`, several by name, or None.

        Raises:
            StartError: It is something else, or wants a metric at its steps.
        """
        self.given = given
        self._drivers = [
            _checked(
                *(driver if isinstance(driver, tuple) and len(driver) == 2 else (driver, "step"))
            )
            for driver in by_phase(given).values()
            if driver is not None
        ]

    def advance(self, unit: str) -> None:
        """Step those whose unit this is: with each step, taken or skipped."""
        for scheduler, every in self._drivers:
            if every == unit:
                with warnings.catch_warnings():
                    # After a skipped first step torch complains about an order that is right here.
                    warnings.filterwarnings(
                        "ignore", message=".*lr_scheduler.step.*", category=UserWarning
                    )
                    scheduler.step()
