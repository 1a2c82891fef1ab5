"""How long until the next save: as given, or from what saves cost and how often things fail.

Promises: where an interval is `auto` the time between two saves is the one that loses least, after Young
and Daly, but never costs more than its budget; a change that matters is told. By the primary's monotonic
clock alone. The rule itself is `checkpoints.policy`.
"""

import logging
import time
from collections.abc import Callable
from typing import Final

from checkpoints.options import Interval
from checkpoints.policy import best_interval, failure_rate

__all__ = ["Pace"]

logger = logging.getLogger(__name__)

_UNKNOWN_S: Final = 60.0
"""Between two saves while nobody knows yet what one costs."""
_WEIGHT: Final = 0.3
"""Of the newest cost in the running mean."""
_TOLD: Final = 2.0
"""A new interval is told where it differs from the last told one by this factor."""


class Pace:
    """When one kind of save is due by the clock. Primary only."""

    def __init__(
        self,
        what: str,
        interval: Interval,
        *,
        budget: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin to count.

        Args:
            what: The key of the interval, for messages.
            interval: As it was given; steps and epochs are not counted here.
            budget: The share of time that these saves may cost where it is auto.
            clock: A monotonic clock.
        """
        self._what, self._interval, self._budget, self._clock = what, interval, budget, clock
        self._cost_s: float | None = None
        self._shortest_s = 0.0
        self._failures, self._observed_s = 0, 0.0
        self._start = self._began = clock()
        self._told_s: float | None = None
        self._is_first = True

    def seen(self, failures: int, observed_s: float) -> None:
        """Take in how often the run has failed so far, and in what time."""
        self._failures, self._observed_s = failures, observed_s

    def restart(self) -> None:
        """A save begins: count from now on."""
        self._began = self._clock()
        self._is_first = False

    def cost(self, cost_s: float, *, took_s: float = 0.0) -> str | None:
        """Take in what a save has cost; returns what a person should know, if anything."""
        old = self._cost_s
        self._cost_s = cost_s if old is None else old + _WEIGHT * (cost_s - old)
        self._shortest_s = took_s
        if not self._interval.is_auto:
            return None
        now_s = self.seconds
        told = self._told_s
        if told is not None and told / _TOLD < now_s < told * _TOLD:
            return None
        self._told_s = now_s
        return (
            f"{self._what}: every {_shown(now_s)} now: a save costs {_shown(self._cost_s)}, "
            f"{self._failures} failure{'s' * (self._failures != 1)} seen, and at most {self._budget:.2%} of the time may go into it"
        )

    @property
    def seconds(self) -> float:
        """The time between two saves where it is auto; at once for the first, which tells the cost."""
        if self._cost_s is None:
            return 0.0 if self._is_first else _UNKNOWN_S
        observed_s = self._observed_s + self._clock() - self._start
        rate = failure_rate(self._failures, observed_s)
        return best_interval(self._cost_s, rate, budget=self._budget, shortest_s=self._shortest_s)

    @property
    def is_due(self) -> bool:
        """Whether the time is up."""
        if self._interval.kind == "seconds":
            return self._clock() - self._began >= self._interval.count
        return self._interval.is_auto and self._clock() - self._began >= self.seconds


def _shown(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 120 else f"{seconds / 60:.3g} min"
