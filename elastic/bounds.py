"""How long each phase of a worker may go without a sign of life before it counts as hung.

What comes again and again (a step, a batch of an evaluation) is judged by what it has taken so far, or by
`hang_after`; what is rare and may be long (a start, a restore, the first step, a save, a hook) by `hang_after_long`.
Pure: a Mapping from phases to seconds, 0 where a phase may take as long as it likes.
"""

from collections.abc import Iterator, Mapping
from typing import Final

__all__ = ["LONG_S", "OPEN", "Bounds"]

LONG_S: Final = 1800.0
"""The default of `hang_after_long`."""
OPEN: Final = frozenset({"prepare"})
"""A download takes as long as it takes."""
_REPEATED: Final = frozenset({"load", "step", "evaluate"})
_LEAST_S: Final = 300.0
"""A measured bound is not shorter: a slow disk or network comes back, and a restart would not help it."""
_TIMES: Final = 10.0
_OF_TIMEOUT: Final = 0.8
"""The others wait for `timeout`: who keeps them waiting is to be named before they give up."""


class Bounds(Mapping[str, float]):
    """The bounds of one worker; those of repeated phases are learnt where `hang_after` is not given."""

    def __init__(
        self, hang_after: float | None, long_s: float, *, timeout_s: float, alone: bool
    ) -> None:
        """Know the settings.

        Args:
            hang_after: Seconds, 0 for never, None for what the measured times say.
            long_s: The bound of what is rare.
            timeout_s: How long the others wait in a collective of a step.
            alone: Whether there are no others.
        """
        self._given = hang_after
        self._long_s = 0.0 if hang_after == 0 else max(long_s, hang_after or 0.0)
        self._timeout_s = None if alone else timeout_s
        self._found: dict[str, float] = {}
        self._longest: dict[str, float] = {}

    def __getitem__(self, phase: str) -> float:
        """The bound of a phase, in seconds; 0 where there is none."""
        if phase in self._found:
            return self._found[phase]
        if phase in OPEN or not self._long_s:
            return 0.0
        first = self._long_s
        if phase == "first step" and self._timeout_s is not None:
            # All ranks come to it at one time, so the others wait for it from its beginning.
            first = min(first, _OF_TIMEOUT * self._timeout_s)
        if phase == "meeting" and self._timeout_s is not None:
            first += self._timeout_s  # which ends it by itself
        self._found[phase] = first if phase not in _REPEATED or not self._given else self._given
        return self._found[phase]

    def __iter__(self) -> Iterator[str]:
        """The phases that have come so far."""
        return iter(self._found)

    def __len__(self) -> int:
        """How many phases have come so far."""
        return len(self._found)

    def took(self, phase: str, seconds: float) -> None:
        """Learn how long a repeated phase took."""
        if (
            self._given is not None
            or phase not in _REPEATED
            or seconds <= self._longest.get(phase, 0.0)
        ):
            return
        self._longest[phase] = seconds
        bound = max(_LEAST_S, _TIMES * seconds)
        if self._timeout_s is not None:
            bound = min(bound, seconds + max(_OF_TIMEOUT * self._timeout_s, 1.0))
        self._found[phase] = bound
