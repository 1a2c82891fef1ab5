"""The commands on checkpoints: `ls`, `show` and `verify`, for people and as JSON.

Promises: they only read, they need no torch, and they show no credentials. Exit codes: 0 where all is
well, 1 where `verify` finds a damaged checkpoint, 2 with one line on stderr where the question cannot
be answered. `URL@latest`, `URL@best`, `URL@1200` and `URL@000007-000000001200` name one checkpoint.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final, NoReturn

from checkpoints import reader
from checkpoints.buffers import STATE
from checkpoints.catalog import Catalog, Inventory, split_address
from checkpoints.errors import CheckpointError, DamagedError, NoCheckpointError, OptionError
from checkpoints.layout import RUN, CheckpointName, Manifest
from checkpoints.policy import newest_first
from checkpoints.redaction import is_secret_name, redact, secret_values
from checkpoints.store import open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

NOT_YET: Final = ("prune", "sweep", "export", "copy")
_UNITS: Final = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
_AGES: Final = (("d", 86400), ("h", 3600), ("min", 60))
_TENSORS: Final = ".safetensors"


def main(argv: Sequence[str], *, clock: Callable[[], float] = time.time) -> int:
    """Run one command; the exit code."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    if argv and argv[0] in NOT_YET:
        sys.stderr.write(f"checkpoints {argv[0]}: not yet served by this version\n")
        return 2
    arguments = _parser().parse_args(argv)
    secrets: frozenset[str] = frozenset()
    try:
        options = dict(_read_option(text) for text in arguments.option)
        url, which = split_address(arguments.url)
        secrets = secret_values(url, options)
        catalog = Catalog(open_store(url, options))
        question = Question(catalog=catalog, which=which, as_json=arguments.json, now_s=clock())
        return int(_COMMANDS[arguments.command](question))
    except CheckpointError as error:
        line = " ".join(redact(str(error), secrets).split())
        sys.stderr.write(f"checkpoints {arguments.command}: {line}\n")
        return 2


