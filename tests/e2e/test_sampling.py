"""Orders, weights, mixtures and draws by address under real torchrun, with kills and other worlds."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from elastic.draws import draws_of
from elastic.sampler import Plan, epoch_order
from jobs.sampling import Mixture, Weighted
from tests.support import records
from tests.support.cases import EACH_STEP, SUPPORT
from tests.support.cluster import RUN, Cluster
from tests.support.soaking import soaked

N, BATCH, DRAWS, EPOCHS = 12, 4, 30, 2
WISHES: dict[str, Any] = {
    "Weighted": Weighted(range(N), DRAWS),
    "Mixture": Mixture([1.0, 1.0], [N // 3, N - N // 3], DRAWS),
}


def sampled(name: str) -> str:
    """The JOB argument of one of the sampled jobs."""
    return f"{SUPPORT / 'sampled.py'}:{name}"


def go_on(
    cluster: Cluster, job: str, world: int, *overrides: str, last: int | None = None, kill: str = ""
) -> records.Record:
    """Train with a world of some size, to a step or to the end, killed at places such as "4@1 9@0"."""
    limit = () if last is None else (f"train.max_steps={last}",)
    kills = () if not kill else (f"args.kill={kill}", f"args.marks={cluster.folder / 'marks'}")
    restarts = len(kill.split())
    given = (*EACH_STEP, f"train.global_batch_size={BATCH}", f"train.epochs={EPOCHS}", *overrides)
    agent = cluster.start(job, *given, *limit, *kills, nproc=world, max_restarts=restarts)
    assert agent.wait(90 + 30 * restarts) == 0, agent.tail()
    return records.summary(cluster.url)


def steps_of(url: Path) -> list[list[int]]:
    """The samples of each step of the lineage, in the order of the ranks."""
    return [step.indices for step in records.committed_steps(url)]


@pytest.mark.parametrize(("job", "order"), [("Mixture", "torch"), *soaked(("Weighted", "feistel"))])
def test_draws_are_those_declared_through_kills_and_other_worlds(
    cluster: Cluster, job: str, order: str
) -> None:
    overrides = (f"args.n={N}", f"args.draws={DRAWS}", f"train.order={order}")
    go_on(cluster, sampled(job), 2, *overrides, last=6, kill="4@1")
    go_on(cluster, sampled(job), 3, *overrides, last=11)
    summary = go_on(cluster, sampled(job), 1, *overrides)
    draws = draws_of(N, WISHES[job])
    plan = Plan(n=N, global_batch_size=BATCH, order=order, draws=draws)
    expected = [plan.indices(e, step, 0) for e in range(EPOCHS) for step in range(plan.steps)]
    assert steps_of(cluster.url) == expected
    assert summary["steps"] == len(expected) == EPOCHS * 8
    assert summary["samples"] == EPOCHS * DRAWS
    assert [g["world_size"] for g in summary["generations"]] == [2, 2, 3, 1]
    assert (
        json.loads((cluster.url / "run.json").read_text())["identity"]["sampling"] == draws.identity
    )
    if job == "Mixture":
        used = records.committed_indices(cluster.url)
        assert [sum(i < N // 3 for i in used[e]) for e in range(EPOCHS)] == [DRAWS // 2] * EPOCHS


@pytest.mark.soak
def test_the_order_without_a_table_is_exact_through_kills_and_other_worlds(
    cluster: Cluster,
) -> None:
    overrides = ("args.n=26", "train.order=feistel", "loader.workers=2")
    job = f"{SUPPORT / 'killed.py'}:Tracer"
    go_on(cluster, job, 2, *overrides, last=9, kill="3@0 8@1")
    go_on(cluster, job, 3, *overrides)
    orders = [epoch_order(26, 0, epoch, "feistel").tolist() for epoch in range(EPOCHS)]
    expected = [order[i : i + BATCH] for order in orders for i in range(0, 26, BATCH)]
    assert steps_of(cluster.url) == expected
    agent = cluster.start(job, "args.n=26", "train.epochs=9", "train.global_batch_size=4", nproc=1)
    assert agent.wait(60) != 0
    assert "train.order: this run is another one, it was 'feistel', this start has 'torch'" in (
        agent.output()
    )


@pytest.mark.soak
def test_other_weights_than_the_runs_are_refused(cluster: Cluster) -> None:
    go_on(cluster, sampled("Mixture"), 1, f"args.n={N}", last=2)
    agent = cluster.start(
        sampled("Mixture"),
        f"args.n={N}",
        "args.share=2",
        f"train.global_batch_size={BATCH}",
        nproc=1,
    )
    assert agent.wait(60) != 0
    (line,) = [x for x in agent.output().splitlines() if "sampling: this run is another one" in x]
    assert "[15, 15]" in line
    assert "[20, 10]" in line


def test_ranks_that_want_different_draws_are_refused(cluster: Cluster) -> None:
    agent = cluster.start(sampled("Various"), f"args.n={N}")
    assert agent.wait(60) != 0
    told = [x for x in agent.output().splitlines() if "ranks 0 and 1 want different draws" in x]
    assert len(told) == 1, agent.tail()
    assert records.claims(cluster.url) == {}


def test_a_dataset_that_only_iterates_is_refused_in_one_line(cluster: Cluster) -> None:
    command = [sys.executable, str(RUN), *cluster.run_arguments(sampled("Stream"), ())]
    process = cluster.spawn(command)
    assert process.wait(60) == 2
    (line,) = [x for x in process.output().splitlines() if "dataset: found Endless" in x]
    assert "docs/data.md" in line
    assert "Traceback" not in process.output()


def draws_in(folder: Path) -> dict[tuple[int, int], tuple[float, ...]]:
    """The draws of each (step, sample) that was read; those that were read twice must be equal."""
    found: dict[tuple[int, int], tuple[float, ...]] = {}
    for path in folder.glob("*.jsonl"):
        for step, samples in map(json.loads, path.read_text().splitlines()):
            for index, *draws in samples:
                assert found.setdefault((step, index), tuple(draws)) == tuple(draws)
    return found


def test_c08_draws_are_one_and_the_same_in_every_run(cluster: Cluster) -> None:
    expected: dict[tuple[int, int], tuple[float, ...]] = {}
    cases = [(1, 0, ""), (1, 2, "4@0"), (2, 4, "4@1"), (2, 0, "")]
    for world, workers, kill in cases:
        folder = cluster.folder / f"draws-{world}-{workers}-{kill}"
        cluster.url = cluster.folder / f"run-{world}-{workers}-{kill}"
        overrides = ("args.n=16", f"args.folder={folder}", f"loader.workers={workers}")
        marks = cluster.folder / "marks"
        for path in marks.glob("*"):
            path.unlink()
        summary = go_on(cluster, sampled("Draws"), world, *overrides, kill=kill)
        assert summary["steps"] == 8
        expected = expected or draws_in(folder)
        assert draws_in(folder) == expected
    assert len(expected) == 32
    for column in zip(*expected.values(), strict=True):
        assert len(set(column)) == 32
