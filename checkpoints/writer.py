"""A snapshot made durable: its files, their checksums, and the manifest last.

Promises: a reader never sees half a checkpoint, because only the exclusive creation of the manifest
makes it one, and that comes after every file is in the store under its full size and after the fence
has been asked. Under a name that has a manifest nothing is written and nothing is deleted. What a failed
attempt has written is taken away again, unless the manifest may exist. Needs no torch: a snapshot is bytes by now.
"""

from __future__ import annotations

import contextlib
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import xxhash

from checkpoints import references
from checkpoints.errors import CheckpointError, DamagedError, ObjectMissingError, RecordError
from checkpoints.layout import MANIFEST_LIMIT_BYTES, FileEntry, Manifest, PartSum, is_void
from checkpoints.parts import READ_BYTES
from checkpoints.store import LARGEST_NEW

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from checkpoints.snapshots import Snapshot, StagedFile
    from checkpoints.store import Store

logger = logging.getLogger(__name__)


def write(
    store: Store,
    snapshot: Snapshot,
    *,
    part_bytes: int,
    fence: Callable[[], None] | None = None,
    base: Manifest | None = None,
) -> Manifest:
    """Write all files of a snapshot and commit it, once. Any thread; no collectives.

    Args:
        store: Where it goes.
        snapshot: What to write.
        part_bytes: The most that one checksum covers.
        fence: Called right before the commit.
        base: A checkpoint whose files are referred to where they are the same (`references.settle`).

    Raises:
        SupersededError, PartedError: From the fence: a newer generation was claimed.
        RecordError: Its manifest would be too large, or is not what a reader takes.
        CheckpointError: The store failed, or the name was swept or is another's; nothing of this
            snapshot is committed, unless it `is_doubtful` (then writing it again finds out).
    """
    if snapshot.is_released:
        raise CheckpointError(f"checkpoint {snapshot.name}: its snapshot was released already")
    # Before the first byte: the files of a checkpoint that is there must not be written over.
    committed = _committed(store, snapshot, fence)
    if committed is not None:
        return committed
    # With sums of the right length: what nobody could read back is not sent in the first place.
    _sealed(_manifest(snapshot, [_blank(file, part_bytes) for file in snapshot.files]))
    try:
        files = _settle_files(store, snapshot, part_bytes, fence, base)
        manifest = _manifest(snapshot, files)
        sealed = _sealed(manifest)
    except CheckpointError:
        if not snapshot.is_doubtful:
            discard(store, snapshot)
        raise
    snapshot.is_doubtful = True
    is_ours = store.put_new(snapshot.name.manifest, sealed)
    snapshot.is_doubtful = False
    if not is_ours:
        raise _taken(store, snapshot, fence)
    return manifest


def _committed(
    store: Store, snapshot: Snapshot, fence: Callable[[], None] | None
) -> Manifest | None:
    """The manifest that this very snapshot has already; None where its name is free.

    Raises:
        CheckpointError: The name is taken.
    """
    try:
        data = store.get(snapshot.name.manifest, limit_bytes=MANIFEST_LIMIT_BYTES)
    except ObjectMissingError:
        return None
    except RecordError:
        data = b""  # too large to be one of ours
    snapshot.is_doubtful = False
    with contextlib.suppress(DamagedError):
        found = Manifest.from_json(data, snapshot.name.manifest)
        if found.token == snapshot.token:
            return found
    raise _taken(store, snapshot, fence)


def _manifest(snapshot: Snapshot, files: Sequence[FileEntry]) -> Manifest:
    return Manifest(
        name=snapshot.name,
        parent=snapshot.parent,
        run_id=snapshot.run_id,
        files=tuple(files),
        info=snapshot.info,
        token=snapshot.token,
        created_at=snapshot.created_at,
    )


def _blank(file: StagedFile, part_bytes: int) -> FileEntry:
    parts = (
        PartSum(offset=at, size=length, xxh3_128="0" * 32)
        for at, length in _parts(file.size_bytes, part_bytes)
    )
    return FileEntry(name=file.name, size_bytes=file.size_bytes, parts=tuple(parts))


