"""Whole runs of the project's loop in a world of one: what it does, in which order, and what it saves."""

# ruff: noqa: ARG002 - the methods' arguments are the Job class's own.

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

from elastic.entry import main
from jobs.job import JobRun
from tests.support import records
from tests.support.distribution import ROOT
from tests.support.ranked import Ended, run_alone
from tests.support.tracer import Batch, Counter, Graded, Numbers, Scored, Tracer

HERE = f"{Path(__file__)}:"
TRACER = f"{ROOT / 'tests/support/tracer.py'}:"


class TwoOptimizers(Tracer):
    def optimizer(self, model: nn.Module) -> Any:
        return {"one": SGD(model.parameters(), lr=0.1)}


class Tuple(Tracer):
    def loss(self, model: nn.Module, batch: Batch) -> Any:
        values = model(batch[0])
        return (values**2).mean(), values


class Lazy(Tracer):
    def model(self) -> nn.Module:
        return nn.LazyLinear(1)


class Stopping(Counter):
    def on_step(self, run: JobRun) -> None:
        torch.rand(3)
        if run.step == 4:
            run.stop("four are enough")


class Hooks(Graded):
    """Writes which hook was called when."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder

    def _note(self, name: str, run: JobRun) -> None:
        with (Path(self.folder) / "hooks").open("a", encoding="utf-8") as file:
            file.write(f"{name} {run.step} {run.epoch}\n")

    def on_step(self, run: JobRun) -> None:
        self._note("step", run)

    def on_epoch(self, run: JobRun) -> None:
        self._note("epoch", run)

    def on_eval(self, run: JobRun, metrics: Any) -> None:
        self._note(f"eval {metrics['seen']}", run)

    def on_end(self, run: JobRun) -> None:
        self._note("end", run)


class WithFrozenNorm(Graded):
    """Its batch norm is frozen: the running mean stays, however often it is evaluated."""

    def model(self) -> nn.Module:
        model = nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 1))
        model[0].eval()
        return model

    def loss(self, model: nn.Module, batch: Batch) -> Any:
        return 1e-4 * (model(batch[0].float()[:, None]) ** 2).mean()

    def eval_dataset(self) -> Any:
        return Numbers(5)


class Bombed(Scored):
    """Killed once in the evaluation after the best one, and once in the last."""

    def __init__(self, marks: str, n: int = 4) -> None:
        super().__init__(n=n)
        self.marks = marks

    def on_eval(self, run: JobRun, metrics: Any) -> None:
        mark = Path(self.marks) / f"epoch-{run.epoch}"
        if run.epoch in {2, 4} and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), 9)


def run(url: Path, job: str, *overrides: str) -> Ended:
    where = TRACER if not job.startswith("Here:") else HERE
    name = job.removeprefix("Here:")
    arguments = [f"{where}{name}", f"checkpoint.url={url}", "train.global_batch_size=4", *overrides]
    return run_alone(main, arguments, {})


def finished(url: Path, job: str, *overrides: str) -> records.Record:
    ended = run(url, job, *overrides)
    assert ended.code == 0, ended.err
    return records.summary(url)


def final(url: Path) -> float:
    (value,) = records.final_weights(url).values()
    return float(value)


def expected_weight(epochs: int, n: int = 12) -> float:
    w = 0.0
    for epoch in range(epochs):
        order = torch.randperm(n, generator=torch.Generator().manual_seed(epoch)).float()
        for part in order.split(4):
            w += 0.1 * (float(part.mean()) - w)
    return w


def test_run_trains_to_its_end_and_says_so(tmp_path: Path) -> None:
    ended = run(tmp_path, "Tracer", "train.epochs=3")
    assert (ended.code, ended.err) == (0, "")
    found = records.summary(tmp_path)
    assert (found["status"], found["steps"], found["samples"], found["epochs"]) == (
        "complete",
        9,
        36,
        3,
    )
    assert final(tmp_path) == pytest.approx(expected_weight(3), rel=1e-6)
    assert ended.out.splitlines() == [
        f"generation 1 (start): W=1, from the start, epoch 1, position 0, step 0 at {tmp_path}",
        f"complete: 3 epochs, 9 steps; the model is checkpoint 000001-000000000009 at {tmp_path}",
    ]
    assert [step for _, step in records.checkpoints(tmp_path)] == [3, 6, 9]


def test_second_start_of_a_finished_run_does_no_work_and_names_the_ways_on(tmp_path: Path) -> None:
    finished(tmp_path, "Tracer", "train.epochs=1")
    ended = run(tmp_path, "Tracer", "train.epochs=1")
    assert (ended.code, ended.err) == (0, "")
    assert ended.out == (
        f"the run at {tmp_path} is complete: 1 epochs, 3 steps; to go on: train.epochs=2 or more; to "
        "train anew: another checkpoint.url\n"
    )
    assert list(records.claims(tmp_path)) == [1]
    more = finished(tmp_path, "Tracer", "train.epochs=2")
    assert (more["steps"], more["lost_steps"], more["generation"]) == (6, 0, 2)
    assert final(tmp_path) == pytest.approx(expected_weight(2), rel=1e-6)


def test_max_steps_ends_inside_an_epoch_with_its_figures_and_goes_on_there(tmp_path: Path) -> None:
    found = finished(tmp_path, "Graded", "train.epochs=2", "train.max_steps=4")
    assert (found["status"], found["steps"], found["epochs"]) == ("complete", 4, 1)
    assert found["metrics"] == {"accuracy": 0.7, "seen": 10.0}
    found = finished(tmp_path, "Graded", "train.epochs=2")
    assert (found["steps"], found["samples"], found["lost_steps"]) == (6, 24, 0)
    assert final(tmp_path) == pytest.approx(expected_weight(2), rel=1e-6)


def test_c43_patience_and_best_survive_kills_in_evaluations(tmp_path: Path) -> None:
    url, marks = tmp_path / "run", tmp_path / "marks"
    marks.mkdir()
    overrides = (
        f"args.marks={marks}",
        "train.epochs=10",
        "eval.monitor=score",
        "eval.patience=3",
    )
    codes: list[int | None] = []
    while not codes or codes[-1] == -9:
        codes.append(run(url, "Here:Bombed", *overrides).code)
    assert codes == [-9, -9, 0]
    found = records.summary(url)
    assert (found["status"], found["epochs"], found["restarts"]) == ("stopped", 5, 2)
    assert found["stopped"] == "eval.patience: 3 evaluations without a better score"
    best = found["best"]
    assert (best["metric"], best["value"], best["step"]) == ("score", 3.0, 2)
    assert records.parse_state(best["checkpoint"]) in records.checkpoints(url)
    ended = run(url, "Here:Bombed", *overrides)
    assert ended.code == 0
    assert ended.out == (
        f"the run at {url} was stopped on purpose (eval.patience: 3 evaluations without a better score): "
        "5 epochs, 5 steps, score 4; to go on from its weights: a new checkpoint.url with "
        f"checkpoint.init_from={url}\n"
    )


def test_each_of_the_best_stays_in_the_store(tmp_path: Path) -> None:
    overrides = (
        "train.epochs=6",
        "eval.monitor=score",
        "checkpoint.keep=1",
        "checkpoint.every=off",
    )
    found = finished(
        tmp_path, "Scored", "args.scores=[5, 3, 4, 6, 7, 8]", "eval.keep_best=2", *overrides
    )
    assert found["best"]["value"] == 3
    assert [step for _, step in records.checkpoints(tmp_path)] == [2, 3, 6]


def test_stop_of_a_hook_ends_the_run_early_and_orderly(tmp_path: Path) -> None:
    found = finished(tmp_path, "Here:Stopping", "train.epochs=4")
    # Asked for after step 4, agreed at the next step's boundary.
    assert (found["status"], found["steps"], found["stopped"]) == ("stopped", 5, "four are enough")
    assert final(tmp_path) == 5


def test_hooks_are_called_in_order(tmp_path: Path) -> None:
    finished(
        tmp_path, "Here:Hooks", f"args.folder={tmp_path}", "train.epochs=1", "eval.every=2 steps"
    )
    assert (tmp_path / "hooks").read_text().splitlines() == [
        "step 1 0",
        "step 2 0",
        "eval 10.0 2 0",
        "step 3 0",
        "epoch 3 0",
        "end 3 1",
    ]


def test_c24_skipped_step_is_reported_everywhere(tmp_path: Path) -> None:
    found = finished(
        tmp_path, "Tracer", "args.nan_item=10", "train.on_nonfinite=skip", "train.epochs=1", "audit.samples=true"
    )  # fmt: skip
    assert (found["steps"], found["skipped_steps"]) == (3, 1)
    assert final(tmp_path) == pytest.approx(1.02, rel=1e-6)
    assert [step.skipped for step in records.committed_steps(tmp_path)] == [False, True, False]


def test_c24_stop_is_one_line_and_76(tmp_path: Path) -> None:
    ended = run(tmp_path, "Tracer", "args.nan_item=10", "train.epochs=1")
    assert ended.code == 76
    assert re.fullmatch(
        r"error: step 2: found loss nan and gradient norm \S+, expected finite numbers; first seen on rank 0, "
        r"samples \[7, 4, 2, 10\]; mend the data or set train.on_nonfinite=skip\n",
        ended.err,
    )
    assert records.summary(tmp_path)["status"] == "failed"


def test_frozen_norm_stays_frozen_through_evaluations(tmp_path: Path) -> None:
    finished(tmp_path, "Here:WithFrozenNorm", "train.epochs=3")
    weights = records.final_weights(tmp_path)
    assert float(weights["0.running_mean"]) == 0.0
    assert int(weights["0.num_batches_tracked"]) == 0


@pytest.mark.parametrize(
    ("job", "override", "line"),
    [
        (
            "Here:TwoOptimizers",
            "train.epochs=1",
            "error: TwoOptimizers.optimizer: found {one}, expected one optimizer, or losses() with a loss "
            "for each of these names\n",
        ),
        (
            "Here:Tuple",
            "train.epochs=1",
            "error: loss returned a tuple (a float32 tensor of shape (), a float32 tensor of shape (4,)), "
            "expected a scalar tensor (the mean over the batch) or Mean(sum, count); return the loss alone\n",
        ),
        (
            "Graded",
            "eval.monitor=f1",
            "error: eval.monitor: found f1, expected one of accuracy, seen\n",
        ),
        (
            "Tracer",
            "eval.monitor=loss",
            "error: eval.monitor: found loss, expected none: Tracer has no eval_dataset() to take it from; write one,",
        ),
        ("Here:Lazy", "train.epochs=1", "error: Lazy.model: found weight without a shape (a lazy module), expected one"),
        ("Empty", "train.epochs=1", "error: dataset: found Numbers with no samples, expected at least 1\n"),
        (
            "Tracer",
            "checkpoint.init_from=/nowhere/at/all.pt",
            "error: checkpoint.init_from: /nowhere/at/all.pt: found no such file",
        ),
    ],
)  # fmt: skip
def test_job_that_does_not_fit_is_one_line_and_code_2(
    job: str, override: str, line: str, tmp_path: Path
) -> None:
    ended = run(tmp_path, job, override)
    assert ended.code == 2
    assert ended.err.startswith(line), ended.err
    assert ended.err.count("\n") == 1


def test_another_seed_that_is_accepted_within_an_epoch_is_told_loudly(tmp_path: Path) -> None:
    finished(tmp_path, "Tracer", "train.epochs=2", "train.max_steps=2")
    ended = run(tmp_path, "Tracer", "train.epochs=2", "train.seed=5", "run.accept=[train.seed]")
    told = [line for line in (ended.err.splitlines() + list(ended.notes)) if "come twice" in line]
    assert ended.code == 0
    assert len(told) == 1
    assert "train.seed: accepted within epoch 1, of which 8 samples are done" in told[0]
    at_a_border = run(
        tmp_path, "Tracer", "train.epochs=3", "train.seed=6", "run.accept=[train.seed]"
    )
    assert at_a_border.code == 0
    assert "come twice" not in at_a_border.err + "".join(at_a_border.notes)


def test_a_start_refused_for_its_position_leaves_the_runs_record_as_it_was(tmp_path: Path) -> None:
    kept = finished(tmp_path, "Tracer", "train.epochs=2", "train.max_steps=2")
    other = ("train.global_batch_size=3", "run.accept=[train.global_batch_size]")
    ended = run(tmp_path, "Tracer", "train.epochs=2", *other)
    assert ended.code == 2
    assert "\nerror: position: found 8 samples into the epoch, expected a multiple" in ended.err
    assert records.summary(tmp_path) == kept
    assert finished(tmp_path, "Tracer", "train.epochs=2")["lost_steps"] == 0


def test_other_run_on_the_same_url_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    finished(tmp_path, "Tracer", "train.epochs=1")
    before = sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*.json"))
    ended = run(tmp_path, "Tracer", "train.epochs=2", "args.n=13")
    assert (ended.code, ended.err) == (
        2,
        "error: dataset: this run is another one, its length is 12 and 13; restore it, take a new "
        "checkpoint.url, or say run.accept=[dataset]\n",
    )
    assert sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*.json")) == before