class _Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; --help tells more\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="checkpoints", description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in (
        ("ls", "the checkpoints: steps, ages, sizes, and whether their files are there"),
        ("show", "one checkpoint: its files, its tensors, and what is told of it"),
        ("verify", "read every byte; exit 1 where a checkpoint is damaged"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("url", metavar="URL", help="the run's URL, or URL@latest|@best|@STEP")
        command.add_argument("--json", action="store_true", help="for programs")
        command.add_argument(
            "--option",
            action="append",
            default=[],
            metavar="KEY=VALUE",
            help="an option of the file system, e.g. endpoint_url=http://…; a.b=c for a nested one",
        )
    for name in NOT_YET:
        commands.add_parser(name, help="not yet served by this version")
    return parser


def _read_option(text: str) -> tuple[str, object]:
    """`key=value`: the value is JSON where it can be, but never where it is a credential."""
    key, equals, raw = text.partition("=")
    if not key or not equals:
        raise OptionError(f"--option: found {key!r}, expected key=value")
    value: object = raw
    if not is_secret_name(key):
        try:
            value = json.loads(raw)
        except ValueError:
            value = raw
    outer, *inner = key.split(".")
    for name in reversed(inner):
        value = {name: value}
    return outer, value


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """What is asked: about which checkpoints, and how the answer should look."""

    catalog: Catalog
    which: str | None
    as_json: bool
    now_s: float

    @property
    def url(self) -> str:
        """The URL without credentials."""
        return self.catalog.store.display_url

    def names(self, found: Inventory) -> list[CheckpointName]:
        """The checkpoints that are meant, newest first.

        Raises:
            NoCheckpointError: The one that is asked for is not there, or nothing at all is.
        """
        if self.which is not None:
            return [self.catalog.resolve(self.which)]
        if not found.files and not self.catalog.store.exists(RUN):
            raise NoCheckpointError(f"{self.url}: no run and no checkpoint is there")
        return newest_first(found.committed)

    def answer(self, value: object, lines: Sequence[str]) -> None:
        """Print the one or the other."""
        text = json.dumps(value, indent=2) if self.as_json else "\n".join(lines)
        sys.stdout.write(f"{text}\n")


# ----------------------------------------------------------------------------------------------- ls
def list_checkpoints(question: Question) -> int:
    """One line for each checkpoint; sizes of files are compared, bytes are not read."""
    found = question.catalog.inventory()
    names = question.names(found)
    best = _best(question.catalog)
    rows = []
    for name in names:
        manifest = found.committed.get(name)
        problem = None if manifest is None else _missing(question, manifest)
        if manifest is None:
            problem = _manifest_problem(question, name)
        row = _row(name, manifest, problem, question)
        rows.append(row | {"best": name == best, "left_behind": name in found.left_behind})
    unfinished = [] if question.which else [str(name) for name in found.unfinished]
    table = [("CHECKPOINT", "STEP", "AGE", "SIZE", "HEALTH", "PARENT", "")]
    for row in rows:
        size = row["size_bytes"]
        table.append(
            (
                str(row["name"]),
                str(row["step"]),
                _age(row["age_s"]),
                "-" if size is None else _size(size),
                str(row["health"]),
                str(row["parent"] or "-"),
                "best" if row["best"] else "left behind" if row["left_behind"] else "",
            )
        )
    lines = _aligned(table) if rows else [f"{question.url}: no checkpoint is committed yet"]
    lines += [str(row["problem"]) for row in rows if row["problem"]]
    lines += [f"{name}: never committed; the next commit sweeps it" for name in unfinished]
    answer = {"url": question.url, "checkpoints": rows, "unfinished": unfinished}
    question.answer(answer, lines)
    return 0


def _row(
    name: CheckpointName, manifest: Manifest | None, problem: str | None, question: Question
) -> dict[str, object]:
    created_at = None if manifest is None else manifest.created_at
    return {
        "name": str(name),
        "generation": name.generation,
        "step": name.step,
        "parent": str(manifest.parent) if manifest and manifest.parent else None,
        "created_at": created_at,
        "age_s": _age_s(created_at, question.now_s),
        "size_bytes": None if manifest is None else manifest.size_bytes,
        "health": "ok" if problem is None else "damaged",
        "problem": problem,
    }


def _missing(question: Question, manifest: Manifest) -> str | None:
    for entry in manifest.files:
        try:
            reader.check_size(question.catalog.store, manifest, entry)
        except DamagedError as error:
            return str(error)
    return None


def _manifest_problem(question: Question, name: CheckpointName) -> str:
    try:
        question.catalog.manifest(name)
    except CheckpointError as error:
        return str(error)
    return f"checkpoint {name}: its manifest could not be read a moment ago"


def _best(catalog: Catalog) -> CheckpointName | None:
    try:
        return catalog.resolve("best")
    except CheckpointError:  # a mark in a list, not what was asked for
        return None


# --------------------------------------------------------------------------------------------- show
def show(question: Question) -> int:
    """One checkpoint, the latest where none is named."""
    catalog = question.catalog
    name = catalog.resolve(question.which or "latest")
    manifest = catalog.manifest(name)
    row = _row(name, manifest, _missing(question, manifest), question)
    files: list[dict[str, object]] = []
    table = [("FILE", "SIZE", "PARTS", "TENSORS")]
    for entry in manifest.files:
        tensors = []
        if entry.name.endswith(_TENSORS) and row["problem"] is None:
            _, header = reader.read_header(catalog.store, manifest, entry)
            tensors = [
                {"name": spec.name, "dtype": spec.dtype, "shape": list(spec.shape)}
                for spec in header.tensors
            ]
        owner = str(entry.owner) if entry.owner else None
        file = {"name": entry.name, "size_bytes": entry.size_bytes, "owner": owner}
        files.append(file | {"parts": len(entry.parts), "tensors": tensors})
        count = str(len(tensors)) if tensors else "-"
        table.append((entry.name, _size(entry.size_bytes), str(len(entry.parts)), count))
    facts = {
        "run": manifest.run_id,
        "step": name.step,
        "generation": name.generation,
        "parent": row["parent"] or "-",
        "created": f"{manifest.created_at} ({_age(row['age_s'])} ago)",
        "size": _size(manifest.size_bytes),
        "health": row["problem"] or "ok (sizes; `verify` reads every byte)",
        **{f"info.{key}": json.dumps(value) for key, value in manifest.info.items()},
    }
    lines = [f"checkpoint {name}"]
    lines += _aligned([(f"  {key}", str(value)) for key, value in facts.items()])
    lines += ["", *_aligned(table)]
    answer = {**row, "url": question.url, "run_id": manifest.run_id, "files": files}
    question.answer(answer | {"info": dict(manifest.info)}, lines)
    return 0


# ------------------------------------------------------------------------------------------- verify
def verify(question: Question) -> int:
    """Read every byte of the checkpoints that are meant; all damage is told, not the first alone."""
    found = question.catalog.inventory()
    results: list[dict[str, object]] = []
    lines: list[str] = []
    for name in question.names(found):
        started = time.monotonic()
        manifest = found.committed.get(name)
        problems = (
            [_manifest_problem(question, name)]
            if manifest is None
            else _problems(question, manifest)
        )
        seconds = time.monotonic() - started
        health = "damaged" if problems else "ok"
        size = manifest.size_bytes if manifest else 0
        results.append({"name": str(name), "health": health, "problems": problems})
        lines += problems or [f"checkpoint {name}: ok, {_size(size)} read in {seconds:.1f} s"]
    if not results:
        lines = [f"{question.url}: no checkpoint is committed yet"]
    question.answer({"url": question.url, "checkpoints": results}, lines)
    return 1 if any(result["problems"] for result in results) else 0


def _problems(question: Question, manifest: Manifest) -> list[str]:
    problems = []
    for entry in manifest.files:
        try:
            reader.verify_file(question.catalog.store, manifest, entry)
        except DamagedError as error:
            problems.append(str(error))
    if not any(entry.name == STATE for entry in manifest.files):
        problems.append(f"checkpoint {manifest.name}: {STATE}: is not in the manifest")
    return problems


_COMMANDS: Final[dict[str, Callable[[Question], int]]] = {
    "ls": list_checkpoints,
    "show": show,
    "verify": verify,
}


# ------------------------------------------------------------------------------------------ writing
def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _size(size_bytes: object) -> str:
    count = float(str(size_bytes))
    for unit, size in _UNITS:
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} B"


def _age_s(created_at: str | None, now_s: float) -> float | None:
    """Seconds since a checkpoint was made; clocks differ, so that it is only for people."""
    if created_at is None:
        return None
    try:
        created = datetime.fromisoformat(created_at)
    except ValueError:
        return None
    if created.tzinfo is None:
        created = created.replace(tzinfo=UTC)
    return max(0.0, round(now_s - created.timestamp(), 3))


def _age(age_s: object) -> str:
    if age_s is None:
        return "-"
    seconds = float(str(age_s))
    for unit, size in _AGES:
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
