"""When a checkpoint is made, and what a store that fails means for the run."""

import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from checkpoints.errors import (
    StoreFullError,
    SupersededError,
    TransientStoreError,
    UnsupportedStateError,
)
from checkpoints.layout import CheckpointName
from checkpoints.manager import CheckpointManager
from checkpoints.options import CheckpointOptions, Interval
from checkpoints.processes import this_process
from checkpoints.store import Store, open_store
from elastic.errors import AttentionError
from elastic.keeping import Keeper
from elastic.saving import Clocked, Saver, is_due, is_due_at_epoch_end
from tests.support.states import same, state


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Failing:
    """Lets a real store's writes fail while `error` is set."""

    def __init__(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        self.error: Exception | None = None
        self._patch(store, "put", monkeypatch)
        self._patch(store, "put_new", monkeypatch)

    def _patch(self, store: Store, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
        real: Callable[[str, object], object] = getattr(store, method)

        def call(name: str, data: object) -> object:
            if self.error is not None:
                raise self.error
            return real(name, data)

        monkeypatch.setattr(store, method, call)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path))


@pytest.fixture
def manager(store: Store) -> Iterator[CheckpointManager]:
    found = CheckpointManager(store)
    yield found
    found.close()


def make_saver(
    manager: CheckpointManager,
    clock: Clock,
    *,
    every: str = "1 epoch",
    parent: CheckpointName | None = None,
) -> Saver:
    store = manager.store
    options = CheckpointOptions(url=store.url, every=Interval.parse(every), max_unsaved=60)
    # Not opened, as on a node without shared memory: there is no writer, each save is made here.
    keeper = Keeper(
        agent=this_process(), folder=Path(store.url), options=options, store=store, leads=True
    )
    return Saver(manager, options, keeper, run_id="run", generation=3, parent=parent, clock=clock)


def save(saver: Saver, step: int, protect: tuple[str, ...] = ()) -> bool:
    return saver.save(state(step), step=step, info={"step": step}, protect=list(protect))


@pytest.mark.parametrize(
    ("text", "steps", "epochs"),
    [
        ("3 steps", [3, 6, 9], []),
        ("1 epoch", [], [0, 1, 2, 3]),
        ("2 epochs", [], [1, 3]),
        ("10 s", [], []),
        ("off", [], []),
    ],
)
def test_interval_is_due_at_what_it_divides(text: str, steps: list[int], epochs: list[int]) -> None:
    interval = Interval.parse(text)
    assert [step for step in range(1, 11) if is_due(interval, step)] == steps
    assert [epoch for epoch in range(4) if is_due_at_epoch_end(interval, epoch)] == epochs


def test_clock_counts_since_the_last_one_began() -> None:
    clock = Clock()
    clocked = Clocked(interval=Interval.parse("10 s"), clock=clock)
    clocked.restart()
    clock.now += 9.9
    assert not clocked.due
    clock.now += 0.1
    assert clocked.due
    clocked.restart()
    assert not clocked.due
    never = Clocked(interval=Interval.parse("5 steps"), clock=clock)
    assert not never.due


def test_saved_state_is_in_the_store_with_its_parent(manager: CheckpointManager) -> None:
    parent = CheckpointName(2, 5)
    saver = make_saver(manager, Clock(), parent=parent)
    assert saver.newest == parent
    assert save(saver, 8)
    assert saver.newest == saver.last == CheckpointName(3, 8)
    assert manager.names() == [CheckpointName(3, 8)]
    assert manager.info(CheckpointName(3, 8)).parent == parent
    assert same(manager.restore(CheckpointName(3, 8)), state(8))


def test_step_is_committed_once(manager: CheckpointManager) -> None:
    saver = make_saver(manager, Clock())
    assert save(saver, 8)
    created = manager.info(CheckpointName(3, 8)).created_at
    assert save(saver, 8)
    assert manager.info(CheckpointName(3, 8)).created_at == created


