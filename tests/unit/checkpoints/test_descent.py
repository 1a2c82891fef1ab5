"""Whether a generation's state descends from a snapshot: what a late writer may still commit."""

from pathlib import Path

from checkpoints.generations import descends_from, write_started
from checkpoints.layout import Started
from checkpoints.store import Store, open_store
from tests.support.states import name


def started(store: Store, generation: int, parent: tuple[int, int] | None, step: int = 0) -> None:
    text = None if parent is None else str(name(parent[1], parent[0]))
    write_started(
        store,
        Started(
            generation=generation,
            parent=text,
            source="fresh" if parent is None else "memory",
            start_step=step,
            position=(0, step),
        ),
    )


def test_a_state_that_was_trained_on_may_be_committed_late(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    started(store, 1, None)
    started(store, 2, (1, 9), 9)
    started(store, 4, (2, 14), 14)
    # 5 of generation 1 came before the 9 that generation 2 went on from.
    assert descends_from(store, 4, name(5, 1)) is True
    assert descends_from(store, 4, name(9, 1)) is True
    assert descends_from(store, 4, name(14, 2)) is True
    # These were left behind.
    assert descends_from(store, 4, name(10, 1)) is False
    assert descends_from(store, 4, name(15, 2)) is False
    assert descends_from(store, 4, name(3, 3)) is False


def test_a_generation_that_has_not_begun_says_nothing_yet(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    started(store, 1, None)
    assert descends_from(store, 2, name(5, 1)) is None
    started(store, 2, None)
    assert descends_from(store, 2, name(5, 1)) is False
