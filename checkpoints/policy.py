"""Which checkpoint is newest, which ones stay, and when the next one is due; decided from values alone.

Checkpoints are compared as (generation, step), as numbers: never as text, never by a clock. Pure: no
I/O, so that each rule is tested by a table.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Final

from checkpoints.layout import CheckpointName, Manifest
from checkpoints.options import Interval

FIRST_FAILURE_S: Final = 6 * 3600.0
"""Before any failure was seen, one is expected in this time."""


def failure_rate(failures: int, observed_s: float) -> float:
    """Failures a second, from those seen in some time; never zero, since they come."""
    return (max(failures, 0) + 1) / (max(observed_s, 0.0) + FIRST_FAILURE_S)


def best_interval(cost_s: float, rate: float, *, budget: float, shortest_s: float = 0.0) -> float:
    """Seconds between two saves that lose the least time, after Young and Daly, within a budget.

    Args:
        cost_s: What one save costs the training.
        rate: Failures a second.
        budget: The share of time that saving may cost.
        shortest_s: How long one save takes until the next can begin.
    """
    cost_s = max(cost_s, 1e-6)
    mean_s = 1 / rate
    best = mean_s
    if cost_s < 2 * mean_s:
        part = cost_s / (2 * mean_s)
        # Daly's second-order form of Young's sqrt(2 * cost * mean time between failures).
        best = math.sqrt(2 * cost_s * mean_s) * (1 + math.sqrt(part) / 3 + part / 9) - cost_s
    return max(best, cost_s / budget, shortest_s)


def newest_first(names: Iterable[CheckpointName]) -> list[CheckpointName]:
    """The names in the order in which a restore tries them."""
    return sorted(set(names), reverse=True)


def newest(
    names: Iterable[CheckpointName], exclude: Collection[CheckpointName] = ()
) -> CheckpointName | None:
    """The greatest name that is not excluded; None where there is none."""
    return max((name for name in names if name not in exclude), default=None)


def retained(
    names: Iterable[CheckpointName],
    *,
    keep: int,
    keep_every: int | None = None,
    protected: Collection[CheckpointName] = (),
) -> set[CheckpointName]:
    """The names that stay: the newest `keep`, one of every `keep_every` steps, and the protected.

    Of each stretch of `keep_every` steps the first checkpoint at or after its multiple stays, so that
    deleting others never changes which one it is. Checkpoints that a later generation left behind (it
    committed the same or a lower step) are not kept for that.
    """
    ordered = newest_first(names)
    stay = set(ordered[: max(keep, 1)]) | {name for name in ordered if name in protected}
    if keep_every:
        first: dict[int, CheckpointName] = {}
        for name in _unabandoned(ordered):
            stretch = name.step // keep_every
            if stretch and (stretch not in first or name.step < first[stretch].step):
                first[stretch] = name
        stay.update(first.values())
    return stay


def expendable(
    names: Iterable[CheckpointName],
    *,
    keep: int,
    keep_every: int | None = None,
    protected: Collection[CheckpointName] = (),
) -> list[CheckpointName]:
    """The names that go, oldest first: what `retained` leaves."""
    found = set(names)
    stay = retained(found, keep=keep, keep_every=keep_every, protected=protected)
    return sorted(found - stay)


def _unabandoned(ordered: Iterable[CheckpointName]) -> Iterable[CheckpointName]:
    """Those of newest-first names that no later generation went below."""
    lowest: int | None = None
    generation = 0
    floor: int | None = None
    for name in ordered:
        if name.generation != generation:
            # What the generations after this one committed, as a floor for its own steps.
            floor, generation = lowest, name.generation
        if floor is None or name.step < floor:
            yield name
        lowest = name.step if lowest is None else min(lowest, name.step)


def referred_files(manifests: Iterable[Manifest]) -> set[str]:
    """The names, under the URL, of all files that these manifests need, their own names included."""
    found = set()
    for manifest in manifests:
        found.add(manifest.name.manifest)
        found.update((entry.owner or manifest.name).file(entry.name) for entry in manifest.files)
    return found


def is_due(
    interval: Interval, *, step: int, elapsed_s: float, epochs_done: int | None = None
) -> bool:
    """Whether something is due after `step`.

    Args:
        interval: How often; `auto` and `off` are never due by themselves.
        step: The step of the run that was just done, counted from 1.
        elapsed_s: Seconds since the last one began, by a monotonic clock.
        epochs_done: At the end of an epoch how many are done; None elsewhere.
    """
    due: Mapping[str, bool] = {
        "steps": interval.kind == "steps" and step > 0 and step % interval.count == 0,
        "seconds": elapsed_s >= interval.count,
        "epochs": interval.kind == "epochs"
        and epochs_done is not None
        and epochs_done % interval.count == 0,
    }
    return due.get(interval.kind, False)
