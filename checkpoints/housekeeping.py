"""Deleting by hand: `prune` old checkpoints, `sweep` what killed writers left.

Promises: the newest checkpoint that verifies, the best, and the one that the newest generation began from
are never pruned; one that stays has been read back before any goes. Nothing is deleted that a checkpoint
refers to. Beside a run that may be at work both refuse, unless they are told to go on.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from checkpoints import segments
from checkpoints.errors import (
    CheckpointError,
    DamagedError,
    NoCheckpointError,
    ObjectMissingError,
    OptionError,
    RecordError,
)
from checkpoints.generations import newest_generation, read_started
from checkpoints.layout import GENERATIONS, CheckpointName
from checkpoints.living import rests
from checkpoints.policy import newest_first, retained
from checkpoints.question import problems_of
from checkpoints.retention import Retention
from checkpoints.terminal import Progress, size_text

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from checkpoints.catalog import Catalog, Inventory
    from checkpoints.question import Question
    from checkpoints.store import Store

logger = logging.getLogger(__name__)

_FOLDERS = ("", GENERATIONS, "journal", "audit", "meeting")
"""Where a killed process may have left temp files, beside the checkpoints' own folders."""


# -------------------------------------------------------------------------------------------- prune
def prune(question: Question) -> int:
    """Delete all checkpoints but the newest, every so-many-th, the best and what is needed."""
    arguments = question.arguments
    assert arguments is not None
    question.whole_run("prune")
    for key in ("keep", "keep_every"):
        value = getattr(arguments, key)
        if value is not None and value < 1:
            raise OptionError(f"--{key.replace('_', '-')}: found {value}, expected at least 1")
    catalog = question.catalog
    found = catalog.inventory()
    question.must_exist(found)
    if not arguments.dry_run:
        rests(catalog.store, "prune", force=arguments.force)
    # What a rollback left behind no reader takes: it counts for nothing, and the next commit clears it away.
    good = {name for name, manifest in found.committed.items() if manifest} - found.left_behind
    protected = _protected(question, good)
    verified, damaged = _verify_one(question, found, good)
    good -= set(damaged)
    if verified is None:
        going: list[CheckpointName] = []
    else:
        stay = retained(
            good, keep=arguments.keep, keep_every=arguments.keep_every, protected=protected
        )
        going = sorted(good - stay - {verified})
        ordered = newest_first(good)
        if len(ordered) >= arguments.keep:
            floor = ordered[arguments.keep - 1]
            ruins = found.committed.keys() - good - protected - found.left_behind
            going += sorted(name for name in ruins if name < floor)
    sizes = _freed(found, going)
    if going and not arguments.dry_run:
        retention = Retention(catalog)
        retention.delete(going, found, look_again=True)
        retention.clear(catalog.inventory())
    _tell_pruned(question, found, going, sizes, damaged, verified)
    return 0


def _protected(question: Question, good: Collection[CheckpointName]) -> set[CheckpointName]:
    """The best one, and the one that the newest generation began from."""
    protected: set[CheckpointName] = set()
    try:
        protected.add(question.catalog.resolve("best"))
    except NoCheckpointError:
        pass  # there is none, or it is gone
    except (RecordError, DamagedError) as error:
        logger.warning("which checkpoint is the best is not known, so none is deleted: %s", error)
        protected.update(good)
    store = question.catalog.store
    newest = newest_generation(store)
    for record in read_started(store):
        if record.generation == newest and record.parent is not None:
            protected.add(CheckpointName.parse(record.parent))
    return protected


def _verify_one(
    question: Question, found: Inventory, good: set[CheckpointName]
) -> tuple[CheckpointName | None, list[CheckpointName]]:
    """The newest checkpoint that was read back whole, and those before it that were not."""
    damaged: list[CheckpointName] = []
    for name in newest_first(good):
        manifest = found.committed[name]
        assert manifest is not None
        with Progress(f"read back {name}", manifest.size_bytes) as progress:
            if not problems_of(question.catalog, manifest, progress.add):
                return name, damaged
        damaged.append(name)
    return None, damaged


