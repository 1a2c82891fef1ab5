"""Snapshots: the state copied into host memory, as the very files that a checkpoint will hold.

Promises: once `Buffers.stage` has returned, nothing that happens to the live tensors changes the
snapshot; its buffers are made once and used again as long as they fit. A slot belongs to its snapshot
until that one is released or forgotten, so a snapshot whose commit failed can be committed later.
Knows no store: what is done with the files is the writer's business.
"""

from __future__ import annotations

import mmap
import re
import threading
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from checkpoints.canonical import plain
from checkpoints.errors import CheckpointError, DamagedError, UnsupportedStateError
from checkpoints.layout import Manifest, new_token, utc_now
from checkpoints.serialization import (
    encode_header,
    encode_index,
    encode_state,
    split,
    tensor_view,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from checkpoints.canonical import JSON
    from checkpoints.layout import CheckpointName

STATE: Final = "state.json"
MODEL: Final = "model"
STATE_FORMAT: Final = 1
MAX_SLOTS: Final = 3
"""Filling, newest complete, being written."""
_KEY: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,99}")


@dataclass(frozen=True, kw_only=True, slots=True)
class StagedFile:
    """One file of a snapshot, all of its bytes in host memory."""

    name: str
    data: memoryview

    @property
    def size_bytes(self) -> int:
        """The size that the file will have."""
        return self.data.nbytes


@dataclass(kw_only=True, slots=True, weakref_slot=True, eq=False)
class Snapshot:
    """A consistent copy of the training state in host memory, not yet durable."""

    name: CheckpointName
    parent: CheckpointName | None
    run_id: str
    info: Mapping[str, JSON]
    files: tuple[StagedFile, ...]
    token: str = field(default_factory=new_token)
    created_at: str = field(default_factory=utc_now)
    slot: Slot | None = None
    is_doubtful: bool = False
    """The manifest was sent and the outcome is not known: the files must stay."""

    @property
    def size_bytes(self) -> int:
        """The bytes of all files together."""
        return sum(file.size_bytes for file in self.files)

    @property
    def is_released(self) -> bool:
        """Whether its memory may already hold another snapshot."""
        return self.slot is None

    def release(self) -> None:
        """Give its memory back; it cannot be committed any more."""
        slot, self.slot = self.slot, None
        if slot is not None:
            slot.free()


class Slot:
    """Host memory for one snapshot; one image for each file."""

    def __init__(self) -> None:
        self._images: dict[str, Image] = {}
        self._holder: weakref.ref[Snapshot] | None = None
        self._is_filling = False

    @property
    def is_free(self) -> bool:
        """Whether no snapshot needs what is in it."""
        return not self._is_filling and (self._holder is None or self._holder() is None)

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

    def images(self, sizes: Mapping[str, int]) -> dict[str, Image]:
        """An image of at least the given size for each file; old ones are used again."""
        kept = {
            name: self._images[name]
            for name, size in sizes.items()
            if name in self._images and self._images[name].capacity_bytes >= size
        }
        self._images = kept  # before more is allocated, what does not fit has to go
        for name, size in sizes.items():
            if name not in kept:
                kept[name] = Image(size)
        return dict(kept)


class Image:
    """Page-aligned memory in the shape of one file."""

    def __init__(self, size_bytes: int) -> None:
        import torch

        self.capacity_bytes = size_bytes
        # Private and anonymous: not bound by the size of /dev/shm, and a full one is no SIGBUS.
        self._memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.bytes: Tensor = torch.frombuffer(self._memory, dtype=torch.uint8)

    def view(self, size_bytes: int) -> memoryview:
        """The first bytes of it."""
        return memoryview(self._memory)[:size_bytes]


class Buffers:
    """The slots of one process. Any thread may stage; one at a time does."""

    def __init__(self, *, split_bytes: int, max_slots: int = MAX_SLOTS) -> None:
        self._split_bytes = split_bytes
        self._max_slots = max_slots
        self._slots: list[Slot] = []
        self._lock = threading.Lock()

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
        with self._lock:
            tables, texts = _plan(tree, self._split_bytes)
            slot = self._take()
            try:
                files = _fill(slot, tables)
                files += [StagedFile(name=n, data=memoryview(d)) for n, d in texts.items()]
                snapshot = Snapshot(
                    name=name,
                    parent=parent,
                    run_id=run_id,
                    info=_checked_info(info, name),
                    files=tuple(files),
                    slot=slot,
                )
            except BaseException:
                slot.free()
                raise
            slot.hold(snapshot)
            return snapshot

    def close(self) -> None:
        """Forget the slots; snapshots that are still held keep their memory."""
        with self._lock:
            self._slots.clear()

    def _take(self) -> Slot:
        slot = next((slot for slot in self._slots if slot.is_free), None)
        if slot is None:
            if len(self._slots) >= self._max_slots:
                raise CheckpointError(
                    f"snapshot: {len(self._slots)} are held already, expected fewer;"
                    " commit or release one"
                )
            slot = Slot()
            self._slots.append(slot)
        slot.fill()
        return slot


