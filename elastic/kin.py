"""Processes of this machine, found by their parent or by a variable of their environment. Needs Linux (/proc)."""

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from checkpoints.processes import stat_of

__all__ = ["carrying", "children", "describe", "end_all", "environment", "send"]

_PROC: Final = Path("/proc")
_POLL_S: Final = 0.02


def environment(pid: int) -> dict[str, str]:
    """The environment that a process was started with; empty where it is gone or somebody else's."""
    try:
        raw = (_PROC / str(pid) / "environ").read_bytes()
    except OSError:
        return {}
    pairs = (item.partition(b"=") for item in raw.split(b"\0") if item)
    return {os.fsdecode(key): os.fsdecode(value) for key, _, value in pairs}


def children(pid: int) -> list[int]:
    """The living direct children of a process."""
    found = ((child, _stat(child)) for child in _all())
    return [child for child, (state, parent) in found if parent == pid and state not in "ZX"]


def carrying(name: str, value: str) -> list[int]:
    """The living processes in whose environment a variable begins with this value."""
    found = (pid for pid in _all() if environment(pid).get(name, "").startswith(value))
    return [pid for pid in found if _stat(pid)[0] not in "ZX"]


def describe(pid: int) -> str:
    """One line on what a process is."""
    try:
        command = (_PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return f"{pid}: gone"
    return f"{pid} ({command[:100].strip()})"


def send(pids: Iterable[int], number: signal.Signals) -> None:
    """Send a signal to each process that is still there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def end_all(name: str, value: str, *, limit_s: float = 10.0) -> list[int]:
    """SIGKILL all processes that carry a variable, until none is left; returns those that stay."""
    deadline = time.monotonic() + limit_s
    while left := carrying(name, value):
        if time.monotonic() > deadline:
            return left
        # A stopped one dies of SIGKILL too; its parent may wait for it to go on.
        send(left, signal.SIGCONT)
        send(left, signal.SIGKILL)
        time.sleep(_POLL_S)
    return []


def _all() -> list[int]:
    return [int(path.name) for path in _PROC.iterdir() if path.name.isdigit()]


def _stat(pid: int) -> tuple[str, int]:
    """State and parent; X and 0 where there is no such process."""
    fields = stat_of(pid)
    return (fields[0], int(fields[1])) if fields else ("X", 0)
