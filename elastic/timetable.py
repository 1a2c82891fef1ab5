"""When which fault strikes: a schedule drawn from a seed, the same for the same seed.

Pure. A moment falls somewhere inside each interval, so that no fault meets the run in step with it; of several kinds each
comes once before any comes again. Whom a fault meets is a fraction, applied to whoever is there when it strikes.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, get_args

from elastic.errors import ConfigError

__all__ = ["KINDS", "Kind", "Planned", "plan", "read_kinds"]

Kind = Literal["kill", "stop", "agent", "preempt", "storage", "partition"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)

_EARLIEST: Final = 0.2
_LATEST: Final = 0.9
"""Of an interval: where its fault may fall."""
_GAP: Final = (0.5, 2.5)
_LASTS: Final[dict[Kind, tuple[float, float]]] = {
    "kill": (0.0, 0.0),
    "stop": (1.0, 4.0),
    "agent": (0.2, 2.0),
    "preempt": (0.2, 2.0),
    "storage": (2.0, 6.0),
    "partition": (5.0, 9.0),
}
"""How many seconds a fault lasts: the stop, the time without store or link, or until the agent is started again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """One fault that is to come."""

    number: int
    kind: Kind
    at_s: float
    """Seconds after the first step of the whole world."""
    lasts_s: float
    gap_s: float
    """At least so long after the fault before it was recovered from: else it would fall into a step's end, as that does."""
    whom: float
    """From 0 up to 1: which of those that it may meet."""


def read_kinds(text: str) -> tuple[Kind, ...]:
    """Read `kill,stop,…`; a kind that is named twice comes twice as often.

    Raises:
        ConfigError: A kind is unknown, or none is named.
    """
    found: list[Kind] = []
    for word in filter(None, (part.strip() for part in text.split(","))):
        kind = next((kind for kind in KINDS if kind == word), None)
        if kind is None:
            raise ConfigError(f"--faults: found {word!r}, expected some of {', '.join(KINDS)}")
        found.append(kind)
    if not found:
        raise ConfigError(f"--faults: found none, expected some of {', '.join(KINDS)}")
    return tuple(found)


def plan(kinds: Sequence[Kind], *, every_s: float, for_s: float, seed: int) -> list[Planned]:
    """Draw the schedule: one fault in each interval of `every_s`, for `for_s`.

    Raises:
        ConfigError: Not a single fault fits.
    """
    count = int(for_s / every_s + 1e-9)
    if count < 1:
        raise ConfigError(f"--for: found {for_s:g} s, expected at least --every ({every_s:g} s)")
    chance = random.Random(seed)  # noqa: S311 - a schedule, no secret
    order: list[Kind] = []
    while len(order) < count:
        order += chance.sample(list(kinds), len(kinds))
    planned = []
    for number, kind in enumerate(order[:count]):
        at_s = every_s * (number + chance.uniform(_EARLIEST, _LATEST))
        lasts_s = chance.uniform(*_LASTS[kind])
        planned.append(
            Planned(
                number=number + 1,
                kind=kind,
                at_s=round(at_s, 3),
                lasts_s=round(lasts_s, 3),
                gap_s=round(chance.uniform(*_GAP), 3),
                whom=chance.random(),
            )
        )
    return planned
