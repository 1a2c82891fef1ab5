"""Everything that is not a local folder, by way of fsspec.

File systems are made anew for each store and each process (an instance that lived before a fork hangs
after it), without instance or listing caches, and with the library's own retries off: they would
multiply with the store's. Every answer comes from the server.
"""

import contextlib
import os
import secrets
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import fsspec
import fsspec.asyn
import xxhash

from checkpoints.backends import Appender, Backend, Verdict, classify, error_code, http_status

_ONE_REQUEST_BYTES: Final = 8 << 20
_BLOCK_BYTES: Final = 32 << 20
_TEMP: Final = ".tmp-"
_S3: Final = frozenset({"s3", "s3a"})
_OBJECTS: Final = frozenset({"gs", "gcs", "az", "abfs", "abfss", "adl"})


def open_remote(url: str, options: Mapping[str, object]) -> Backend:
    """The back end for a URL that is no local folder.

    Raises:
        ImportError: The file system's package is not installed.
        ValueError: fsspec knows no such protocol.
    """
    protocol = url.partition("://")[0].lower()
    fsspec.get_filesystem_class(protocol)
    if protocol in _S3:
        from checkpoints.backend_s3 import S3Backend

        return S3Backend(url, options)
    if protocol == "memory":
        return MemoryBackend(url, options)
    return ObjectBackend(url, options) if protocol in _OBJECTS else FsspecBackend(url, options)


class FsspecBackend:
    """Any fsspec file system with folders and rename, e.g. SFTP."""

    is_local = False

    def __init__(self, url: str, options: Mapping[str, object]) -> None:
        self._url = url
        self._options = options
        self._lock = threading.Lock()
        self._made: tuple[int, Any, str] | None = None

    # ---------------------------------------------------------------------------- the file system
    def _arguments(self) -> dict[str, Any]:
        return {**self._options, "skip_instance_cache": True, "use_listings_cache": False}

    def _open(self) -> tuple[Any, str]:
        """The file system and the root in it; made anew in a process that was forked."""
        with self._lock:
            if self._made is None or self._made[0] != os.getpid():
                fs, root = fsspec.core.url_to_fs(self._url, **self._arguments())
                self._made = (os.getpid(), fs, str(root).rstrip("/"))
            return self._made[1], self._made[2]

    @property
    def _fs(self) -> Any:
        return self._open()[0]

    def _path(self, name: str) -> str:
        root = self._open()[1]
        return f"{root}/{name}" if name else root

    def close(self) -> None:
        """Forget the file system; the next call makes a new one."""
        with self._lock:
            self._made = None

    def check(self) -> None:
        """Make the folder and list it."""
        self._fs.makedirs(self._path(""), exist_ok=True)
        self._fs.ls(self._path(""), detail=False)

    # ------------------------------------------------------------------------------------- writing
    def write(self, name: str, chunks: Sequence[memoryview]) -> None:
        """Write beside it, then rename."""
        path = self._path(name)
        folder = path.rpartition("/")[0]
        temp = f"{folder}/{_TEMP}{secrets.token_hex(8)}"
        self._fs.makedirs(folder, exist_ok=True)
        try:
            self._send(temp, chunks)
            self._fs.mv(temp, path)
        except BaseException:
            _quietly_remove(self._fs, temp)
            raise

    def _send(self, path: str, chunks: Sequence[memoryview]) -> None:
        size = sum(chunk.nbytes for chunk in chunks)
        if size <= _ONE_REQUEST_BYTES:
            self._fs.pipe_file(path, b"".join(chunks))
            return
        file = self._fs.open(path, "wb", block_size=_BLOCK_BYTES)
        try:
            for chunk in chunks:
                for start in range(0, chunk.nbytes, _BLOCK_BYTES):
                    file.write(chunk[start : start + _BLOCK_BYTES])
            file.close()
        except BaseException:
            _discard(file)
            raise
        found = self._fs.size(path)
        if found != size:
            raise TimeoutError(f"found {found} bytes after writing {size}")

    def create(self, name: str, data: bytes) -> bool:
        """Open exclusively."""
        path = self._path(name)
        self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        try:
            with self._fs.open(path, "xb") as file:
                file.write(data)
        except FileExistsError:
            return False
        return True

    def swap(self, name: str, data: bytes, tag: str | None) -> str | None:
        """Only creation can be exclusive here."""
        if tag is None:
            return _tag(data) if self.create(name, data) else None
        raise NotImplementedError(f"{name}: this store cannot compare and set")

    def delete(self, name: str) -> None:
        """Delete one file."""
        try:
            self._fs.rm_file(self._path(name))
        except FileNotFoundError:
            return

    def delete_tree(self, folder: str) -> None:
        """Delete the files, then what may be left of the folders."""
        for name in self.names(f"{folder}/"):
            self.delete(name)
        try:
            self._fs.rm(self._path(folder), recursive=True)
        except FileNotFoundError:
            return

    def delete_temps(self, folder: str) -> None:
        """Delete the temp files in one folder."""
        try:
            found = self._fs.ls(self._path(folder), detail=False)
        except FileNotFoundError:
            return
        for path in map(str, found):
            if path.rpartition("/")[2].startswith(_TEMP):
                _quietly_remove(self._fs, path)

    def appender(self, name: str) -> Appender | None:  # noqa: ARG002  # the same for every name
        """Nothing grows here."""
        return None

    # ------------------------------------------------------------------------------------- reading
    def read(self, name: str, limit_bytes: int | None) -> bytes:
        """Read from the beginning."""
        if limit_bytes is None:
            return bytes(self._fs.cat_file(self._path(name)))
        return self._range(name, 0, limit_bytes)

    def read_tagged(self, name: str) -> tuple[bytes, str]:
        """Read all; the tag is a hash of the content."""
        data = self.read(name, None)
        return data, _tag(data)

    def read_into(self, name: str, start: int, buffer: memoryview) -> int:
        """Read a range, then copy it."""
        data = self._range(name, start, buffer.nbytes)
        buffer[: len(data)] = data
        return len(data)

    def _range(self, name: str, start: int, length: int) -> bytes:
        try:
            return bytes(self._fs.cat_file(self._path(name), start=start, end=start + length))
        except Exception as error:
            if past_the_end(error):
                return b""
            raise

    def size(self, name: str) -> int:
        """Ask for the file's facts."""
        info = self._fs.info(self._path(name))
        if info.get("type") == "directory":
            raise FileNotFoundError(name)
        return int(info["size"])

    def names(self, prefix: str) -> list[str]:
        """Walk by listings that raise: fsspec's own walk takes an error for an empty folder."""
        folder = prefix.rpartition("/")[0]
        return [name for name in self._walk(folder) if name.startswith(prefix)]

    def _walk(self, folder: str) -> Iterator[str]:
        for child, is_folder in self._entries(folder):
            name = f"{folder}/{child}" if folder else child
            if is_folder:
                yield from self._walk(name)
            else:
                yield name

    def _entries(self, folder: str) -> list[tuple[str, bool]]:
        try:
            found = self._fs.ls(self._path(folder), detail=True)
        except FileNotFoundError:
            return []
        pairs = [
            (str(item["name"]).rstrip("/").rpartition("/")[2], item["type"] == "directory")
            for item in found
        ]
        return [pair for pair in pairs if not pair[0].startswith(_TEMP)]

    def children(self, folder: str) -> list[str]:
        """List one folder."""
        return [child for child, _ in self._entries(folder)]


