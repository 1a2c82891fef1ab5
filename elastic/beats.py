"""The heartbeat of a worker as bytes: where it stands in its slot, and how others read it.

A worker writes it in a microsecond, into memory that its node's watcher reads; nothing in it waits for anybody, so
that a worker that is stuck anywhere is seen all the same. Imports what costs next to nothing: the watcher is a small
process.
"""

import os
import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Final

__all__ = ["STATUS", "Pulse", "read_pulse", "slots_in", "write_status"]

SIZE: "Final" = 4096
HEAD: "Final" = struct.Struct("<8sqqqqqqd16s")
"""magic, pid, start, local rank, rank, generation, kills for lack of memory, time of the beginning, and a reserve."""
MAGIC: "Final" = b"elastic1"
BEAT: "Final" = struct.Struct("<qd")
"""step, time."""
BEAT_AT: "Final" = 256
PHASE_AT: "Final" = 320
PHASE_BYTES: "Final" = 32
PULSE: "Final" = struct.Struct("<qddq")
"""number of the beat, bound of the phase, and of a wait for others (0: it does not wait), in seconds; a reserve."""
PULSE_AT: "Final" = 384
PLACE: "Final" = struct.Struct("<qq")
"""pid of the stub that torchrun knows this worker by (0: none), whether all of its world is on this node."""
PLACE_AT: "Final" = 448
END_AT: "Final" = 512
STATUS: "Final" = ".status"
"""Suffix of the file beside a slot that holds the worker's wait status, where its parent is one of ours."""


class Pulse:
    """What a slot says at one moment."""

    def __init__(self, path: str, data: bytes) -> None:
        """Read the bytes of a slot; `magic` is another one where they are none."""
        self.path = path
        found = HEAD.unpack_from(data)
        self.pid: int
        self.start: int
        self.rank: int
        self.local_rank: int
        self.magic, self.pid, self.start, self.local_rank, self.rank, self.generation = found[:6]
        self.step = BEAT.unpack_from(data, BEAT_AT)[0]
        self.phase = data[PHASE_AT : PHASE_AT + PHASE_BYTES].rstrip(b"\0").decode(errors="replace")
        self.number: int
        self.bound_s: float
        self.wait_s: float
        self.stub: int
        self.number, self.bound_s, self.wait_s, _ = PULSE.unpack_from(data, PULSE_AT)
        self.stub, is_whole = PLACE.unpack_from(data, PLACE_AT)
        self.world_is_here = bool(is_whole)
        self.has_ended = data[END_AT] != 0

    @property
    def waits(self) -> bool:
        """Whether the worker says that it waits for others."""
        return self.wait_s > 0


def read_pulse(path: str) -> Pulse | None:
    """Read a worker's slot; None where there is none, or not yet."""
    try:
        with open(path, "rb", buffering=0) as file:
            data = file.read(SIZE)
    except OSError:
        return None
    if len(data) < SIZE:
        return None
    pulse = Pulse(path, data)
    return pulse if pulse.magic == MAGIC else None


def slots_in(folder: str) -> list[str]:
    """List the slots of an agent's folder, those of workers that are gone too; none where it is gone."""
    try:
        names = os.listdir(folder)  # noqa: PTH208 - no pathlib here
    except OSError:
        return []
    found = []
    for name in names:
        parts = name.split("-")
        if parts[0] == "slot" and len(parts) == 4 and all(part.isdigit() for part in parts[1:]):
            found.append(f"{folder}/{name}")
    return sorted(found)


def write_status(folder: str, pid: int, status: int) -> None:
    """Tell those who come after a worker how it has ended, should it not have told that itself."""
    for slot in slots_in(folder):
        if slot.split("-")[-2] == str(pid):
            try:
                with open(slot + STATUS, "w", encoding="ascii") as file:
                    file.write(str(status))
            except OSError:
                continue
