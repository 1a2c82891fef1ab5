"""Public cases on worlds that change their size: C09, C10, C11, C13."""

import signal

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
from tests.support.cluster import Agent, Cluster
from tests.support.soaking import soaked

# A busy machine keeps an agent from the processor for longer than the seconds that we set.
PATIENT = "--rdzv_conf=last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=8"


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


def steps_done_again(cluster: Cluster) -> int:
    """The steps that the audit has in more than one generation, each time but the first."""
    done = {(line["generation"], line["step"]) for line in records.audit(cluster.url)}
    return len(done) - len({step for _, step in done})


def test_c10_a_node_that_leaves_and_comes_back_costs_no_step(cluster: Cluster) -> None:
    # The loss sleeps: a signal comes in the middle of a step.
    overrides = ("args.n=40", "args.delay=0.3", "train.global_batch_size=4")
    memory = ("checkpoint.every=off", "checkpoint.tier.memory=1 step")
    given = (tracer(), *overrides, *memory, "train.epochs=1000")

    def start() -> Agent:
        return cluster.start(*given, nproc=1, nnodes="1:2", max_restarts=5, launcher=[PATIENT])

    first = start()
    cluster.until_step(2)
    second = start()
    joined = until_world(cluster, 2, after=0)
    second.signal(signal.SIGTERM)
    assert second.wait(60) == 1
    left = until_world(cluster, 1, after=joined)
    second = start()
    until_world(cluster, 2, after=left)
    second.signal(signal.SIGTERM)
    first.signal(signal.SIGTERM)
    assert [agent.wait(60) for agent in (first, second)] == [1, 1]
    assert "Traceback" not in first.output() + second.output(), first.tail()
    epochs = max(line["epoch"] for line in records.audit(cluster.url)) + 1
    run_once(cluster, *given[:-1], f"train.epochs={epochs}", nproc=1)
    summary = records.summary(cluster.url)
    assert summary["steps"] == 10 * epochs
    assert_each_sample_once(cluster.url, 40, epochs)
    # With a snapshot at each step a change of the world costs the step under way at most.
    assert summary["lost_steps"] == steps_done_again(cluster) <= summary["restarts"]


def until_world(cluster: Cluster, size: int, *, after: int) -> int:
    """Wait until a world of a size, later than a generation, is in its second step; its generation."""

    def there() -> int | None:
        claims = records.claims(cluster.url)
        found = [n for n, one in claims.items() if n > after and one["world_size"] == size]
        return max(found, default=None)

    found = cluster.until(there, f"a world of {size} after generation {after}", timeout_s=240)
    begun = cluster.until_step(1, generation=found)
    cluster.until_step(begun + 1, generation=found)
    return found


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


@pytest.mark.parametrize("worlds", [[1, 5], *soaked([1, 2, 3, 5])])
def test_c13_the_loss_shown_does_not_jump_with_the_world(
    cluster: Cluster, worlds: list[int]
) -> None:
    epochs = len(worlds)
    overrides = ("args.n=12", "args.lr=0", f"train.epochs={epochs}", "train.global_batch_size=12")
    for last, world in enumerate(worlds, 1):
        run_until(cluster, world, last if last < epochs else None, *overrides)
    losses = [event["loss"] for event in records.step_events(cluster.url)]
    assert losses == pytest.approx([253 / 12] * epochs, rel=1e-6)
    assert final_weight(cluster.url) == 0
