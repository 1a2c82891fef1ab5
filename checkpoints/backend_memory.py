"""Objects in this process's memory: for trying things, and for tests.

fsspec's own checks and writes are two steps each; a lock makes them one, so that this store promises
what the others do.
"""

import threading
from collections.abc import Sequence
from typing import Final

from checkpoints.backend_fsspec import FsspecBackend, content_tag


class MemoryBackend(FsspecBackend):
    """fsspec's objects in this process's memory; a lock makes its checks and writes one."""

    can_swap = True

    _alone: Final = threading.RLock()

    def reconnect(self) -> None:
        """There is no connection."""

    def delete_temps(self, folder: str) -> None:
        """Objects need none."""

    def check(self) -> None:
        """It is always there."""
        self._open()

    def write(self, name: str, chunks: Sequence[memoryview]) -> None:
        """Replace under the lock."""
        data = b"".join(chunks)
        with self._alone:
            self._fs.pipe_file(self._path(name), data)

    def create(self, name: str, data: bytes) -> bool:
        """Look and write under the lock: fsspec shows an exclusively opened file before it is full."""
        with self._alone:
            if self._fs.isfile(self._path(name)):
                return False
            self._fs.pipe_file(self._path(name), data)
            return True

    def swap(self, name: str, data: bytes, tag: str | None) -> str | None:
        """Compare and write under the lock."""
        with self._alone:
            path = self._path(name)
            found = content_tag(self._fs.cat_file(path)) if self._fs.isfile(path) else None
            if found != tag:
                return None
            self._fs.pipe_file(path, data)
            return content_tag(data)

    def read(self, name: str, limit_bytes: int | None) -> bytes:
        """Read under the lock."""
        with self._alone:
            return super().read(name, limit_bytes)

    def _range(self, name: str, start: int, length: int) -> bytes:
        with self._alone:
            return super()._range(name, start, length)
