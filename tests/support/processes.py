"""Looks at processes through /proc: children, ranks, environments; and ends what a test started."""

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

PROC = Path("/proc")


def environment(pid: int) -> dict[str, str]:
    """The environment that a process was started with; empty where it is gone or a zombie."""
    try:
        raw = (PROC / str(pid) / "environ").read_bytes()
    except OSError:
        return {}
    pairs = (item.partition(b"=") for item in raw.split(b"\0") if item)
    return {os.fsdecode(key): os.fsdecode(value) for key, _, value in pairs}


def state(pid: int) -> str | None:
    """The one-letter state of a process (R S D T Z ...); None where there is none."""
    fields = _stat(pid)
    return fields[0] if fields else None


def is_alive(pid: int) -> bool:
    """Whether a process runs or could run again: neither gone nor a zombie."""
    return state(pid) not in {None, "Z", "X"}


def parent(pid: int) -> int | None:
    """The parent's pid."""
    fields = _stat(pid)
    return int(fields[1]) if fields else None


def _stat(pid: int) -> list[str]:
    try:
        text = (PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()


def all_pids() -> list[int]:
    """Every process there is."""
    return [int(path.name) for path in PROC.iterdir() if path.name.isdigit()]


def children(pid: int) -> list[int]:
    """The direct children of a process."""
    return [child for child in all_pids() if parent(child) == pid]


def carrying(name: str, value: str) -> list[int]:
    """The living processes in whose environment a variable has this value."""
    found = (pid for pid in all_pids() if environment(pid).get(name) == value)
    return [pid for pid in found if is_alive(pid)]


def describe(pid: int) -> str:
    """One line on what a process is and where it waits."""
    try:
        command = (PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return f"{pid}: gone"
    wait = ""
    with contextlib.suppress(OSError):
        wait = (PROC / str(pid) / "wchan").read_text(encoding="utf-8")
    rank = environment(pid).get("RANK", "-")
    return f"{pid}: state {state(pid)}, rank {rank}, in {wait or '?'}: {command[:160]}"


def send(pids: Iterable[int], number: signal.Signals) -> None:
    """Send a signal to each process that is still there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def end_all(name: str, value: str, timeout_s: float = 10) -> None:
    """SIGKILL all processes that carry a variable, until none is left."""
    deadline = time.monotonic() + timeout_s
    while left := carrying(name, value):
        send(left, signal.SIGCONT)
        send(left, signal.SIGKILL)
        if time.monotonic() > deadline:
            raise TimeoutError("; ".join(describe(pid) for pid in left))
        time.sleep(0.02)
