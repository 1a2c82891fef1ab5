"""Files that need not be written again: what is the same in an earlier checkpoint is referred to.

A file of tensors whose every byte is that of the same file in a committed checkpoint, the *base*, is named
in the manifest with its first owner instead of being sent once more: frozen weights cost nothing after the
first time. Promises: sameness is decided by size and checksum of every part, never by a hint; the index
beside split files leads to where each of them lies. Pure: no I/O, no torch.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import xxhash

from checkpoints.layout import FileEntry
from checkpoints.serialization import decode_state
from checkpoints.snapshots import StagedFile

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from checkpoints.layout import Manifest

TENSORS: Final = ".safetensors"
INDEX: Final = ".safetensors.index.json"
SMALLEST_BYTES: Final = 1 << 20
"""Below this a file is written each time: a reference would save nothing that is felt."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settled:
    """What has to be written of a snapshot, and what is in the store already."""

    write: tuple[StagedFile, ...]
    refer: tuple[FileEntry, ...]


def settle(files: Sequence[StagedFile], base: Manifest | None) -> Settled:
    """Part the files of a snapshot into those to write and those to refer to.

    A file that has changed is nearly always found out by its first part, so that this costs next to
    nothing where nothing is frozen, and one reading of the memory where something is.

    Args:
        files: All files of the snapshot.
        base: A committed checkpoint of the same store that will not be deleted before this one is
            committed and whose files are believed to be whole; None: everything is written.
    """
    known = {} if base is None else {entry.name: entry for entry in base.files}
    refer: list[FileEntry] = []
    for file in files:
        entry = known.get(file.name)
        if base is not None and entry is not None and _is_same(file, entry):
            owner = entry.owner or base.name
            refer.append(
                FileEntry(
                    name=file.name, size_bytes=file.size_bytes, parts=entry.parts, owner=owner
                )
            )
    if not refer:
        return Settled(write=tuple(files), refer=())
    names = {entry.name for entry in refer}
    write = [_indexed(file, refer) for file in files if file.name not in names]
    return Settled(write=tuple(write), refer=tuple(refer))


def _is_same(file: StagedFile, entry: FileEntry) -> bool:
    if (
        file.size_bytes != entry.size_bytes
        or file.size_bytes < SMALLEST_BYTES
        or not file.name.endswith(TENSORS)
    ):
        return False
    return all(
        xxhash.xxh3_128_hexdigest(file.data[part.offset : part.offset + part.size]) == part.xxh3_128
        for part in entry.parts
    )


def _indexed(file: StagedFile, refer: Sequence[FileEntry]) -> StagedFile:
    if not file.name.endswith(INDEX):
        return file
    return StagedFile(name=file.name, data=memoryview(lead_to(bytes(file.data), refer)))


def lead_to(index: bytes, entries: Iterable[FileEntry]) -> bytes:
    """The index of split files with each name leading to where its file lies.

    Raises:
        DamagedError: It is no index.
    """
    paths = {entry.name: path_of(entry) for entry in entries}
    document = decode_state(index, where="index")
    weights = document.get("weight_map")
    if isinstance(weights, dict):
        for tensor, path in weights.items():
            if isinstance(path, str):
                name = path.rpartition("/")[2]
                weights[tensor] = paths.get(name, path)
    return json.dumps(document, indent=2).encode("ascii")


def path_of(entry: FileEntry) -> str:
    """Where a file lies, as seen from the checkpoint's own folder."""
    return entry.name if entry.owner is None else f"../{entry.owner}/{entry.name}"
