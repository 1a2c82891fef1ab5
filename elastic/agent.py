"""The process that stands over this worker: who it is, how to die with it, and how to end it.

Under torchrun that is the torchrun process of this node (the agent): it restarts workers for every exit code,
and it leaves them running as orphans where it is killed itself. Without a launcher that restarts (by hand,
mpirun, srun) a worker is its own agent, and then nothing else is ever signalled.

Guarantees: an agent gets at most one signal from all its workers together; a worker that ends its agent leaves
by itself, so that the agent never waits out its 30 seconds. Needs Linux (/proc). Does not import torch.
"""

import contextlib
import ctypes
import fcntl
import logging
import os
import shutil
import signal
import socket
import stat
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import NoReturn, Protocol

from checkpoints.layout import AgentId
from checkpoints.processes import is_alive, process_start
from elastic.errors import StartError

__all__ = [
    "agent_of",
    "current_agent",
    "die_with_agent",
    "end_agent",
    "has_agent",
    "is_alive",
    "is_known_dead",
    "node_folder",
    "process_start",
]

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_CLAIM_S = 10.0
"""How long a signal to the agent is given to work before another worker may send one: torchrun acts within one."""
_LEAVE_S = 5.0
"""How long a worker waits for its agent's SIGTERM before it leaves without."""
_LOOK_S = 0.01
_FIRST_PID = 1


class Launched(Protocol):
    """What this room wants to know of a worker's place (elastic.ranks.Place is one)."""

    @property
    def launcher(self) -> str:
        """Who started this worker: "torchrun", "hand", "mpirun", "srun" or "none"."""


# ------------------------------------------------------------------------------------------- who it is
def has_agent(place: Launched) -> bool:
    """Tell whether a process that restarts workers stands over this one."""
    return place.launcher == "torchrun"


def current_agent(place: Launched, environ: Mapping[str, str]) -> AgentId:
    """Name the agent of this worker: torchrun's process, or else this process itself.

    A process that starts workers in torchrun's place passes the agent's pid on as ELASTIC_AGENT_PID.

    Raises:
        StartError: Raised when /proc does not show the process.
    """
    pid = os.getpid()
    if has_agent(place):
        passed_on = environ.get("ELASTIC_AGENT_PID", "")
        pid = int(passed_on) if passed_on.isdigit() else os.getppid()
    return agent_of(pid)


def agent_of(pid: int) -> AgentId:
    """Name a process of this host as an agent.

    Raises:
        StartError: Raised when /proc does not show the process.
    """
    start = process_start(pid)
    if start is None:
        raise StartError(
            f"agent: found no process {pid} in /proc, expected the one that started this worker"
        )
    return AgentId(host=socket.gethostname(), boot_id=_boot_id(), pid=pid, start=start)


def is_known_dead(agent: AgentId) -> bool | None:
    """Tell whether an agent is gone; None where it was on another host, whose processes are not seen."""
    if agent.host != socket.gethostname():
        return None
    # After a reboot, no process of before lives.
    return agent.boot_id != _boot_id() or not is_alive(agent.pid, agent.start)


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError as error:
        raise StartError(
            f"agent: cannot read the boot id of this host ({error}); Linux is needed"
        ) from error


# ------------------------------------------------------------------------------------------- dying with it
def die_with_agent(place: Launched) -> None:
    """Let the kernel kill this worker when its agent dies; nothing without an agent. Main thread, early."""
    if not has_agent(place):
        return
    parent = os.getppid()
    if (
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        != 0
    ):
        logger.warning("cannot tie this worker to its agent: %s", os.strerror(ctypes.get_errno()))
    # The agent may have died before the call above: then init has inherited us and no signal ever comes.
    if os.getppid() != parent or (parent == _FIRST_PID and not _is_python(parent)):
        os.kill(os.getpid(), signal.SIGKILL)


def _is_python(pid: int) -> bool:
    """Tell whether a process runs our interpreter: in a container torchrun itself may be process 1."""
    try:
        name = Path(f"/proc/{pid}/exe").readlink().name
    except OSError:
        return False  # another user's, so no torchrun of ours
    return name.startswith("python") or name == Path("/proc/self/exe").readlink().name


