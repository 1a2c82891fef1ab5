"""The slots that snapshots lie in: memory that is shared, named or this process's own.

Promises: a slot belongs to its snapshot until that one is released or forgotten; where a tensor goes in it
is worked out once. Shared memory is made by `segments`, which never lets a full mount be a SIGBUS.
"""

from __future__ import annotations

import mmap
import weakref
from typing import TYPE_CHECKING, Final

from checkpoints.copier import pin, unpin
from checkpoints.segments import Segment, segment_path
from checkpoints.serialization import TensorSpec, tensor_view

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from checkpoints.layout import AgentId
    from checkpoints.snapshots import Snapshot

_MOST_PLACES: Final = 100_000


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
        self._places: dict[tuple[int, TensorSpec], Tensor] = {}

    def place(self, image: Tensor, at: int, spec: TensorSpec) -> Tensor:
        """Where a tensor of the file that lies at `at` goes; made once."""
        found = self._places.get((at, spec))
        if found is None:
            if len(self._places) > _MOST_PLACES:
                self._places.clear()  # the state is another one by now
            found = self._places[at, spec] = tensor_view(image, spec)
        return found

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
