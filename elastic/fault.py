"""Why one worker ended: what is told of it to the next workers, to the journal and to people.

Pure; how an end is known is the business of `elastic.monitor`, which writes and reads it.
"""

import dataclasses
from dataclasses import dataclass
from typing import Literal

__all__ = ["Fault", "Kind"]

Kind = Literal[
    "killed", "exception", "collective", "preempted", "ended", "exited", "vanished", "hung"
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """Why one worker ended, told by itself or read from what it left."""

    rank: int
    local_rank: int
    host: str
    step: int
    """The last step that it had begun, 0 before the first."""
    phase: str
    kind: Kind
    signal: str | None = None
    """The signal's name, such as SIGKILL, where one ended it."""
    type: str | None = None
    """The exception's class."""
    message: str = ""
    where: str | None = None
    """file:line, the innermost of the user's code if there is one."""
    signature: str = ""
    """Equal for the same exception at the same place, whatever the numbers in its message."""
    time: float = 0.0
    """When it ended, or when it was last heard of (seconds since 1970)."""

    @property
    def is_secondary(self) -> bool:
        """Tell whether this is the echo of another worker's fault, or no fault at all."""
        return self.kind in ("collective", "preempted", "ended")

    def __str__(self) -> str:
        """Tell it in half a line, as the cause of a generation."""
        at = f"rank {self.rank}" + (
            f", step {self.step}" if self.step and self.kind == "exception" else ""
        )
        if self.kind == "exception":
            at += f", {self.where}" if self.where else ""
            return f"worker raised {self.type}: {_first_line(self.message)} ({at})"
        if self.kind == "killed":
            why = f": {self.message}" if self.message else ""
            return f"worker killed ({self.signal}, {at}){why}"
        if self.kind == "exited":
            return f"worker ended with {self.message} and without an exception ({at})"
        if self.kind == "hung":
            where = f", {self.where}" if self.where else ""
            return f"worker hung ({at}, step {self.step}, {self.phase}{where}): {_first_line(self.message)}"
        if self.type == "KeyboardInterrupt":
            return f"worker interrupted (SIGINT, {at})"
        told = {
            "collective": "lost a peer",
            "preempted": "preempted",
            "ended": "ended by its agent",
        }
        return f"worker {told.get(self.kind, 'vanished')} ({at})"

    def to_json(self) -> dict[str, object]:
        """Return the fault as JSON fields, for hellos, claims and the journal."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, found: object) -> "Fault":
        """Read what to_json gave.

        Raises:
            ValueError: Raised when it is something else.
        """
        names = {field.name for field in dataclasses.fields(cls)}
        if not isinstance(found, dict) or not set(found) <= names:
            raise ValueError(
                f"fault: found {found!r:.200}, expected an object with the keys {sorted(names)}"
            )
        try:
            return cls(**found)
        except TypeError as error:
            raise ValueError(f"fault: found {found!r:.200} ({error})") from error


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0][:200]