# ------------------------------------------------------------------------------------------- ending it
def end_agent(agent: AgentId, code: int) -> NoReturn:
    """End this worker with a code, and its agent with it, so that torchrun does not restart anything.

    Every worker of the node may call it, at the same time too: one of them signals. Without a launcher (the
    agent is this process) it only leaves.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    if agent.pid != os.getpid():
        heard = _listen()
        _signal_once(agent)
        # Leaving only now makes the agent's signal surely the first thing that it sees.
        deadline = time.monotonic() + _LEAVE_S
        while not heard and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
    os._exit(code)


def _listen() -> list[int]:
    """Return a list that gets the agent's SIGTERM, in place of whatever this process did at it before.

    No threading.Event: its lock may be held by the very thread that the handler interrupts, for ever then.
    """
    heard: list[int] = []

    def handler(signum: int, _frame: FrameType | None) -> None:
        heard.append(signum)

    # Only the main thread may set a handler. In another one the wait above runs to its bound.
    with contextlib.suppress(ValueError):
        signal.signal(signal.SIGTERM, handler)
    return heard


def _signal_once(agent: AgentId) -> None:
    """Send SIGTERM to the agent unless a worker of the node has just done so; return once it is sent.

    torchrun stops its workers inside the handling of the first signal; a second one would break that off and
    leave them running.
    """
    try:
        record = (node_folder(agent) / "ended").open("a+b")
    except (OSError, StartError) as error:
        logger.warning("no folder to agree in (%s): signalling the agent without", error)
        _send(agent)
        return
    with record:
        if not _lock(record.fileno()):
            return
        record.seek(0)
        sent = record.read()
        # A signal that is old had no effect (torch lost its exception somewhere): then once more.
        if not sent or _boot_s() - float(sent) > _CLAIM_S:
            _send(agent)
            record.truncate(0)
            record.write(str(_boot_s()).encode())
            record.flush()


def _lock(descriptor: int) -> bool:
    """Take the lock of an open file, which the kernel frees if its holder dies; False if it takes too long."""
    deadline = time.monotonic() + _LEAVE_S
    while time.monotonic() < deadline:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        time.sleep(_LOOK_S)
    return False


def _boot_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _send(agent: AgentId) -> None:
    """Signal the agent if it still is the process that we know."""
    if is_alive(agent.pid, agent.start):
        with contextlib.suppress(ProcessLookupError):
            os.kill(agent.pid, signal.SIGTERM)


# ------------------------------------------------------------------------------------------- its folder
def node_folder(agent: AgentId) -> Path:
    """Return the private folder on this node that an agent's workers share, over restarts too.

    Folders of agents that are gone are removed on the way.

    Raises:
        StartError: Raised when the folder belongs to somebody else or others may write to it.
    """
    root = Path(tempfile.gettempdir()) / f"elastic-trainer-{os.getuid()}"
    folder = root / f"{agent.boot_id[:8]}-{agent.pid}-{agent.start}"
    if not folder.is_dir():
        _make_private(root)
        _sweep(root)
        _make_private(folder)
    _check_private(root)
    _check_private(folder)
    return folder


def _make_private(folder: Path) -> None:
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)


def _check_private(folder: Path) -> None:
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise StartError(
            f"{folder}: found mode {stat.filemode(found.st_mode)} of user {found.st_uid}, expected a folder that"
            f" only user {os.getuid()} may use; remove it or set TMPDIR"
        )


def _sweep(root: Path) -> None:
    """Remove the folders of agents that are gone. A failure is left to the next start."""
    boot = _boot_id()[:8]
    for folder in root.iterdir():
        parts = folder.name.split("-")
        if len(parts) != 3 or not (parts[1].isdigit() and parts[2].isdigit()):
            continue
        if parts[0] != boot or not is_alive(int(parts[1]), int(parts[2])):
            shutil.rmtree(folder, ignore_errors=True)
