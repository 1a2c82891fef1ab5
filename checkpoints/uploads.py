"""Large objects sent in parts: out of the caller's own memory, each part retried by itself.

A part is a file-like view of the bytes, never a copy of them, so that an upload needs the same small
memory whatever its size. Nothing is seen of an object before its upload is finished; one that fails is
given up under its own id, and no other writer's is touched.
"""

import io
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

logger = logging.getLogger(__name__)

PART_BYTES: Final = 16 << 20
PARALLEL: Final = 4
Retry: TypeAlias = Callable[[threading.Event, Callable[[], object]], None]
"""Calls until it succeeds, its time is up, or the event is set."""


class Upload(Protocol):
    """One object on its way. `begin`, then each part in any thread, then `finish` or `abort`."""

    count: int
    """How many parts it has."""
    parallel: int
    """How many of them may be under way at once; 1: in their order."""

    def begin(self) -> None:
        """Open it at the server."""

    def send(self, number: int) -> None:
        """Send the part `number`, from 0; a second time replaces the first."""

    def finish(self) -> None:
        """Make it the object, whole; once more does no harm."""

    def abort(self) -> None:
        """Give it up; no part of it stays at the server."""


def transfer(upload: Upload, retry: Retry) -> None:
    """Send all parts and finish; on any error the upload is given up and the error raised."""
    stop = threading.Event()
    retry(stop, upload.begin)
    try:
        if upload.parallel > 1:
            _send_beside(upload, retry, stop)
        else:
            for number in range(upload.count):
                retry(stop, _part(upload, number))
        retry(stop, upload.finish)
    except BaseException:
        try:
            upload.abort()
        except Exception as error:  # noqa: BLE001  # whatever the library raises: the first error is told
            logger.debug("an upload could not be given up: %s", type(error).__name__)
        raise


def _part(upload: Upload, number: int) -> Callable[[], None]:
    return lambda: upload.send(number)


def _send_beside(upload: Upload, retry: Retry, stop: threading.Event) -> None:
    """Several parts at a time; the first error stops the others."""
    with ThreadPoolExecutor(upload.parallel, thread_name_prefix="upload") as pool:
        try:
            parts = range(upload.count)
            sent = [pool.submit(retry, stop, _part(upload, number)) for number in parts]
            done, _ = wait(sent, return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()
        finally:
            stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
    stop.clear()


def total_bytes(chunks: Sequence[memoryview]) -> int:
    """The length of all chunks together."""
    return sum(chunk.nbytes for chunk in chunks)


def divide(chunks: Sequence[memoryview], part_bytes: int) -> list[list[memoryview]]:
    """The bytes of all chunks in parts of that length, as views; the last one may be shorter."""
    parts: list[list[memoryview]] = []
    room = 0
    for chunk in chunks:
        at = 0
        while at < chunk.nbytes:
            if not room:
                parts.append([])
                room = part_bytes
            piece = chunk[at : at + room]
            parts[-1].append(piece)
            at += piece.nbytes
            room -= piece.nbytes
    return parts


def pieces(chunks: Sequence[memoryview], length: int = 1 << 20) -> Iterator[memoryview]:
    """Views of at most `length` bytes, in order."""
    for chunk in chunks:
        for start in range(0, chunk.nbytes, length):
            yield chunk[start : start + length]


class Body(io.RawIOBase):
    """Chunks as a file that can be read and rewound; closing it does nothing, libraries do it early."""

    def __init__(self, chunks: Sequence[memoryview]) -> None:
        super().__init__()
        self._chunks = [chunk for chunk in chunks if chunk.nbytes]
        self._starts = [0]
        for chunk in self._chunks:
            self._starts.append(self._starts[-1] + chunk.nbytes)
        self._at = 0
        self._index = 0

    def __len__(self) -> int:
        """The number of bytes, whatever has been read."""
        return self._starts[-1]

    def close(self) -> None:
        """Stay open."""

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def tell(self) -> int:
        """The position."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a position."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self)}[whence]
        self._at = min(max(0, base + offset), len(self))
        self._index = next(
            (i for i, end in enumerate(self._starts[1:]) if self._at < end), len(self._chunks)
        )
        return self._at

    def read(self, size: int | None = -1, /) -> bytes:
        """The next bytes, exactly `size` of them unless the end is nearer."""
        left = len(self) - self._at
        wanted = left if size is None or size < 0 else min(size, left)
        if self._index < len(self._chunks):
            within = self._at - self._starts[self._index]
            if within + wanted <= self._chunks[self._index].nbytes:
                return bytes(self._take(wanted))  # the usual case: one copy, out of one chunk
        buffer = bytearray(wanted)
        self.readinto(buffer)
        return bytes(buffer)

    def readinto(self, buffer: "WriteableBuffer", /) -> int:
        """Fill a buffer as far as there is something."""
        target: memoryview[Any] = memoryview(buffer).cast("B")
        done = 0
        while done < target.nbytes and self._at < len(self):
            piece = self._take(target.nbytes - done)
            target[done : done + piece.nbytes] = piece
            done += piece.nbytes
        return done

    def _take(self, most: int) -> memoryview:
        if self._index == len(self._chunks):
            return memoryview(b"")
        chunk = self._chunks[self._index]
        within = self._at - self._starts[self._index]
        piece = chunk[within : within + most]
        self._at += piece.nbytes
        if self._at == self._starts[self._index + 1]:
            self._index += 1
        return piece
