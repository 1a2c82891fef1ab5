"""Checkpoints read back: every byte is verified before anything of it is used.

Promises: what does not verify is a `DamagedError` that names the checkpoint and the file; a store that
does not answer is never taken for damage. Files are read in ranges of bounded size, several at a time,
straight into the memory of their tensors. Nothing that is read can run code: a file is a safetensors
file or JSON, or it is damaged. torch is needed to restore, not to verify.
"""

from __future__ import annotations

import bisect
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import xxhash

from checkpoints.errors import DamagedError, NoCheckpointError, ObjectMissingError, RecordError
from checkpoints.layout import MANIFEST_LIMIT_BYTES, Manifest, is_void
from checkpoints.serialization import (
    MAX_STATE_BYTES,
    Header,
    decode_header,
    decode_state,
    header_bytes,
    join,
    new_tensor,
)
from checkpoints.staging import STATE, STATE_FORMAT

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from torch import Tensor

    from checkpoints.canonical import JSON
    from checkpoints.layout import CheckpointName, FileEntry, PartSum
    from checkpoints.store import Store

READ_BYTES: Final = 8 << 20
"""The largest range that is read at once: its checksum is taken while it is still in the cache."""
WORKERS: Final = 4
_FIRST_BYTES: Final = 1 << 16
_TENSORS: Final = ".safetensors"
_INDEX: Final = ".safetensors.index.json"


def read_manifest(store: Store, name: CheckpointName) -> Manifest:
    """The verified manifest of a checkpoint.

    Raises:
        NoCheckpointError: There is none, or only a void one: the checkpoint was never committed.
        DamagedError: It does not verify.
    """
    try:
        data = store.get(name.manifest, limit_bytes=MANIFEST_LIMIT_BYTES)
    except RecordError as error:
        raise DamagedError(f"checkpoint {name}: {error}") from None
    except ObjectMissingError:
        raise NoCheckpointError(
            f"checkpoint {name}: not found in {store.display_url}; `ls` shows what is there"
        ) from None
    if is_void(data):
        raise NoCheckpointError(f"checkpoint {name}: was swept before it was committed")
    return Manifest.from_json(data, name.manifest)


def restore(
    store: Store, manifest: Manifest, *, keys: Collection[str] | None = None
) -> dict[str, object]:
    """The state in a checkpoint, its tensors in host memory; verified before this returns.

    Args:
        store: Where it is.
        manifest: Its verified manifest.
        keys: Top-level keys to read; None: all of them, and so every byte.

    Raises:
        DamagedError: A file is missing, has another size, does not verify or is not what it should be.
    """
    state = read_state(store, manifest)
    wanted = [key for key in state.skeletons if keys is None or key in keys]
    for key in keys or ():
        if key not in state.skeletons:
            raise NoCheckpointError(
                f"checkpoint {manifest.name}: holds no {key!r}, but {', '.join(state.skeletons)}"
            )
    names = {name for key in wanted for name in state.files.get(key, ())}
    loads = [open_load(store, manifest, e) for e in manifest.files if e.name in names]
    run_parts(loads)
    if keys is None:
        for entry in manifest.files:
            if entry.name.endswith(_INDEX):
                read_index(store, manifest, entry)
    tensors = {load.entry.name: load.finish() for load in loads}
    tree: dict[str, object] = {}
    for key in wanted:
        where = f"checkpoint {manifest.name}: {STATE}: {key}"
        mine: dict[str, Tensor] = {}
        for name in state.files.get(key, ()):
            if mine.keys() & tensors[name].keys():
                raise DamagedError(f"checkpoint {manifest.name}: {name}: a tensor is there twice")
            mine.update(tensors[name])
        tree[key] = join(state.skeletons[key], mine, where=where)
    return tree


def verify_file(
    store: Store, manifest: Manifest, entry: FileEntry, tell: Callable[[int], None] | None = None
) -> None:
    """Read every byte of one file, and its structure; needs no torch.

    Args:
        store: Where it is.
        manifest: The checkpoint's.
        entry: The file.
        tell: Called with the size of each part of it that was verified, in any thread.

    Raises:
        DamagedError: It does not verify, or is not what its name says.
    """
    if entry.name == STATE:
        read_state(store, manifest)
        return
    if entry.name.endswith(_INDEX):
        read_index(store, manifest, entry)
        return
    check_kind(manifest, entry)
    read_header(store, manifest, entry)
    run_parts([VerifyOnly(store, manifest, entry)], tell)


def verify(store: Store, manifest: Manifest) -> None:
    """Read every byte of a checkpoint.

    Raises:
        DamagedError: The first file that does not verify.
    """
    for entry in manifest.files:
        check_size(store, manifest, entry)
    for entry in manifest.files:
        verify_file(store, manifest, entry)


