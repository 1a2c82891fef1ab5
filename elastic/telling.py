"""What is said and written down of a hang: the log's lines, and the record that the next generation finds.

Used by the watcher, once there is something to tell; so it may import more than the watching does.
"""

import json
import os
import socket
import struct
import sys
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from elastic.beats import END_AT, SIZE, Pulse
from elastic.fault import Fault
from elastic.hanging import Seen
from elastic.stacks import frames_of, where_of

__all__ = ["note_end", "note_hang", "tell"]

_ROOT: Final = Path(__file__).resolve().parent.parent
_FOREIGN: Final = (
    sysconfig.get_path("stdlib"),
    f"{_ROOT}/elastic/",
    f"{_ROOT}/checkpoints/",
)
_FRAMES: Final = 12
_MESSAGE: Final = 1200


def tell(
    hung: Sequence[Seen],
    workers: Sequence[Seen],
    dumps: dict[str, str],
    stopped: Sequence[str],
    *,
    most: int,
) -> None:
    """Write to the log who hangs, the stacks of all ranks of this node, and once more who."""
    lines = [f"hang: {told_of(seen, stopped)}" for seen in hung]
    text = [*lines]
    for seen in sorted(workers, key=lambda seen: seen.pulse.rank):
        word = "hangs" if seen in hung else doing(seen)
        text += [
            f"--- rank {seen.pulse.rank} (pid {seen.pulse.pid}, step {seen.pulse.step}, {seen.pulse.phase}) {word}:",
            dumps.get(seen.pulse.path, "")[:most].rstrip() or "  no stack: it does not answer",
        ]
    text += [
        f"{line}; it is ended, the stacks of all ranks of this node are above" for line in lines
    ]
    sys.stderr.write("\n".join(text) + "\n")
    sys.stderr.flush()


def told_of(seen: Seen, stopped: Sequence[str]) -> str:
    """Who hangs, where and since when."""
    pulse = seen.pulse
    since = time.strftime("%H:%M:%S", time.gmtime(time.time() - seen.idle_s))
    what = "it waits in a collective to which nobody comes" if seen.waits else "no sign of life"
    if pulse.path in stopped:
        what = "it was stopped (SIGSTOP)"
    return (
        f"rank {pulse.rank} on {socket.gethostname()} in phase {pulse.phase!r} of step {pulse.step}: {what} for {seen.idle_s:.0f} s,"
        f" since {since} UTC (allowed: {pulse.bound_s:.0f} s)"
    )


def doing(seen: Seen) -> str:
    """What a worker does that does not hang."""
    return "waits for others" if seen.waits else "is at work"


def note_hang(seen: Seen, dump: str, children: str, *, is_stopped: bool) -> None:
    """Write the cause into the worker's slot, for those who come after it; what it has told itself stays.

    Args:
        seen: The worker.
        dump: Its stacks.
        children: Those of its loader workers, where it may wait for one of them.
        is_stopped: Whether it was stopped by a signal.
    """
    frames = frames_of(dump)
    why = "stopped" if is_stopped else "no peer came" if seen.waits else "no sign of life"
    first = f"{why} for {seen.idle_s:.0f} s"
    shown = [f"{file}:{line} in {function}" for file, line, function in frames[:_FRAMES]]
    fault = _fault(seen.pulse, "hung", "\n".join([first, *shown])[:_MESSAGE])
    where = where_of(frames, _FOREIGN, frames_of(children))
    _write(seen.pulse, Fault.from_json({**fault.to_json(), "where": where or None}))


def note_end(pulse: Pulse) -> None:
    """Write into a slot that its worker was ended with its generation, which is no cause of anything."""
    _write(pulse, _fault(pulse, "ended", "ended with its generation"))


def _fault(pulse: Pulse, kind: str, message: str) -> Fault:
    return Fault.from_json({
        "rank": pulse.rank, "local_rank": pulse.local_rank, "host": socket.gethostname(), "step": pulse.step, "phase": pulse.phase,
        "kind": kind, "signal": "SIGKILL", "message": message, "time": time.time(),
        "signature": f"{kind}-{pulse.phase}",
    })  # fmt: skip


def _write(pulse: Pulse, fault: Fault) -> None:
    text = json.dumps(fault.to_json()).encode()
    if pulse.has_ended or len(text) > SIZE - END_AT - 8:
        return
    descriptor = os.open(pulse.path, os.O_WRONLY)
    try:
        os.pwrite(descriptor, text, END_AT + 8)
        # The length last, as the worker itself does it.
        os.pwrite(descriptor, struct.pack("<Q", len(text)), END_AT)
    finally:
        os.close(descriptor)
