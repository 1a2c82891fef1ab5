"""Every name under a run's URL.

Names sort in order, and what is newest follows from generation and step as numbers. Pure: no I/O.
"""

import re
import secrets
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, Self

from checkpoints.errors import RecordError

RUN: Final = "run.json"
SUMMARY: Final = "summary.json"
MANIFEST: Final = "manifest.json"
CHECKPOINTS: Final = "checkpoints"
GENERATIONS: Final = "generations"
LARGEST_GENERATION: Final = 10**9
LARGEST_STEP: Final = 10**15

_CHECKPOINT: Final = re.compile(r"(\d{6,10})-(\d{12,16})", re.ASCII)
_CLAIM: Final = re.compile(rf"{GENERATIONS}/(\d{{6,10}})\.json", re.ASCII)
_COMPONENT: Final = re.compile(r"[^/\x00-\x1f\x7f]{1,255}")


def new_token() -> str:
    """A random text that tells one writer's object from all others'."""
    return secrets.token_hex(16)


def utc_now() -> str:
    """The time for people to read; nothing is ever decided by it."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


@dataclass(frozen=True, order=True, slots=True)
class CheckpointName:
    """The name of a checkpoint: ordered by generation, then step, as numbers."""

    generation: int
    step: int

    def __post_init__(self) -> None:
        if type(self.generation) is not int or type(self.step) is not int:
            raise RecordError(
                f"checkpoint name: found generation {self.generation!r} and step {self.step!r}, expected whole numbers"
            )
        if not 1 <= self.generation <= LARGEST_GENERATION or not 0 <= self.step <= LARGEST_STEP:
            raise RecordError(
                f"checkpoint name: found generation {self.generation} and step {self.step}, "
                "expected a generation of at least 1 and a step of at least 0"
            )

    def __str__(self) -> str:
        return f"{self.generation:06d}-{self.step:012d}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `000007-000000001200`; a second spelling of the same numbers is refused."""
        match = _CHECKPOINT.fullmatch(text)
        name = cls(int(match[1]), int(match[2])) if match and int(match[1]) else None
        if name is None or str(name) != text:
            raise RecordError(
                f"checkpoint name: found {text[:60]!r}, expected generation-step as in "
                "000007-000000001200"
            )
        return name

    @classmethod
    def find(cls, text: str) -> Self | None:
        """The same, with None for what is no name: other things may lie in the folder."""
        try:
            return cls.parse(text)
        except RecordError:
            return None

    @property
    def folder(self) -> str:
        """The folder that holds the checkpoint's files."""
        return f"{CHECKPOINTS}/{self}"

    def file(self, name: str) -> str:
        """The name of one of its files under the run's URL."""
        return f"{CHECKPOINTS}/{self}/{name}"

    @property
    def manifest(self) -> str:
        """The name of its manifest under the run's URL."""
        return self.file(MANIFEST)


def claim_name(generation: int) -> str:
    """Where a generation is claimed."""
    return f"{GENERATIONS}/{generation:06d}.json"


def started_name(generation: int) -> str:
    """Where a generation says from which state it began."""
    return f"{GENERATIONS}/{generation:06d}.started.json"


def generation_of(name: str) -> int | None:
    """The generation that a claim's name stands for; None where it is no claim's name."""
    match = _CLAIM.fullmatch(name)
    return int(match[1]) if match else None


def journal_prefix(generation: int) -> str:
    """What the names of a generation's journal begin with."""
    return f"journal/{generation:06d}"


def audit_prefix(generation: int) -> str:
    """What the names of a generation's audit begin with."""
    return f"audit/{generation:06d}"


def meeting_name(key: str) -> str:
    """Where ranks leave an address for each other."""
    return f"meeting/{key}.json"


def check_name(name: str) -> str:
    """The name itself, if it stays under the URL: no empty, dotted or absolute component."""
    for component in name.split("/"):
        if not _COMPONENT.fullmatch(component) or component in {".", ".."}:
            raise RecordError(
                f"object name: found {name[:80]!r}, expected a relative path without '.', '..' "
                "and empty components"
            )
    return name
