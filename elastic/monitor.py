"""What each worker leaves behind on its node: where it was, and why it ended.

A worker writes its place (rank, generation, step, phase) into a small mapped file of the node's folder, about a
microsecond a time, so that it is there however the worker ends. The workers after it read what those before them
left (`previous_faults`). Guarantees: a fault is handed out once, to one worker; a worker that still lives is never
reported; a broken file is skipped, never raised.

How an end is known: by the record that the worker wrote itself; else by the file of Python's fault handler (the
signals that a crash raises); else by its mark of a SIGTERM or of another signal that ends a process; else by the wait
status, where a warm process has it; else it was killed, for lack of memory if the cgroup (or, for want of one, the
machine) counted such a kill since the worker began. Does not import torch.
"""

import contextlib
import dataclasses
import faulthandler
import hashlib
import json
import logging
import mmap
import os
import re
import signal
import socket
import struct
import sysconfig
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final

from elastic.agent import is_alive, process_start
from elastic.beats import (
    BEAT,
    BEAT_AT,
    END_AT,
    HEAD,
    MAGIC,
    PHASE_AT,
    PHASE_BYTES,
    PLACE,
    PLACE_AT,
    PULSE,
    PULSE_AT,
    SIZE,
    STATUS,
    slots_in,
)
from elastic.fault import Fault, Kind
from elastic.stacks import STACKS, allow_stacks

if TYPE_CHECKING:
    from elastic.bounds import Bounds

__all__ = ["Fault", "Kind", "Slot", "open_slot", "present_faults", "previous_faults"]

logger = logging.getLogger(__name__)

_CRASHES: Final = {
    "Segmentation fault": "SIGSEGV",
    "Aborted": "SIGABRT",
    "Bus error": "SIGBUS",
    "Floating point exception": "SIGFPE",
    "Floating-point exception": "SIGFPE",
    "Illegal instruction": "SIGILL",
}
_DEADLY: Final = ("SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGXCPU")
"""They end a process that has not said otherwise, and leave no trace; the first is an agent's."""
_OUT_OF_MEMORY: Final = "out of memory: the kernel ended a process of this cgroup"
_LOADER_KILLED: Final = re.compile(
    r"DataLoader worker .*(killed by signal: Killed|exited unexpectedly)"
)
_FRAME: Final = re.compile(r'File "([^"]+)", line (\d+)')
_ADDRESS: Final = re.compile(r"0x[0-9a-fA-F]+|\d+")