def check_size(store: Store, manifest: Manifest, entry: FileEntry) -> None:
    """Look whether a file is there under its size, without reading it.

    Raises:
        DamagedError: It is not.
    """
    try:
        found = store.size(object_name(manifest, entry))
    except ObjectMissingError:
        raise DamagedError(f"{where(manifest, entry)}: is missing") from None
    if found != entry.size_bytes:
        raise DamagedError(
            f"{where(manifest, entry)}: found {found} bytes, expected {entry.size_bytes}"
        )


def check_kind(manifest: Manifest, entry: FileEntry) -> None:
    """Refuse a file that no checkpoint of ours has, a pickle for instance.

    Raises:
        DamagedError: It is neither state.json nor a file of tensors nor the index of some.
    """
    if entry.name != STATE and not entry.name.endswith((_TENSORS, _INDEX)):
        raise DamagedError(
            f"{where(manifest, entry)}: found a file of another kind, expected safetensors or JSON"
        )


def object_name(manifest: Manifest, entry: FileEntry) -> str:
    """Where a file lies: in the folder of the checkpoint that first wrote it."""
    return (entry.owner or manifest.name).file(entry.name)


def where(manifest: Manifest, entry: FileEntry) -> str:
    """A file in a message."""
    return f"checkpoint {manifest.name}: {entry.name}"


# --------------------------------------------------------------------------------------- state.json
@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """What state.json says: a skeleton for each key, and the files that hold its tensors."""

    skeletons: dict[str, JSON]
    files: dict[str, list[str]]


def read_state(store: Store, manifest: Manifest) -> State:
    """The verified state.json of a checkpoint.

    Raises:
        DamagedError: It is missing, does not verify or does not fit the manifest.
    """
    entry = next((entry for entry in manifest.files if entry.name == STATE), None)
    if entry is None:
        raise DamagedError(f"checkpoint {manifest.name}: {STATE}: is not in the manifest")
    name = where(manifest, entry)
    document = decode_state(_read_whole(store, manifest, entry), where=name)
    state = check_state(document, name)
    lists = state.files
    for other in manifest.files:
        check_kind(manifest, other)
    listed = sorted(file for names in lists.values() for file in names)
    present = sorted(e.name for e in manifest.files if e.name.endswith(_TENSORS))
    if listed != present:
        raise DamagedError(f"{name}: names the files {listed}, the manifest {present}")
    return state


def check_state(document: dict[str, JSON], name: str) -> State:
    """What the document of a state.json says.

    Raises:
        DamagedError: It is of another version, or not what it should be.
    """
    skeletons, files = document.get("state"), document.get("files")
    if document.get("format") != STATE_FORMAT:
        raise DamagedError(
            f"{name}: found format {str(document.get('format'))[:40]}, expected {STATE_FORMAT}"
            " (written by a newer version?)"
        )
    if not isinstance(skeletons, dict) or not isinstance(files, dict):
        raise DamagedError(f"{name}: found no table of state and files")
    lists = {key: _names(value, name) for key, value in files.items()}
    if lists.keys() - skeletons.keys():
        raise DamagedError(
            f"{name}: names the files of {sorted(lists.keys() - skeletons.keys())[:5]}, expected state"
        )
    return State(skeletons=skeletons, files=lists)


def read_index(store: Store, manifest: Manifest, entry: FileEntry) -> None:
    """Verify the index of split files: it is for other readers, so it has to lead somewhere.

    Raises:
        DamagedError: It does not verify, or names a file that is not there.
    """
    name = where(manifest, entry)
    index = decode_state(_read_whole(store, manifest, entry), where=name)
    files = {f"../{other.owner or manifest.name}/{other.name}" for other in manifest.files}
    own = f"../{entry.owner or manifest.name}/"
    weights = index.get("weight_map")
    paths = weights.values() if isinstance(weights, dict) else [None]
    if not all(isinstance(p, str) and (p if "/" in p else own + p) in files for p in paths):
        raise DamagedError(f"{name}: found no map of tensors to the files of the checkpoint")


def _names(value: JSON, name: str) -> list[str]:
    names = [item for item in value if isinstance(item, str)] if isinstance(value, list) else []
    if not isinstance(value, list) or len(names) != len(value):
        raise DamagedError(f"{name}: found {str(value)[:80]}, expected a list of files")
    return names


def _read_whole(store: Store, manifest: Manifest, entry: FileEntry) -> bytes:
    if entry.size_bytes > MAX_STATE_BYTES:
        raise DamagedError(
            f"{where(manifest, entry)}: found {entry.size_bytes} bytes,"
            f" expected at most {MAX_STATE_BYTES}"
        )
    check_size(store, manifest, entry)
    data = bytearray(entry.size_bytes)
    load = Load(store, manifest, entry, [memoryview(data)])
    run_parts([load])
    return bytes(data)


