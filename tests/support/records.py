"""Reads what a run leaves at its local URL: the files that other people's scripts rely on, and nothing else.

It imports none of the project's packages, so that it judges the format from outside. The accounting is
the format's own: the lineage is the chain generation -> parent state -> its generation back from the
final state; of a step that several generations did, the one in the lineage counts; a step whose update
was skipped used no samples.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

Record = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """The steps that one generation of the lineage gave to it: `first` to `last`, both included."""

    generation: int
    first: int
    last: int
    parent: tuple[int, int] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class CommittedStep:
    """One step of the lineage, the parts of all ranks together in order of rank."""

    step: int
    epoch: int
    generation: int
    parts: dict[int, list[int]]
    skipped: bool

    @property
    def indices(self) -> list[int]:
        """The samples that the step used."""
        return [index for rank in sorted(self.parts) for index in self.parts[rank]]


def read_json(path: Path) -> Record:
    """Read one JSON object."""
    record = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(record, dict):
        raise TypeError(f"{path}: found {type(record).__name__}, expected a JSON object")
    return record


def read_lines(path: Path) -> Iterator[Record]:
    """Read a file of JSON lines; a torn last line (its writer was killed) is left out."""
    lines = path.read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            if number < len(lines):
                raise ValueError(f"{path}:{number}: not JSON: {line[:80]!r}") from None


def summary(url: Path) -> Record:
    """The run's summary."""
    return read_json(url / "summary.json")


def status(url: Path) -> str | None:
    """The status of the run; None before the first summary."""
    path = url / "summary.json"
    return str(summary(url)["status"]) if path.exists() else None


def parse_state(text: str | None) -> tuple[int, int] | None:
    """`generation-step` as two numbers."""
    if text is None:
        return None
    generation, _, step = text.partition("-")
    return int(generation), int(step)


def claims(url: Path) -> dict[int, Record]:
    """The claims, by generation."""
    return _generations(url, ".json")


def started(url: Path) -> dict[int, Record]:
    """The started records, by generation."""
    return _generations(url, ".started.json")


def _generations(url: Path, suffix: str) -> dict[int, Record]:
    folder = url / "generations"
    paths = sorted(folder.glob(f"*{suffix}")) if folder.exists() else []
    found = {path.name.removesuffix(suffix): path for path in paths}
    return {int(name): read_json(path) for name, path in found.items() if name.isdigit()}


def checkpoints(url: Path) -> list[tuple[int, int]]:
    """The committed checkpoints as (generation, step), oldest first."""
    folder = url / "checkpoints"
    manifests = folder.glob("*/manifest.json") if folder.exists() else []
    names = [parse_state(path.parent.name) for path in manifests if not read_json(path).get("void")]
    return sorted(name for name in names if name is not None)


def newest_step(url: Path) -> int:
    """The step of the newest committed checkpoint; 0 where there is none."""
    names = checkpoints(url)
    return names[-1][1] if names else 0


def checkpoint_path(url: Path, name: tuple[int, int]) -> Path:
    """The folder of a checkpoint."""
    generation, step = name
    return url / "checkpoints" / f"{generation:06d}-{step:012d}"


def final_weights(url: Path) -> dict[str, "Tensor"]:
    """The weights of the newest committed checkpoint, read with the safetensors library alone."""
    from safetensors.torch import load_file

    return load_file(checkpoint_path(url, checkpoints(url)[-1]) / "model.safetensors")


def weights_at(url: Path, step: int) -> dict[str, "Tensor"]:
    """The weights of the newest generation's checkpoint of a step."""
    from safetensors.torch import load_file

    names = [name for name in checkpoints(url) if name[1] == step]
    if not names:
        raise LookupError(f"no checkpoint of step {step} in {url}; there are {checkpoints(url)}")
    return load_file(checkpoint_path(url, names[-1]) / "model.safetensors")


