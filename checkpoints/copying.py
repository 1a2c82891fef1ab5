"""`copy`: a checkpoint or a whole run, between any two URLs.

Promises: a checkpoint exists at the target only once all of its bytes are there and were read back; another
run is never written over; a copy that was cut short goes on where it stopped; whatever the size of a file,
little memory is needed. A single checkpoint is copied whole: what it referred to becomes its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

import xxhash

from checkpoints.canonical import LIMIT_BYTES
from checkpoints.catalog import Catalog
from checkpoints.errors import (
    CheckpointError,
    DamagedError,
    NoCheckpointError,
    ObjectMissingError,
)
from checkpoints.exporting import folder_of, real_place
from checkpoints.layout import (
    CHECKPOINTS,
    GENERATIONS,
    MANIFEST_LIMIT_BYTES,
    RUN,
    CheckpointName,
    FileEntry,
    Manifest,
    PartSum,
)
from checkpoints.parts import check_size, object_name
from checkpoints.reader import check_fit, check_structure, read_manifest
from checkpoints.references import INDEX, lead_to
from checkpoints.spool import check, fetch, fetch_object, spool
from checkpoints.store import open_store
from checkpoints.terminal import Progress, size_text

if TYPE_CHECKING:
    from checkpoints.question import Question
    from checkpoints.store import Store

_PASSING: Final = ("meeting/",)
"""What means nothing elsewhere."""


@dataclass(kw_only=True, slots=True)
class Copy:
    """A copy on its way."""

    source: Store
    target: Store
    progress: Progress
    copied_bytes: int = 0
    skipped_bytes: int = 0
    copied: list[CheckpointName] = field(default_factory=list)
    present: list[CheckpointName] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def copy(question: Question) -> int:
    """Copy what is meant; 1 where something of it is damaged, and was left out."""
    arguments = question.arguments
    assert arguments is not None
    source = question.catalog.store
    options = arguments.to_options or (question.options if "://" in arguments.target else {})
    target = open_store(arguments.target, options)
    _refuse_itself(source, target)
    found = question.catalog.inventory()
    names = question.names(found)
    target.check()
    _refuse_another_run(question.catalog, Catalog(target), question.which is not None)
    manifests = [m for name in names if (m := found.committed.get(name)) is not None]
    total = 2 * sum(manifest.size_bytes for manifest in manifests)
    with Progress("copy", total) as progress:
        work = Copy(source=source, target=target, progress=progress)
        newest = names[0].generation if question.which else None
        _copy_records(work, newest)
        for name in names:
            manifest = found.committed.get(name)
            if manifest is None:
                work.problems.append(f"checkpoint {name}: its manifest does not verify")
            else:
                _copy_checkpoint(work, manifest, is_alone=question.which is not None)
        if not question.which:
            _copy_others(work)
    return _tell(question, work)


def _tell(question: Question, work: Copy) -> int:
    answer = {
        "url": question.url,
        "target": work.target.display_url,
        "copied": [str(name) for name in work.copied],
        "present": [str(name) for name in work.present],
        "problems": work.problems,
        "copied_bytes": work.copied_bytes,
        "skipped_bytes": work.skipped_bytes,
    }
    lines = [f"copied {name}" for name in work.copied]
    lines += [f"{name} was there already" for name in work.present]
    lines += [f"left out: {problem}" for problem in work.problems]
    lines.append(
        f"{work.target.display_url}: {size_text(work.copied_bytes)} copied and read back,"
        f" {size_text(work.skipped_bytes)} were there"
    )
    question.answer(answer, lines)
    return 1 if work.problems else 0


# --------------------------------------------------------------------------------------- whose it is
def _refuse_itself(source: Store, target: Store) -> None:
    """Refuse a target that is the source, or lies in it: the copy would grow into itself.

    Raises:
        CheckpointError: It does.
    """
    here, there = (real_place(store) for store in (source, target))
    if here == there:
        raise CheckpointError(f"{source.display_url}: found the same place twice")
    if there.startswith(here.rstrip("/") + "/"):
        raise CheckpointError(
            f"{target.display_url}: lies in {source.display_url}, which is copied; expected another place"
        )


def _refuse_another_run(source: Catalog, target: Catalog, is_alone: bool) -> None:
    """Refuse a target that is another run's, or that has gone on by itself.

    Raises:
        CheckpointError: It is.
    """
    mine, theirs = _identity(source), _identity(target)
    place = target.store.display_url
    if theirs and mine != theirs:
        raise CheckpointError(
            f"{place}: found another run ({theirs}), expected an empty place or a copy of"
            f" {source.store.display_url} ({mine or 'without a name'})"
        )
    if is_alone:
        return
    claims = set(source.store.list(f"{GENERATIONS}/"))
    for name in target.store.list(f"{GENERATIONS}/"):
        if name not in claims or _record(target.store, name) != _record(source.store, name):
            raise CheckpointError(
                f"{place}: {name}: the run has gone on there by itself; copy to another place"
            )


def _record(store: Store, name: str) -> bytes:
    """The bytes of a small record, whatever they say."""
    return store.get(name, limit_bytes=LIMIT_BYTES)


def _identity(catalog: Catalog) -> str:
    """What tells a run from others: its record, or what its checkpoints say."""
    try:
        return xxhash.xxh3_128_hexdigest(_record(catalog.store, RUN))
    except ObjectMissingError:
        pass
    found = {manifest.run_id for manifest in catalog.inventory().committed.values() if manifest}
    return ", ".join(sorted(found))


# ------------------------------------------------------------------------------------------- records
def _copy_records(work: Copy, newest: int | None) -> None:
    """The run's identity and its generations: what a start at the target has to know."""
    for name in (RUN, *work.source.list(f"{GENERATIONS}/")):
        number = name.removeprefix(f"{GENERATIONS}/").partition(".")[0]
        if newest is not None and number.isdecimal() and int(number) > newest:
            continue
        try:
            data = _record(work.source, name)
        except ObjectMissingError:
            continue
        if not work.target.put_new(name, data):
            raise CheckpointError(
                f"{work.target.display_url}/{name}: found another one, expected none"
            )


