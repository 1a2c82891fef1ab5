"""The memory of snapshots: made once, used again, and filled beside the training.

Promises: once a filling is copied, nothing that happens to the live tensors changes the snapshot. What
the next forward changes is kept before `begin` returns; the tensors that were named as still are copied
by `Filling.copy`, in any thread, and must not change until it has returned. A slot belongs to its snapshot
until that one is released or forgotten, so a snapshot whose commit failed can be committed later. Where
there is too little shared memory one line says so, and private memory serves.
Knows no store: what is done with the files is the writer's business.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, cast

from checkpoints import snapshots
from checkpoints.canonical import dump
from checkpoints.copier import DeviceCopy, keep, marks_of
from checkpoints.errors import CheckpointError
from checkpoints.frozen import Watch
from checkpoints.segments import Segment
from checkpoints.slots import Place, Private, Slot
from checkpoints.snapshots import Plan, Snapshot, StagedFile
from checkpoints.staging import Tables, check_info, plan_files

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from torch import Tensor

    from checkpoints.canonical import JSON
    from checkpoints.layout import CheckpointName

__all__ = ["Buffers", "Filling", "Place", "Slot", "Snapshot", "StagedFile"]

logger = logging.getLogger(__name__)

MAX_SLOTS: Final = 3
"""Filling, newest complete, being written."""


@dataclass(frozen=True, kw_only=True, slots=True)
class What:
    """What a snapshot is told by."""

    name: CheckpointName
    parent: CheckpointName | None
    run_id: str
    info: Mapping[str, JSON]


class Filling:
    """A snapshot on its way: what changes is kept already, the rest is copied by `copy`."""

    def __init__(self, buffers: Buffers, tree: Mapping[str, object], what: What) -> None:
        """Made by `Buffers.begin`."""
        self._buffers, self._tree, self._what = buffers, tree, what
        self._marks = marks_of(tree)

    def copy(self, *, known: CheckpointName | None = None) -> Snapshot:
        """Plan it and copy it; the snapshot is whole when this returns. Any thread, once.

        Args:
            known: The newest checkpoint that is known to be in the store.

        Raises:
            UnsupportedStateError: Something in the state is neither tensor nor JSON.
            CheckpointError: All slots hold snapshots that nobody released.
        """
        tree, self._tree = self._tree, {}  # what was kept of it is not kept longer than this
        return self._buffers.fill(tree, self._what, self._marks, known)


class Buffers:
    """The slots of one process. Any thread may stage; one at a time does."""

    def __init__(
        self, *, split_bytes: int, max_slots: int = MAX_SLOTS, place: Place | None = None
    ) -> None:
        """Make no memory yet.

        Args:
            split_bytes: Files of tensors are split so that none is larger, where tensors allow it.
            max_slots: How many snapshots there may be at a time.
            place: Where slots lie; None: in this process's own memory.
        """
        self._split_bytes = split_bytes
        self._max_slots = max_slots
        self._place = place
        self._slots: list[Slot] = []
        self._newest: weakref.ref[Slot] | None = None
        self._numbers = 0
        self._lock = threading.Lock()
        self._tables: Tables | None = None
        self._watch = Watch()

    @property
    def is_shared(self) -> bool:
        """Whether other processes can see the snapshots."""
        return self._place is not None

    def stage(
        self,
        tree: Mapping[str, object],
        *,
        name: CheckpointName,
        parent: CheckpointName | None,
        run_id: str,
        info: Mapping[str, JSON],
    ) -> Snapshot:
        """Copy a state into host memory; all of it is copied when this returns.

        Raises:
            UnsupportedStateError: Something in the state is neither tensor nor JSON.
            CheckpointError: All slots hold snapshots that nobody released.
        """
        what = What(name=name, parent=parent, run_id=run_id, info=info)
        return self.fill(tree, what, {}, None)

    def begin(
        self,
        tree: Mapping[str, object],
        *,
        name: CheckpointName,
        parent: CheckpointName | None,
        run_id: str,
        info: Mapping[str, JSON],
        still: Collection[int] = (),
    ) -> Filling:
        """Begin a snapshot: keep all that may change, now; the rest is copied by `Filling.copy`.

        Args:
            tree: The state.
            name: Its generation and step.
            parent: The state that its generation began from.
            run_id: Whose it is.
            info: What is told of it without reading it.
            still: The data pointers of the tensors that do not change until `Filling.copy` is done.
        """
        what = What(name=name, parent=parent, run_id=run_id, info=info)
        kept = keep(tree, frozenset(still))
        return Filling(self, cast("Mapping[str, object]", kept), what)

    def fill(
        self,
        tree: Mapping[str, object],
        what: What,
        marks: Mapping[object, object],
        known: CheckpointName | None,
    ) -> Snapshot:
        """Copy a state into a slot; see `stage` and `Filling.copy`."""
        with self._lock:
            tables = plan_files(tree, self._split_bytes, self._tables, self._watch.seen)
            self._tables = tables
            plan = Plan.of(tables.sizes)
            checked = check_info(what.info, what.name, what.run_id)
            slot = self._take(plan.capacity(len(dump(checked)) + 200 * len(tables.sizes)))
            try:
                memory = slot.memory.view()
                snapshots.clear(memory)
                self._newest = weakref.ref(slot)
                self._write(slot, plan, tables, marks)
                self._look(slot, plan, tables)
                files = tuple(
                    StagedFile(name=name, data=memory[at : at + size])
                    for name, (at, size) in plan.places.items()
                )
                snapshot = Snapshot(
                    name=what.name,
                    parent=what.parent,
                    run_id=what.run_id,
                    info=checked,
                    files=files,
                    slot=slot,
                )
                snapshots.seal(memory, snapshot, plan, known=known)
            except BaseException:
                slot.free()
                raise
            slot.hold(snapshot)
            return snapshot

    def _write(
        self, slot: Slot, plan: Plan, tables: Tables, marks: Mapping[object, object]
    ) -> None:
        """Copy headers, tensors and texts to their places."""
        memory = slot.memory.view()
        places: list[Tensor] = []
        sources: list[Tensor] = []
        for name, table in tables.files.items():
            at, size = plan.places[name]
            memory[at : at + len(table.start)] = table.start
            image = slot.bytes[at : at + size]
            for spec in table.header.tensors:
                places.append(slot.place(image, at, spec))
                sources.append(table.tensors[spec.name].detach())
        for name, text in tables.texts.items():
            at, size = plan.places[name]
            memory[at : at + size] = text
        if any(source.is_cuda for source in sources):
            slot.pin()
        if places:
            DeviceCopy(places, sources, marks, pinned=slot.is_pinned).run()

    def _look(self, slot: Slot, plan: Plan, tables: Tables) -> None:
        """See which tensors do not change from snapshot to snapshot."""
        if not self._watch.is_done:
            self._watch.look(tables.views(slot.memory.view(), plan.places))

    def _take(self, size_bytes: int) -> Slot:
        """A free slot that is large enough: best one that does not hold the newest snapshot."""
        keeps_newest = self.is_shared and self._newest is not None
        newest = self._newest() if keeps_newest and self._newest is not None else None
        free = [slot for slot in self._slots if slot.is_free]
        others = [slot for slot in free if slot is not newest]
        if others or (free and len(self._slots) >= self._max_slots):
            slot = (others or free)[0]
            if slot.memory.size_bytes < size_bytes:
                self._drop(slot)
                slot = self._make(size_bytes)
        elif len(self._slots) < self._max_slots:
            slot = self._make(size_bytes)
        else:
            raise CheckpointError(
                f"snapshot: {len(self._slots)} are held already, expected fewer;"
                " commit or release one"
            )
        slot.fill()
        return slot

    def _make(self, size_bytes: int) -> Slot:
        while True:
            try:
                memory = self._new_memory(size_bytes)
                break
            except OSError as error:
                reason = error.strerror or str(error)
                if self._place is not None and self._place.owner is not None:
                    # Memory without a name is not bound by the size of the mount.
                    logger.warning(
                        "snapshots: %s; they lie in memory without a name, which is gone with the writer",
                        reason,
                    )
                    self._place = Place()
                    continue
                logger.warning(
                    "snapshots: %s; saving goes on without shared memory: the loop waits for each save",
                    reason,
                )
                self._place = None
        slot = Slot(self._numbers, memory)
        self._slots.append(slot)
        return slot

    def _new_memory(self, size_bytes: int) -> Segment | Private:
        while True:
            self._numbers += 1
            if self._place is None:
                return Private(size_bytes)
            # A name that is taken belongs to a writer that lives on.
            with contextlib.suppress(FileExistsError):
                return self._place.make(self._numbers, size_bytes)

    def _drop(self, slot: Slot) -> None:
        self._slots.remove(slot)
        slot.close(unlink=True)

    def reserve(self, size_bytes: int) -> Slot:
        """A slot for a snapshot that comes from elsewhere; `hold` or `free` it.

        Raises:
            CheckpointError: All slots hold snapshots that nobody released.
        """
        with self._lock:
            slot = self._take(size_bytes)
            self._newest = weakref.ref(slot)
            return slot

    def take_over(self, memory: Segment, number: int) -> Slot:
        """Use the memory of a process before this one again."""
        with self._lock:
            slot = Slot(number, memory)
            self._slots.append(slot)
            self._numbers = max(self._numbers, number)
            return slot

    def abandon(self, slot: Slot) -> None:
        """Never write to a slot again: somebody who does not answer may still read it."""
        with self._lock:
            if slot in self._slots:
                self._slots.remove(slot)
            slot.memory.unlink()

    def hold(self, memory: Segment) -> Snapshot | None:
        """The whole snapshot that lies in some shared memory, held; None where there is none."""
        with self._lock:
            for slot in self._slots:
                if slot.memory is memory and slot.is_free:
                    snapshot = snapshots.read(memory.view(), slot)
                    if snapshot is not None:
                        slot.hold(snapshot)
                    return snapshot
        return None

    @property
    def has_free(self) -> bool:
        """Whether `begin` would find memory."""
        return len(self._slots) < self._max_slots or any(slot.is_free for slot in self._slots)

    @property
    def segments(self) -> list[Segment]:
        """The shared memory of all slots."""
        return [slot.memory for slot in self._slots if isinstance(slot.memory, Segment)]

    def forget(self, good: Collection[CheckpointName]) -> None:
        """What is in the slots is no snapshot any more, but for those that are known to be good."""
        with self._lock:
            for slot in self._slots:
                memory = slot.memory.view()
                with contextlib.suppress(CheckpointError):
                    found = snapshots.read(memory)
                    if found is None or found.name in good:
                        continue
                snapshots.clear(memory)

    def close(self, *, unlink: bool = True) -> None:
        """Forget the slots; snapshots that are still held keep their memory."""
        with self._lock:
            for slot in self._slots:
                if slot.is_free:
                    slot.close(unlink=unlink)
                elif unlink:
                    slot.memory.unlink()
            self._slots.clear()
