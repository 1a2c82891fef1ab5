"""`export`: the weights of one checkpoint as one file, for those who have nothing of ours.

Promises: the file opens with `safetensors.torch.load_file`, or with `torch.load(weights_only=True)` where
that is asked for; every byte was verified; whatever the size, little memory is needed (large files pass
through a temporary copy beside the target, two for torch's format). Names are those of the plain model. A
file that is there already is replaced only if that is asked for.
"""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

from checkpoints import parts, reader
from checkpoints.errors import CheckpointError, DamagedError, NoCheckpointError, OptionError
from checkpoints.layout import CHECKPOINTS
from checkpoints.redaction import redact_url
from checkpoints.spool import mapped, no_room, spool
from checkpoints.store import open_store
from checkpoints.tensorfile import DTYPES, encode_rows
from checkpoints.terminal import Progress, size_text

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from checkpoints.layout import FileEntry, Manifest
    from checkpoints.question import Question
    from checkpoints.store import Store
    from checkpoints.tensorfile import Header, TensorSpec

FORMATS: Final = ("safetensors", "torch")
_COMPILED: Final = "_orig_mod"


def export(question: Question) -> int:
    """Write one file of weights."""
    arguments = question.arguments
    assert arguments is not None
    catalog = question.catalog
    name = catalog.resolve(question.which or "latest")
    manifest = catalog.manifest(name)
    target, file = open_target(arguments.target, question.options, arguments.to_options)
    if (real_place(target) + "/").startswith(f"{real_place(catalog.store)}/{CHECKPOINTS}/"):
        raise CheckpointError(
            f"{target.display_url}/{file}: lies among the run's own checkpoints, expected another place"
        )
    if target.folder is not None and (kind := _odd_kind(target.folder / file)):
        raise OptionError(
            f"{target.display_url}/{file}: found {kind}, expected the name of a file to write"
        )
    if not arguments.force and target.exists(file):
        raise CheckpointError(
            f"{target.display_url}/{file}: there is a file already; --force replaces it"
        )
    sources = _sources(catalog.store, manifest, arguments.key)
    rows, names = _rows(sources, arguments.strip)
    start, header = encode_rows(rows)
    with (
        Progress(f"export {name}", header.file_bytes) as progress,
        spool(header.file_bytes, folder_of(target)) as image,
    ):
        image[: len(start)] = start
        _fetch(catalog.store, manifest, sources, names, header, image, progress.add)
        if arguments.format == "torch":
            size = _put_pickled(target, file, header, image)
        else:
            target.put(file, image)
            size = header.file_bytes
    place = f"{target.display_url}/{file}"
    answer = {
        "checkpoint": str(name),
        "target": place,
        "format": arguments.format,
        "tensors": len(header.tensors),
        "size_bytes": size,
    }
    line = f"{place}: {len(header.tensors)} tensors of {name}, {size_text(size)}"
    question.answer(answer, [line])
    return 0


def open_target(
    address: str, options: Mapping[str, object], own: Mapping[str, object] | None
) -> tuple[Store, str]:
    """The folder and the name of a file at any URL.

    Args:
        address: A path or a URL.
        options: Those of the source, used where the target is of the same kind.
        own: The target's own options.

    Raises:
        OptionError: It names no file.
    """
    folder, _, file = address.rpartition("/")
    if not file or file in {".", ".."} or folder.endswith(":/"):
        raise OptionError(f"{redact_url(address)}: found no file name at its end")
    if not folder and address.startswith("/"):
        folder = "/"
    return open_store(folder or ".", own or options if "://" in address else own), file


def _odd_kind(path: Path) -> str | None:
    """What lies there that must not be replaced; None where nothing does, or a file."""
    if path.is_symlink():  # be it /dev/stdout: a rename would take its place
        return "a link"
    try:
        mode = path.stat().st_mode
    except OSError:
        return None
    if stat.S_ISREG(mode):
        return None
    return "a folder" if stat.S_ISDIR(mode) else "a device, FIFO or socket"


def folder_of(store: Store) -> Path | None:
    """Where temp files for a target lie best: on its own disk, where it has one."""
    return store.folder if store.folder is not None and store.folder.is_dir() else None


