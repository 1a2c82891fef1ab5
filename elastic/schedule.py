"""Rates and their schedules: constants from code and config, position from the checkpoint.

Promises: where the constants are those that the run was saved with, every number of the groups and
schedulers is taken back bit by bit, and the rates go on as if nothing had happened. Where code or
config has another constant it takes effect: a plain one as it is, one that a schedule moves by
stepping the fresh schedule to the saved position; a scheduler that is fed metrics keeps its
counters, and the rate keeps its ratio to the one it started from. Each change is told in one line.
(A plain `load_state_dict` would silently bring the old constants back.)

To know what is a constant, everything is remembered as code and config built it, before the first
step, and saved beside what it has become.
"""

import inspect
import math
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any, Final, Literal, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, MultiplicativeLR

from elastic.constants import SOURCE, merge, plain, same, tell_change
from elastic.errors import StartError

__all__ = ["Driver", "Schedule", "Scheduler"]

_NO_CONSTANT: Final = ("params", "param_names")
_RATES: Final = frozenset({"lr", "initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum"})
"""Keys of a group that belong to a schedule where there is one."""
_FOLLOWS: Final = frozenset({"base_lrs", "last_lr", "step_count"})
"""State of a scheduler that follows from the groups: a change is not told twice."""


class Scheduler(Protocol):
    """What a schedule must have to be saved; `step` is called by the loop."""

    def state_dict(self) -> dict[str, Any]:
        """All that `load_state_dict` needs."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Take a state back."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Driver:
    """A scheduler, and by what it is stepped."""

    scheduler: Scheduler
    per: Literal["step", "epoch"] = "step"


# ------------------------------------------------------------------------------------- one schedule
class Schedule:
    """One optimizer's groups and the schedulers that drive them, as built by code and config.

    Make it right after the optimizer and schedulers were made, before any step.
    """

    def __init__(self, optimizer: Optimizer, drivers: Mapping[str, Driver], label: str) -> None:
        """Remember the constants.

        Args:
            optimizer: Whose `param_groups` hold the rates.
            drivers: By the name that each has in notes (`scheduler`).
            label: The optimizer's name in notes (`optimizer`).
        """
        self._optimizer = optimizer
        self._drivers = dict(drivers)
        self._label = label
        self._built_groups = self._groups()
        self._built_states = {n: plain(d.scheduler.state_dict()) for n, d in drivers.items()}

    def capture_groups(self) -> list[dict[str, Any]]:
        """The constants of each group, as they are and as they were built."""
        pairs = zip(self._groups(), self._built_groups, strict=True)
        return [{"current": now, "at_construction": plain(was)} for now, was in pairs]

    def capture_drivers(self) -> dict[str, Any]:
        """The state of each scheduler, as it is and as it was built."""
        return {
            name: {
                "kind": _kind(driver.scheduler),
                "per": driver.per,
                "current": plain(driver.scheduler.state_dict()),
                "at_construction": plain(self._built_states[name]),
                "probes": [_probe(part) for part in _lambdas(driver.scheduler)],
            }
            for name, driver in self._drivers.items()
        }

    def restore(
        self,
        groups: list[Mapping[str, Any]],
        drivers: Mapping[str, Any],
        done: Mapping[str, int | None],
    ) -> list[str]:
        """Go on where the saved schedule was; returns the changes of constants, one line each.

        Args:
            groups: What `capture_groups` gave, in the order of this optimizer's groups.
            drivers: What `capture_drivers` gave.
            done: Steps and epochs done ("step", "epoch"), for a scheduler that the saved one cannot
                tell its position. None: not known.

        Raises:
            StartError: The schedule of code and config cannot be stepped so far.
        """
        self._reset()
        notes = self._group_notes(groups)
        changed, driver_notes = self._driver_changes(groups, drivers)
        if not changed:
            for name, driver in self._drivers.items():
                driver.scheduler.load_state_dict(plain(drivers[name]["current"]))
        elif self._is_fed(drivers):
            self._merge_drivers(drivers)
        else:
            driver_notes += self._replay(drivers, done)
        replayed = self._groups() if changed and not self._is_fed(drivers) else None
        for number, saved in enumerate(groups):
            self._settle(number, saved, None if replayed is None else replayed[number])
        if changed and replayed is None:
            self._refresh_last_lr()
        return notes + driver_notes

    # ------------------------------------------------------------------------------- what has changed
    def _group_notes(self, groups: list[Mapping[str, Any]]) -> list[str]:
        found: dict[str, list[tuple[int, str]]] = {}
        for number, (saved, built) in enumerate(zip(groups, self._built_groups, strict=True)):
            was = saved["at_construction"]
            for key in sorted(set(built) & set(was)):
                shown = "lr" if key == "initial_lr" else key
                if key == "lr" and "initial_lr" in built and "initial_lr" in was:
                    continue  # the rate before warm-up; the other is what the user wrote
                if not same(built[key], was[key]):
                    note = tell_change("", was[key], built[key])
                    found.setdefault(shown, []).append((number, note))
        notes = []
        for key, changes in found.items():
            if len(changes) == len(self._built_groups) and len({c[1] for c in changes}) == 1:
                notes.append(f"{self._label}.{key}{changes[0][1]}")
            else:
                notes += [f"{self._label}.group{number}.{key}{note}" for number, note in changes]
        return notes

    def _driver_changes(
        self, groups: list[Mapping[str, Any]], saved: Mapping[str, Any]
    ) -> tuple[bool, list[str]]:
        """Whether the schedule is another than it was, and the lines that tell it."""
        changed = bool(self._drivers) and any(
            key in group["at_construction"] and not same(built[key], group["at_construction"][key])
            for built, group in zip(self._built_groups, groups, strict=True)
            for key in _RATES & built.keys()
        )
        notes: list[str] = []
        for name in sorted({*self._drivers, *saved}):
            was = saved[name]["kind"] if name in saved else None
            kind = _kind(self._drivers[name].scheduler) if name in self._drivers else None
            if was != kind or was is None or kind is None:
                changed = True
                notes.append(f"{name}: {_title(was)} -> {_title(kind)} {SOURCE}")
                continue
            entry, driver = saved[name], self._drivers[name]
            if entry["per"] != driver.per:
                changed = True
                notes.append(tell_change(f"{name}.per", entry["per"], driver.per))
            for key, old, new in _differences(entry["at_construction"], self._built_states[name]):
                changed = True
                if key.rpartition(".")[2] not in _FOLLOWS:
                    notes.append(tell_change(f"{name}.{key}", old, new))
            if _lambdas_changed(driver.scheduler, entry):
                changed = True
                notes.append(f"{name}.lr_lambda: changed {SOURCE}")
        return changed, notes

    def _is_fed(self, saved: Mapping[str, Any]) -> bool:
        """Whether one of the schedulers was the same kind then and cannot be stepped by itself."""
        return any(
            name in saved
            and saved[name]["kind"] == _kind(driver.scheduler)
            and (not _steps_alone(driver.scheduler) or _reach(saved[name]["current"]) is None)
            for name, driver in self._drivers.items()
        )

    # ---------------------------------------------------------------------------------- what is done
    def _merge_drivers(self, saved: Mapping[str, Any]) -> None:
        """Keep the counters of schedulers that are fed, with the constants of today."""
        for name, driver in self._drivers.items():
            if name in saved and saved[name]["kind"] == _kind(driver.scheduler):
                was, now = saved[name]["at_construction"], plain(saved[name]["current"])
                driver.scheduler.load_state_dict(merge(self._built_states[name], was, now))

    def _replay(self, saved: Mapping[str, Any], done: Mapping[str, int | None]) -> list[str]:
        """Step the fresh schedulers to where the saved ones were."""
        notes: list[str] = []
        reach: dict[str, float] = {}
        for name, driver in self._drivers.items():
            if not _steps_alone(driver.scheduler):
                continue
            known = name in saved and saved[name]["per"] == driver.per
            position = _reach(saved[name]["current"]) if known else None
            position = done.get(driver.per) if position is None else position
            if position is None:
                notes.append(f"{name}: its position is not known; it begins at its start")
            reach[name] = position or 0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of stepping before the optimizer has
            for count in range(1, math.ceil(max(reach.values(), default=0)) + 1):
                for name, position in reach.items():
                    if count <= position or count - 1 < position:
                        self._step(name, count, position)
        return notes

    def _step(self, name: str, count: int, position: float) -> None:
        step: Any = self._drivers[name].scheduler.step  # type: ignore[attr-defined]  # _steps_alone
        try:
            if count > position:
                step(position)  # within an epoch, as CosineAnnealingWarmRestarts allows
            else:
                step()
        except (ValueError, ArithmeticError, LookupError) as error:
            raise StartError(
                f"{name}: found a schedule that cannot be stepped to {position:g}, where the"
                f" checkpoint is ({error}), expected one that reaches it; set its constants back or"
                " make it longer"
            ) from error

    def _settle(
        self, number: int, saved: Mapping[str, Any], replayed: Mapping[str, Any] | None
    ) -> None:
        """Give one group its values."""
        built, was, now = self._built_groups[number], saved["at_construction"], saved["current"]
        values = merge(built, was, plain(now))
        if replayed is not None:
            old_cycle = {"momentum", "betas"} if "max_momentum" in was else set()
            for key, value in replayed.items():
                moved = key not in built or not same(value, built[key])
                if moved or key in _RATES or key in old_cycle:
                    values[key] = value
        elif not same(built.get("lr"), was.get("lr")) and not same(was.get("lr"), now.get("lr")):
            values["lr"] = _scaled(now["lr"], was["lr"], built["lr"])
        group = self._optimizer.param_groups[number]
        for key, value in values.items():
            _put(group, key, value)

    def _refresh_last_lr(self) -> None:
        for driver in self._drivers.values():
            if hasattr(driver.scheduler, "_last_lr"):
                rates = [plain(group["lr"]) for group in self._optimizer.param_groups]
                driver.scheduler.__dict__["_last_lr"] = rates

    def _groups(self) -> list[dict[str, Any]]:
        return [
            {k: plain(v) for k, v in group.items() if k not in _NO_CONSTANT and not callable(v)}
            for group in self._optimizer.param_groups
        ]

    def _reset(self) -> None:
        """Back to what code and config built, where steps were done since (a rollback)."""
        for group, built in zip(self._optimizer.param_groups, self._built_groups, strict=True):
            for key in [k for k, v in group.items() if k not in _NO_CONSTANT and not callable(v)]:
                if key not in built:
                    del group[key]
            for key, value in built.items():
                _put(group, key, plain(value))
        for name, driver in self._drivers.items():
            driver.scheduler.load_state_dict(plain(self._built_states[name]))


def _put(group: dict[str, Any], key: str, value: Any) -> None:
    """Set a value; a tensor keeps its memory, which a captured graph may know."""
    before = group.get(key)
    if isinstance(before, Tensor) and isinstance(value, Tensor) and before.shape == value.shape:
        with torch.no_grad():
            before.copy_(value)
    else:
        group[key] = value


def _scaled(now: Any, was: Any, built: Any) -> Any:
    """A rate that was moved by what cannot be replayed, in the ratio of the new base to the old."""
    try:
        return now * (built / was)
    except (TypeError, ZeroDivisionError):
        return built


# ------------------------------------------------------------------------------ looking at schedulers
def _parts(scheduler: object) -> list[object]:
    parts = getattr(scheduler, "_schedulers", None)
    return list(parts) if isinstance(parts, list | tuple) else []


def _kind(scheduler: object) -> list[Any]:
    return [type(scheduler).__qualname__, [_kind(part) for part in _parts(scheduler)]]


def _title(kind: list[Any] | None) -> str:
    if kind is None:
        return "none"
    parts = f"({', '.join(map(_title, kind[1]))})" if kind[1] else ""
    return f"{kind[0]}{parts}"


def _steps_alone(scheduler: object) -> bool:
    """Whether `step()` needs nothing from outside: the schedule is a function of its position."""
    step = getattr(scheduler, "step", None)
    if step is None:
        return False
    given = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(step).parameters.values()
    return all(p.default is not p.empty or p.kind not in given for p in parameters)


def _reach(state: Mapping[str, Any]) -> float | None:
    """How often a scheduler was stepped, by its state; None where that does not tell."""
    if "last_epoch" in state:
        within = math.modf(state.get("T_cur", 0))[0]
        return max(float(state["last_epoch"] + within), 0.0)
    reached = [_reach(part) for part in state.get("_schedulers", ())]
    return max((r for r in reached if r is not None), default=None)


def _differences(
    was: Mapping[str, Any], built: Mapping[str, Any], path: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    """What differs in two states at construction: name, then and now. New keys are torch's own."""
    for key in [key for key in built if key in was]:
        if key == "_schedulers":
            for i, (old, new) in enumerate(zip(was[key], built[key], strict=True)):
                yield from _differences(old, new, f"{path}schedulers[{i}].")
        elif not same(was[key], built[key]):
            yield path + key.lstrip("_"), was[key], built[key]