def _checked_info(info: Mapping[str, JSON], name: CheckpointName) -> dict[str, JSON]:
    """The info as it will be read back: it stands in the manifest, so it has to be plain JSON."""
    tensors, _ = split(dict(info), where="info")
    if tensors:
        raise UnsupportedStateError(f"info.{next(iter(tensors))}: found a tensor, expected JSON")
    manifest = Manifest(name=name, parent=None, run_id="-", files=(), info=_object(plain(info)))
    try:
        return dict(Manifest.from_json(manifest.to_json(), name.manifest).info)
    except DamagedError as error:  # numbers or a depth that nobody reads back
        raise UnsupportedStateError(f"info: {error}") from error


def _object(value: JSON) -> dict[str, JSON]:
    return value if isinstance(value, dict) else {}


def _plan(
    tree: Mapping[str, object], split_bytes: int
) -> tuple[dict[str, dict[str, Tensor]], dict[str, bytes]]:
    """Which tensors go to which file, and the JSON files beside them."""
    tables: dict[str, dict[str, Tensor]] = {}
    texts: dict[str, bytes] = {}
    skeletons: dict[str, JSON] = {}
    names: dict[str, JSON] = {}
    for key, state in tree.items():
        if not _KEY.fullmatch(key):
            raise UnsupportedStateError(
                f"{key!r}: found a key that makes no file name, expected letters, digits, _ and -"
            )
        tensors, skeletons[key] = split(state, where=key)
        if key == MODEL:
            _check_model(state, tensors)
        if not tensors and key != MODEL:
            continue
        files = _divide(key, tensors, split_bytes)
        if files.keys() & tables.keys():
            raise UnsupportedStateError(f"{key!r}: found a second file of the name {key}")
        tables.update(files)
        names[key] = list(files)
        if len(files) > 1:
            texts[f"{key}.safetensors.index.json"] = encode_index(files)
    state_document: dict[str, JSON] = {
        "format": STATE_FORMAT,
        "files": names,
        "state": skeletons,
    }
    texts[STATE] = encode_state(state_document)
    return tables, texts


def _check_model(state: object, tensors: Mapping[str, Tensor]) -> None:
    """The weights open with safetensors alone, under exactly their names: so no trees in them."""
    if not isinstance(state, dict):
        raise UnsupportedStateError(
            f"{MODEL}: found {type(state).__name__}, expected a dict of name and tensor"
        )
    for name, value in state.items():
        if tensors.get(name) is not value:
            raise UnsupportedStateError(
                f"{MODEL}.{name}: found {type(value).__name__}, expected a tensor under a plain name"
            )


def _divide(
    key: str, tensors: Mapping[str, Tensor], split_bytes: int
) -> dict[str, dict[str, Tensor]]:
    """The tensors of a key in files of at most `split_bytes` (a larger tensor has its own)."""
    groups: list[dict[str, Tensor]] = [{}]
    filled = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        if groups[-1] and filled + size > split_bytes:
            groups.append({})
            filled = 0
        groups[-1][name] = tensor
        filled += size
    if len(groups) == 1:
        return {f"{key}.safetensors": groups[0]}
    return {
        f"{key}-{number:05d}-of-{len(groups):05d}.safetensors": group
        for number, group in enumerate(groups, 1)
    }


def _fill(slot: Slot, tables: Mapping[str, Mapping[str, Tensor]]) -> list[StagedFile]:
    """Copy the tensors to their places in the images of their files."""
    import torch

    headers = {name: encode_header(tensors) for name, tensors in tables.items()}
    images = slot.images({name: header.file_bytes for name, (_, header) in headers.items()})
    places: list[Tensor] = []
    sources: list[Tensor] = []
    files: list[StagedFile] = []
    for name, (start, header) in headers.items():
        data = images[name].view(header.file_bytes)
        data[: len(start)] = start
        for spec in header.tensors:
            places.append(tensor_view(images[name].bytes, spec))
            sources.append(tables[name][spec.name].detach())
        files.append(StagedFile(name=name, data=data))
    if places:
        # One call for all: the interpreter is free for other threads while it copies.
        with torch.no_grad():
            torch._foreach_copy_(places, sources)
    return files
