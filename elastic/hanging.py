"""Which workers of a node hang: pure, from what they said last and for how long they have said nothing since.

A worker hangs where its phase has outlasted its bound. One that waits for others is not judged by that: who keeps it
waiting is. Where all of a world is on this node and everybody waits, nobody will ever come, and those who are behind
hang. Time is what the watcher itself has seen pass, so that a machine that was suspended or starved accuses nobody.
"""

from elastic.beats import Pulse

__all__ = ["Seen", "find_hung", "is_behind", "is_overdue"]

_PAST_WAIT_S = 60.0
"""A wait that has outlasted its own time-out by so much does not end by itself."""


class Seen:
    """A worker as its watcher has seen it."""

    def __init__(self, pulse: Pulse) -> None:
        """Begin with its first pulse."""
        self.pulse = pulse
        self.idle_s = 0.0
        """How long it has said nothing."""
        self.state = ""
        """As `stacks.state_of` tells it; looked at once it is overdue."""
        self.excused = False
        """Whether its stack has shown a collective, so that it may only wait."""

    def look(self, pulse: Pulse, passed_s: float) -> None:
        """Take in what its slot says now; so much time has passed since the last look."""
        if pulse.number != self.pulse.number:
            self.idle_s, self.excused, self.state = 0.0, False, ""
        else:
            self.idle_s += passed_s
        self.pulse = pulse

    @property
    def waits(self) -> bool:
        """Whether it only waits for others; one that is stopped waits for nobody."""
        return bool(self.pulse.waits or self.excused) and self.state != "T"

    @property
    def is_judged(self) -> bool:
        """Whether its phase has a bound, and nobody debugs it."""
        return self.pulse.bound_s > 0 and self.state != "traced"


def is_overdue(seen: Seen) -> bool:
    """Whether a worker has said nothing for longer than its phase may take, waiting or not."""
    return seen.pulse.bound_s > 0 and seen.idle_s > seen.pulse.bound_s


def find_hung(workers: list[Seen]) -> list[Seen]:
    """The workers that hang, the one to be named first in front; none where all is well."""
    judged = [seen for seen in workers if seen.is_judged]
    stuck = [seen for seen in judged if is_overdue(seen) and not seen.waits]
    if stuck:
        return sorted(stuck, key=lambda seen: -seen.idle_s)
    everybody_waits = len(judged) == len(workers) and all(seen.waits for seen in judged)
    if everybody_waits and judged and all(seen.pulse.world_is_here for seen in judged):
        if all(is_overdue(seen) for seen in judged):
            behind = [seen for seen in judged if is_behind(seen, judged)]
            return sorted(behind or judged, key=lambda seen: -seen.idle_s)
        return []
    # On several nodes the one that does not come may be elsewhere, and its own watcher sees to it.
    return [
        seen
        for seen in judged
        if seen.waits and seen.idle_s > max(seen.pulse.wait_s, seen.pulse.bound_s) + _PAST_WAIT_S
    ]


def is_behind(one: Seen, workers: list[Seen]) -> bool:
    """Whether a worker is at an earlier step than another."""
    return any(one.pulse.step < other.pulse.step for other in workers)