def _lambdas(scheduler: object) -> list[LambdaLR | MultiplicativeLR]:
    own = [scheduler] if isinstance(scheduler, LambdaLR | MultiplicativeLR) else []
    return own + [part for child in _parts(scheduler) for part in _lambdas(child)]


def _functions(scheduler: LambdaLR | MultiplicativeLR) -> list[Any]:
    """Its functions that have no state of their own; None for the others."""
    return [
        fn if isinstance(fn, FunctionType | MethodType) else None for fn in scheduler.lr_lambdas
    ]


def _probe(scheduler: LambdaLR | MultiplicativeLR) -> list[float | None]:
    """The values of its functions where it stands, or nothing where it has not called them yet."""
    epoch = scheduler.last_epoch
    if epoch < (0 if isinstance(scheduler, LambdaLR) else 1):
        return []
    return [None if fn is None else float(fn(epoch)) for fn in _functions(scheduler)]


def _lambdas_changed(scheduler: object, saved: Mapping[str, Any]) -> bool:
    """Whether functions of code give other values than then, at the position of the checkpoint.

    What a function closes over (the length of a warm-up) is seen in no state. The bound lets pass
    what another processor's cosine does to the last bits.
    """
    epochs = [part["last_epoch"] for part in _lambda_states(scheduler, saved["current"])]
    for part, epoch, values in zip(_lambdas(scheduler), epochs, saved["probes"], strict=True):
        for fn, value in zip(_functions(part), values, strict=False):
            if fn is None or value is None:
                continue
            if not math.isclose(float(fn(epoch)), value, rel_tol=1e-9, abs_tol=1e-15):
                return True
    return False


def _lambda_states(scheduler: object, state: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The saved states of what `_lambdas` finds, in the same order."""
    own = [state] if isinstance(scheduler, LambdaLR | MultiplicativeLR) else []
    parts = zip(_parts(scheduler), state.get("_schedulers", ()), strict=True)
    return own + [found for child, sub in parts for found in _lambda_states(child, sub)]
