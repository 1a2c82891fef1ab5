"""One run under a schedule of faults, from its first agent to the last process that is gone.

Promises: a fault strikes only when the one before it has been recovered from, so that each recovery, restart and loss
belongs to one fault; each wait is bounded, and what does not come in time is told, not raised; whatever happens, the
fleet is closed and what a fault took away is given back.
"""

import itertools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from elastic.errors import ElasticError
from elastic.fleet import Fleet
from elastic.following import Follower, Seen
from elastic.strikes import Strikes, Struck
from elastic.timetable import Planned

__all__ = ["Outcome", "Trial"]

logger = logging.getLogger(__name__)

_LOOK_S: Final = 0.05
_START_S: Final = 240.0
"""How long the whole world may take to its first step."""
_RECOVERY_S: Final = 300.0
_COMMIT_S: Final = 30.0
"""How long after a storage fault the next one waits for a commit: none may be due."""
_STALL_S: Final = 600.0
"""A run without a step for so long has not recovered."""
_LEAVE_S: Final = 30.0
"""How long writers and warm processes may take to end after the run."""


@dataclass(kw_only=True, slots=True)
class Outcome:
    """What happened."""

    struck: list[Struck] = field(default_factory=list)
    planned: int = 0
    codes: list[int] = field(default_factory=list)
    """Exit codes of the agents that no fault has ended."""
    problem: str | None = None
    """Why the run did not come to its end."""
    tail: str = ""
    """The end of what the agents printed, where there was a problem."""
    leftovers: list[str] = field(default_factory=list)


