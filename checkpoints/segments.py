"""Memory that several processes of one node share: files in /dev/shm, or memory without a name.

Promises: every page of a segment exists before it is used, so that a full /dev/shm or a small container
is an error at the start and never a SIGBUS later; a segment without a name is gone with its last holder.
One with a name outlives its makers: the name tells whose it is, and `sweep` removes those whose owner is
dead. Nothing but the operating system's own calls; needs no torch.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import re
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from checkpoints.processes import boot_id, is_alive

if TYPE_CHECKING:
    from collections.abc import Iterator

    from checkpoints.layout import AgentId

SHM: Final = Path("/dev/shm")  # noqa: S108  # it is what POSIX shared memory is on Linux
PAGE: Final = 4096
_PREFIX: Final = "elastic-trainer"
_POPULATE: Final = 23
"""MADV_POPULATE_WRITE, since Linux 5.14; the mmap module has no name for it yet."""
_NAME: Final = re.compile(
    rf"{_PREFIX}-(\d+)-([0-9a-f]{{1,8}})-(\d+)-(\d+)-([0-9a-z]{{1,32}})-(\d+)", re.ASCII
)
_CGROUP_FILES: Final = (
    ("memory.max", "memory.current"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes"),
)
_MARGIN: Final = 64 << 20
"""What is left to everybody else, whatever the limits say."""


class Segment:
    """Some memory that can be handed to other processes by its descriptor."""

    def __init__(self, fd: int, size_bytes: int, path: Path | None) -> None:
        """Map what a descriptor stands for; it is ours from now on."""
        self.fd = fd
        self.size_bytes = size_bytes
        self.path = path
        """Its name, where it has one."""
        try:
            self.memory = mmap.mmap(fd, size_bytes)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def make(cls, size_bytes: int, path: Path | None = None) -> Self:
        """Make a segment, all of whose pages are there.

        Raises:
            OSError: There is not that much shared memory.
        """
        size_bytes = -(-size_bytes // PAGE) * PAGE
        check_room(size_bytes, named=path is not None)
        if path is None:
            fd = os.memfd_create(_PREFIX, os.MFD_CLOEXEC)
        else:
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
            fd = os.open(path, flags, 0o600)
        try:
            # A hole in a full tmpfs is a SIGBUS for whoever touches it.
            os.posix_fallocate(fd, 0, size_bytes)
            segment = cls(os.dup(fd), size_bytes, path)
        except BaseException:
            if path is not None:
                path.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)
        # Older kernels fault the pages in one by one, at the first copy.
        with contextlib.suppress(OSError):
            segment.memory.madvise(_POPULATE)
        return segment

    @classmethod
    def open(cls, path: Path) -> Self:
        """Map the segment of a name.

        Raises:
            OSError: There is none that is this user's.
        """
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid() or not found.st_size:
            os.close(fd)
            raise PermissionError(errno.EPERM, "found somebody else's or no memory", str(path))
        return cls(fd, found.st_size, path)

    @classmethod
    def of(cls, fd: int, path: Path | None) -> Self:
        """Map the segment that a descriptor, which becomes ours, was sent for."""
        size_bytes = os.fstat(fd).st_size
        if not size_bytes:
            os.close(fd)
            raise OSError(errno.EINVAL, "found a descriptor of no memory")
        return cls(fd, size_bytes, path)

    def view(self, start: int = 0, size_bytes: int | None = None) -> memoryview:
        """A part of it."""
        end = self.size_bytes if size_bytes is None else start + size_bytes
        return memoryview(self.memory)[start:end]

    def unlink(self) -> None:
        """Take the name away; the memory goes with its last holder."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Let it go; views that are still used keep the memory."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)
        with contextlib.suppress(BufferError):
            self.memory.close()


# ------------------------------------------------------------------------------------------ the names
def segment_path(owner: AgentId, run_id: str, number: int) -> Path:
    """The name of a node's segment for a run: it tells by which process it lives and dies."""
    boot = owner.boot_id.replace("-", "")[:8]
    run = _run_mark(run_id)
    return SHM / f"{_PREFIX}-{os.getuid()}-{boot}-{owner.pid}-{owner.start}-{run}-{number}"


