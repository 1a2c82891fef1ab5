"""Everything that is not a local folder, by way of fsspec: what all of it has in common.

File systems are made anew for each store and each process (an instance that lived before a fork hangs
after it), without instance or listing caches, and with the library's own retries off: they would
multiply with the store's. Every answer comes from the server.
"""

import contextlib
import importlib
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import fsspec
import fsspec.asyn
import xxhash

from checkpoints.backends import Appender, Backend, error_code, http_status
from checkpoints.uploads import Upload, pieces, total_bytes

_ONE_REQUEST_BYTES: Final = 8 << 20
_BLOCK_BYTES: Final = 32 << 20
_TEMP: Final = ".tmp-"
_RETIRED: Final = 4
"""How many clients of old credentials are kept for the requests that they still have under way."""
_YOUNG_S: Final = 1.0
_REPLY_S: Final = 90.0
_SLOWEST: Final = 256 << 10
"""Bytes in a second: what goes slower than this is taken for a connection that hangs."""


def open_remote(url: str, options: Mapping[str, object]) -> Backend:
    """The back end for a URL that is no local folder.

    Raises:
        ImportError: The file system's package is not installed.
        ValueError: fsspec knows no such protocol.
    """
    protocol = url.partition("://")[0].lower()
    fsspec.get_filesystem_class(protocol)
    room, _, name = _BACKENDS.get(protocol, "backend_fsspec.FsspecBackend").partition(".")
    made: Backend = getattr(importlib.import_module(f"checkpoints.{room}"), name)(url, options)
    return made


_BACKENDS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("s3", "s3a"), "backend_s3.S3Backend"),
    **dict.fromkeys(("gs", "gcs"), "backend_gcs.GcsBackend"),
    **dict.fromkeys(("az", "abfs", "abfss"), "backend_azure.AzureBackend"),
    **dict.fromkeys(("sftp", "ssh"), "backend_sftp.SftpBackend"),
    "memory": "backend_memory.MemoryBackend",
}


class _Client(NamedTuple):
    """A file system object, whose it is, and since when."""

    pid: int
    at: float
    fs: Any
    root: str