def _sealed(manifest: Manifest) -> bytes:
    """The bytes of a manifest, which a reader will take.

    Raises:
        RecordError: None would: it is too large, or something in it is impossible.
    """
    data = manifest.to_json()
    if len(data) > LARGEST_NEW:
        raise RecordError(
            f"checkpoint {manifest.name}: found a manifest of {len(data)} bytes, expected at most"
            f" {LARGEST_NEW}: more part_bytes and split_bytes make it smaller"
        )
    try:
        Manifest.from_json(data, manifest.name.manifest)
    except DamagedError as error:
        raise RecordError(f"checkpoint {manifest.name}: nobody could read it: {error}") from error
    return data


def _settle_files(
    store: Store,
    snapshot: Snapshot,
    part_bytes: int,
    fence: Callable[[], None] | None,
    base: Manifest | None,
) -> tuple[FileEntry, ...]:
    settled = references.settle(snapshot.files, base)
    entries = write_files(store, snapshot, part_bytes=part_bytes, files=settled.write)
    if fence is not None:
        fence()
    if all(_is_there(store, entry) for entry in settled.refer):
        order = [file.name for file in snapshot.files]
        return tuple(sorted((*entries, *settled.refer), key=lambda entry: order.index(entry.name)))
    # Somebody has deleted the base in the meantime, by hand for instance.
    return _settle_files(store, snapshot, part_bytes, fence, None)


def _is_there(store: Store, entry: FileEntry) -> bool:
    try:
        return entry.owner is None or store.size(entry.owner.file(entry.name)) == entry.size_bytes
    except ObjectMissingError:
        return False


def write_files(
    store: Store, snapshot: Snapshot, *, part_bytes: int, files: Sequence[StagedFile] | None = None
) -> tuple[FileEntry, ...]:
    """Write the files, without committing them; the sums are of the memory, not of what arrived."""
    entries = []
    with ThreadPoolExecutor(1, thread_name_prefix="checksums") as pool:
        for file in snapshot.files if files is None else files:
            sums = pool.submit(part_sums, file.data, part_bytes)
            name = snapshot.name.file(file.name)
            store.put(name, file.data)
            found = store.size(name)
            if found != file.size_bytes:
                raise DamagedError(
                    f"checkpoint {snapshot.name}: {file.name}: found {found} bytes in the store"
                    f" after writing, expected {file.size_bytes}"
                )
            entry = FileEntry(name=file.name, size_bytes=file.size_bytes, parts=sums.result())
            entries.append(entry)
    return tuple(entries)


def part_sums(data: memoryview, part_bytes: int) -> tuple[PartSum, ...]:
    """The checksum of each part of a file; no part is longer than `part_bytes`."""
    sums = []
    for at, length in _parts(data.nbytes, part_bytes):
        digest = xxhash.xxh3_128_hexdigest(data[at : at + length])
        sums.append(PartSum(offset=at, size=length, xxh3_128=digest))
    return tuple(sums)


def _parts(size_bytes: int, part_bytes: int) -> Iterator[tuple[int, int]]:
    """Offset and length of each part: at least eight of a file, so that several readers share it evenly."""
    whole = -(-size_bytes // (8 * READ_BYTES)) * READ_BYTES
    length = min(part_bytes, max(READ_BYTES, whole))
    for at in range(0, size_bytes, length):
        yield at, min(length, size_bytes - at)


def discard(store: Store, snapshot: Snapshot) -> None:
    """Take away what an attempt that failed has written, so that ruins do not fill the store."""
    try:
        if store.exists(snapshot.name.manifest):
            return  # somebody has committed under this name: the files are theirs
        for file in snapshot.files:
            store.delete(snapshot.name.file(file.name))
    except CheckpointError as error:
        logger.warning(
            "checkpoint %s: what was written of it stays until it is swept: %s",
            snapshot.name,
            error,
        )


def _taken(store: Store, snapshot: Snapshot, fence: Callable[[], None] | None) -> CheckpointError:
    """Somebody else created the manifest: say who, best by the fence."""
    if fence is not None:
        fence()
    try:
        is_swept = is_void(store.get(snapshot.name.manifest, limit_bytes=4096))
    except ObjectMissingError:
        is_swept = True
    except RecordError:
        is_swept = False
    reason = (
        "was swept before it was committed, or deleted"
        if is_swept
        else "was committed by another writer"
    )
    return CheckpointError(
        f"checkpoint {snapshot.name}: {reason}; it is left as it is, and what is saved anew needs a"
        " greater generation or step"
    )