def _freed(found: Inventory, going: Iterable[CheckpointName]) -> dict[str, int]:
    """The files that nothing needs once these are gone, with their sizes as far as they are known."""
    gone = set(going)
    needed = found.needed(without=gone)
    sizes: dict[str, int] = {}
    for name, manifest in found.committed.items():
        if manifest is not None and name in gone:
            for entry in manifest.files:
                path = (entry.owner or name).file(entry.name)
                if path not in needed:
                    sizes[path] = entry.size_bytes
    return sizes


def _tell_pruned(
    question: Question,
    found: Inventory,
    going: list[CheckpointName],
    sizes: dict[str, int],
    damaged: list[CheckpointName],
    verified: CheckpointName | None,
) -> None:
    assert question.arguments is not None
    dry_run = question.arguments.dry_run
    stay = newest_first(found.committed.keys() - set(going))
    answer = {
        "url": question.url,
        "dry_run": dry_run,
        "deleted": [str(name) for name in sorted(going)],
        "kept": [str(name) for name in stay],
        "damaged": [str(name) for name in damaged],
        "verified": None if verified is None else str(verified),
        "freed_bytes": sum(sizes.values()),
    }
    word = "would delete" if dry_run else "deleted"
    lines = [f"{name}: damaged, does not count" for name in damaged]
    lines += [f"{word} {name}" for name in sorted(going)]
    if verified is None:
        lines.append(f"{question.url}: no checkpoint verifies, so nothing is deleted")
    else:
        freed = size_text(sum(sizes.values()))
        kept = ", ".join(str(name) for name in stay)
        lines.append(f"{word} {len(going)} ({freed}); {verified} was read back; kept: {kept}")
    question.answer(answer, lines)


# -------------------------------------------------------------------------------------------- sweep
def sweep(question: Question) -> int:
    """Take away what was never committed, unfinished uploads, temp files, and memory of dead runs."""
    arguments = question.arguments
    assert arguments is not None
    question.whole_run("sweep")
    catalog = question.catalog
    found = catalog.inventory()
    question.must_exist(found)
    unfinished = found.unfinished
    newest = max(found.committed, default=None)
    begun = [name for name in unfinished if newest is None or name > newest]
    is_at_rest = arguments.dry_run or rests(
        catalog.store, "sweep", force=arguments.force, begun=begun
    )
    void_files = [name.file(file) for name in found.void for file in found.unneeded(name)]
    files = [name.file(file) for name in unfinished for file in found.unneeded(name)]
    sizes = _sizes(catalog.store, [*files, *void_files])
    memory = segments.leftovers()
    swept = unfinished
    if not arguments.dry_run:
        retention = Retention(catalog)
        swept = retention.sweep(unfinished, found)
        retention.take_names(found.bare)
        retention.clear(found)
        if is_at_rest:  # else a temp file may be somebody's work
            folders = [name.folder for name in found.committed]
            # Without a claim an upload that no listing shows yet may be somebody's first file.
            folders += _FOLDERS if newest_generation(catalog.store) else ()
            for folder in folders:
                catalog.store.delete_temps(folder)
        memory = segments.sweep()
    answer = {
        "url": question.url,
        "dry_run": arguments.dry_run,
        "swept": [str(name) for name in swept],
        "committed_meanwhile": [str(name) for name in unfinished if name not in swept],
        "files": sorted(sizes),
        "freed_bytes": sum(sizes.values()),
        "memory": [str(path) for path in memory],
    }
    word = "would sweep" if arguments.dry_run else "swept"
    lines = [f"{word} {name}: it was never committed" for name in swept]
    lines += [f"{name}: {_why_it_stays(catalog, name)}" for name in unfinished if name not in swept]
    lines += [f"{word} {path}: its run is dead" for path in memory]
    lines.append(f"{word} {len(sizes)} files ({size_text(sum(sizes.values()))})")
    question.answer(answer, lines)
    return 0


def _why_it_stays(catalog: Catalog, name: CheckpointName) -> str:
    try:
        catalog.manifest(name)
    except CheckpointError as error:
        return f"left as it is: {error}"
    return "was committed in the meantime, and stays"


def _sizes(store: Store, files: Iterable[str]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for file in files:
        try:
            sizes[file] = store.size(file)
        except ObjectMissingError:
            continue
    return sizes
