"""Public cases on worlds that change their size: C09, C11, C13; the run is started again with other workers."""

import pytest

from tests.support import records
from tests.support.cases import (
    EACH_STEP,
    REL,
    assert_each_sample_once,
    final_weight,
    run_once,
    tracer,
    weight,
)
from tests.support.cluster import Cluster


def run_until(
    cluster: Cluster, world: int, last: int | None, *overrides: str, job: str = "Tracer"
) -> None:
    """Go on with a world of some size up to a step, or to the end."""
    limit = () if last is None else (f"train.max_steps={last}",)
    run_once(cluster, tracer(job), *EACH_STEP, *overrides, *limit, nproc=world)


def test_c09_samples_done_do_not_depend_on_the_present_world(cluster: Cluster) -> None:
    overrides = ("args.n=60", "train.epochs=2", "train.global_batch_size=6")
    for world, last in ((4, 3), (3, 5), (2, 10), (4, None)):
        run_until(cluster, world, last, *overrides)
    summary = records.summary(cluster.url)
    assert summary["steps"] == 20
    assert [g["world_size"] for g in summary["generations"]] == [4, 3, 2, 4]
    assert_each_sample_once(cluster.url, 60, 2)
    weights = [weight(cluster.url, 10), final_weight(cluster.url)]
    assert weights == pytest.approx([19.250208, 26.262978], rel=REL)
    starts = records.events(cluster.url, "start")
    assert [start["position"] for start in starts][:3] == [0, 18, 30]


def test_c11_the_global_batch_does_not_change_with_the_world(cluster: Cluster) -> None:
    overrides = ("args.n=12", "train.epochs=1", "train.global_batch_size=4")
    for world, last in ((4, 1), (3, 2), (1, None)):
        run_until(cluster, world, last, *overrides)
    steps = records.committed_steps(cluster.url)
    assert [len(step.indices) for step in steps] == [4, 4, 4]
    assert sorted(len(part) for part in steps[1].parts.values()) == [1, 1, 2]
    assert [event["lr"] for event in records.step_events(cluster.url)] == [0.1, 0.1, 0.1]
    weights = [weight(cluster.url, step) for step in (1, 2, 3)]
    assert weights == pytest.approx([0.55, 1.07, 1.488], rel=REL)


def test_c13_the_loss_shown_does_not_jump_with_the_world(cluster: Cluster) -> None:
    overrides = ("args.n=12", "args.lr=0", "train.epochs=4", "train.global_batch_size=12")
    for world, last in ((1, 1), (2, 2), (3, 3), (5, None)):
        run_until(cluster, world, last, *overrides)
    losses = [event["loss"] for event in records.step_events(cluster.url)]
    assert losses == pytest.approx([253 / 12] * 4, rel=1e-6)
    assert final_weight(cluster.url) == 0
