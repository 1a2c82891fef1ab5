"""Faults done to a fleet for real: signals to processes, a store that is away, a link that is cut.

Promises: what a fault takes away for a while it gives back, also where the drill is broken off in between (`Strikes.mend`).
What was there when a fault struck is noted before it strikes, so that afterwards it can be told what had to be lost.
"""

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeVar

from checkpoints import memory
from checkpoints.layout import AgentId, CheckpointName
from elastic import kin
from elastic.errors import ElasticError
from elastic.fleet import Agent, Fleet, Worker
from elastic.following import Follower
from elastic.timetable import Kind, Planned

__all__ = ["Strikes", "Struck", "exchange", "is_exchangeable"]

T = TypeVar("T")

_LEAVE_S: Final = 300.0
_AT_FDCWD: Final = -100
_RENAME_EXCHANGE: Final = 2
_LIBC: Final = ctypes.CDLL(None, use_errno=True)


@dataclass(kw_only=True, slots=True)
class Struck:
    """A fault that happened, what was there when it did, and what followed."""

    number: int
    kind: Kind
    time: float
    """Seconds since 1970."""
    after_s: float
    """Seconds after the first step of the whole world."""
    lasts_s: float
    victim: str = ""
    generation: int = 0
    """That it struck."""
    step: int = 0
    """The last step that this generation did."""
    committed: CheckpointName | None = None
    """The newest checkpoint in the store at that moment."""
    kept_step: int = 0
    """Of the newest state that was whole and that the fault left: in the store or in a node's memory."""
    leaves_memory: bool = True
    """Whether a node's memory outlives it."""
    recovery_s: float | None = None
    """Until the first new step was done; None where there was none in time."""
    whole_s: float | None = None
    """Until all nodes had taken part in a step again."""
    claimed: int = 0
    """Generations that had been claimed before it."""
    claims: list[str] = field(default_factory=list)
    """The causes of the generations that were claimed because of it."""
    restarts: int = 0
    """The most that an agent which outlived it has counted because of it."""
    lost_steps: int = 0
    must_lose: int = 0
    """Of these, what no recovery could have kept: steps done after the last state that was due."""
    ended: bool = False
    """Whether the run was complete before it could recover."""


