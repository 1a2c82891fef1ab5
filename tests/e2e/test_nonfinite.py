"""Losses that are not finite: C24 with skip, stop and rollback; bounds; a rollback by hand."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import records
from tests.support.cases import EACH_STEP, REL, SLOW, SUPPORT, run_once, tracer, weight
from tests.support.cluster import Cluster
from tests.support.soaking import soaked

C24 = (
    *EACH_STEP,
    "args.n=12",
    "args.nan_item=10",
    "train.epochs=1",
    "train.global_batch_size=4",
)
SECOND = {7, 4, 2, 10}


def assert_second_step_was_skipped(url: Path) -> None:
    """Check C24's exact values."""
    assert weight(url, 1) == pytest.approx(0.55, rel=REL)
    assert weight(url, 2) == pytest.approx(0.55, rel=REL)
    assert weight(url, 3) == pytest.approx(1.02, rel=REL)
    steps = records.committed_steps(url)
    assert [step.skipped for step in steps] == [False, True, False]
    assert set(steps[1].indices) == SECOND
    used = records.committed_indices(url)
    assert sorted(used[0]) == sorted(set(range(12)) - SECOND)
    assert records.summary(url)["skipped_steps"] == 1


@pytest.mark.parametrize("world", [*soaked(1), 2])
def test_c24_a_step_with_a_nan_is_skipped_by_all_ranks(cluster: Cluster, world: int) -> None:
    summary = run_once(cluster, tracer(), *C24, "train.on_nonfinite=skip", nproc=world)
    assert_second_step_was_skipped(cluster.url)
    assert (summary["restarts"], summary["lost_steps"]) == (0, 0)


def test_c24_stop_is_one_line_that_names_step_rank_and_samples(cluster: Cluster) -> None:
    agent = cluster.start(tracer(), *C24, nproc=2, max_restarts=3)
    assert agent.wait(120) != 0
    lines = [line for line in agent.output().splitlines() if "step 2: found loss nan" in line]
    assert len(lines) == 1, agent.tail()
    assert "rank 1" in lines[0]
    assert all(str(index) in lines[0].partition("samples [")[2] for index in SECOND)
    assert records.status(cluster.url) == "failed"
    assert len(records.claims(cluster.url)) == 1


@pytest.mark.parametrize("world", [*soaked(1), 2])
def test_c24_rollback_leaves_the_step_out_in_a_new_generation_of_the_same_processes(
    cluster: Cluster, world: int
) -> None:
    summary = run_once(cluster, tracer(), *C24, "train.on_nonfinite=rollback", nproc=world)
    assert_second_step_was_skipped(cluster.url)
    assert [row["source"] for row in summary["generations"]] == ["fresh", "rollback"]
    assert (summary["restarts"], summary["lost_steps"], summary["steps"]) == (1, 0, 3)
    second = summary["generations"][1]
    assert second["parent"] == "000001-000000000001"
    assert second["cause"] == "rollback to 000001-000000000001: step 2 is not finite"
    claims = records.claims(cluster.url)
    assert claims[2]["rollback_to"] == "000001-000000000001"
    assert claims[2]["skip"] == [[0, 4]]
    assert claims[2]["agents"] == claims[1]["agents"]
    assert claims[2]["launch"] == claims[1]["launch"]


@pytest.mark.soak
def test_rollback_to_an_older_checkpoint_does_the_steps_between_again(cluster: Cluster) -> None:
    overrides = (
        *C24[2:],
        "checkpoint.every=2 steps",
        "args.n=24",
        "args.nan_item=0",
        "train.epochs=2",
        "train.on_nonfinite=rollback",
        "loader.workers=1",
    )
    summary = run_once(cluster, tracer(), *overrides, nproc=2)
    steps = records.committed_steps(cluster.url)
    skipped = [step for step in steps if step.skipped]
    assert len(steps) == 12
    assert [0 in step.indices for step in skipped] == [True, True]
    assert len({step.epoch for step in skipped}) == 2
    for epoch, used in records.committed_indices(cluster.url).items():
        left_out = {i for step in skipped if step.epoch == epoch for i in step.indices}
        assert sorted([*used, *left_out]) == list(range(24))
    assert summary["restarts"] == 2
    parents = [records.parse_state(row["parent"]) for row in summary["generations"][1:]]
    went_back = [parent[1] for parent in parents if parent is not None]
    lost = sum(step.step - 1 for step in skipped) - sum(went_back)
    assert summary["lost_steps"] == lost
    # The weights are those of a run that never used the steps.
    skipping = cluster.folder / "skipping"
    run_once(
        cluster,
        tracer(),
        *overrides,
        "train.on_nonfinite=skip",
        f"checkpoint.url={skipping}",
        nproc=1,
    )
    found = float(records.final_weights(cluster.url)["w"])
    assert found == pytest.approx(float(records.final_weights(skipping)["w"]), rel=REL)