class Slot:
    """One worker's mapped file. Made by `open_slot`; used by that worker alone, any thread."""

    def __init__(self, path: Path, local_rank: int, start: int) -> None:
        self.path = path
        self._local_rank = local_rank
        self._start = start
        self._rank = local_rank
        self._step = 0
        self._phase = ""
        self._beats = 0
        self._wait_began = 0.0
        self.waited_s = 0.0
        """Seconds in which this worker waited for others."""
        self.bounds: Bounds | None = None
        """How long each phase may go without a beat; without, each may take as long as it likes."""
        self._beaten = time.monotonic()
        with path.open("w+b") as file:
            file.truncate(SIZE)
            self._map = mmap.mmap(file.fileno(), SIZE)
        self._kills = _oom_kills()
        self._write_head(None)
        self.beat(0, "start")
        self._crash_file: IO[str] = path.with_suffix(".crash").open("w", encoding="utf-8")
        faulthandler.enable(self._crash_file, all_threads=False)
        self._marks: list[IO[str]] = []
        for name in _DEADLY:
            if signal.getsignal(signal.Signals[name]) is not signal.SIG_DFL:
                continue
            mark = path.with_suffix(f".{name}").open("w", encoding="utf-8")
            self._marks.append(mark)
            # In C, so that it also works while an import keeps Python busy; then the default action ends us. A handler
            # that Python code sets later takes its place, and tells of the signal by `end`.
            faulthandler.register(signal.Signals[name], mark, all_threads=False, chain=True)
        self._stack_file: IO[str] = path.with_suffix(STACKS).open("a", encoding="utf-8")
        allow_stacks(self._stack_file)

    def _write_head(self, generation: int | None) -> None:
        HEAD.pack_into(
            self._map, 0, MAGIC, os.getpid(), self._start, self._local_rank, self._rank,
            -1 if generation is None else generation, self._kills, time.time(), b"",
        )  # fmt: skip

    def begin(self, rank: int, generation: int | None) -> None:
        """Write who this worker is; called again once the generation is known."""
        self._rank = rank
        self._write_head(generation)

    def stand(self, *, stub: int, world_is_here: bool) -> None:
        """Write what the node's watcher has to know of this worker besides."""
        PLACE.pack_into(self._map, PLACE_AT, stub, int(world_is_here))

    def beat(self, step: int, phase: str) -> None:
        """Write where the worker is. Some microseconds; safe at any moment."""
        now = time.monotonic()
        if self.bounds is not None:
            self.bounds.took(self._phase, now - self._beaten)
        self._beaten = now
        if phase != self._phase:
            self._phase = phase
            self._map[PHASE_AT : PHASE_AT + PHASE_BYTES] = phase.encode()[:PHASE_BYTES].ljust(
                PHASE_BYTES, b"\0"
            )
        self._step = step
        BEAT.pack_into(self._map, BEAT_AT, step, time.time())
        self.resume()
        self._pulse(0.0)

    @property
    def phase(self) -> str:
        """What the worker does."""
        return self._phase

    def enter(self, phase: str) -> None:
        """Write what the worker does now; a sign of life where it is the same as before."""
        self.beat(self._step, phase)

    def wait(self, limit_s: float) -> None:
        """From here on this worker waits for others, who will be waited for so long at most. Any thread."""
        if not self._wait_began:
            self._wait_began = time.monotonic()
            self._pulse(limit_s)

    def resume(self) -> None:
        """The others have come. Safe where it did not wait."""
        if self._wait_began:
            self.waited_s += time.monotonic() - self._wait_began
            self._wait_began = 0.0
            self._pulse(0.0)

    @contextlib.contextmanager
    def waiting(self, limit_s: float) -> Iterator[None]:
        """Around a wait for others, of whom one that is gone or late is no fault of this worker."""
        self.wait(limit_s)
        try:
            yield
        finally:
            self.resume()

    def _pulse(self, wait_s: float) -> None:
        self._beats += 1
        bound_s = 0.0 if self.bounds is None else self.bounds[self._phase]
        PULSE.pack_into(self._map, PULSE_AT, self._beats, bound_s, wait_s, 0)

    def fault(self, error: BaseException, kind: Kind = "exception") -> Fault:
        """Describe an exception as this worker's fault, at the place where the worker is."""
        where = _where(error)
        name = type(error).__name__
        text = str(error)
        signature = hashlib.sha256(
            f"{name}|{where}|{_ADDRESS.sub('#', text)}".encode()
        ).hexdigest()[:16]
        if _LOADER_KILLED.search(text) and -1 < self._kills < _oom_kills():
            text = f"{_OUT_OF_MEMORY}; {text}"
        return Fault(
            rank=self._rank, local_rank=self._local_rank, host=socket.gethostname(), step=self._step,
            phase=self._phase, kind=kind, type=name, message=text[:2000], where=where, signature=signature,
            time=time.time(),
        )  # fmt: skip

    def end(self, fault: Fault | None) -> None:
        """Write why the worker ends; None is an orderly end. The first one told stays."""
        if self._map[END_AT] != 0:
            return
        room = SIZE - END_AT - 8
        text = json.dumps({} if fault is None else fault.to_json()).encode()
        if fault is not None and len(text) > room:
            short = dataclasses.replace(fault, message=fault.message[:200], where=None)
            text = json.dumps(short.to_json()).encode()[:room]
        self._map[END_AT + 8 : END_AT + 8 + len(text)] = text
        # The length last: a reader never sees half a record.
        struct.pack_into("<Q", self._map, END_AT, len(text))


def open_slot(folder: Path, local_rank: int) -> Slot:
    """Make this worker's slot in its node's folder. Main thread, as early as can be."""
    start = process_start(os.getpid()) or 0
    return Slot(folder / f"slot-{local_rank}-{os.getpid()}-{start}", local_rank, start)


def previous_faults(folder: Path) -> list[Fault]:
    """Take what workers that are gone have left here, causes first. Any worker of the node, at its start."""
    found = [fault for taken, slot in _take_dead(folder) for fault in _read(taken, slot)]
    return sorted(found, key=lambda fault: (fault.is_secondary, fault.time))


def present_faults(folder: Path, *, but: Path | None = None) -> list[Fault]:
    """Look at what workers that are gone have left here, but for one slot, and leave it for those who come after."""
    found = [fault for slot in _dead(folder) if slot != but for fault in _read(slot, slot)]
    return sorted(found, key=lambda fault: (fault.is_secondary, fault.time))


def _dead(folder: Path) -> Iterator[Path]:
    for slot in map(Path, slots_in(str(folder))):
        parts = slot.name.split("-")
        if not is_alive(int(parts[2]), int(parts[3])):
            yield slot


