"""Follows a run at a local URL while it goes: which generations were claimed and began, and when each did its steps.

Reads what is new of the journal, and the records of generations; a file that cannot be read at the moment (the store is
away, a line is torn) is read the next time. Changes nothing.
"""

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from checkpoints.layout import CHECKPOINTS, GENERATIONS, MANIFEST, RUN, CheckpointName

__all__ = ["Follower", "Seen"]

_JOURNAL: Final = "journal"


@dataclass(kw_only=True, slots=True)
class Seen:
    """What was seen of one started generation."""

    generation: int
    world_size: int
    cause: str
    start_step: int
    parent: str | None
    source: str
    last_step: int
    """The last step that it is known to have done."""
    steps: list[tuple[int, float]] = field(default_factory=list)
    """Each step with the time of its end (seconds since 1970)."""


class Follower:
    """One reader of a run's records."""

    def __init__(self, folder: Path) -> None:
        """Nothing is read yet; the folder may come later."""
        self._folder = folder
        self._offsets: dict[Path, int] = {}
        self._rests: dict[Path, bytes] = {}
        self.generations: dict[int, Seen] = {}
        """Of the generations that began, in order."""

    @property
    def newest(self) -> Seen | None:
        """The newest generation that began."""
        return self.generations[max(self.generations)] if self.generations else None

    def look(self) -> None:
        """Take in what has come since the last look."""
        with contextlib.suppress(OSError):
            for path in sorted((self._folder / _JOURNAL).iterdir()):
                if path.suffix == ".jsonl" and ".rank" not in path.name:
                    self._read(path)

    def _read(self, path: Path) -> None:
        begin = self._offsets.get(path, 0)
        if path.stat().st_size == begin:
            return
        with path.open("rb") as file:
            file.seek(begin)
            data = file.read()
        self._offsets[path] = begin + len(data)
        *lines, rest = (self._rests.get(path, b"") + data).split(b"\n")
        self._rests[path] = rest
        for line in lines:
            with contextlib.suppress(ValueError):
                event = json.loads(line)
                if isinstance(event, dict):
                    self._take(event)

    def _take(self, event: Mapping[str, Any]) -> None:
        number = int(event.get("generation", 0))
        if event.get("event") == "start":
            self.generations[number] = Seen(
                generation=number,
                world_size=int(event["world_size"]),
                cause=str(event["cause"]),
                start_step=int(event["step"]),
                parent=event["parent"],
                source=str(event["source"]),
                last_step=int(event["step"]),
            )
        elif event.get("event") == "step" and number in self.generations:
            seen = self.generations[number]
            seen.last_step = int(event["step"])
            seen.steps.append((seen.last_step, float(event["time"])))

    # ------------------------------------------------------------------------------------ records
    def claims(self) -> dict[int, str]:
        """The cause of every claimed generation, started or not."""
        found = {}
        for path in self._children(GENERATIONS):
            if path.suffix == ".json" and path.stem.isdigit():
                found[int(path.stem)] = str(_json(path).get("cause", ""))
        return dict(sorted(found.items()))

    def committed(self) -> list[CheckpointName]:
        """The committed checkpoints, oldest first."""
        found = []
        for path in self._children(CHECKPOINTS):
            name = CheckpointName.find(path.name)
            manifest = path / MANIFEST
            if name is not None and manifest.exists() and not _json(manifest).get("void"):
                found.append(name)
        return sorted(found)

    def run_id(self) -> str:
        """The run's id; empty before there is one."""
        return str(_json(self._folder / RUN).get("run_id", ""))

    def _children(self, name: str) -> list[Path]:
        with contextlib.suppress(OSError):
            return sorted((self._folder / name).iterdir())
        return []


def _json(path: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(path.read_bytes())
        if isinstance(found, dict):
            return found
    return {}