class FsspecBackend:
    """Any fsspec file system with folders and rename, e.g. SFTP."""

    folder = None
    can_swap = False

    def __init__(self, url: str, options: Mapping[str, object]) -> None:
        self._url = url
        # The caller's own mapping, not a copy: fresh credentials in it are seen when a client is made.
        self._options = options
        self._locks: dict[int, threading.Lock] = {}
        self._made: _Client | None = None
        self._retired: list[_Client] = []

    # ---------------------------------------------------------------------------- the file system
    def _arguments(self) -> dict[str, Any]:
        return {**self._options, "skip_instance_cache": True, "use_listings_cache": False}

    def _connect(self) -> tuple[Any, str]:
        """A new file system, and the root in it."""
        fs, root = fsspec.core.url_to_fs(self._url, **self._arguments())
        return fs, str(root).rstrip("/")

    @property
    def _lock(self) -> threading.Lock:
        # One for each process: a thread of the parent may have held its own while this one was forked.
        return self._locks.setdefault(os.getpid(), threading.Lock())

    def _open(self) -> "_Client":
        """The client; made anew in a process that was forked."""
        with self._lock:
            made = self._made
            if made is None or made.pid != os.getpid():
                if made is not None:
                    # The parent's is kept and never closed: that would wait for a loop with no thread.
                    self._retired.append(made)
                made = self._made = _Client(os.getpid(), time.monotonic(), *self._connect())
            return made

    @property
    def _fs(self) -> Any:
        return self._open().fs

    def _path(self, name: str) -> str:
        root = self._open().root
        return f"{root}/{name}" if name else root

    def _ask(self, call: Callable[..., Any], *args: Any, sends: int = 0, **kwargs: Any) -> Any:
        """The result of a coroutine function of the library, in a bounded time."""
        limit = _REPLY_S + sends / _SLOWEST
        return fsspec.asyn.sync(self._fs.loop, call, *args, timeout=limit, **kwargs)

    def renew(self) -> None:
        """Make a new client at the next call; requests that the old one has under way may end."""
        with self._lock:
            made = self._made
            # One that is this young was made by another thread, for the same reason.
            if made is None or time.monotonic() - made.at < _YOUNG_S:
                return
            self._made = None
            self._retired.append(made)
            old = [one for one in self._retired if one.pid == os.getpid()][:-_RETIRED]
            for one in old:
                self._retired.remove(one)
        for one in old:
            self._disconnect(one.fs)

    def reconnect(self) -> None:
        """Make a new client: whatever this file system is, its connection may be what failed."""
        self.renew()

    def close(self) -> None:
        """Close the clients of this process; the next call makes a new one."""
        with self._lock:
            mine = [one for one in (*self._retired, self._made) if one and one.pid == os.getpid()]
            self._retired = [one for one in self._retired if one.pid != os.getpid()]
            if self._made in mine:
                self._made = None
        for one in mine:
            self._disconnect(one.fs)

    def _disconnect(self, fs: Any) -> None:
        """Forgetting it is enough, where nothing else is known."""

    def check(self) -> None:
        """Make the folder and list it."""
        self._fs.makedirs(self._path(""), exist_ok=True)
        self._fs.ls(self._path(""), detail=False)

    # ------------------------------------------------------------------------------------- writing
    def write(self, name: str, chunks: Sequence[memoryview]) -> None:
        """Write beside it, then rename."""
        path = self._path(name)
        with self._sent(path, chunks) as temp:
            self._fs.mv(temp, path)

    @contextlib.contextmanager
    def _sent(self, path: str, chunks: Sequence[memoryview]) -> Iterator[str]:
        """A temp file beside `path` that holds the bytes; gone afterwards, however it ends."""
        folder = path.rpartition("/")[0]
        self._make_folder(folder)
        temp = f"{folder}/{_TEMP}{secrets.token_hex(8)}"
        try:
            self._send(temp, chunks)
            yield temp
        except BaseException:
            self._quietly_remove(temp)
            raise

    def _make_folder(self, folder: str) -> None:
        for left in (2, 1, 0):
            try:
                self._fs.makedirs(folder, exist_ok=True)
            except OSError:
                # Another one may be making it at this moment; not every library forgives that.
                if not left and not self._fs.isdir(folder):
                    raise
            else:
                return

    def _send(self, path: str, chunks: Sequence[memoryview]) -> None:
        size = total_bytes(chunks)
        if size <= _ONE_REQUEST_BYTES:
            self._fs.pipe_file(path, b"".join(chunks))
        else:
            self._stream(path, chunks)
        found = self._fs.size(path)
        if found != size:
            raise TimeoutError(f"found {found} bytes after writing {size}")

    def _stream(self, path: str, chunks: Sequence[memoryview]) -> None:
        file = self._fs.open(path, "wb", block_size=_BLOCK_BYTES)
        try:
            for piece in pieces(chunks, _BLOCK_BYTES):
                file.write(piece)
            file.close()
        except BaseException:
            _discard(file)
            raise

    def _quietly_remove(self, path: str) -> None:
        """Best effort: the error that led here is the one to tell."""
        try:
            self._fs.rm_file(path)
        except Exception:  # noqa: BLE001  # any library's error; nothing is lost but a temp file
            return

    def upload(self, name: str, chunks: Sequence[memoryview]) -> Upload | None:  # noqa: ARG002
        """There is one way to write a file here, whatever its size."""
        return None

    def create(self, name: str, data: bytes) -> bool:
        """Open exclusively."""
        path = self._path(name)
        self._make_folder(path.rpartition("/")[0])
        try:
            with self._fs.open(path, "xb") as file:
                file.write(data)
        except FileExistsError:
            return False
        return True

    def swap(self, name: str, data: bytes, tag: str | None) -> str | None:
        """Only creation can be exclusive here."""
        if tag is None:
            return content_tag(data) if self.create(name, data) else None
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
                self._quietly_remove(path)

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
        return data, content_tag(data)

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


def content_tag(data: bytes) -> str:
    """A tag for stores that have none: a hash of the content."""
    return xxhash.xxh3_128_hexdigest(data)
