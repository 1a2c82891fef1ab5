"""Files of a checkpoint read part by part, each part verified as soon as it is there.

Promises: ranges of bounded size, several at a time, straight into where their bytes belong; what does not
verify is a `DamagedError` that names checkpoint and file, and a store that does not answer never is.
"""

from __future__ import annotations

import bisect
import contextlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import xxhash

from checkpoints.errors import DamagedError, ObjectMissingError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from checkpoints.layout import FileEntry, Manifest, PartSum
    from checkpoints.store import Store

READ_BYTES: Final = 8 << 20
"""The largest range that is read at once: its checksum is taken while it is still in the cache."""
WORKERS: Final = 4


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


def object_name(manifest: Manifest, entry: FileEntry) -> str:
    """Where a file lies: in the folder of the checkpoint that first wrote it."""
    return (entry.owner or manifest.name).file(entry.name)


def where(manifest: Manifest, entry: FileEntry) -> str:
    """A file in a message."""
    return f"checkpoint {manifest.name}: {entry.name}"


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
        pieces = []
        done = 0
        while done < length:
            pieces.append(self.targets[number][within : within + length - done])
            done += pieces[-1].nbytes
            number, within = number + 1, 0
        if self.store.is_local:
            with self._missing():
                self.store.read_pieces(name, start, pieces)
            for piece in pieces:
                digest.update(piece)
            return
        # Many small tensors: one request for all of them, then each to its place.
        scratch = memoryview(bytearray(length))
        self._fetch(name, start, scratch)
        digest.update(scratch)
        done = 0
        for piece in pieces:
            piece[:] = scratch[done : done + piece.nbytes]
            done += piece.nbytes

    def _fetch(self, name: str, start: int, target: memoryview) -> None:
        with self._missing():
            self.store.readinto(name, start, target)

    @contextlib.contextmanager
    def _missing(self) -> Iterator[None]:
        try:
            yield
        except ObjectMissingError:
            raise DamagedError(f"{where(self.manifest, self.entry)}: is missing") from None


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
