"""The small process that sees a worker hang: it reads the heartbeats of its node, and ends what does not come back.

Started by the first worker of a node (`elastic.watching`), with that worker's stderr; no torch, no threads, some
10 MB. Guarantees: it needs nothing of a worker but its slot, so that a stopped one, one that holds Python's lock in C
or one in a dead collective is seen; the stacks of all ranks of the node are told first, then the one that hangs is
ended and the rest of its generation after it; a debugged worker is left alone; it ends with its agent at once, and
else with the workers that it has watched.
"""

import os
import select
import signal
import sys
import time

from elastic.beats import Pulse, read_pulse, slots_in
from elastic.broken import broken_at
from elastic.hanging import Seen, find_hung, is_overdue
from elastic.stacks import STACKS, ask_stacks, family_of, frames_of, in_collective, state_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import NoReturn

__all__ = ["main"]

_LEAST_LOOK_S = 0.1
_MOST_LOOK_S = 1.0
_LOOKS = 10.0
"""So many looks in the shortest bound."""
_LEAVE_S = 5.0
"""How long the others of a generation have to end by themselves once one of them was ended for a hang."""
_BROKEN_S = 0.5
"""How long the workers of a broken world have to see that by themselves."""
_VAIN_S = 2.0
"""A worker of a broken world that has waited for so long waits for the node that is gone."""
_SHOWN_BYTES = 20_000
"""Of one rank's stacks."""


def main(argv: "list[str]") -> "NoReturn":
    """Watch; the arguments are folder, pid and start of the agent, pid and start of the worker that started this."""
    folder, agent, agent_start, starter, starter_start = argv
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: torchrun ends us by ending itself
    try:
        watched = os.pidfd_open(int(agent))
    except ProcessLookupError:
        os._exit(0)
    if start_of(int(agent)) != int(agent_start):
        os._exit(0)
    Watcher(folder, watched, (int(starter), int(starter_start))).run()
    os._exit(0)