def _copy_others(work: Copy) -> None:
    """All else: journal, audit, summary, and what others have put there."""
    for name in work.source.list():
        if name.startswith((f"{CHECKPOINTS}/", f"{GENERATIONS}/", *_PASSING)) or name == RUN:
            continue
        try:
            _copy_object(work, name)
        except (ObjectMissingError, DamagedError) as error:
            work.problems.append(f"{name}: changed while it was copied: {error}")


def _copy_object(work: Copy, name: str) -> None:
    size = work.source.size(name)
    folder = folder_of(work.target)
    with spool(size, folder) as mine, spool(size, folder) as theirs:
        fetch_object(work.source, name, mine)
        if _size(work.target, name) == size:
            fetch_object(work.target, name, theirs)
            if mine == theirs:
                work.skipped_bytes += size
                return
        work.target.put(name, mine)
        fetch_object(work.target, name, theirs)
        if mine != theirs:
            raise DamagedError(f"{work.target.display_url}/{name}: other bytes arrived")
        work.copied_bytes += size


def _size(store: Store, name: str) -> int | None:
    try:
        return store.size(name)
    except ObjectMissingError:
        return None


# ---------------------------------------------------------------------------------------- checkpoints
def _copy_checkpoint(work: Copy, manifest: Manifest, *, is_alone: bool) -> None:
    try:
        wanted, texts = _whole(work.source, manifest) if is_alone else (manifest, {})
        if _is_present(work.target, wanted):
            work.present.append(wanted.name)
            work.skipped_bytes += wanted.size_bytes
            work.progress.add(2 * wanted.size_bytes)
            return
        if _is_present_otherwise(work.target, wanted):
            work.present.append(wanted.name)
            work.progress.add(2 * wanted.size_bytes)
            return
        for entry in manifest.files:
            check_structure(work.source, manifest, entry)
        check_fit(work.source, manifest)
        for mine, theirs in zip(manifest.files, wanted.files, strict=True):
            _copy_file(work, (manifest, mine), (wanted, theirs), texts.get(mine.name))
    except DamagedError as error:
        gone = not work.source.exists(manifest.name.manifest)
        work.problems.append(
            f"checkpoint {manifest.name}: was deleted while it was copied" if gone else str(error)
        )
        return
    if not work.target.put_new(wanted.name.manifest, wanted.to_json()):
        raise CheckpointError(
            f"{work.target.display_url}/{wanted.name.manifest}: found another one, expected none:"
            " the name was swept, or is another checkpoint's"
        )
    work.copied.append(wanted.name)