def _take_dead(folder: Path) -> Iterator[tuple[Path, Path]]:
    """Yield slots of dead workers under names of our own; a rename gives each to one worker only."""
    for slot in _dead(folder):
        taken = slot.with_name(f"taken-{os.getpid()}-{slot.name}")
        try:
            slot.rename(taken)
        except FileNotFoundError:
            continue  # another worker of this node was faster
        yield taken, slot
        taken.unlink(missing_ok=True)
        for suffix in (".crash", STATUS, STACKS, *(f".{name}" for name in _DEADLY)):
            slot.with_suffix(suffix).unlink(missing_ok=True)


def _read(taken: Path, slot: Path) -> list[Fault]:
    """Read the fault of a dead worker's slot; none where it ended in order or the file makes no sense."""
    try:
        data = taken.read_bytes()
        magic, _, _, local_rank, rank, _, kills, begun, _ = HEAD.unpack_from(data)
        step, heard = BEAT.unpack_from(data, BEAT_AT)
        (length,) = struct.unpack_from("<Q", data, END_AT)
        if magic != MAGIC:
            return []
        if length:
            record = json.loads(data[END_AT + 8 : END_AT + 8 + length])
            return [Fault.from_json(record)] if record else []
    except (OSError, ValueError, struct.error) as error:
        logger.warning("what a worker before this one left in %s cannot be read: %s", slot, error)
        return []
    phase = data[PHASE_AT : PHASE_AT + PHASE_BYTES].rstrip(b"\0").decode(errors="replace")
    vanished = Fault(
        rank=rank, local_rank=local_rank, host=socket.gethostname(), step=step, phase=phase, kind="killed",
        signal="SIGKILL", time=max(heard, begun),
    )  # fmt: skip
    return [_explain(vanished, slot, kills)]


def _explain(fault: Fault, slot: Path, kills: int) -> Fault:
    """Tell what ended a worker that could not tell it itself."""
    crash = _text(slot.with_suffix(".crash"))
    for words, name in _CRASHES.items():
        if f"Fatal Python error: {words}" in crash:
            frame = _FRAME.search(crash)
            where = f"{frame[1]}:{frame[2]}" if frame else None
            return dataclasses.replace(fault, signal=name, where=where)
    for name in _DEADLY:
        if _text(slot.with_suffix(f".{name}")):
            return dataclasses.replace(
                fault, kind="ended" if name == "SIGTERM" else "killed", signal=name
            )
    status = _text(slot.with_suffix(STATUS))
    if status.isdigit() and os.WIFEXITED(int(status)):
        code = os.WEXITSTATUS(int(status))
        return dataclasses.replace(fault, kind="exited", signal=None, message=f"exit code {code}")
    if status.isdigit() and (number := os.WTERMSIG(int(status))) != signal.SIGKILL:
        return dataclasses.replace(fault, signal=_name_of(number))
    if kills >= 0 and _oom_kills() > kills:
        return dataclasses.replace(fault, message=_OUT_OF_MEMORY)
    return fault


def _name_of(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _oom_kills() -> int:
    """Return how often the kernel has ended a process of our cgroup for lack of memory; -1 where nobody counts."""
    for path in _oom_counters():
        with contextlib.suppress(OSError, ValueError):
            for event in path.read_text(encoding="utf-8").splitlines():
                if event.startswith("oom_kill "):
                    return int(event.split()[1])
    return -1


def _oom_counters() -> Iterator[Path]:
    """The files that may count such kills, the nearest first."""
    lines: list[str] = []
    with contextlib.suppress(OSError):
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    for number, controllers, path in (line.split(":", 2) for line in lines):
        if number == "0":
            base, name = Path("/sys/fs/cgroup"), "memory.events"
        elif controllers == "memory":
            base, name = Path("/sys/fs/cgroup/memory"), "memory.oom_control"
        else:
            continue
        yield base / path.lstrip("/") / name
        # A container may see its own cgroup as the root, and the host's path for it.
        yield base / name
    # Of the whole machine: a process in no cgroup is counted here alone.
    yield Path("/proc/vmstat")


def _where(error: BaseException) -> str | None:
    """Name the innermost line of the user's code that an exception came through; else the innermost at all."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith("<")
    ]
    ours = str(Path(__file__).resolve().parent.parent)
    foreign = [
        sysconfig.get_path("stdlib"),
        sysconfig.get_path("purelib"),
        f"{ours}/elastic/",
        f"{ours}/checkpoints/",
    ]
    theirs = [frame for frame in frames if not frame.filename.startswith(tuple(foreign))]
    for frame in reversed(theirs or frames):
        return f"{frame.filename}:{frame.lineno}"
    return None
