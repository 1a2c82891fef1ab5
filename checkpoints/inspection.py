"""What is at a URL, and whether it is whole: `ls`, `show` and `verify`.

Promises: they only read, and they need no torch. Sizes are compared by all of them, bytes are read by
`verify` alone, which ends with 1 where a checkpoint is damaged.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Final

from checkpoints import parts, reader
from checkpoints.errors import CheckpointError, DamagedError
from checkpoints.question import manifest_problem, problems_of
from checkpoints.terminal import Progress, age_s, age_text, aligned, size_text

if TYPE_CHECKING:
    from checkpoints.catalog import Catalog
    from checkpoints.layout import CheckpointName, Manifest
    from checkpoints.question import Question

_TENSORS: Final = ".safetensors"


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
            problem = manifest_problem(question.catalog, name)
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
                age_text(row["age_s"]),
                "-" if size is None else size_text(size),
                str(row["health"]),
                str(row["parent"] or "-"),
                "best" if row["best"] else "left behind" if row["left_behind"] else "",
            )
        )
    lines = aligned(table) if rows else [f"{question.url}: no checkpoint is committed yet"]
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
        "age_s": age_s(created_at, question.now_s),
        "size_bytes": None if manifest is None else manifest.size_bytes,
        "health": "ok" if problem is None else "damaged",
        "problem": problem,
    }


def _missing(question: Question, manifest: Manifest) -> str | None:
    for entry in manifest.files:
        try:
            parts.check_size(question.catalog.store, manifest, entry)
        except DamagedError as error:
            return str(error)
    return None


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
        table.append((entry.name, size_text(entry.size_bytes), str(len(entry.parts)), count))
    facts = {
        "run": manifest.run_id,
        "step": name.step,
        "generation": name.generation,
        "parent": row["parent"] or "-",
        "created": f"{manifest.created_at} ({age_text(row['age_s'])} ago)",
        "size": size_text(manifest.size_bytes),
        "health": row["problem"] or "ok (sizes; `verify` reads every byte)",
        **{f"info.{key}": json.dumps(value) for key, value in manifest.info.items()},
    }
    lines = [f"checkpoint {name}"]
    lines += aligned([(f"  {key}", str(value)) for key, value in facts.items()])
    lines += ["", *aligned(table)]
    answer = {**row, "url": question.url, "run_id": manifest.run_id, "files": files}
    question.answer(answer | {"info": dict(manifest.info)}, lines)
    return 0


# ------------------------------------------------------------------------------------------- verify
def verify(question: Question) -> int:
    """Read every byte of the checkpoints that are meant; all damage is told, not the first alone."""
    found = question.catalog.inventory()
    results: list[dict[str, object]] = []
    lines: list[str] = []
    names = question.names(found)
    total = sum(m.size_bytes for name in names if (m := found.committed.get(name)) is not None)
    with Progress("verify", total) as progress:
        for name in names:
            started = time.monotonic()
            manifest = found.committed.get(name)
            problems = (
                [manifest_problem(question.catalog, name)]
                if manifest is None
                else problems_of(question.catalog, manifest, progress.add)
            )
            seconds = time.monotonic() - started
            health = "damaged" if problems else "ok"
            size = manifest.size_bytes if manifest else 0
            results.append({"name": str(name), "health": health, "problems": problems})
            lines += problems or [
                f"checkpoint {name}: ok, {size_text(size)} read in {seconds:.1f} s"
            ]
    if not results:
        lines = [f"{question.url}: no checkpoint is committed yet"]
    question.answer({"url": question.url, "checkpoints": results}, lines)
    return 1 if any(result["problems"] for result in results) else 0
