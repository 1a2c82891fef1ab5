"""A folder as a store, by the operating system's own calls.

Guarantees: a name appears with all its bytes or not at all, and what was written survives a power cut
once the call has returned (temp file, fsync, rename or link, fsync of the folder). Of any number of
creators, in threads, processes or hosts, one wins. Listing raises where it could not look: a folder
that cannot be read is never taken for an empty one. A link to a folder is followed at the top alone (so
that `checkpoints` may lie on another disk): what lies behind any other is not the run's, is in no listing,
and so is never deleted with it.
"""

import errno
import fcntl
import logging
import os
import secrets
import shutil
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import xxhash

from checkpoints.backends import NotAFileError
from checkpoints.direct import write_direct

logger = logging.getLogger(__name__)

_TEMP: Final = ".tmp-"
_LOCK: Final = ".lock-"
_MOST_BUFFERS: Final = 1024
_NOWHERE: Final = "found a link that leads nowhere (a disk that is not mounted?)"
_NO_LINKS: Final = frozenset(
    {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
)


class LocalBackend:
    """The operations of a store in one folder."""

    can_swap = True

    def __init__(self, path: str) -> None:
        # Absolute at once: a job may change its working directory.
        self.root = Path(path).expanduser().absolute()
        self.folder = self.root
        self._told: set[str] = set()

    def check(self) -> None:
        """Make the folder if need be, and put a file in it and away again."""
        if self.root.exists() and not self.root.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "found a file", str(self.root))
        self.root.mkdir(parents=True, exist_ok=True)
        temp = self._temp(self.root / "check")
        temp.touch()
        temp.unlink()

    def write(self, name: str, chunks: Sequence[memoryview]) -> None:
        """Replace by rename."""
        path = self.root / name
        with self._written(path, chunks) as temp:
            temp.replace(path)

    def create(self, name: str, data: bytes) -> bool:
        """Create by hard link, which fails where the name is taken."""
        path = self.root / name
        if path.exists():
            return False
        with self._written(path, [memoryview(data)]) as temp:
            try:
                path.hardlink_to(temp)
            except FileExistsError:
                return False
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                return self._create_in_place(path, data)
        return True

    @staticmethod
    def _create_in_place(path: Path, data: bytes) -> bool:
        """For file systems without hard links: exclusive, but a kill may leave a torn object."""
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except FileExistsError:
            return False
        try:
            try:
                _write_all(fd, [memoryview(data)])
                os.fsync(fd)
            finally:
                os.close(fd)
        except BaseException:
            path.unlink(missing_ok=True)  # ours alone; torn, it would hold the name for ever
            raise
        return True

    def swap(self, name: str, data: bytes, tag: str | None) -> str | None:
        """Compare and replace under a lock; the tag is a hash of the content."""
        if tag is None:
            return _tag(data) if self.create(name, data) else None
        path = self.root / name
        with self._locked(path):
            try:
                if _tag(_read_all(path)) != tag:
                    return None
            except FileNotFoundError:
                return None
            self.write(name, [memoryview(data)])
        return _tag(data)

    def read(self, name: str, limit_bytes: int | None) -> bytes:
        """Read from the beginning."""
        return _read_all(self.root / name, limit_bytes)

    def read_tagged(self, name: str) -> tuple[bytes, str]:
        """Read all; the tag is a hash of the content."""
        data = _read_all(self.root / name)
        return data, _tag(data)

    def read_into(self, name: str, start: int, buffer: memoryview) -> int:
        """Read straight into the buffer."""
        fd = _open_file(self.root / name)
        try:
            done = 0
            while done < buffer.nbytes:
                count = os.preadv(fd, [buffer[done:]], start + done)
                if not count:
                    break
                done += count
            return done
        finally:
            os.close(fd)

    def read_pieces(self, name: str, start: int, buffers: Sequence[memoryview]) -> int:
        """Read straight into several buffers, one after the other; how many bytes there were."""
        fd = _open_file(self.root / name)
        left = list(buffers)
        done = 0
        try:
            while left:
                count = os.preadv(fd, left[:_MOST_BUFFERS], start + done)
                if not count:
                    break
                done += count
                while left and count >= left[0].nbytes:
                    count -= left.pop(0).nbytes
                if count:
                    left[0] = left[0][count:]
            return done
        finally:
            os.close(fd)

    def size(self, name: str) -> int:
        """Ask the file system."""
        path = self.root / name
        if path.is_dir():
            raise FileNotFoundError(errno.ENOENT, "found a folder", str(path))
        try:
            return path.stat().st_size
        except OSError as error:
            raise _odd(error) or error from error

    def names(self, prefix: str) -> list[str]:
        """Walk the folder that the prefix lies in."""
        folder = prefix.rpartition("/")[0]
        return [name for name in self._walk(folder) if name.startswith(prefix)]

    def _walk(self, folder: str) -> Iterator[str]:
        for entry in self._entries(folder):
            name = f"{folder}/{entry.name}" if folder else entry.name
            if not _is_folder(entry):
                yield name
            elif not entry.is_symlink() or not self._leads_back(entry):
                yield from self._walk(name)

    def _leads_back(self, entry: "os.DirEntry[str]") -> bool:
        """Whether a link leads to the store itself, or above: all that it shows of it is listed already."""
        real, here = os.path.realpath(entry.path), os.path.realpath(self.root)
        return here == real or here.startswith(real.rstrip("/") + "/")

    def _entries(self, folder: str) -> list["os.DirEntry[str]"]:
        try:
            with os.scandir(self.root / folder) as found:
                entries = [entry for entry in found if not entry.name.startswith((_TEMP, _LOCK))]
        except FileNotFoundError:
            if (
                self.root / folder
            ).is_symlink():  # to a disk that is not mounted: not the same as empty
                raise OSError(errno.ENXIO, _NOWHERE, str(self.root / folder)) from None
            return []
        if not folder:
            return entries
        return [entry for entry in entries if not (entry.is_symlink() and self._passes_over(entry))]

    def _passes_over(self, entry: "os.DirEntry[str]") -> bool:
        if not _is_folder(entry):
            return False
        if entry.path not in self._told:
            self._told.add(entry.path)
            logger.warning("%s: found a link to a folder, which is passed over", entry.path)
        return True

    def children(self, folder: str) -> list[str]:
        """List one folder."""
        return [entry.name for entry in self._entries(folder)]

    def delete(self, name: str) -> None:
        """Unlink."""
        (self.root / name).unlink(missing_ok=True)

    def delete_tree(self, folder: str) -> None:
        """Remove; somebody else may be removing it, too."""
        path = self.root / folder
        for _ in range(10):
            try:
                shutil.rmtree(path)
            except FileNotFoundError:
                if path.exists():
                    continue
            return

    def delete_temps(self, folder: str) -> None:
        """Unlink the temp files in one folder."""
        for path in (self.root / folder).glob(f"{_TEMP}*"):
            path.unlink(missing_ok=True)

    def appender(self, name: str) -> "LocalAppender":
        """Open for appending."""
        path = self.root / name
        self._make_folder(path.parent)
        return LocalAppender(path)

    def upload(self, name: str, chunks: Sequence[memoryview]) -> None:
        """A file is written in one go, whatever its size."""

    def renew(self) -> None:
        """There are no credentials."""

    def reconnect(self) -> None:
        """There is no connection."""

    def close(self) -> None:
        """Nothing is held open."""

    # ------------------------------------------------------------------------------------- writing
    @contextmanager
    def _written(self, path: Path, chunks: Sequence[memoryview]) -> Iterator[Path]:
        """A synced temp file beside `path`, to be renamed or linked inside; gone afterwards."""
        self._make_folder(path.parent)
        temp = self._temp(path)
        try:
            fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            try:
                _write_all(fd, chunks)
                os.fsync(fd)
            except OSError as error:
                raise _told(error, fd, chunks) from error
            finally:
                os.close(fd)
            yield temp
        finally:
            temp.unlink(missing_ok=True)
        _sync_folder(path.parent)

    @staticmethod
    def _temp(path: Path) -> Path:
        return path.with_name(f"{_TEMP}{os.getpid()}-{secrets.token_hex(6)}")

    def _make_folder(self, folder: Path) -> None:
        made = []
        while not folder.is_dir():
            made.append(folder)
            folder = folder.parent
        for new in reversed(made):
            try:
                new.mkdir(exist_ok=True)
            except (FileExistsError, NotADirectoryError) as error:
                kind = _NOWHERE.removeprefix("found ") if new.is_symlink() else "a file"
                told = f"found {kind} at {new.name}, expected a folder"
                raise NotAFileError(errno.ENOTDIR, told) from error
            # Without this a power cut may lose the folder with all that was synced in it.
            _sync_folder(new.parent)

    @contextmanager
    def _locked(self, path: Path) -> Iterator[None]:
        """Alone among threads, processes and, where the file system locks for them, hosts."""
        self._make_folder(path.parent)
        lock = path.with_name(_LOCK + path.name)
        fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)


