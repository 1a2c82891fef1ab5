"""`python -m elastic drill JOB`: trains a job under a schedule of faults on this machine, and judges what came of it.

Promises: faults are real (signals, a folder that is away, links that are cut), on real torchruns; the exit code is 0 only
where every question was answered well; whatever ends the drill, no process, memory or temporary file of it stays, and only
the runs themselves and what they printed are left to be looked at. Imports no torch.
"""

import argparse
import contextlib
import json
import secrets
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Final, NoReturn

from checkpoints.errors import CheckpointError, OptionError
from checkpoints.options import parse_duration
from checkpoints.store import open_store
from elastic import namespaces, summary
from elastic.bound import Cost, Loss, cost, must_lose
from elastic.config import parse_arguments, read_settings
from elastic.errors import ConfigError, ElasticError, ExitCode, StartError
from elastic.fleet import Fleet, check_folder, serves_nodes
from elastic.judging import Verdict, judge
from elastic.options import Settings
from elastic.strikes import Struck, is_exchangeable
from elastic.timetable import KINDS, Kind, Planned, plan, read_kinds
from elastic.trial import Outcome, Trial
from elastic.undisturbed import Reference, key_of, reference, sources_of

__all__ = ["Request", "add_arguments", "drill", "read_request"]

_ROOT: Final = Path(__file__).resolve().parent.parent
_SHARDS: Final = 4
_SPARE_RESTARTS: Final = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What is to be drilled, checked."""

    job: str | None
    given: tuple[str, ...]
    """The settings as they were given."""
    settings: Settings
    kinds: tuple[Kind, ...]
    planned: tuple[Planned, ...]
    for_s: float
    seed: int
    nproc: int
    nodes: int
    folder: Path
    as_json: bool

    @property
    def workers(self) -> int:
        """Of all nodes together."""
        return self.nproc * self.nodes

    def gives(self, key: str) -> bool:
        """Whether a setting stands on the command line."""
        return any(text.lstrip("-").startswith(f"{key}=") for text in self.given)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own arguments."""
    add = parser.add_argument
    add("run", nargs="*", metavar="JOB key=value", help="as for run.py: a job, and settings")
    add("--faults", default="kill,stop", help=f"some of {', '.join(KINDS)}; default kill,stop")
    add("--every", default="20s", help="one fault in each such interval; default 20s")
    add("--for", dest="time", default="2min", help="how long faults strike; default 2min")
    add("--nproc", type=int, default=2, help="workers of each node; default 2")
    add("--nodes", type=int, default=1, help="agents, each one a node; default 1")
    add("--seed", type=int, help="of the schedule; by default a new one, which is told")
    add("--url", default="runs/drill", help="a local folder for the runs; default runs/drill")
    add("--json", action="store_true", help="the result as JSON on stdout, progress on stderr")


def drill(argv: Sequence[str]) -> int:
    """Run one drill; returns 0 where it was passed, 1 where not, 2 where it cannot be done as asked."""
    parser = argparse.ArgumentParser(
        prog="python -m elastic drill",
        description="Trains JOB under a schedule of faults on this machine, and says whether the "
        "model, the samples and the cost are what they have to be. Exit code 0: passed, 1: not, 2: wrong arguments.",
    )
    add_arguments(parser)
    try:
        # Settings may stand before and behind options.
        request = read_request(parser.parse_intermixed_args(argv))
    except (ElasticError, CheckpointError) as error:
        sys.stderr.write(f"error: {error}\n")
        return ExitCode.WRONG
    try:
        with _ended_by_signals():
            return _run(request)
    except StartError as error:
        sys.stderr.write(f"error: {error}\n")
        return ExitCode.WRONG
    except (ElasticError, CheckpointError, OSError) as error:
        sys.stderr.write(f"drill: FAILED: {error}\n")
        return ExitCode.RETRY
    except KeyboardInterrupt:
        sys.stderr.write("drill: broken off; all that it started is ended\n")
        return 128 + signal.SIGINT


def read_request(found: argparse.Namespace) -> Request:
    """Check what was asked for, before anything is started.

    Raises:
        ElasticError: It cannot be done, here or at all.
    """
    arguments = parse_arguments(found.run)
    kinds = read_kinds(found.faults)
    every_s, for_s = _duration("--every", found.every), _duration("--for", found.time)
    for name, value in (("--nproc", found.nproc), ("--nodes", found.nodes)):
        if value < 1:
            raise ConfigError(f"{name}: found {value}, expected at least 1")
    seed = secrets.randbits(32) if found.seed is None else found.seed
    if "://" in found.url:
        raise ConfigError(f"--url: found {found.url}, expected a local folder")
    if any(text.lstrip("-").startswith("checkpoint.url=") for text in arguments.overrides):
        raise ConfigError("checkpoint.url: found a value, expected none: runs lie below --url")
    folder = Path(found.url).expanduser().absolute()
    settings = read_settings(parse_arguments([*found.run, f"checkpoint.url={folder}"]), root=_ROOT)
    request = Request(
        job=arguments.job,
        given=arguments.overrides,
        settings=settings,
        kinds=kinds,
        planned=tuple(plan(kinds, every_s=every_s, for_s=for_s, seed=seed)),
        for_s=for_s,
        seed=seed,
        nproc=found.nproc,
        nodes=found.nodes,
        folder=folder,
        as_json=found.json,
    )
    _check_possible(request)
    return request


