"""Public cases on the order of samples, under real torchrun with real kills: C01 to C07."""

import pytest

from tests.support import records
from tests.support.cases import (
    EACH_STEP,
    REL,
    assert_each_sample_once,
    final_weight,
    run_killed,
    run_once,
    sets,
    tracer,
    weight,
)
from tests.support.cluster import Cluster
from tests.support.soaking import soaked


def test_c01_the_rest_of_the_epoch_is_not_shuffled_anew(cluster: Cluster) -> None:
    overrides = (*EACH_STEP, "args.n=12", "train.epochs=1", "train.global_batch_size=4")
    summary = run_killed(cluster, "Tracer", "2@1", *overrides)
    assert sets(cluster.url) == [{8, 0, 5, 9}, {7, 4, 2, 10}, {3, 1, 11, 6}]
    weights = [weight(cluster.url, step) for step in (1, 2, 3)]
    assert weights == pytest.approx([0.55, 1.07, 1.488], rel=REL)
    assert summary["generations"][1]["start_step"] == 1


def test_c02_the_resume_offset_is_that_of_one_epoch(cluster: Cluster) -> None:
    overrides = (*EACH_STEP, "args.n=20", "train.epochs=3", "train.global_batch_size=4")
    summary = run_killed(cluster, "Tracer", "4@1", *overrides)
    assert summary["steps"] == 15
    steps = records.committed_steps(cluster.url)
    assert [step.epoch for step in steps] == [0] * 5 + [1] * 5 + [2] * 5
    assert_each_sample_once(cluster.url, 20, 3)
    weights = [weight(cluster.url, step) for step in (3, 5, 15)]
    assert weights == pytest.approx([2.48025, 3.8690025, 7.577655], rel=REL)


@pytest.mark.parametrize("workers", [*soaked(0), 2])
def test_c03_a_resume_in_a_later_epoch_has_that_epochs_order(
    cluster: Cluster, workers: int
) -> None:
    overrides = (*EACH_STEP, "args.n=8", "train.epochs=3", "train.global_batch_size=4")
    run_killed(cluster, "Tracer", "4@1", *overrides, f"loader.workers={workers}")
    orders = [{4, 0, 7, 3}, {2, 5, 1, 6}, {5, 4, 2, 6}, {7, 3, 1, 0}, {0, 4, 7, 2}, {6, 5, 1, 3}]
    assert sets(cluster.url) == orders
    assert records.committed_steps(cluster.url)[3].generation > 1
    weights = [weight(cluster.url, step) for step in (3, 4, 5, 6)]
    assert weights == pytest.approx([1.0235, 1.19615, 1.401535, 1.6363815], rel=REL)


def test_c04_what_the_loader_fetched_is_not_what_was_trained(cluster: Cluster) -> None:
    overrides = (
        *EACH_STEP,
        "args.n=64",
        "args.delay=0.2",
        "train.epochs=1",
        "train.global_batch_size=8",
        "loader.workers=2",
        "loader.prefetch=8",
    )
    summary = run_killed(cluster, "Tracer", "4@1", *overrides)
    third = next(n for n in records.checkpoints(cluster.url) if n[1] == 3)
    manifest = records.read_json(records.checkpoint_path(cluster.url, third) / "manifest.json")
    assert manifest["info"]["position"] == 24
    assert sets(cluster.url)[3] == {48, 60, 55, 16, 61, 54, 9, 1}
    assert records.committed_steps(cluster.url)[3].generation > 1
    assert summary["steps"] == 8
    assert_each_sample_once(cluster.url, 64, 1)
    assert weight(cluster.url, 4) == pytest.approx(10.1718875, rel=REL)
    assert final_weight(cluster.url) == pytest.approx(18.302863, rel=REL)


@pytest.mark.parametrize("world", [3, *soaked(1, 2, 4)])
def test_c05_n_is_no_multiple_of_world_or_batch(cluster: Cluster, world: int) -> None:
    overrides = (*EACH_STEP, "args.n=10", "train.epochs=3", "train.global_batch_size=4")
    summary = run_once(cluster, tracer(), *overrides, nproc=world)
    assert summary["steps"] == 9
    assert_each_sample_once(cluster.url, 10, 3)
    weights = [weight(cluster.url, step) for step in (3, 9)]
    assert weights == pytest.approx([1.19425, 2.673095], rel=REL)


def test_c05_only_drop_last_leaves_samples_out(cluster: Cluster) -> None:
    overrides = ("args.n=10", "train.epochs=1", "train.global_batch_size=4", "train.drop_last=true")
    summary = run_once(cluster, tracer(), *overrides, nproc=3)
    assert summary["steps"] == 2
    assert final_weight(cluster.url) == pytest.approx(0.8825, rel=REL)


@pytest.mark.parametrize(("n", "epoch"), [(9, 2), *soaked((8, 1), (8, 2), (9, 1))])
def test_c06_a_checkpoint_at_the_end_of_an_epoch(cluster: Cluster, n: int, epoch: int) -> None:
    steps_per_epoch = -(-n // 4)
    overrides = (*EACH_STEP, f"args.n={n}", "train.epochs=3", "train.global_batch_size=4")
    summary = run_killed(cluster, "Tracer", f"{epoch * steps_per_epoch + 1}@1", *overrides)
    assert summary["steps"] == 3 * steps_per_epoch
    started = records.events(cluster.url, "start")[-1]
    assert (started["epoch"], started["position"]) == (epoch, 0)
    assert_each_sample_once(cluster.url, n, 3)
    if n == 8:
        assert sets(cluster.url)[2] == {5, 4, 2, 6}
        assert final_weight(cluster.url) == pytest.approx(1.6363815, rel=REL)


def test_c06_killed_between_the_last_commit_and_the_end_of_the_run(cluster: Cluster) -> None:
    overrides = (*EACH_STEP, "args.n=8", "train.epochs=3", "train.global_batch_size=4")
    run_once(cluster, tracer(), *overrides)
    # What such a kill leaves: the last commit, and a summary that still says "running".
    path = cluster.url / "summary.json"
    path.write_text(path.read_text().replace('"complete"', '"running"'))
    summary = run_once(cluster, tracer(), *overrides)
    assert summary["status"] == "complete"
    assert summary["steps"] == 6
    assert summary["lost_steps"] == 0
    assert final_weight(cluster.url) == pytest.approx(1.6363815, rel=REL)
    assert len(records.events(cluster.url, "step")) == 6


@pytest.mark.parametrize(
    ("job", "telling"),
    [("Shuffled", "content of item"), *soaked(("Uneven", "length is 40 and 41"))],
)
def test_c07_ranks_that_see_different_datasets_are_refused(
    cluster: Cluster, job: str, telling: str
) -> None:
    agent = cluster.start(tracer(job), max_restarts=3)
    assert agent.wait(60) != 0
    lines = [line for line in agent.output().splitlines() if telling in line]
    assert len(lines) == 1, agent.tail()
    assert "ranks 0 and 1" in lines[0]
    assert "Traceback" not in agent.output()
    assert records.audit(cluster.url) == []
    assert records.claims(cluster.url) == {}


def test_c07_a_restart_with_another_dataset_is_refused(cluster: Cluster) -> None:
    run_once(cluster, tracer(), "args.n=12", "train.epochs=1", "train.global_batch_size=4")
    agent = cluster.start(tracer(), "args.n=13", "train.epochs=2", "train.global_batch_size=4")
    assert agent.wait(60) != 0
    assert "length is 12 and 13" in agent.output()
