"""Public cases on exact means, rates and metrics: C45, C46, C47."""

import pytest

from tests.support import records
from tests.support.cases import EACH_STEP, REL, run_once, tracer, weight
from tests.support.cluster import Cluster
from tests.support.soaking import soaked

OTHERS = [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (2, 4), (3, 2), (3, 4), (4, 1), (4, 2), (4, 4)]


@pytest.mark.parametrize(("world", "micro"), [(3, 1), *soaked(*OTHERS)])
def test_c45_items_that_weigh_differently_have_an_exact_mean(
    cluster: Cluster, world: int, micro: int
) -> None:
    overrides = (
        *EACH_STEP,
        "args.n=10",
        "args.weighted=true",
        "train.epochs=1",
        "train.global_batch_size=4",
        f"train.micro_batch_size={micro}",
    )
    run_once(cluster, tracer(), *overrides, nproc=world)
    weights = [weight(cluster.url, step) for step in (1, 2, 3)]
    assert weights == pytest.approx([0.4333333, 0.99, 1.191], rel=REL)


STAIRS = {0: 0.1, 19: 0.1, 20: 0.01, 39: 0.01, 40: 0.001, 59: 0.001}


@pytest.mark.parametrize("worlds", [(4, 1), *soaked(((1,),), ((2,),))])
def test_c46_the_schedule_does_not_depend_on_the_world(
    cluster: Cluster, worlds: tuple[int, ...]
) -> None:
    overrides = (
        "args.n=240",
        "train.epochs=1",
        "train.global_batch_size=4",
        "train.micro_batch_size=1",
    )
    for world in worlds[:-1]:
        run_once(cluster, tracer("Stairs"), *overrides, "train.max_steps=10", nproc=world)
    run_once(cluster, tracer("Stairs"), *overrides, nproc=worlds[-1])
    rates = [event["lr"] for event in records.step_events(cluster.url)]
    assert len(rates) == 60
    assert {t: rates[t] for t in STAIRS} == pytest.approx(STAIRS, rel=1e-12)


@pytest.mark.parametrize("worlds", [[1, 4], *soaked([1, 2, 3, 4])])
def test_c47_metrics_count_each_item_once(cluster: Cluster, worlds: list[int]) -> None:
    overrides = ("args.n=4", "train.global_batch_size=4", "eval.batch_size=4")
    for world in worlds:
        summary = run_once(
            cluster, tracer("Graded"), *overrides, f"train.epochs={world}", nproc=world
        )
        assert summary["metrics"] == {"accuracy": 0.7, "seen": 10.0}