class ObjectBackend(FsspecBackend):
    """An object store: a write is whole or nothing by itself, and there are no folders to make."""

    def check(self) -> None:
        """List the bucket."""
        self._fs.ls(self._path("").partition("/")[0], detail=False)

    def write(self, name: str, chunks: Sequence[memoryview]) -> None:
        """Send."""
        self._send(self._path(name), chunks)

    def create(self, name: str, data: bytes) -> bool:
        """Send under the condition that there is no such object."""
        try:
            self._fs.pipe_file(self._path(name), data, mode="create")
        except Exception as error:
            if classify(error) is Verdict.EXISTS:
                return False
            raise
        return True

    def delete_tree(self, folder: str) -> None:
        """Delete the objects."""
        for name in self.names(f"{folder}/"):
            self.delete(name)

    def delete_temps(self, folder: str) -> None:
        """Objects need none."""


class MemoryBackend(ObjectBackend):
    """fsspec's objects in this process's memory; a lock makes its checks and writes one."""

    _alone: Final = threading.RLock()

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
            found = _tag(self._fs.cat_file(path)) if self._fs.isfile(path) else None
            if found != tag:
                return None
            self._fs.pipe_file(path, data)
            return _tag(data)

    def read(self, name: str, limit_bytes: int | None) -> bytes:
        """Read under the lock."""
        with self._alone:
            return super().read(name, limit_bytes)

    def _range(self, name: str, start: int, length: int) -> bytes:
        with self._alone:
            return super()._range(name, start, length)


def past_the_end(error: BaseException) -> bool:
    """Whether a range was refused because it begins at or after the end."""
    return error_code(error) == "InvalidRange" or http_status(error) == 416


def _discard(file: Any) -> None:
    """Give up a file that is half sent; the error that led here is the one to tell."""
    try:
        # close() would publish what has been sent so far, also by way of the garbage collector.
        file.closed = True
    except AttributeError:
        # A plain file: it has been written to a temp name, so that closing it shows nothing.
        with contextlib.suppress(Exception):
            file.close()
        return
    with contextlib.suppress(Exception):
        file.discard()


def _quietly_remove(fs: Any, path: str) -> None:
    """Best effort: the error that led here is the one to tell."""
    try:
        fs.rm_file(path)
    except Exception:  # noqa: BLE001  # any library's error; nothing is lost but a temp file
        return


def _tag(data: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(data)
