"""The run that a drill is compared with: the same job and settings with no fault, made once and used again.

Promises: one that is there is used only for the very same job, settings and code (the project's, and the job's own file); it
appears under its name only when it is complete, so that two drills at one place never see half of it.
"""

import hashlib
import importlib.util
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Final

from checkpoints.store import open_store
from elastic import summary
from elastic.errors import ElasticError, StartError
from elastic.fleet import Fleet
from elastic.trial import Trial

__all__ = ["Reference", "key_of", "reference"]

_ROOT: Final = Path(__file__).resolve().parent.parent
_PACKAGES: Final = ("elastic", "jobs", "checkpoints")
_UNIMPORTANT: Final = ("train.step_delay", "train.warm_start")
"""Settings that change no bit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reference:
    """The undisturbed run."""

    folder: Path
    steps: int
    epochs: int
    step_s: float
    """What a step takes without any delay."""
    reused: bool


def key_of(
    job: str | None, overrides: Iterable[str], *, workers: int, sources: Sequence[Path]
) -> str:
    """A name for what decides the outcome of an undisturbed run."""
    kept = sorted(text for text in overrides if not text.lstrip("-").startswith(_UNIMPORTANT))
    digest = hashlib.sha256()
    for word in (job or "", *kept, str(workers), metadata.version("torch")):
        digest.update(f"{word}\0".encode())
    for path in sources:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def sources_of(job: str | None, name: str) -> list[Path]:
    """The files whose change makes another run: the project's, the YAML file, and the job's own module."""
    found = [path for package in _PACKAGES for path in sorted((_ROOT / package).rglob("*.py"))]
    if job is not None and ":" not in job:
        found += [path for path in (Path(job), _ROOT / job) if path.is_file()][:1]
    module = name.rpartition(":")[0]
    if module.endswith(".py"):
        found += [path for path in (Path(module), _ROOT / module) if path.is_file()][:1]
    else:
        found += _file_of(module)
    return found


def _file_of(module: str) -> list[Path]:
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return []
    origin = None if spec is None else spec.origin
    return [Path(origin)] if origin is not None and Path(origin).is_file() else []


def reference(
    folder: Path, arguments: Sequence[str], *, workers: int, say: Callable[[str], None]
) -> Reference:
    """Use the undisturbed run in a folder, or make it.

    Args:
        folder: Where it is, or is to be.
        arguments: The runner's own, but for the URL.
        workers: Its workers, of one agent.
        say: Takes a line on what happens.

    Raises:
        StartError: The job or a setting is wrong.
        ElasticError: It did not come to its end.
    """
    found = _read(folder, reused=True)
    if found is not None:
        say(f"undisturbed run: {folder} ({found.steps} steps), used again")
        return found
    say(f"undisturbed run: {folder}, with {workers} workers")
    made = folder.with_name(f".{folder.name}-{os.getpid()}")
    shutil.rmtree(made, ignore_errors=True)
    logs = folder.with_name(f"{folder.name}.logs")
    try:
        given = [*arguments, f"checkpoint.url={made}"]
        outcome = Trial(Fleet(logs, given, nodes=1, nproc=workers, max_restarts=0), made).run([])
        if outcome.problem is not None or any(outcome.codes) or _read(made, reused=False) is None:
            last = (outcome.tail or _tail(logs)).strip().splitlines()
            told = next((line for line in last if line.startswith("error: ")), None)
            if told is not None:  # the job or a setting is wrong, and no fault of a run
                raise StartError(told.removeprefix("error: "))
            errors = [line for line in last if "rror" in line]
            line = (errors or last or ["nothing was printed"])[0]
            raise ElasticError(f"the undisturbed run failed: {line} (all of it: {logs})")
        if folder.exists():  # another drill was quicker
            shutil.rmtree(folder)
        made.rename(folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)
    done = _read(folder, reused=False)
    if done is None:
        raise ElasticError(f"{folder}: found no complete run, expected the one just made")
    return done


def _tail(logs: Path) -> str:
    paths = sorted(logs.glob("*.log"))
    text = paths[-1].read_text(encoding="utf-8", errors="replace") if paths else ""
    return "\n".join(text.splitlines()[-40:])


def _read(folder: Path, *, reused: bool) -> Reference | None:
    if not folder.is_dir():
        return None
    told = summary.read(open_store(str(folder)))
    if told is None or told.get("status") not in {"complete", "stopped"} or not told.get("steps"):
        return None
    return Reference(
        folder=folder,
        steps=int(told["steps"]),
        epochs=int(told["epochs"]),
        step_s=float(told["seconds"]["steps"]) / int(told["steps"]),
        reused=reused,
    )