def _is_folder(entry: "os.DirEntry[str]") -> bool:
    try:
        return entry.is_dir()
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        return False


def _odd(error: OSError) -> NotAFileError | None:
    """The error for what holds no bytes, whoever asks; None where it is another one."""
    if error.errno in {errno.ELOOP, errno.ENXIO}:  # a socket has no such address
        return NotAFileError(error.errno, "found no file but a link or a socket, expected a file")
    return None


def _open_file(path: Path) -> int:
    """Open what holds bytes; a FIFO would make one wait for whoever writes to it.

    Raises:
        NotAFileError: It is none.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise _odd(error) or error from error
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode):
        os.close(fd)
        kind = "a folder" if stat.S_ISDIR(mode) else "a FIFO" if stat.S_ISFIFO(mode) else "a device"
        raise NotAFileError(errno.EINVAL, f"found {kind}, expected a file")
    return fd


def _read_all(path: Path, limit_bytes: int | None = None) -> bytes:
    with open(_open_file(path), "rb") as file:  # a descriptor, not a path
        return file.read() if limit_bytes is None else file.read(limit_bytes)


class LocalAppender:
    """One growing file, held open: a line costs one write."""

    def __init__(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        self._fd = os.open(path, flags, 0o666)

    def write(self, data: bytes | memoryview) -> int:
        """Append in one write."""
        return os.write(self._fd, data)

    def sync(self) -> None:
        """Wait for the disk."""
        os.fsync(self._fd)

    def close(self) -> None:
        """Close the file; a second time does nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _write_all(fd: int, chunks: Sequence[memoryview]) -> None:
    """Write all chunks into an empty file, however much the kernel takes at a time."""
    at = 0
    done = write_direct(fd, chunks[0]) if len(chunks) == 1 else 0
    if chunks and done == chunks[0].nbytes:
        return
    while at < len(chunks):
        batch = [chunks[at][done:], *chunks[at + 1 : at + _MOST_BUFFERS]]
        done += os.writev(fd, batch)
        while at < len(chunks) and done >= chunks[at].nbytes:
            done -= chunks[at].nbytes
            at += 1


def _told(error: OSError, fd: int, chunks: Sequence[memoryview]) -> OSError:
    """The error of a full disk with how much is missing; any other as it is."""
    if error.errno not in {errno.ENOSPC, errno.EDQUOT}:
        return error
    wanted = sum(chunk.nbytes for chunk in chunks)
    facts = os.fstatvfs(fd)
    # What the temp file holds already comes back when it goes.
    free = facts.f_bavail * facts.f_frsize + os.fstat(fd).st_blocks * 512
    room = f"{wanted / 1e6:.3g} MB are needed, {min(free, wanted) / 1e6:.3g} MB are free"
    return OSError(error.errno, f"{os.strerror(error.errno)}: {room}")


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        # Some network and user-space file systems cannot sync a folder; they order it themselves.
        if error.errno not in {errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.ENOSYS}:
            raise
    finally:
        os.close(fd)


def _tag(data: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(data)