class Trial:
    """One run, its fleet and its faults."""

    def __init__(
        self, fleet: Fleet, folder: Path, *, say: Callable[[str], None] = logger.info
    ) -> None:
        """Start nothing yet.

        Args:
            fleet: The agents, none of them started.
            folder: The run's folder.
            say: Takes a line on what happens.
        """
        self._fleet, self._folder, self._say = fleet, folder, say
        self.follower = Follower(folder)
        self._strikes = Strikes(fleet, self.follower, folder, pause=self._pause)
        self._began = 0.0
        self._recovered_s = 0.0

    def run(self, planned: Sequence[Planned]) -> Outcome:
        """Start, strike, and wait for the end; the fleet is closed afterwards."""
        outcome = Outcome(planned=len(planned))
        try:
            for node in range(self._fleet.nodes):
                self._fleet.start(node)
            if planned:
                self._await_whole()
            self._began = time.monotonic()
            for one in planned:
                if not self._until(max(one.at_s, self._recovered_s + one.gap_s)):
                    break
                self._strike(one, outcome)
            self._await_end()
            outcome.leftovers = self._fleet.leftovers(limit_s=_LEAVE_S)
        except ElasticError as error:
            outcome.problem = str(error)
            outcome.tail = "\n".join(agent.tail() for agent in self._fleet.agents.values())
        finally:
            self._strikes.mend()
            self.follower.look()
            outcome.codes = [
                agent.process.returncode
                for agent in self._fleet.all
                if not (agent.was_hit or agent.is_running)
            ]
            self._fleet.close()
        self._attribute(outcome.struck)
        return outcome

    # ------------------------------------------------------------------------------------ waiting
    def _pause(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            time.sleep(min(left, _LOOK_S))
            self.follower.look()

    @property
    def _is_over(self) -> bool:
        return not self._fleet.running()

    def _until(self, at_s: float) -> bool:
        """Wait for a moment of the schedule; False where the run has ended before."""
        while time.monotonic() - self._began < at_s:
            if self._is_over:
                return False
            self._pause(_LOOK_S)
        return not self._is_over

    def _await_whole(self) -> None:
        """Wait for a step of the whole world."""
        began = time.monotonic()
        while not self._has_stepped_whole(after=0):
            if self._is_over:
                raise ElasticError("the agents ended before the first step of the whole world")
            if time.monotonic() - began > _START_S:
                raise ElasticError(f"no step of the whole world within {_START_S:g} s")
            self._pause(_LOOK_S)

    def _has_stepped_whole(self, *, after: int) -> bool:
        newest = self.follower.newest
        wanted = self._fleet.nodes * self._fleet.nproc
        return (
            newest is not None
            and newest.generation > after
            and newest.world_size == wanted
            and bool(newest.steps)
        )

    def _await_end(self) -> None:
        """Wait until all agents have ended, as long as steps are done."""
        moved, known = time.monotonic(), None
        while not self._is_over:
            newest = self.follower.newest
            now = None if newest is None else (newest.generation, newest.last_step)
            if now != known:
                moved, known = time.monotonic(), now
            if time.monotonic() - moved > _STALL_S:
                raise ElasticError(f"no step for {_STALL_S:g} s, the last was {known}")
            self._pause(_LOOK_S)

    # ------------------------------------------------------------------------------------ faults
    def _strike(self, planned: Planned, outcome: Outcome) -> None:
        claimed = len(self.follower.claims())
        counts = {agent.identity: agent.restarts() for agent in self._fleet.running()}
        struck = self._strikes.strike(planned, time.monotonic() - self._began)
        self._say(f"{struck.after_s:7.1f} s  {struck.kind} of {struck.victim}, step {struck.step}")
        struck.claimed = claimed
        outcome.struck.append(struck)
        self._await_recovery(struck)
        struck.restarts = max(
            (
                agent.restarts() - counts[agent.identity]
                for agent in self._fleet.running()
                if agent.identity in counts and not agent.was_hit
            ),
            default=0,
        )
        took = "not recovered" if struck.recovery_s is None else f"{struck.recovery_s:.2f} s"
        self._recovered_s = time.monotonic() - self._began
        self._say(f"{self._recovered_s:7.1f} s  first new step after {took}")

    def _await_recovery(self, struck: Struck) -> None:
        """Wait for the first new step, and for that of the whole world where nodes had gone.

        Raises:
            ElasticError: It does not come.
        """
        began = time.monotonic()
        while True:
            first, whole = self._new_steps(struck)
            struck.recovery_s = None if first is None else first - struck.time
            struck.whole_s = None if whole is None else whole - struck.time
            if whole is not None:
                break
            if self._is_over:
                struck.ended = True
                return
            if time.monotonic() - began > _RECOVERY_S:
                what = "whole again" if first is not None else "recovered from"
                told = f"fault {struck.number} ({struck.kind} of {struck.victim})"
                raise ElasticError(f"{told}: not {what} within {_RECOVERY_S:g} s")
            self._pause(_LOOK_S)
        if struck.kind == "storage":
            self._await_commit(struck)

    def _new_steps(self, struck: Struck) -> tuple[float | None, float | None]:
        """When the first new step was done, and the first one of the whole world."""
        wanted = self._fleet.nodes * self._fleet.nproc
        if struck.kind in {"stop", "storage"}:
            over = struck.time + struck.lasts_s
            ends = [at for seen in self._since(struck.generation) for _, at in seen.steps]
            first = next((at for at in ends if at > over), None)
            return first, first
        later = [seen for seen in self._since(struck.generation + 1) if seen.steps]
        first = min((seen.steps[0][1] for seen in later), default=None)
        whole = [seen.steps[0][1] for seen in later if seen.world_size == wanted]
        if struck.kind == "partition":
            # The others may have gone on and be whole again before the link is.
            whole = [at for at in whole if at > struck.time + struck.lasts_s]
        return first, min(whole, default=None)

    def _since(self, generation: int) -> list[Seen]:
        found = self.follower.generations
        return [found[number] for number in sorted(found) if number >= generation]

    def _await_commit(self, struck: Struck) -> None:
        """What was kept back while the store was away is to be there before the next fault."""
        began = time.monotonic()
        while time.monotonic() - began < _COMMIT_S and not self._is_over:
            committed = self.follower.committed()
            if committed and (struck.committed is None or committed[-1] > struck.committed):
                return
            self._pause(4 * _LOOK_S)

    def _attribute(self, struck: Sequence[Struck]) -> None:
        """Which generations, and which steps done twice, came of which fault."""
        if not struck:
            return
        causes = list(self.follower.claims().values())
        until = [*(one.claimed for one in struck[1:]), len(causes)]
        for one, last in zip(struck, until, strict=True):
            one.claims = causes[one.claimed : last]
        rows = self._since(0)
        ends = [*(one.generation for one in struck[1:]), float("inf")]
        for one, end in zip(struck, ends, strict=True):
            for before, after in itertools.pairwise(rows):
                if one.generation <= before.generation < end:
                    one.lost_steps += max(0, before.last_step - after.start_step)