def lineage(url: Path) -> list[Span]:
    """The generations behind the final state, oldest first, each with the steps it gave.

    The final state is that of the summary while it is the newest generation's, else the newest
    checkpoint's.
    """
    known = started(url)
    if not known:
        return []
    generation = max(known)
    last = _end_step(url, generation)
    spans: list[Span] = []
    while True:
        record = known[generation]
        parent = parse_state(record["parent"])
        span = Span(generation=generation, first=record["start_step"] + 1, last=last, parent=parent)
        spans.append(span)
        if parent is None:
            return spans[::-1]
        if parent[1] != record["start_step"]:
            raise ValueError(f"generation {generation}: parent {parent} but {record['start_step']}")
        generation, last = parent


def _end_step(url: Path, generation: int) -> int:
    """The last step of the newest generation: the summary's at its end, else what it committed."""
    path = url / "summary.json"
    told = summary(url) if path.exists() else {}
    if told.get("generation") == generation and told.get("status") != "running":
        return int(told["steps"])
    steps = [step for owner, step in checkpoints(url) if owner == generation]
    return max(steps, default=int(started(url)[generation]["start_step"]))


def audit(url: Path) -> list[Record]:
    """All audit lines, by generation, step and rank."""
    folder = url / "audit"
    paths = sorted(folder.glob("*.jsonl")) if folder.exists() else []
    lines = [line for path in paths for line in read_lines(path)]
    return sorted(lines, key=lambda line: (line["generation"], line["step"], line["rank"]))


def committed_steps(url: Path) -> list[CommittedStep]:
    """The steps of the lineage in order; raises ValueError where one is missing or told twice."""
    spans = lineage(url)
    steps: dict[int, CommittedStep] = {}
    for line in audit(url):
        step = int(line["step"])
        generation = int(line["generation"])
        if not any(s.generation == generation and s.first <= step <= s.last for s in spans):
            continue
        skipped = bool(line.get("skipped", False))
        known = steps.get(step)
        parts = {} if known is None else dict(known.parts)
        if not skipped:
            if line["rank"] in parts:
                raise ValueError(f"step {step}: rank {line['rank']} told its samples twice: {line}")
            parts[line["rank"]] = line["indices"]
        steps[step] = CommittedStep(
            step=step,
            epoch=line["epoch"],
            generation=generation,
            parts=parts,
            skipped=skipped or (known is not None and known.skipped),
        )
    expected = range(1, (spans[-1].last if spans else 0) + 1)
    if sorted(steps) != list(expected):
        raise ValueError(f"steps {sorted(set(expected) ^ set(steps))} are not told once: {spans}")
    return [steps[step] for step in sorted(steps)]


def committed_indices(url: Path) -> dict[int, list[int]]:
    """The samples used in each epoch of the lineage, in order of step and rank; skipped steps left out."""
    used: dict[int, list[int]] = {}
    for step in committed_steps(url):
        used.setdefault(step.epoch, []).extend([] if step.skipped else step.indices)
    return used


def journal(url: Path) -> list[Record]:
    """All events, by generation, in the order in which each file tells them."""
    folder = url / "journal"
    paths = sorted(folder.glob("*.jsonl")) if folder.exists() else []
    lines = [line for path in paths for line in read_lines(path)]
    return sorted(lines, key=lambda line: line["generation"])  # sorted() is stable


def events(url: Path, kind: str) -> list[Record]:
    """The events of one kind."""
    return [line for line in journal(url) if line["event"] == kind]


def step_events(url: Path) -> list[Record]:
    """The journal's line of each step of the lineage, in order."""
    spans = lineage(url)

    def counts(line: Record) -> bool:
        return any(
            s.generation == line["generation"] and s.first <= line["step"] <= s.last for s in spans
        )

    return [line for line in events(url, "step") if counts(line)]


def all_text(url: Path) -> str:
    """Everything readable at the URL, to look for what must not be there."""
    texts = [str(path) for path in sorted(url.rglob("*"))]
    readable = {".json", ".jsonl", ".html", ".txt"}
    files = (path for path in sorted(url.rglob("*")) if path.suffix in readable)
    return "\n".join(texts + [path.read_text(encoding="utf-8") for path in files])