def real_place(store: Store) -> str:
    """One spelling of where a store is: links, `.` and `file://` lead to the same folder."""
    return store.url if store.folder is None else os.path.realpath(store.folder)


Sources = list[tuple["FileEntry", "bytes", "Header"]]


def _sources(store: Store, manifest: Manifest, key: str) -> Sources:
    """The files that hold the tensors of a key, with their headers."""
    state = reader.read_state(store, manifest)
    files = state.files.get(key)
    if files is None:
        raise NoCheckpointError(
            f"checkpoint {manifest.name}: holds no tensors of {key!r}, but of"
            f" {', '.join(state.files) or 'nothing'}"
        )
    entries = [entry for entry in manifest.files if entry.name in files]
    return [(entry, *reader.read_header(store, manifest, entry)) for entry in entries]


def _rows(
    sources: Sources, strip: str
) -> tuple[list[tuple[str, str, tuple[int, ...], int]], dict[str, str]]:
    """What the new header tells of each tensor, and the new name of each."""
    names: dict[str, str] = {}
    taken: set[str] = set()
    rows = []
    for entry, _, header in sources:
        for spec in header.tensors:
            plain = ".".join(part for part in spec.name.split(".") if part != _COMPILED)
            plain = plain.removeprefix(strip)
            if strip and (not plain or plain in taken):
                found = f"makes {plain[:80]!r} of two tensors" if plain else "leaves nothing"
                raise OptionError(
                    f"--strip: {strip!r} {found} ({spec.name[:80]!r}), expected names that stay apart"
                )
            if not plain or spec.name in names or plain in taken:
                raise DamagedError(
                    f"{entry.name}: tensor {spec.name[:80]!r}: found a second one of the name"
                    f" {plain[:80]!r}"
                )
            names[spec.name] = plain
            taken.add(plain)
            rows.append((plain, spec.dtype, spec.shape, spec.size_bytes))
    return rows, names


def _fetch(
    store: Store,
    manifest: Manifest,
    sources: Sources,
    names: Mapping[str, str],
    header: Header,
    image: memoryview,
    tell: Callable[[int], None],
) -> None:
    """Read each tensor to its new place, and verify all of it."""
    places = {spec.name: spec for spec in header.tensors}
    loads = []
    firsts = []
    for entry, start, table in sources:
        first = bytearray(len(start))
        targets = [memoryview(first)]
        for spec in table.tensors:
            place = places[names[spec.name]]
            targets.append(image[place.offset : place.offset + place.size_bytes])
        loads.append(parts.Load(store, manifest, entry, targets))
        firsts.append((entry, start, first))
    parts.run_parts(loads, tell)
    for entry, start, first in firsts:
        if start != first:
            raise DamagedError(
                f"{parts.where(manifest, entry)}: its header changed while it was read"
            )


def _put_pickled(target: Store, file: str, header: Header, image: memoryview) -> int:
    """The same tensors as torch.save has them: nothing but tensors, so that weights_only reads it."""
    import torch

    tensors = {spec.name: _tensor(spec, image) for spec in header.tensors}
    with tempfile.TemporaryDirectory(dir=folder_of(target), prefix=".tmp-") as folder:
        path = Path(folder) / "weights.pt"
        try:
            torch.save(tensors, path)
        except RuntimeError as error:  # what torch makes of a full disk
            raise CheckpointError(no_room(header.file_bytes, path.parent, error)) from error
        del tensors
        with path.open("rb+") as saved:
            size = os.fstat(saved.fileno()).st_size
            with mapped(saved.fileno(), size) as view:
                target.put(file, view)
    return size


def _tensor(spec: TensorSpec, image: memoryview) -> Tensor:
    """A tensor with a storage of its own: one that shared the file's would be saved with all of it."""
    import torch

    dtype = getattr(torch, DTYPES[spec.dtype][0])
    if not spec.size_bytes:
        return torch.empty(spec.shape, dtype=dtype)
    count = spec.size_bytes // DTYPES[spec.dtype][1]
    return torch.frombuffer(image, dtype=dtype, count=count, offset=spec.offset).view(spec.shape)