@pytest.mark.soak
def test_rollback_keeps_the_bits_of_both_nets_and_the_average(cluster: Cluster) -> None:
    job = f"{SUPPORT / 'phased.py'}:Gan"
    overrides = (
        "args.nan_item=7",
        "train.epochs=2",
        "train.global_batch_size=4",
        "train.logical_shards=4",
        "train.reproducible=bitwise",
        "train.on_nonfinite=rollback",
        "train.ema=0.9",
        "checkpoint.every=2 steps",
    )
    found = []
    for world in (1, 3):
        url = cluster.folder / f"bits-{world}"
        agent = cluster.start(job, *overrides, f"checkpoint.url={url}", nproc=world)
        assert agent.wait(120) == 0, agent.tail()
        summary = records.summary(url)
        assert (summary["skipped_steps"], summary["restarts"]) == (2, 2)
        newest = records.checkpoint_path(url, records.checkpoints(url)[-1])
        average = (newest / "ema.safetensors").read_bytes()
        found.append((summary["weights_sha256"], average))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("what", "every", "told", "generations"),
    [
        *soaked(("skip", "1 step", "found 10 skipped steps in a row", 1)),
        ("rollback", "off", "found 3 rollbacks to checkpoint 000001-000000000000", 4),
    ],
)
def test_weights_that_are_ruined_end_the_run_with_a_line(
    cluster: Cluster, what: str, every: str, told: str, generations: int
) -> None:
    job = f"{SUPPORT / 'kept.py'}:Ruined"
    overrides = ("args.n=80", "train.epochs=1", "train.global_batch_size=4")
    given = (f"checkpoint.every={every}", f"train.on_nonfinite={what}")
    agent = cluster.start(job, *overrides, *given, nproc=2, max_restarts=3)
    assert agent.wait(150) != 0
    lines = [line for line in agent.output().splitlines() if told in line]
    assert len(lines) == 1, agent.tail()
    assert records.status(cluster.url) == "failed"
    assert len(records.claims(cluster.url)) == generations


def back(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "elastic", "rollback", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


PLAIN = (*EACH_STEP, "args.n=12", "train.global_batch_size=4")


def test_rollback_by_hand_is_obeyed_by_the_next_start(cluster: Cluster) -> None:
    run_once(cluster, tracer(), *PLAIN, "train.epochs=2", nproc=2)
    last = float(records.final_weights(cluster.url)["w"])
    done = back(str(cluster.url), "--to", "2")
    assert done.returncode == 0, done.stderr
    assert "returns to checkpoint 000001-000000000002; 4 newer left behind" in done.stdout
    assert records.status(cluster.url) == "preempted"
    again = back(str(cluster.url), "--to", "000001-000000000005")
    assert again.returncode == 2
    assert "left behind" in again.stderr
    summary = run_once(cluster, tracer(), *PLAIN, "train.epochs=2", nproc=1)
    rows = summary["generations"]
    assert [(row["generation"], row["source"], row["parent"]) for row in rows] == [
        (1, "fresh", None),
        (3, "rollback", "000001-000000000002"),
    ]
    assert rows[1]["cause"] == "rollback to 000001-000000000002 by hand"
    assert (summary["steps"], summary["lost_steps"]) == (6, 4)
    assert float(records.final_weights(cluster.url)["w"]) == pytest.approx(last, rel=REL)
    # What was left behind is cleared away by the first commit.
    assert (1, 3) not in records.checkpoints(cluster.url)


@pytest.mark.soak
def test_rollback_by_hand_is_refused_beside_a_living_run_and_forced_supersedes_it(
    cluster: Cluster,
) -> None:
    agent = cluster.start(tracer(), *PLAIN, "train.epochs=50", SLOW, nproc=2, max_restarts=3)
    cluster.until_committed(3)
    refused = back(str(cluster.url), "--to", "2")
    assert refused.returncode == 2
    assert "generation 1 may be at work" in refused.stderr
    assert len(refused.stderr.splitlines()) == 1
    done = back(str(cluster.url), "--to", "2", "--force")
    assert done.returncode == 0, done.stderr
    assert agent.wait(60) != 0
    assert len(records.claims(cluster.url)) == 2  # no restart was spent
    newest = max(step for generation, step in records.checkpoints(cluster.url) if generation == 1)
    summary = run_once(
        cluster, tracer(), *PLAIN, "train.epochs=50", f"train.max_steps={newest + 1}", nproc=1
    )
    assert summary["generations"][-1]["source"] == "rollback"
    assert summary["generations"][-1]["start_step"] == 2
    assert summary["steps"] == newest + 1
