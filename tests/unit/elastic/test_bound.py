"""The least that a schedule of faults costs: by the interval of saves, by what was seen, and in time."""

import pytest

from checkpoints.options import Interval
from elastic.bound import Loss, cost, last_due, must_lose

STEPS_5, EPOCH = Interval("steps", 5), Interval("epochs", 1)
AUTO, OFF = Interval("auto"), Interval("off")


def loss(kind: str = "kill", step: int = 23, kept: int = 0, *, memory: bool = True) -> Loss:
    return Loss(kind=kind, step=step, kept_step=kept, leaves_memory=memory)


@pytest.mark.parametrize(
    ("every", "epoch_steps", "expected"),
    [(STEPS_5, None, 20), (EPOCH, 9, 18), (EPOCH, None, 0), (AUTO, 9, 0), (OFF, 9, 0)],
)
def test_last_save_that_was_due(every: Interval, epoch_steps: int | None, expected: int) -> None:
    assert last_due(23, every, epoch_steps) == expected


@pytest.mark.parametrize(
    ("found", "store", "memory", "expected"),
    [
        (loss(), STEPS_5, OFF, 3),
        (loss(step=20), STEPS_5, OFF, 0),
        # What was seen counts where it is newer than what was due.
        (loss(kept=22), STEPS_5, AUTO, 1),
        (loss(kept=10), STEPS_5, AUTO, 3),
        (loss(kept=22), AUTO, AUTO, 1),
        (loss(kept=24), AUTO, AUTO, 0),
        # A node's memory saves nothing where it is gone.
        (loss(), EPOCH, STEPS_5, 3),
        (loss(memory=False), EPOCH, STEPS_5, 5),
        (loss("agent", memory=False), STEPS_5, STEPS_5, 3),
        (loss("partition"), STEPS_5, STEPS_5, 3),
        *((loss(kind), STEPS_5, OFF, 0) for kind in ("stop", "storage", "preempt")),
    ],
)
def test_steps_that_must_be_lost(
    found: Loss, store: Interval, memory: Interval, expected: int
) -> None:
    assert must_lose(found, store=store, memory=memory, epoch_steps=9) == expected


def test_a_perfect_recovery_reaches_the_bound() -> None:
    found = cost(
        steps=100, lost_steps=25, losses=[10, 15, 0], recoveries_s=[2.0, 3.0, 1.0],
        steps_s=50.0, goodput=50.0 / 67.0,
    )  # fmt: skip
    assert found.efficiency == found.efficiency_bound == 0.8
    # 12.5 s for the lost steps, and 6 s of recoveries, three steps of which are counted already.
    assert found.goodput_bound == pytest.approx(50.0 / (50.0 + 12.5 + 4.5))


def test_a_loss_that_need_not_be_is_seen() -> None:
    found = cost(steps=100, lost_steps=25, losses=[5], recoveries_s=[], steps_s=50.0, goodput=0.5)
    assert found.efficiency == 0.8
    assert found.efficiency_bound == pytest.approx(100 / 105)


def test_a_run_without_a_step_is_no_error() -> None:
    found = cost(steps=0, lost_steps=0, losses=[], recoveries_s=[], steps_s=0.0, goodput=0.0)
    assert found.efficiency == found.goodput_bound == 0.0
