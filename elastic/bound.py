"""What a schedule of faults costs at least, and how near a run came to it.

Pure. The bound is that of the very schedule: a fault that ends workers after step s loses what was done after the newest
state that could have been kept when it struck. That is the last save that was due by then (every k steps: s mod k steps are
lost), or what was seen whole in the store or in a surviving node's memory, where that is newer or saves go by the clock.
A stop, a store that is away, and a node that is told to leave cost no step at all. The bound in time adds to the steps
done once those that had to be lost, at the run's own time for a step, and each recovery as long as it took.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from checkpoints.options import Interval

__all__ = ["Cost", "Loss", "cost", "last_due", "must_lose"]

_COSTS_NOTHING: Final = frozenset({"stop", "storage", "preempt"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """One fault, as far as it counts here."""

    kind: str
    step: int
    """Steps of the lineage that were done when it ended the workers."""
    kept_step: int
    """Of the newest state that was seen whole and that outlived the fault."""
    leaves_memory: bool
    """Whether a node's memory outlives it."""


def last_due(step: int, every: Interval, epoch_steps: int | None) -> int:
    """The last step up to `step` at which a save was due; 0 where steps do not tell."""
    if every.kind == "steps":
        size = int(every.count)
    elif every.kind == "epochs" and epoch_steps:
        size = int(every.count) * epoch_steps
    else:
        return 0
    return step - step % size


def must_lose(loss: Loss, *, store: Interval, memory: Interval, epoch_steps: int | None) -> int:
    """The steps that no recovery from this fault could have kept."""
    if loss.kind in _COSTS_NOTHING:
        return 0
    kept = [loss.kept_step, last_due(loss.step, store, epoch_steps)]
    if loss.leaves_memory:
        kept.append(last_due(loss.step, memory, epoch_steps))
    return max(0, loss.step - max(kept))


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """What the faults cost, beside what they had to."""

    steps: int
    lost_steps: int
    must_lose: int
    efficiency: float
    """Steps done once / all steps done."""
    efficiency_bound: float
    goodput: float
    goodput_bound: float


def cost(
    *, steps: int, lost_steps: int, losses: Sequence[int], recoveries_s: Sequence[float],
    steps_s: float, goodput: float,
) -> Cost:  # fmt: skip
    """Put together what a run cost.

    Args:
        steps: Of the lineage.
        lost_steps: Done more than once.
        losses: What each fault had to lose.
        recoveries_s: How long each one's recovery took, up to the end of the first new step.
        steps_s: The time spent on the steps of the lineage.
        goodput: Their share of the wall time.
    """
    least = sum(losses)
    each_s = steps_s / steps if steps else 0.0
    # The first new step is counted among the steps already.
    away_s = sum(max(0.0, recovery_s - each_s) for recovery_s in recoveries_s)
    whole_s = steps_s + least * each_s + away_s
    return Cost(
        steps=steps,
        lost_steps=lost_steps,
        must_lose=least,
        efficiency=_share(steps, steps + lost_steps),
        efficiency_bound=_share(steps, steps + least),
        goodput=goodput,
        goodput_bound=_share(steps_s, whole_s),
    )


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