# ----------------------------------------------------------------------------------- tensors' files
def read_header(store: Store, manifest: Manifest, entry: FileEntry) -> tuple[bytes, Header]:
    """The header of a tensors' file, read strictly, but not verified by checksum yet.

    Raises:
        DamagedError: It is none, or does not fit the size of the file.
    """
    name = object_name(manifest, entry)
    check_size(store, manifest, entry)
    data = store.get_range(name, 0, min(_FIRST_BYTES, entry.size_bytes))
    length = header_bytes(data[:8], entry.size_bytes, where=where(manifest, entry))
    if length > len(data):
        data += store.get_range(name, len(data), length - len(data))
    header = decode_header(data, entry.size_bytes, where=where(manifest, entry))
    return data[:length], header


def open_load(store: Store, manifest: Manifest, entry: FileEntry) -> TensorLoad:
    """Make the tensors that a file will be read into."""
    start, header = read_header(store, manifest, entry)
    tensors: dict[str, Tensor] = {}
    first = bytearray(len(start))
    targets = [memoryview(first)]
    for spec in header.tensors:
        tensors[spec.name], view = new_tensor(spec)
        targets.append(view)
    return TensorLoad(store, manifest, entry, targets, start=start, first=first, tensors=tensors)


def header_size(data: memoryview, name: str) -> int:
    """How long the header is of a tensors' file that is in memory."""
    return header_bytes(bytes(data[:8]), data.nbytes, where=name)


@dataclass(slots=True)
class Load:
    """One file on its way into memory: where each of its bytes belongs."""

    store: Store
    manifest: Manifest
    entry: FileEntry
    targets: list[memoryview]
    """In the order of the file, without gaps."""
    _starts: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self._starts = []
        offset = 0
        for target in self.targets:
            self._starts.append(offset)
            offset += target.nbytes

    def read_part(self, part: PartSum, tell: Callable[[int], None] | None = None) -> None:
        """Read one part to its place and verify it.

        Raises:
            DamagedError: Its bytes are others than were written.
        """
        digest = xxhash.xxh3_128()
        end = part.offset + part.size
        for start in range(part.offset, end, READ_BYTES):
            self._read_range(start, min(READ_BYTES, end - start), digest)
        if digest.hexdigest() != part.xxh3_128:
            raise DamagedError(
                f"{where(self.manifest, self.entry)}: bytes {part.offset} to {end} do not verify:"
                f" found xxh3_128 {digest.hexdigest()}, expected {part.xxh3_128}"
            )
        if tell is not None:
            tell(part.size)

    def _read_range(self, start: int, length: int, digest: xxhash.xxh3_128) -> None:
        name = object_name(self.manifest, self.entry)
        number = bisect.bisect_right(self._starts, start) - 1
        within = start - self._starts[number]
        if self.targets[number].nbytes - within >= length:
            target = self.targets[number][within : within + length]
            self._fetch(name, start, target)
            digest.update(target)
            return
        # Many small tensors: one request for all of them, then each to its place.
        scratch = memoryview(bytearray(length))
        self._fetch(name, start, scratch)
        digest.update(scratch)
        done = 0
        while done < length:
            target = self.targets[number][within : within + length - done]
            target[:] = scratch[done : done + target.nbytes]
            done += target.nbytes
            number, within = number + 1, 0

    def _fetch(self, name: str, start: int, target: memoryview) -> None:
        try:
            self.store.readinto(name, start, target)
        except ObjectMissingError:
            raise DamagedError(f"{where(self.manifest, self.entry)}: is missing") from None


@dataclass(slots=True)
class TensorLoad(Load):
    """A tensors' file on its way into its tensors."""

    start: bytes = b""
    first: bytearray = field(default_factory=bytearray)
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def finish(self) -> dict[str, Tensor]:
        """The tensors, all parts being verified.

        Raises:
            DamagedError: The header that said where they lie was another than the verified one.
        """
        if self.first != self.start:
            raise DamagedError(
                f"{where(self.manifest, self.entry)}: its header changed while it was read"
            )
        return self.tensors


class VerifyOnly(Load):
    """A file that is only checked: its bytes go nowhere."""

    def __init__(self, store: Store, manifest: Manifest, entry: FileEntry) -> None:
        check_size(store, manifest, entry)
        super().__init__(store, manifest, entry, [])

    def _read_range(self, start: int, length: int, digest: xxhash.xxh3_128) -> None:
        scratch = memoryview(bytearray(length))
        self._fetch(object_name(self.manifest, self.entry), start, scratch)
        digest.update(scratch)


def run_parts(loads: Iterable[Load], tell: Callable[[int], None] | None = None) -> None:
    """Read and verify all parts of some files, several at a time.

    Args:
        loads: The files.
        tell: Called with the size of each part that was verified, in any thread.

    Raises:
        DamagedError: The first part, in the order of the files, that does not verify.
    """
    tasks = [(load, part) for load in loads for part in load.entry.parts]
    if len(tasks) == 1:
        tasks[0][0].read_part(tasks[0][1], tell)
        return
    with ThreadPoolExecutor(WORKERS, thread_name_prefix="restore") as pool:
        futures = [pool.submit(load.read_part, part, tell) for load, part in tasks]
        try:
            for future in futures:
                future.result()
        finally:
            for future in futures:  # after a failure the rest is not worth reading
                future.cancel()
