"""A slot holds a whole snapshot or none: torn ones, damaged ones and strangers' are never read."""

import contextlib
import struct
from typing import TYPE_CHECKING, cast

import pytest

from checkpoints import memory, snapshots
from checkpoints.buffers import Buffers, Place
from checkpoints.errors import DamagedError
from checkpoints.snapshots import Snapshot
from tests.support.states import name, same, state

if TYPE_CHECKING:
    import torch

    from checkpoints.segments import Segment
    from checkpoints.slots import Slot


def taken(step: int = 3) -> tuple[Buffers, Snapshot, memoryview]:
    """A snapshot in shared memory without a name."""
    buffers = Buffers(split_bytes=10**9, place=Place())
    snapshot = buffers.stage(
        state(step), name=name(step), parent=name(1), run_id="r", info={"epoch": 2, "position": 5}
    )
    return buffers, snapshot, cast("Slot", snapshot.slot).memory.view()


def test_what_was_sealed_is_read_back_without_a_copy() -> None:
    _, snapshot, view = taken()
    found = snapshots.read(view)
    assert found is not None
    assert (found.name, found.parent, found.run_id) == (name(3), name(1), "r")
    assert (found.info, found.token) == ({"epoch": 2, "position": 5}, snapshot.token)
    assert [(f.name, bytes(f.data)) for f in found.files] == [
        (f.name, bytes(f.data)) for f in snapshot.files
    ]


def test_a_state_in_memory_is_loaded_as_it_was() -> None:
    _, snapshot, _ = taken()
    slot = cast("Slot", snapshot.slot)
    tree = memory.load(f"/proc/self/fd/{slot.memory.fd}", name(3))
    assert same(tree, state(3))
    weights = cast("dict[str, torch.Tensor]", tree["model"])["net.weight"]
    weights.fill_(9.0)  # its own page from now on
    assert same(memory.load(f"/proc/self/fd/{slot.memory.fd}", name(3)), state(3))


def test_a_slot_that_is_being_filled_is_no_snapshot() -> None:
    buffers, snapshot, view = taken()
    snapshots.clear(view)
    assert snapshots.read(view) is None
    slot = cast("Slot", snapshot.slot)
    with pytest.raises(DamagedError, match="no longer in this node's memory"):
        memory.load(f"/proc/self/fd/{slot.memory.fd}", name(3))
    buffers.close()


@pytest.mark.parametrize("at", [0, 16, 24, 32, 40])
def test_words_that_do_not_fit_the_table_are_damage_or_nothing(at: int) -> None:
    _, _, view = taken()
    (word,) = struct.unpack_from("<Q", view, at)
    struct.pack_into("<Q", view, at, word ^ 0x100)
    with contextlib.suppress(DamagedError):
        assert snapshots.read(view) is None


def test_a_flipped_bit_in_the_table_is_damage() -> None:
    _, _, view = taken()
    (at,) = struct.unpack_from("<Q", view, 24)
    view[at + 20] ^= 1
    with pytest.raises(DamagedError, match="table does not verify"):
        snapshots.read(view)


def test_held_snapshots_are_told_newest_first_and_only_of_the_run() -> None:
    buffers = Buffers(split_bytes=10**9, place=Place())
    kept = [
        buffers.stage(state(step), name=name(step), parent=None, run_id=run, info={})
        for step, run in ((1, "r"), (2, "r"), (3, "other"))
    ]
    segments: list[Segment] = buffers.segments
    snapshots.note_known(segments[1].view(), name(1))
    snapshots.count_try(segments[1].view(), 2)
    found = memory.held(segments, ["a", "b", "c"], "r")
    assert [(one.name, one.path) for one in found if one.name.step == 2] == [(name(2), "b")]
    assert (found[0].known, found[0].tries) == (name(1), 2)
    assert len(found) == 2 == len(kept) - 1


def test_the_newest_snapshot_is_the_last_to_be_overwritten() -> None:
    buffers = Buffers(split_bytes=10**9, place=Place(), max_slots=2)
    for step in range(1, 8):
        buffers.stage(state(step), name=name(step), parent=None, run_id="r", info={}).release()
        held = memory.held(buffers.segments, ["a", "b"][: len(buffers.segments)], "r")
        assert held[0].name.step == step
        assert len(held) == min(step, 2)


def test_what_may_be_wrong_is_forgotten() -> None:
    buffers = Buffers(split_bytes=10**9, place=Place())
    for step in (1, 2):
        buffers.stage(state(step), name=name(step), parent=None, run_id="r", info={}).release()
    buffers.forget([name(1)])
    held = memory.held(buffers.segments, ["a", "b"], "r")
    assert [one.name for one in held] == [name(1)]


def test_a_copy_of_a_slot_is_the_snapshot_in_it() -> None:
    _, snapshot, view = taken()
    snapshots.note_known(view, name(2))
    snapshots.count_try(view, 1)
    other = memoryview(bytearray(view.nbytes + 4096))
    assert snapshots.copy(view, other)
    found = snapshots.read(other)
    assert found is not None
    assert (found.name, found.token) == (snapshot.name, snapshot.token)
    assert [bytes(f.data) for f in found.files] == [bytes(f.data) for f in snapshot.files]
    assert (snapshots.known(other), snapshots.tries(other)) == (name(2), 1)


def test_a_copy_of_a_slot_that_is_filled_meanwhile_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, view = taken()
    other = memoryview(bytearray(view.nbytes))
    clear = snapshots.clear

    def filled(memory: memoryview) -> None:
        clear(memory)
        if memory is other:
            clear(view)  # as its owner begins

    monkeypatch.setattr(snapshots, "clear", filled)
    assert not snapshots.copy(view, other)
    assert snapshots.read(other) is None