def _run_mark(run_id: str) -> str:
    return re.sub(r"[^0-9a-z]", "", run_id.lower())[:32] or "run"


def segments_of(owner: AgentId, run_id: str | None = None) -> list[Path]:
    """The named segments that live by a process, of one run or of all."""
    some = segment_path(owner, run_id or "run", 0).name.rsplit("-", 2)
    lead = f"{some[0]}-" if run_id is None else f"{some[0]}-{some[1]}-"
    return sorted(path for path in _ours() if path.name.startswith(lead))


def sweep() -> list[Path]:
    """Remove this user's named segments whose owner is dead; returns what was removed."""
    removed = leftovers()
    for path in removed:
        path.unlink(missing_ok=True)
    return removed


def leftovers(run_id: str | None = None) -> list[Path]:
    """This user's named segments whose owner is dead, of one run or of all; of this boot where of one run."""
    run = None if run_id is None else _run_mark(run_id)
    boot = boot_id().replace("-", "")[:8]
    found = []
    for path in _ours():
        match = _NAME.fullmatch(path.name)
        if match is None or int(match[1]) != os.getuid():
            continue
        if run is not None and (match[2], match[5]) != (boot, run):
            continue
        if match[2] != boot or not is_alive(int(match[3]), int(match[4])):
            found.append(path)
    return found


def _ours() -> Iterator[Path]:
    try:
        yield from SHM.glob(f"{_PREFIX}-{os.getuid()}-*")
    except OSError:
        return


# ------------------------------------------------------------------------------------------- the room
def check_room(size_bytes: int, *, named: bool) -> None:
    """Return if so much shared memory can be had.

    Raises:
        OSError: ENOSPC, where the mount, the container's limit or the machine has less.
    """
    rooms = {"the memory limit of this container": _cgroup_room(), "this machine": _machine_room()}
    if named:
        rooms[str(SHM)] = _mount_room()
    for where, room in rooms.items():
        if room is not None and size_bytes > room:
            raise OSError(
                errno.ENOSPC,
                f"{where} has room for {room >> 20} MiB of shared memory, expected"
                f" {-(-size_bytes // (1 << 20))} MiB",
            )


def _mount_room() -> int | None:
    try:
        found = os.statvfs(SHM)
    except OSError:
        return 0
    return found.f_bavail * found.f_frsize


def _machine_room() -> int | None:
    for line in _lines(Path("/proc/meminfo")):
        if line.startswith("MemAvailable:"):
            return max(0, int(line.split()[1]) * 1024 - _MARGIN)
    return None


def _cgroup_room() -> int | None:
    """What the tightest memory limit above this process leaves; None where there is none."""
    rooms = []
    for folder in _cgroups():
        for limit, usage in _CGROUP_FILES:
            most, used = _number(folder / limit), _number(folder / usage)
            if most is not None and used is not None and most < 1 << 60:
                # File pages that nobody uses are given up before anybody is killed.
                rooms.append(max(0, most - used + _idle(folder) - _MARGIN))
    return min(rooms, default=None)


def _cgroups() -> Iterator[Path]:
    root = Path("/sys/fs/cgroup")
    for line in _lines(Path("/proc/self/cgroup")):
        number, controllers, own = line.split(":", 2)
        if number == "0" or "memory" in controllers.split(","):
            base = root if number == "0" else root / "memory"
            folder = base / own.lstrip("/")
            while folder.is_relative_to(base):
                yield folder
                if folder == base:
                    break
                folder = folder.parent


def _idle(folder: Path) -> int:
    for line in _lines(folder / "memory.stat"):
        name, _, value = line.partition(" ")
        if name in {"inactive_file", "total_inactive_file"}:
            return int(value)
    return 0


def _number(path: Path) -> int | None:
    text = next(iter(_lines(path)), "")
    return int(text) if text.isdigit() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return []