def _is_present(target: Store, wanted: Manifest) -> bool:
    """Whether the target has the very checkpoint, as far as sizes tell; it was read back when it came."""
    try:
        if target.get(wanted.name.manifest, limit_bytes=MANIFEST_LIMIT_BYTES) != wanted.to_json():
            return False
        for entry in wanted.files:
            check_size(target, wanted, entry)
    except (ObjectMissingError, DamagedError):
        return False
    return True


def _is_present_otherwise(target: Store, wanted: Manifest) -> bool:
    """Whether the target has the same checkpoint in another form: referring to others, or whole by itself.

    Raises:
        CheckpointError: The name is another checkpoint's, or void: no file under it is touched.
    """
    place = f"{target.display_url}/{wanted.name.manifest}"
    try:
        data = target.get(wanted.name.manifest, limit_bytes=MANIFEST_LIMIT_BYTES)
    except ObjectMissingError:
        return False
    if data == wanted.to_json():
        return False  # this very one, whose files are not all there any more
    try:
        found = Manifest.from_json(data, wanted.name.manifest)
    except DamagedError:
        found = None
    if found is None or found.token != wanted.token:
        raise CheckpointError(
            f"{place}: found another one, expected none: the name was swept, or is another checkpoint's"
        )
    try:
        for entry in found.files:
            check_size(target, found, entry)
    except DamagedError as error:
        raise CheckpointError(
            f"{place}: found it in another form and damaged ({error}); copy to another place"
        ) from error
    return True


def _refuse_to_replace(target: Store, manifest: Manifest, entry: FileEntry) -> None:
    """Refuse to write a file that a checkpoint at the target has, with other bytes, under its own name.

    Raises:
        CheckpointError: One has.
    """
    if entry.owner is None or entry.owner == manifest.name:
        return
    try:
        owner = read_manifest(target, entry.owner)
    except (NoCheckpointError, DamagedError):
        return
    theirs = next((one for one in owner.files if one.name == entry.name), None)
    if theirs is not None and theirs.owner is None and theirs.parts != entry.parts:
        raise CheckpointError(
            f"{target.display_url}/{object_name(manifest, entry)}: is another checkpoint's, expected"
            f" that of the source; copy to another place"
        )


def _copy_file(
    work: Copy,
    mine: tuple[Manifest, FileEntry],
    theirs: tuple[Manifest, FileEntry],
    text: bytes | None,
) -> None:
    """One file: fetched and verified, sent, read back. What is there already is only read."""
    manifest, entry = theirs
    try:
        check(work.target, manifest, entry, work.progress.add)
    except DamagedError:
        pass  # not there yet, or not as it should be
    else:
        work.skipped_bytes += entry.size_bytes
        work.progress.add(entry.size_bytes)
        return
    _refuse_to_replace(work.target, manifest, entry)
    if text is not None:
        work.target.put(object_name(manifest, entry), text)
    else:
        with spool(entry.size_bytes, folder_of(work.target)) as view:
            fetch(work.source, *mine, view, work.progress.add)
            work.target.put(object_name(manifest, entry), view)
    try:
        check(work.target, manifest, entry, work.progress.add)
    except DamagedError as error:
        raise CheckpointError(f"{work.target.display_url}: other bytes arrived: {error}") from error
    work.copied_bytes += entry.size_bytes


def _whole(store: Store, manifest: Manifest) -> tuple[Manifest, dict[str, bytes]]:
    """The manifest of a checkpoint that refers to no other, and the files that change with that."""
    texts: dict[str, bytes] = {}
    files = []
    for entry in manifest.files:
        own = replace(entry, owner=None)
        if entry.name.endswith(INDEX):
            with spool(entry.size_bytes) as view:
                fetch(store, manifest, entry, view)
                data = bytes(view)
            changed = lead_to(data, [replace(other, owner=None) for other in manifest.files])
            if changed != data:
                texts[entry.name] = changed
                digest = xxhash.xxh3_128_hexdigest(changed)
                part = PartSum(offset=0, size=len(changed), xxh3_128=digest)
                own = FileEntry(name=entry.name, size_bytes=len(changed), parts=(part,))
        files.append(own)
    return replace(manifest, files=tuple(files)), texts