def test_store_that_fails_is_told_and_tried_again_and_training_goes_on(
    store: Store,
    manager: CheckpointManager,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = Clock()
    failing = Failing(store, monkeypatch)
    saver = make_saver(manager, clock)
    assert save(saver, 4)
    failing.error = StoreFullError("no room left")
    with caplog.at_level(logging.ERROR, "elastic"):
        assert not save(saver, 8)
    assert caplog.messages == [
        "the checkpoint of step 8 was not saved (no room left); training goes on, the last one is "
        "000003-000000000004, next try in 15 s"
    ]
    assert saver.last_error == "no room left"
    assert not saver.wants
    clock.now += 15
    assert saver.wants
    failing.error = None
    assert save(saver, 9)
    assert (saver.last, saver.last_error) == (CheckpointName(3, 9), None)
    assert not saver.wants
    assert same(manager.restore(CheckpointName(3, 9)), state(9))


def test_very_step_that_failed_may_be_saved_later(
    store: Store, manager: CheckpointManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = Failing(store, monkeypatch)
    saver = make_saver(manager, Clock())
    failing.error = TransientStoreError("busy")
    assert not save(saver, 8)
    failing.error = None
    assert save(saver, 8)
    assert same(manager.restore(CheckpointName(3, 8)), state(8))


def test_first_save_that_fails_says_that_there_is_none_yet(
    store: Store,
    manager: CheckpointManager,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    Failing(store, monkeypatch).error = TransientStoreError("busy")
    with caplog.at_level(logging.ERROR, "elastic"):
        assert not save(make_saver(manager, Clock()), 8)
    assert caplog.messages == [
        "the checkpoint of step 8 was not saved (busy); training goes on, there is none yet, next "
        "try in 15 s"
    ]


def test_only_max_unsaved_ends_the_run(
    store: Store, manager: CheckpointManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    failing = Failing(store, monkeypatch)
    saver = make_saver(manager, clock, parent=CheckpointName(2, 7))
    failing.error = TransientStoreError("busy")
    for step in (8, 9, 10, 11):
        assert not save(saver, step)
        clock.now += 15
    expected = (
        "checkpoint.max_unsaved: nothing could be saved for 60 s (limit 60 s): busy; the last one "
        "is 000002-000000000007"
    )
    with pytest.raises(AttentionError, match=f"^{re.escape(expected)}$"):
        save(saver, 12)


def test_one_success_starts_the_time_anew(
    store: Store, manager: CheckpointManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    failing = Failing(store, monkeypatch)
    saver = make_saver(manager, clock)
    for step in range(1, 10):
        failing.error = None if step == 4 else TransientStoreError("busy")
        assert save(saver, step) is (step == 4)
        clock.now += 11


def test_interval_by_the_clock_wants_a_save(manager: CheckpointManager) -> None:
    clock = Clock()
    saver = make_saver(manager, clock, every="10 s")
    assert not saver.wants
    clock.now += 10
    assert saver.wants
    assert save(saver, 2)
    assert not saver.wants


def test_world_that_was_overtaken_does_not_save(
    store: Store, manager: CheckpointManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    Failing(store, monkeypatch).error = SupersededError("another launch")
    with pytest.raises(SupersededError, match="another launch"):
        save(make_saver(manager, Clock()), 8)


def test_state_that_cannot_be_saved_is_an_error_and_no_failure_of_the_store(
    manager: CheckpointManager,
) -> None:
    saver = make_saver(manager, Clock())
    tree = {"model": {"w": torch.zeros(1)}, "job": {"function": len}}
    with pytest.raises(UnsupportedStateError, match=r"job\.function"):
        saver.save(tree, step=1, info={}, protect=[])
    assert saver.last_error is None


def test_protected_checkpoint_outlives_retention(store: Store) -> None:
    with_two = CheckpointManager(store, keep=2)
    saver = make_saver(with_two, Clock())
    for step in range(1, 6):
        assert save(saver, step, protect=("000003-000000000002",))
    assert [name.step for name in with_two.names()] == [5, 4, 2]
    with_two.close()
