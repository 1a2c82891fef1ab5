"""Checkpoints read back: every byte is verified before anything of it is used.

Promises: what does not verify is a `DamagedError` that names the checkpoint and the file; a store that
does not answer is never taken for damage. Files are read in ranges of bounded size, several at a time,
straight into the memory of their tensors. Nothing that is read can run code: a file is a safetensors
file or JSON, or it is damaged. torch is needed to restore, not to verify.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from checkpoints.errors import DamagedError, NoCheckpointError, ObjectMissingError, RecordError
from checkpoints.layout import MANIFEST_LIMIT_BYTES, Manifest, is_void
from checkpoints.parts import Load, VerifyOnly, check_size, object_name, run_parts, where
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
    from collections.abc import Callable, Collection

    from torch import Tensor

    from checkpoints.canonical import JSON
    from checkpoints.layout import CheckpointName, FileEntry
    from checkpoints.store import Store

_FIRST_BYTES: Final = 1 << 16
_TENSORS: Final = ".safetensors"
_INDEX: Final = ".safetensors.index.json"


def read_manifest(store: Store, name: CheckpointName) -> Manifest:
    """The verified manifest of a checkpoint.

    Raises:
        NoCheckpointError: There is none, or only a void one: it was never committed, or deleted.
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
        raise NoCheckpointError(f"checkpoint {name}: was swept before it was committed, or deleted")
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
    check_structure(store, manifest, entry)
    if entry.name.endswith(_TENSORS):
        run_parts([VerifyOnly(store, manifest, entry)], tell)
    elif tell is not None:
        tell(entry.size_bytes)


def check_structure(store: Store, manifest: Manifest, entry: FileEntry) -> None:
    """Look whether a file is what its name says; of tensors only the header is read.

    Raises:
        DamagedError: It is not.
    """
    if entry.name == STATE:
        read_state(store, manifest)
    elif entry.name.endswith(_INDEX):
        read_index(store, manifest, entry)
    else:
        check_kind(manifest, entry)
        read_header(store, manifest, entry)


def verify(store: Store, manifest: Manifest) -> None:
    """Read every byte of a checkpoint.

    Raises:
        DamagedError: The first file that does not verify.
    """
    for entry in manifest.files:
        check_size(store, manifest, entry)
    for entry in manifest.files:
        verify_file(store, manifest, entry)
    check_fit(store, manifest)


def check_fit(store: Store, manifest: Manifest) -> None:
    """Look whether state and tensors belong together, without reading the tensors.

    Raises:
        DamagedError: A tensor is missing, or has no place.
    """
    state = read_state(store, manifest)
    names: dict[str, list[str]] = {}
    for entry in manifest.files:
        if entry.name.endswith(_TENSORS):
            _, header = read_header(store, manifest, entry)
            names[entry.name] = [spec.name for spec in header.tensors]
    for key, skeleton in state.skeletons.items():
        where = f"checkpoint {manifest.name}: {STATE}: {key}"
        mine: dict[str, None] = {}
        for file in state.files.get(key, ()):
            for name in names[file]:
                if name in mine:
                    raise DamagedError(
                        f"checkpoint {manifest.name}: {file}: a tensor is there twice"
                    )
                mine[name] = None
        join(skeleton, mine, where=where)


def check_kind(manifest: Manifest, entry: FileEntry) -> None:
    """Refuse a file that no checkpoint of ours has, a pickle for instance.

    Raises:
        DamagedError: It is neither state.json nor a file of tensors nor the index of some.
    """
    if entry.name != STATE and not entry.name.endswith((_TENSORS, _INDEX)):
        raise DamagedError(
            f"{where(manifest, entry)}: found a file of another kind, expected safetensors or JSON"
        )


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
        raise DamagedError(
            f"{name}: names the files {str(listed)[:200]}, the manifest {str(present)[:200]}"
        )
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
            f"{name}: names the files of {str(sorted(lists.keys() - skeletons.keys()))[:200]}, expected state"
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