class Strikes:
    """The hand that does it, on one fleet."""

    def __init__(
        self, fleet: Fleet, follower: Follower, folder: Path, *, pause: Callable[[float], None]
    ) -> None:
        """Do nothing yet.

        Args:
            fleet: Whom it meets.
            follower: What is known of the run.
            folder: The run's folder.
            pause: Waits, and goes on following the run.
        """
        self._fleet, self._follower, self._folder, self._pause = fleet, follower, folder, pause
        self._undo: list[Callable[[], None]] = []

    def strike(self, planned: Planned, after_s: float) -> Struck:
        """Do one fault; returns when what it takes for a while is given back."""
        struck = Struck(
            number=planned.number,
            kind=planned.kind,
            time=0.0,
            after_s=after_s,
            lasts_s=planned.lasts_s,
        )
        match planned.kind:
            case "kill":
                self._kill(planned, struck)
            case "stop":
                self._stop(planned, struck)
            case "storage":
                self._storage(planned, struck)
            case "partition":
                self._partition(planned, struck)
            case _:
                self._agent(planned, struck)
        return struck

    def mend(self) -> None:
        """Give back what a fault that was broken off has taken away."""
        while self._undo:
            self._undo.pop()()

    # ------------------------------------------------------------------------------------ the faults
    def _kill(self, planned: Planned, struck: Struck) -> None:
        worker = self._worker(planned)
        struck.victim = f"rank {worker.rank} (pid {worker.pid})"
        self._note(struck, self._fleet.running())
        kin.send([worker.pid], signal.SIGKILL)

    def _stop(self, planned: Planned, struck: Struck) -> None:
        worker = self._worker(planned)
        struck.victim = f"rank {worker.rank} (pid {worker.pid}) for {planned.lasts_s:.1f} s"
        self._note(struck, self._fleet.running())
        self._undo.append(lambda: kin.send([worker.pid], signal.SIGCONT))
        kin.send([worker.pid], signal.SIGSTOP)
        self._pause(planned.lasts_s)
        self.mend()

    def _agent(self, planned: Planned, struck: Struck) -> None:
        agent = _pick(self._fleet.running(), planned.whom)
        struck.victim = f"agent {agent.node} (pid {agent.process.pid})"
        others = [one for one in self._fleet.running() if one is not agent]
        self._note(struck, others)
        agent.was_hit = True
        if planned.kind == "agent":
            self._fleet.kill(agent)
        else:
            kin.send([agent.process.pid], signal.SIGTERM)
            self._await_end(agent)
        self._pause(planned.lasts_s)
        self._fleet.start(agent.node)

    def _await_end(self, agent: Agent) -> None:
        """An agent that was told to leave waits for its workers for 30 s; a crowded machine takes its time."""
        deadline = time.monotonic() + _LEAVE_S
        while agent.is_running:
            if time.monotonic() > deadline:
                told = f"agent {agent.node}: still there {_LEAVE_S:g} s after a SIGTERM"
                raise ElasticError(told)
            self._pause(0.02)

    def _storage(self, planned: Planned, struck: Struck) -> None:
        struck.victim = f"{self._folder.name} for {planned.lasts_s:.1f} s"
        self._note(struck, self._fleet.running())
        # With a file in its place every path below the folder fails, also for root, and nobody can make it anew.
        file = self._folder.with_name(f"{self._folder.name}.away")
        file.write_bytes(b"")

        def give_back() -> None:
            if self._folder.is_file():
                exchange(self._folder, file)
            file.unlink()

        self._undo.append(give_back)
        exchange(self._folder, file)
        self._pause(planned.lasts_s)
        self.mend()

    def _partition(self, planned: Planned, struck: Struck) -> None:
        bridge = self._fleet.bridge
        if bridge is None:
            raise ElasticError("partition: found no links between the nodes")
        agent = _pick(self._fleet.running(), planned.whom)
        struck.victim = f"link of agent {agent.node} for {planned.lasts_s:.1f} s"
        self._note(struck, [one for one in self._fleet.running() if one is not agent])
        self._undo.append(lambda: bridge.heal(agent.node))
        bridge.cut(agent.node)
        self._pause(planned.lasts_s)
        self.mend()

    # ------------------------------------------------------------------------------------ the moment
    def _worker(self, planned: Planned) -> Worker:
        """Whom a fault of one worker meets; they may be just about to come.

        Raises:
            ElasticError: None comes.
        """
        deadline = time.monotonic() + 30
        while not (found := self._fleet.workers()):
            if time.monotonic() > deadline:
                raise ElasticError(f"{planned.kind}: found no worker for 30 s")
            self._pause(0.02)
        return _pick(found, planned.whom)

    def _note(self, struck: Struck, survivors: list[Agent]) -> None:
        """What is there right before the fault."""
        self._follower.look()
        committed = self._follower.committed()
        struck.committed = committed[-1] if committed else None
        steps = [0 if struck.committed is None else struck.committed.step]
        run_id = self._follower.run_id()
        for agent in survivors:
            steps += [name.step for name in _held(agent.identity, run_id)]
        struck.kept_step = max(steps)
        struck.leaves_memory = bool(survivors)
        self._follower.look()
        newest = self._follower.newest
        if newest is not None:
            struck.generation, struck.step = newest.generation, newest.last_step
        struck.time = time.time()


def _pick(found: list[T], whom: float) -> T:
    return found[int(whom * len(found))]


def _held(owner: AgentId, run_id: str) -> list[CheckpointName]:
    """The whole snapshots that an agent's node holds in memory."""
    segments = memory.open_named(owner, run_id)
    try:
        return [one.name for one in memory.held(segments, [""] * len(segments), run_id)]
    finally:
        for segment in segments:
            segment.close()


def exchange(one: Path, other: Path) -> None:
    """Exchange two names at once: no moment is without either.

    Raises:
        OSError: The file system does not do that.
    """
    paths = (os.fsencode(one), os.fsencode(other))
    if _LIBC.renameat2(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _RENAME_EXCHANGE) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(one))


def is_exchangeable(folder: Path) -> bool:
    """Whether names in a folder can be exchanged: not every network file system does."""
    one, other = folder / ".exchange-1", folder / ".exchange-2"
    try:
        one.touch()
        other.touch()
        exchange(one, other)
    except OSError:
        return False
    finally:
        for path in (one, other):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
    return True
