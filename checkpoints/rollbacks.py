"""Rollbacks: a run that went back to an older checkpoint, and what that left behind.

A rollback stands in the claim of the generation that went back, and every later claim carries it on, so
that the newest claim tells all of them. Pure: what readers leave out and what is not trained again are
functions of the rollbacks alone.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

from checkpoints.canonical import JSON, Fields
from checkpoints.names import LARGEST_GENERATION, CheckpointName

__all__ = ["Position", "Rollback", "in_a_row", "is_left_behind", "positions"]

Position = tuple[int, int]
"""(epoch, samples of it used before) of a step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollback:
    """One return to an older checkpoint."""

    generation: int
    """The generation whose claim it stands in: it is about what older ones committed."""
    to: CheckpointName
    skip: tuple[Position, ...] = ()
    """Where the steps began that are not to be trained again."""

    def to_json(self) -> dict[str, JSON]:
        """As it stands in a claim."""
        return {
            "generation": self.generation,
            "to": str(self.to),
            "skip": [list(position) for position in self.skip],
        }

    @classmethod
    def read(cls, fields: Fields) -> Self:
        """Read one out of a claim, or raise RecordError."""
        to = CheckpointName.find(fields.text("to"))
        if to is None:
            raise fields.wrong("to", "generation-step as in 000007-000000001200")
        skip: list[Position] = []
        for item in fields.items("skip"):
            match item:
                case [int(epoch), int(samples)] if epoch >= 0 and samples >= 0:
                    skip.append((epoch, samples))
                case _:
                    raise fields.wrong("skip", "a list of [epoch, samples]")
        generation = fields.whole("generation", 1, LARGEST_GENERATION)
        return cls(generation=generation, to=to, skip=tuple(skip))


def is_left_behind(name: CheckpointName, rollbacks: Iterable[Rollback]) -> bool:
    """Whether a checkpoint lies beyond what a later generation went back to."""
    return any(name.generation < one.generation and name > one.to for one in rollbacks)


def positions(rollbacks: Iterable[Rollback]) -> frozenset[Position]:
    """Where the steps began that are not to be trained again, of all rollbacks."""
    return frozenset(position for one in rollbacks for position in one.skip)


def in_a_row(rollbacks: Sequence[Rollback], to: CheckpointName) -> int:
    """How many rollbacks at the end went back to this same checkpoint: since then nothing was committed."""
    count = 0
    for one in reversed(rollbacks):
        if one.to != to:
            break
        count += 1
    return count