def _duration(name: str, text: str) -> float:
    try:
        return parse_duration(text)
    except OptionError as error:
        raise ConfigError(f"{name}: {error}") from error


def _check_possible(request: Request) -> None:
    """Whether this machine can do it.

    Raises:
        StartError: It cannot.
    """
    if request.nodes > 1 and not serves_nodes():
        raise StartError(
            "--nodes: found no rendezvous of several nodes, expected the package installed (pip install -e .)"
        )
    if "partition" in request.kinds:
        if request.nodes < 2:
            raise StartError(f"partition: found --nodes {request.nodes}, expected at least 2")
        if (why := namespaces.why_impossible()) is not None:
            raise StartError(f"partition: {why}, expected root and `ip`; leave it out of --faults")
    check_folder(request.folder)
    if "storage" in request.kinds and not is_exchangeable(request.folder):
        raise StartError(
            f"storage: {request.folder} lies where two names cannot be exchanged, expected a local file system"
        )


# ------------------------------------------------------------------------------------------ the drill
def _run(request: Request) -> int:
    _say(request, f"drill: seed {request.seed}, {len(request.planned)} faults planned")
    before, bits, settings = _undisturbed(request)
    delay = _delay(request, before)
    if delay is not None:
        settings = [*settings, f"train.step_delay={delay}"]
        _say(request, f"train.step_delay={delay}, so that faults fall into {before.steps} steps")
    folder = _free(request.folder / f"drill-{request.seed}")
    _say(request, f"run: {folder}, {request.nodes} nodes with {request.nproc} workers each")
    arguments = [*_words(request), *settings, f"checkpoint.url={folder}"]
    with contextlib.ExitStack() as stack:
        bridge = None
        if "partition" in request.kinds:
            bridge = stack.enter_context(namespaces.Bridge(request.nodes))
        fleet = Fleet(
            folder.with_name(f"{folder.name}.logs"),
            arguments,
            nodes=request.nodes,
            nproc=request.nproc,
            max_restarts=3 * len(request.planned) + _SPARE_RESTARTS,
            bridge=bridge,
        )
        trial = Trial(fleet, folder, say=lambda line: _say(request, line))
        outcome = trial.run(request.planned)
    costs = _costs(request, before, trial, outcome, folder)
    verdicts = judge(
        open_store(str(folder)), open_store(str(before.folder)), outcome, nodes=request.nodes, bits=bits
    )  # fmt: skip
    passed = all(verdict.passed is not False for verdict in verdicts)
    _tell(request, outcome, costs, verdicts, folder=folder, passed=passed)
    return ExitCode.DONE if passed else ExitCode.RETRY


def _undisturbed(request: Request) -> tuple[Reference, str | None, list[str]]:
    """The run to compare with, why its bits cannot be compared (None: they can), and the settings of both."""
    ours = ["audit.samples=true"]
    train = request.settings.train
    if train.reproducible == "bitwise":
        return _reference(request, ours, workers=request.nproc), None, ours
    if request.gives("train.reproducible"):
        bits = "train.reproducible=off was asked for"
        return _reference(request, ours, workers=request.workers), bits, ours
    bitwise = [*ours, "train.reproducible=bitwise"]
    if train.logical_shards is None:
        shards = min(max(_SHARDS, request.workers), train.global_batch_size)
        bitwise.append(f"train.logical_shards={shards}")
    _say(request, f"set for equal bits: {' '.join(bitwise[1:])}")
    try:
        return _reference(request, bitwise, workers=request.nproc), None, bitwise
    except ElasticError as error:
        _say(request, f"{error}; once more without equal bits")
        bits = f"the job does not run in bitwise mode ({error})"
        return _reference(request, ours, workers=request.workers), bits, ours


def _reference(request: Request, ours: Sequence[str], *, workers: int) -> Reference:
    settings = [*request.given, *ours]
    sources = sources_of(request.job, request.settings.job)
    key = key_of(request.job, settings, workers=workers, sources=sources)
    quick = [text for text in request.given if not text.lstrip("-").startswith("train.step_delay=")]
    words = [*([request.job] if request.job else []), *quick, *ours, "train.step_delay=0"]
    folder = request.folder / f"undisturbed-{key}"
    return reference(folder, words, workers=workers, say=lambda line: _say(request, line))


