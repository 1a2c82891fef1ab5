"""The memory of snapshots: made once, used again, and filled beside the training.

Promises: once a filling is finished, nothing that happens to the live tensors changes the snapshot. What
the next forward changes is copied before `begin` returns; the tensors that were named as still are copied
by `Filling.copy`, in any thread, and must not change until it has returned. A slot belongs to its snapshot
until that one is released or forgotten, so a snapshot whose commit failed can be committed later. Where
there is too little shared memory one line says so, and private memory serves.
Knows no store: what is done with the files is the writer's business.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import threading
import weakref
from typing import TYPE_CHECKING, Final

from checkpoints import snapshots
from checkpoints.copier import DeviceCopy, pin, unpin
from checkpoints.errors import CheckpointError
from checkpoints.frozen import Watch
from checkpoints.segments import Segment, segment_path
from checkpoints.serialization import tensor_view
from checkpoints.snapshots import Plan, Snapshot, StagedFile
from checkpoints.staging import Tables, check_info, plan_files

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from pathlib import Path

    from torch import Tensor

    from checkpoints.canonical import JSON
    from checkpoints.layout import AgentId, CheckpointName

__all__ = ["Buffers", "Filling", "Place", "Slot", "Snapshot", "StagedFile"]

logger = logging.getLogger(__name__)

MAX_SLOTS: Final = 3
"""Filling, newest complete, being written."""


class Private:
    """Memory of this process alone."""

    path: Path | None = None
    fd = -1

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        # Anonymous: not bound by the size of /dev/shm, and a full one is no SIGBUS.
        self.memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def view(self, start: int = 0, size_bytes: int | None = None) -> memoryview:
        """A part of it."""
        end = self.size_bytes if size_bytes is None else start + size_bytes
        return memoryview(self.memory)[start:end]

    def unlink(self) -> None:
        """It has no name."""

    def close(self) -> None:
        """It goes with its last view."""


class Place:
    """Where slots are to lie: shared with other processes, under a name or without."""

    def __init__(self, owner: AgentId | None = None, run_id: str = "") -> None:
        """Give an owner for segments with a name, which outlive their makers."""
        self.owner, self.run_id = owner, run_id

    def make(self, number: int, size_bytes: int) -> Segment:
        """Make the memory of a slot.

        Raises:
            OSError: There is not that much.
        """
        path = None if self.owner is None else segment_path(self.owner, self.run_id, number)
        return Segment.make(size_bytes, path)


class Slot:
    """The memory of one snapshot."""

    def __init__(self, number: int, memory: Segment | Private) -> None:
        import torch

        self.number = number
        self.memory = memory
        self.bytes: Tensor = torch.frombuffer(memory.memory, dtype=torch.uint8)
        self._holder: weakref.ref[Snapshot] | None = None
        self._is_filling = False
        self.is_pinned = False

    @property
    def is_free(self) -> bool:
        """Whether no snapshot needs what is in it."""
        return not self._is_filling and (self._holder is None or self._holder() is None)

    @property
    def is_shared(self) -> bool:
        """Whether other processes can map it."""
        return isinstance(self.memory, Segment)

    def fill(self) -> None:
        """Take it before a snapshot exists."""
        self._is_filling = True

    def hold(self, snapshot: Snapshot) -> None:
        """Keep it for a snapshot, for as long as that lives and is not released."""
        self._holder = weakref.ref(snapshot)
        self._is_filling = False

    def free(self) -> None:
        """Let the next snapshot have it."""
        self._holder = None
        self._is_filling = False

    def pin(self) -> None:
        """Make it fit for copies from CUDA devices that overlap with their work; once."""
        if not self.is_pinned:
            self.is_pinned = pin(self.bytes)

    def close(self, *, unlink: bool) -> None:
        """Let the memory go."""
        if self.is_pinned:
            unpin(self.bytes)
            self.is_pinned = False
        if unlink:
            self.memory.unlink()
        self.memory.close()


class Filling:
    """A snapshot on its way: begun, copied, finished."""

    def __init__(
        self,
        slot: Slot,
        plan: Plan,
        snapshot: Snapshot,
        copy: DeviceCopy,
        look: Callable[[], None],
    ) -> None:
        """Made by `Buffers.begin`."""
        self.slot = slot
        self.snapshot = snapshot
        self._plan, self._copy, self._look = plan, copy, look

    def copy(self, *, known: CheckpointName | None = None) -> Snapshot:
        """Copy the still tensors; the snapshot is whole when this returns. Any thread, once.

        Args:
            known: The newest checkpoint that is known to be in the store.
        """
        try:
            self._copy.run()
            self._look()
            snapshots.seal(self.slot.memory.view(), self.snapshot, self._plan, known=known)
        except BaseException:
            self.slot.free()
            raise
        self.slot.hold(self.snapshot)
        return self.snapshot


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
        return self.begin(tree, name=name, parent=parent, run_id=run_id, info=info).copy()

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
        """Begin a snapshot: copy all but the still tensors, now.

        Args:
            tree: The state.
            name: Its generation and step.
            parent: The state that its generation began from.
            run_id: Whose it is.
            info: What is told of it without reading it.
            still: The data pointers of the tensors that do not change until `Filling.copy` is done.

        Raises:
            UnsupportedStateError: Something in the state is neither tensor nor JSON.
            CheckpointError: All slots hold snapshots that nobody released.
        """
        with self._lock:
            tables = plan_files(tree, self._split_bytes, self._tables, self._watch.seen)
            self._tables = tables
            plan = Plan.of(tables.sizes)
            checked = check_info(info, name)
            slot = self._take(plan.capacity(len(str(checked)) + 200 * len(tables.sizes)))
            try:
                snapshots.clear(slot.memory.view())
                files, moved = self._fill(slot, plan, tables, frozenset(still))
                snapshot = Snapshot(
                    name=name, parent=parent, run_id=run_id, info=checked, files=files, slot=slot
                )
            except BaseException:
                slot.free()
                raise
            self._newest = weakref.ref(slot)
            return Filling(slot, plan, snapshot, moved, lambda: self._look(slot, plan, tables))

    def _fill(
        self, slot: Slot, plan: Plan, tables: Tables, still: frozenset[int]
    ) -> tuple[tuple[StagedFile, ...], DeviceCopy]:
        """Write what is at hand; returns the files and what is still to be copied."""
        memory = slot.memory.view()
        now: tuple[list[Tensor], list[Tensor]] = ([], [])
        later: tuple[list[Tensor], list[Tensor]] = ([], [])
        for name, table in tables.files.items():
            at, size = plan.places[name]
            memory[at : at + len(table.start)] = table.start
            image = slot.bytes[at : at + size]
            for spec in table.header.tensors:
                source = table.tensors[spec.name].detach()
                places, sources = later if source.data_ptr() in still else now
                places.append(tensor_view(image, spec))
                sources.append(source)
        for name, text in tables.texts.items():
            at, size = plan.places[name]
            memory[at : at + size] = text
        if any(source.is_cuda for source in later[1]):
            slot.pin()
        if now[0]:
            DeviceCopy(*now, pinned=slot.is_pinned).run()
        files = tuple(
            StagedFile(name=name, data=memory[at : at + size])
            for name, (at, size) in plan.places.items()
        )
        return files, DeviceCopy(*later, pinned=slot.is_pinned)

    def _look(self, slot: Slot, plan: Plan, tables: Tables) -> None:
        """See which tensors do not change from snapshot to snapshot."""
        if self._watch.is_done:
            return
        memory = slot.memory.view()
        places = {}
        for name, table in tables.files.items():
            at, _ = plan.places[name]
            for spec in table.header.tensors:
                start = at + spec.offset
                places[tables.keys[name], spec.name] = memory[start : start + spec.size_bytes]
        self._watch.look(places)

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
        memory: Segment | Private
        try:
            memory = self._new_memory(size_bytes)
        except OSError as error:
            logger.warning(
                "snapshots: %s; saving goes on without shared memory: the loop waits for each save",
                error.strerror or error,
            )
            self._place = None
            memory = Private(size_bytes)
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