class Watcher:
    """Looks at the slots of one generation's workers until they are gone."""

    def __init__(self, folder: str, agent: int, starter: tuple[int, int]) -> None:
        """Watch the slots in a folder.

        Args:
            folder: The private folder of the agent.
            agent: A descriptor that is ready once the agent has ended.
            starter: Pid and start time of the worker whose generation this is.
        """
        self._folder, self._agent, self._starter = folder, agent, starter
        self._workers: dict[str, Seen] = {}
        self._told: set[str] = set()
        self._dumps: dict[str, str] = {}
        """The stacks that were asked last: a second request could find a worker elsewhere, woken by the first."""
        self._began = time.monotonic()
        self._asked = 0.0

    def run(self) -> None:
        """Look again and again; returns when there is nobody left to watch."""
        poll = select.poll()
        poll.register(self._agent, select.POLLIN)
        before, pause_s = time.monotonic(), _LEAST_LOOK_S
        while not poll.poll(pause_s * 1000):
            now = time.monotonic()
            # What passed while this process itself could not run is nobody's fault.
            self._look(min(now - before, 2 * pause_s))
            before = now
            if not self._workers:
                return
            if hung := self._find():
                self._end(hung)
            self._end_vain(now)
            bounds = [s.pulse.bound_s for s in self._workers.values() if s.pulse.bound_s > 0]
            pause_s = min(_MOST_LOOK_S, max(_LEAST_LOOK_S, min(bounds, default=0.0) / _LOOKS))

    def _look(self, passed_s: float) -> None:
        """Read the heartbeats; new workers belong to this generation while the one that started this lives."""
        is_open = is_alive(*self._starter)
        for path in slots_in(self._folder) if is_open else list(self._workers):
            pulse = read_pulse(path)
            seen = self._workers.get(path)
            if pulse is None or not is_alive(pulse.pid, pulse.start):
                self._workers.pop(path, None)
            elif seen is None:
                self._workers[path] = Seen(pulse)
            else:
                seen.look(pulse, passed_s)

    def _find(self) -> list[Seen]:
        """Who hangs; what only its stack tells is asked before anybody is accused."""
        self._dumps.clear()
        workers = list(self._workers.values())
        for seen in workers:
            if is_overdue(seen):
                seen.state = state_of(seen.pulse.pid)
        hung = find_hung(workers)
        doubtful = [seen for seen in hung if seen.state != "T" and not seen.waits]
        if not doubtful or (len(workers) == 1 and workers[0].pulse.world_is_here):
            return hung
        self._excuse(doubtful)
        return find_hung(workers)

    def _excuse(self, workers: list[Seen]) -> None:
        """Look whose stack shows a collective."""
        dumps = self._dump(workers)
        for seen in workers:
            seen.excused = in_collective(frames_of(dumps[seen.pulse.path]))

    def _dump(self, workers: list[Seen]) -> dict[str, str]:
        asked = [seen.pulse for seen in workers if not self._dumps.get(seen.pulse.path)]
        files = {pulse.path: pulse.path + STACKS for pulse in asked}
        found = ask_stacks([pulse.pid for pulse in asked], list(files.values()))
        self._dumps |= {path: found[file] for path, file in files.items()}
        return {seen.pulse.path: self._dumps[seen.pulse.path] for seen in workers}

    def _end(self, hung: list[Seen]) -> None:
        """Tell everything, then end the ones that hang, and see that the generation ends."""
        if all(seen.pulse.path in self._told for seen in hung):
            return  # it cannot be ended, and was told
        from elastic.telling import (
            note_end,
            note_hang,
            tell,
        )  # they load more than the watching needs

        workers = list(self._workers.values())
        stopped = [seen.pulse.path for seen in workers if state_of(seen.pulse.pid) == "T"]
        dumps = self._dump(workers)
        self._look(0.0)
        hung = self._still(hung, stopped)
        if not hung:
            return
        children = {seen.pulse.path: family_of(seen.pulse.pid) for seen in hung}
        beside = {
            path: ask_stacks(pids, [path + STACKS])[path + STACKS] if pids else ""
            for path, pids in children.items()
        }
        shown = {path: dump + beside.get(path, "") for path, dump in dumps.items()}
        tell(hung, workers, shown, stopped, most=_SHOWN_BYTES)
        for seen in hung:
            path = seen.pulse.path
            note_hang(seen, dumps[path], beside[path], is_stopped=path in stopped)
            self._told.add(path)
            kill(seen.pulse, children[path])
        self._see_off(note_end)

    def _still(self, hung: list[Seen], stopped: list[str]) -> list[Seen]:
        """Who hangs yet: the request for its stack ends a call in C such as sleep, and the worker goes on.

        One that was stopped has been continued for the request alone, and its stub has not.
        """
        still = [seen for seen in hung if is_overdue(seen) or seen.pulse.path in stopped]
        for seen in hung:
            if seen not in still:
                rank, step = seen.pulse.rank, seen.pulse.step
                sys.stderr.write(
                    f"rank {rank} goes on in step {step}: it was asked for its stack, as nothing was heard of it for long\n"
                )
                sys.stderr.flush()
        return still

    def _end_vain(self, now: float) -> None:
        """End who waits for a node that is gone, once the agent has said so: no reset will come from there."""
        broken = broken_at(self._folder)
        if broken <= self._began or now - broken < _BROKEN_S:
            return
        idle = [
            seen
            for seen in self._workers.values()
            if seen.idle_s >= _VAIN_S and seen.pulse.path not in self._told
        ]
        if now - self._asked >= _VAIN_S and (doubtful := [seen for seen in idle if not seen.waits]):
            # DDP has collectives of its own, of which only a stack tells.
            self._asked = now
            self._excuse(doubtful)
        for seen in idle:
            if seen.waits:
                from elastic.telling import note_end  # it loads more than the watching needs

                note_end(seen.pulse)
                kill(seen.pulse, [])
                self._told.add(seen.pulse.path)

    def _see_off(self, note_end: "Callable[[Pulse], None]") -> None:
        """The generation is over: who does not leave by itself (a stuck collective) would cost 30 s more."""
        poll = select.poll()
        poll.register(self._agent, select.POLLIN)
        deadline = time.monotonic() + _LEAVE_S
        while self._workers and time.monotonic() < deadline:
            if poll.poll(50):
                os._exit(0)
            self._look(0.0)
        for seen in self._workers.values():
            if seen.pulse.path not in self._told:
                note_end(seen.pulse)
                kill(seen.pulse, [])
                self._told.add(seen.pulse.path)


def kill(pulse: Pulse, children: list[int]) -> None:
    """End a worker, its loader workers with it, and let its stub see it."""
    for pid in (pulse.pid, *children):
        send(pid, signal.SIGKILL)
    if pulse.stub:
        # A stub that was stopped together with its worker could not end as it has ended.
        send(pulse.stub, signal.SIGCONT)


def send(pid: int, number: int) -> None:
    """Send a signal to a process that may be gone."""
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return


def start_of(pid: int) -> int | None:
    """When a process started, in ticks since boot; None where it is gone (a zombie is gone)."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def is_alive(pid: int, start: int) -> bool:
    """Whether the process of this pid is still the one that started then."""
    return start_of(pid) == start
