"""Bytes on their way from one place to another: memory of any size that lies on disk where it is large.

Promises: however large a file is, it takes no more of the machine's memory than the kernel likes to give;
what is fetched has been verified. The disk is that of `TMPDIR`, or of the folder that is written to.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

from checkpoints.errors import CheckpointError
from checkpoints.parts import Load, VerifyOnly, run_parts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from checkpoints.layout import FileEntry, Manifest
    from checkpoints.store import Store

SMALL_BYTES: Final = 8 << 20
_READ_BYTES: Final = 8 << 20


@contextlib.contextmanager
def spool(size_bytes: int, folder: Path | None = None) -> Iterator[memoryview]:
    """So many bytes to write to and to read from; gone afterwards.

    Args:
        size_bytes: How many.
        folder: Where they lie; None: where temp files lie.

    Raises:
        CheckpointError: The disk there has no room for them.
    """
    if size_bytes <= SMALL_BYTES:
        yield memoryview(bytearray(size_bytes))
        return
    with tempfile.TemporaryFile(dir=folder, prefix=".tmp-") as file:
        # All of it now: a disk that is full later would be a SIGBUS.
        try:
            os.posix_fallocate(file.fileno(), 0, size_bytes)
        except OSError as error:
            raise CheckpointError(no_room(size_bytes, folder, error)) from error
        with mapped(file.fileno(), size_bytes) as view:
            yield view


def no_room(size_bytes: int, folder: Path | None, error: Exception) -> str:
    """What is told where temporary bytes found no room."""
    place = folder or Path(tempfile.gettempdir())
    free = shutil.disk_usage(place).free
    way_out = "make room there" if folder is not None else "make room there, or set TMPDIR"
    reason = error.strerror if isinstance(error, OSError) else type(error).__name__
    return (
        f"{place}: {reason}: found {free / 1e6:.1f} MB free, expected {size_bytes / 1e6:.1f} MB for a"
        f" temporary copy; {way_out}"
    )


@contextlib.contextmanager
def mapped(fd: int, size_bytes: int) -> Iterator[memoryview]:
    """An open file as memory."""
    memory = mmap.mmap(fd, size_bytes)
    view = memoryview(memory)
    try:
        yield view
    finally:
        with contextlib.suppress(BufferError):  # views of it are still about; it goes with them
            view.release()
            memory.close()


def fetch(
    store: Store,
    manifest: Manifest,
    entry: FileEntry,
    target: memoryview,
    tell: Callable[[int], None] | None = None,
) -> None:
    """Read a file of a checkpoint into memory.

    Raises:
        DamagedError: It does not verify.
    """
    run_parts([Load(store, manifest, entry, [target])], tell)


def check(
    store: Store, manifest: Manifest, entry: FileEntry, tell: Callable[[int], None] | None = None
) -> None:
    """Read a file of a checkpoint and compare it with its checksums.

    Raises:
        DamagedError: It does not verify.
    """
    run_parts([VerifyOnly(store, manifest, entry)], tell)


def fetch_object(store: Store, name: str, target: memoryview) -> None:
    """Read any object into memory of its size, piece by piece."""
    for start in range(0, target.nbytes, _READ_BYTES):
        store.readinto(name, start, target[start : start + _READ_BYTES])
