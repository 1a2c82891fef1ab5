"""The stacks of a process that may be unable to run Python: asked for by a signal, written in C, read by its watcher.

Guarantees: only a process that has set the handler is ever signalled, for the signal would end any other; what a
stopped process is asked comes when it is continued. Which stack means what is told in pure functions. Imports what
costs next to nothing.
"""

import faulthandler
import os
import signal
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TextIO

__all__ = [
    "STACKS",
    "allow_stacks",
    "ask_stacks",
    "family_of",
    "frames_of",
    "in_collective",
    "state_of",
    "where_of",
]

STACKS = ".stacks"
"""Suffix of the file beside a worker's slot."""
NUMBER = signal.SIGRTMIN + 6
"""A signal that nobody else uses: SIGUSR1 and the like may be a user's notice."""
_DUMP_S = 2.0
_REST_S = 0.03
_RESTS = 3
_COLLECTIVES = ("/torch/distributed/", "/torch/nn/parallel/distributed.py", "/elastic/world.py")
_DEPTH = 4
"""So far from its innermost frame a stack is looked at for a collective."""
_MOST = 100_000


# ------------------------------------------------------------------------------------------- the worker's side
def allow_stacks(file: "TextIO") -> None:
    """Let the stacks of all threads be written into a file at the signal, whatever Python does then."""
    faulthandler.register(NUMBER, file, all_threads=True, chain=False)


# ------------------------------------------------------------------------------------------- processes
def status_of(pid: int) -> dict[str, str]:
    """The lines of /proc/PID/status; empty where there is no such process."""
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
            lines = file.read().splitlines()
    except OSError:
        return {}
    return {name: text.strip() for name, _, text in (line.partition(":") for line in lines)}


def state_of(pid: int) -> str:
    """The state of a process: R, S, D, T (stopped), or "traced" where somebody debugs it; empty where it is gone."""
    status = status_of(pid)
    if status.get("TracerPid", "0") != "0":
        return "traced"
    return status.get("State", "")[:1]


def family_of(pid: int) -> list[int]:
    """The forks of a worker and theirs: loader workers hang too. What it has started anew is none of them."""
    parents: dict[int, int] = {}
    for name in os.listdir("/proc"):  # noqa: PTH208 - names alone
        if name.isdigit():
            parent = status_of(int(name)).get("PPid", "")
            parents[int(name)] = int(parent) if parent.isdigit() else 0
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return [child for child in found[1:] if _answers(child)]


def _answers(pid: int) -> bool:
    """Whether a process has set the handler: by default this signal ends a process."""
    try:
        caught = int(status_of(pid).get("SigCgt", "0"), 16)
    except ValueError:
        return False
    return bool(caught >> (NUMBER - 1) & 1)


def ask_stacks(pids: list[int], files: list[str]) -> dict[str, str]:
    """Have these processes write their stacks; returns what came into each file until all had come to rest."""
    starts = {path: _size(path) for path in files}
    for pid in pids:
        if _answers(pid):
            _send(pid, NUMBER)
            # A stopped one answers what is pending before it does anything else.
            _send(pid, signal.SIGCONT)
    deadline, rested = time.monotonic() + _DUMP_S, 0
    sizes = dict(starts)
    while time.monotonic() < deadline and rested < _RESTS:
        time.sleep(_REST_S)
        now = {path: _size(path) for path in files}
        all_came = all(now[path] > starts[path] for path in files)
        rested = rested + 1 if all_came and now == sizes else 0
        sizes = now
    return {path: _read(path, starts[path]) for path in files}


def _send(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size  # noqa: PTH116 - no pathlib here
    except OSError:
        return 0


def _read(path: str, start: int) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            file.seek(start)
            return file.read(_MOST)
    except OSError:
        return ""


# ------------------------------------------------------------------------------------------- what a stack says
def frames_of(dump: str) -> list[tuple[str, int, str]]:
    """The main thread's frames as file, line and function, the innermost first.

    Python writes the threads of a process one after the other, the main one last; it marks as current the one that
    answered the signal.
    """
    thread: list[tuple[str, int, str]] = []
    for line in dump.splitlines():
        if line.startswith(("Thread 0x", "Current thread 0x")):
            thread = []
        elif line.startswith('  File "'):
            file, _, rest = line[8:].rpartition('", line ')
            number, _, function = rest.partition(" in ")
            if number.isdigit():
                thread.append((file, int(number), function))
    return thread


def in_collective(frames: list[tuple[str, int, str]]) -> bool:
    """Whether a thread is in a collective: then it may only wait for a rank that does not come."""
    return any(part in file for file, _, _ in frames[:_DEPTH] for part in _COLLECTIVES)


def where_of(
    frames: list[tuple[str, int, str]],
    foreign: tuple[str, ...],
    children: list[tuple[str, int, str]] | None = None,
) -> str:
    """Name the innermost line that is none of a library's, as file:line; else one of a child's, else the innermost at all."""
    for file, line, _ in (*frames, *(children or ())):
        if not file.startswith((*foreign, "<")) and "/site-packages/" not in file:
            return f"{file}:{line}"
    return f"{frames[0][0]}:{frames[0][1]}" if frames else ""