def _words(request: Request) -> list[str]:
    return [*([request.job] if request.job else []), *request.given]


def _delay(request: Request, before: Reference) -> float | None:
    """How long to sleep in each step so that the schedule fits; None where it does, or the user has said it."""
    if request.gives("train.step_delay") or request.settings.train.step_delay:
        return None
    missing = request.for_s / before.steps - before.step_s
    return round(missing, 4) if missing > 0 else None


def _free(folder: Path) -> Path:
    """A folder that is not there yet."""
    number, found = 1, folder
    while found.exists():
        number += 1
        found = folder.with_name(f"{folder.name}-{number}")
    return found


def _costs(
    request: Request, before: Reference, trial: Trial, outcome: Outcome, folder: Path
) -> Cost | None:
    """What the faults cost, and had to; None where the run told nothing."""
    told = summary.read(open_store(str(folder)))
    if told is None:
        return None
    options = request.settings.checkpoint
    # Where train.max_steps cuts an epoch off, steps do not tell how many an epoch has.
    whole = before.epochs and request.settings.train.max_steps is None
    epoch_steps = before.steps // before.epochs if whole else None
    for one in outcome.struck:
        if one.ended:
            continue
        seen = trial.follower.generations.get(one.generation)
        last = one.step if seen is None else max(one.step, seen.last_step)
        told_of = [
            Loss(
                kind=one.kind,
                step=step,
                kept_step=one.kept_step,
                leaves_memory=one.leaves_memory,
            )
            # A step that was under way may have been finished, and saved, before the fault took hold.
            for step in range(one.step, last + 1)
        ]
        least = (
            must_lose(
                loss, store=options.every, memory=options.tier.memory, epoch_steps=epoch_steps
            )
            for loss in told_of
        )
        # What was kept could be kept: a snapshot may have become whole after the look at memory.
        one.must_lose = min(one.lost_steps, *least)
    return cost(
        steps=int(told["steps"]),
        lost_steps=int(told["lost_steps"]),
        losses=[one.must_lose for one in outcome.struck],
        recoveries_s=[
            one.recovery_s
            for one in outcome.struck
            if one.recovery_s is not None and one.kind != "storage"
        ],
        steps_s=float(told["seconds"]["steps"]),
        goodput=float(told["goodput"]),
    )


# ------------------------------------------------------------------------------------------ what is said
def _say(request: Request, line: str) -> None:
    out = sys.stderr if request.as_json else sys.stdout
    out.write(f"{line}\n")
    out.flush()


def _tell(
    request: Request, outcome: Outcome, costs: Cost | None, verdicts: Sequence[Verdict], *,
    folder: Path, passed: bool,
) -> None:  # fmt: skip
    if request.as_json:
        content = {
            "passed": passed,
            "seed": request.seed,
            "url": str(folder),
            "verdicts": [asdict(verdict) for verdict in verdicts],
            "cost": None if costs is None else asdict(costs),
            "faults": [_row(one) for one in outcome.struck],
            "tail": outcome.tail,
        }
        sys.stdout.write(json.dumps(content, indent=1) + "\n")
        return
    lines = ["", "  #      at  fault      recovery  whole again   lost (had to)  whom", *map(_line, outcome.struck), ""]  # fmt: skip
    if costs is not None:
        lines += [
            f"steps: {costs.steps} and {costs.lost_steps} of them twice; step efficiency {costs.efficiency:.2%}, "
            f"at most {costs.efficiency_bound:.2%} under these faults",
            f"time: goodput {costs.goodput:.2%}, at most {costs.goodput_bound:.2%} with these recoveries",
            "",
        ]
    for verdict in verdicts:
        word = {True: "ok", False: "FAIL", None: "-"}[verdict.passed]
        lines.append(f"{word:5}{verdict.name}: {verdict.told}")
    if outcome.problem is not None and outcome.tail:
        lines += ["", outcome.tail]
    failed = [verdict.name for verdict in verdicts if verdict.passed is False]
    end = "passed" if passed else f"FAILED ({', '.join(failed)})"
    lines.append(f"drill: {end}; seed {request.seed}, {folder}")
    _say(request, "\n".join(lines))


def _line(one: Struck) -> str:
    recovery = "ended" if one.recovery_s is None else f"{one.recovery_s:.2f} s"
    whole = "-" if one.whole_s is None else f"{one.whole_s:.2f} s"
    return (
        f"{one.number:3} {one.after_s:6.1f} s  {one.kind:9} {recovery:>9}  {whole:>11}  "
        f"{one.lost_steps:4} ({one.must_lose})         {one.victim}"
    )


def _row(one: Struck) -> dict[str, Any]:
    return {**asdict(one), "committed": None if one.committed is None else str(one.committed)}


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """A signal that ends the drill is an exception, so that all is cleared away; a second one does not hurry that."""

    def end(_number: int, _frame: FrameType | None) -> NoReturn:
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, end) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
