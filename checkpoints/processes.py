"""Which process is meant: a pid together with when it started, on this boot of this machine.

A pid alone is given out again; with its start time it never is. Reads /proc, so it needs Linux.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

from checkpoints.errors import CheckpointError
from checkpoints.layout import AgentId


def stat_of(pid: int) -> list[str]:
    """State, parent, group, session and so on of a process, from its third field on; empty where there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    # The command name stands in parentheses and may hold spaces and parentheses itself.
    return text.rpartition(")")[2].split()


def process_start(pid: int) -> int | None:
    """When a process started, in ticks since boot, or None where it is gone (a zombie is gone)."""
    fields = stat_of(pid)
    return None if not fields or fields[0] in "ZX" else int(fields[19])


def is_alive(pid: int, start: int) -> bool:
    """Whether the process of this pid is still the one that started then."""
    return process_start(pid) == start


def boot_id() -> str:
    """What tells this boot of the machine from any other.

    Raises:
        CheckpointError: /proc does not show it.
    """
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError as error:
        raise CheckpointError(f"boot id: cannot be read ({error}); Linux is needed") from error


def this_process() -> AgentId:
    """This process, as one that others may have to find dead."""
    pid = os.getpid()
    start = process_start(pid)
    if start is None:
        raise CheckpointError(f"process {pid}: found nothing of it in /proc; Linux is needed")
    return AgentId(host=socket.gethostname(), boot_id=boot_id(), pid=pid, start=start)
