"""Which checkpoints are at a URL: listed, told about, found by name, step, or as the best.

Promises: a checkpoint is there once its manifest is, and never before; newest is decided by generation
and step as numbers. Listings are made anew each time; only manifests, which never change, are known
from before. Only reads.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from checkpoints import reader
from checkpoints.canonical import LIMIT_BYTES, parse
from checkpoints.errors import DamagedError, NoCheckpointError, ObjectMissingError
from checkpoints.generations import newest_generation, read_rollbacks
from checkpoints.layout import CHECKPOINTS, MANIFEST, SUMMARY, CheckpointName, Manifest, Rollback
from checkpoints.policy import newest, newest_first, referred_files
from checkpoints.rollbacks import is_left_behind

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from checkpoints.canonical import JSON
    from checkpoints.store import Store

logger = logging.getLogger(__name__)

_WHICH: Final = re.compile(r"best|latest|\d{1,15}|\d{6,10}-\d{12,16}", re.ASCII)


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointInfo:
    """What a manifest tells of a checkpoint."""

    name: CheckpointName
    parent: CheckpointName | None
    run_id: str
    info: Mapping[str, JSON]
    size_bytes: int
    created_at: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Inventory:
    """What lies in the folder of the checkpoints."""

    committed: dict[CheckpointName, Manifest | None] = field(default_factory=dict)
    """None where the manifest is damaged."""
    files: dict[CheckpointName, list[str]] = field(default_factory=dict)
    """All files of each folder, committed or not."""
    void: set[CheckpointName] = field(default_factory=set)
    """Names that were swept, or deleted while others needed a file of theirs."""
    left_behind: set[CheckpointName] = field(default_factory=set)
    """Committed, but beyond what a later generation went back to."""

    @property
    def living(self) -> list[CheckpointName]:
        """The committed checkpoints that count, newest first; damaged ones included."""
        return newest_first(self.committed.keys() - self.left_behind)

    @property
    def unfinished(self) -> list[CheckpointName]:
        """What was begun and never committed; not what stays because others refer to it."""
        needed = self.needed()
        return sorted(
            name
            for name in self.files.keys() - self.committed.keys() - self.void
            if not self.files[name]
            or any(name.file(file) not in needed for file in self.files[name])
        )

    @property
    def bare(self) -> list[CheckpointName]:
        """Deleted checkpoints whose names are free, while others need all that is left of them."""
        free = self.files.keys() - self.committed.keys() - self.void
        return sorted(free - set(self.unfinished))

    def needed(self, without: Collection[CheckpointName] = ()) -> set[str]:
        """The names, under the URL, of all files that a manifest refers to."""
        return referred_files(m for name, m in self.committed.items() if m and name not in without)

    def unneeded(self, name: CheckpointName, without: Collection[CheckpointName] = ()) -> list[str]:
        """The files in one folder that no manifest (but those left out) refers to."""
        needed = self.needed(without)
        files = self.files.get(name, [])
        return [file for file in files if file != MANIFEST and name.file(file) not in needed]


class Catalog:
    """The checkpoints at one URL, for any number of readers."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._manifests: dict[CheckpointName, Manifest] = {}
        self._void: set[CheckpointName] = set()
        self._told: set[CheckpointName] = set()
        self._rollbacks: tuple[int, tuple[Rollback, ...]] = (0, ())

    def names(self) -> list[CheckpointName]:
        """The committed checkpoints, newest first: listed anew each time, damaged ones included.

        What a rollback left behind is no part of the run any more.
        """
        found = self.inventory()
        for name in found.unfinished:
            if name not in self._told:
                self._told.add(name)
                logger.info("checkpoint %s: was never committed; it is left out", name)
        return found.living

    def latest(self, exclude: Collection[CheckpointName] = ()) -> CheckpointName | None:
        """The newest committed checkpoint that is not excluded."""
        return newest(self.names(), exclude)

    def manifest(self, name: CheckpointName) -> Manifest:
        """The verified manifest of a checkpoint.

        Raises:
            NoCheckpointError: There is no such checkpoint.
            DamagedError: The manifest does not verify.
        """
        if name not in self._manifests:
            self._manifests[name] = reader.read_manifest(self.store, name)
        return self._manifests[name]

    def info(self, name: CheckpointName) -> CheckpointInfo:
        """What is told of a checkpoint without reading its state.

        Raises:
            NoCheckpointError: There is no such checkpoint.
            DamagedError: The manifest does not verify.
        """
        return told(self.manifest(name))

    def resolve(self, which: str) -> CheckpointName:
        """The checkpoint meant by `latest`, `best`, a step (its newest generation) or a full name.

        Raises:
            NoCheckpointError: There is no such checkpoint.
        """
        listed = self.inventory()
        names = listed.living
        found: CheckpointName | None = None
        if which == "latest":
            found = newest(names)
        elif which == "best":
            found = self._best(names)
        elif which.isdecimal():
            found = next((name for name in names if name.step == int(which)), None)
        else:
            found, names = CheckpointName.find(which), newest_first(listed.committed)
        if found is None or found not in names:
            steps = ", ".join(str(name.step) for name in names[:5]) or "none"
            raise NoCheckpointError(
                f"{self.store.display_url}: no checkpoint {which!r}; newest steps: {steps}"
            )
        return found

    def inventory(self) -> Inventory:
        """List what is there; manifests that are not known yet are read."""
        found = Inventory()
        for child in self.store.children(CHECKPOINTS):
            # A writer killed in its first file leaves a folder in which no listing shows a file.
            if (empty := CheckpointName.find(child)) is not None:
                found.files[empty] = []
        for path in self.store.list(f"{CHECKPOINTS}/"):
            _, _, rest = path.partition("/")
            folder, _, file = rest.partition("/")
            name = CheckpointName.find(folder)
            if name is not None and file:
                found.files.setdefault(name, []).append(file)
        for name, files in found.files.items():
            if MANIFEST not in files:
                self._manifests.pop(name, None)
            elif name in self._void:
                found.void.add(name)
            else:
                self._look(name, found)
        rollbacks = self.rollbacks()
        found.left_behind.update(n for n in found.committed if is_left_behind(n, rollbacks))
        return found

    def rollbacks(self) -> tuple[Rollback, ...]:
        """The rollbacks of the run; read again where a generation has come."""
        newest_claim = newest_generation(self.store)
        if newest_claim != self._rollbacks[0]:
            self._rollbacks = (newest_claim, read_rollbacks(self.store))
        return self._rollbacks[1]

    def _look(self, name: CheckpointName, found: Inventory) -> None:
        try:
            found.committed[name] = self.manifest(name)
        except DamagedError:
            found.committed[name] = None
        except NoCheckpointError:  # void, or deleted since it was listed
            if self.store.exists(name.manifest):
                self._void.add(name)
                found.void.add(name)

    def add(self, manifest: Manifest) -> None:
        """Know a manifest that was just written."""
        self._manifests[manifest.name] = manifest

    def add_void(self, name: CheckpointName) -> None:
        """Know that a name is void."""
        self._void.add(name)

    def forget(self, name: CheckpointName) -> None:
        """Read the manifest again when it is next asked for."""
        self._manifests.pop(name, None)

    def _best(self, names: Collection[CheckpointName]) -> CheckpointName | None:
        """What the newest checkpoint, or else the summary, calls the best."""
        for name in names:
            try:
                found = _best_name(self.info(name).info.get("best"))
            except DamagedError:
                continue
            if found is not None:
                return found
            break
        try:
            return _best_name(
                parse(self.store.get(SUMMARY, limit_bytes=LIMIT_BYTES), SUMMARY).get("best")
            )
        except ObjectMissingError:
            return None


def split_address(address: str) -> tuple[str, str | None]:
    """Part `URL@best`, `URL@latest`, `URL@1200` into the URL and which checkpoint is meant."""
    url, mark, which = address.rpartition("@")
    if mark and url and _WHICH.fullmatch(which):
        return url, which
    return address, None


def told(manifest: Manifest) -> CheckpointInfo:
    """What a manifest tells."""
    return CheckpointInfo(
        name=manifest.name,
        parent=manifest.parent,
        run_id=manifest.run_id,
        info=manifest.info,
        size_bytes=manifest.size_bytes,
        created_at=manifest.created_at,
    )


def _best_name(best: JSON) -> CheckpointName | None:
    name = best.get("checkpoint") if isinstance(best, dict) else best
    return CheckpointName.find(name) if isinstance(name, str) else None
