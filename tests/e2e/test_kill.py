"""Workers and agents that die, leave and join: every sample once, every step once, the same losses."""

import secrets
import signal
from pathlib import Path

import pytest

from tests.support import processes, records
from tests.support.agent_kills import recover_from_agent_kills
from tests.support.cases import (
    SLOW,
    assert_each_sample_once,
    final_weight,
    killed,
    run_killed,
    run_once,
    tracer,
)
from tests.support.cluster import Agent, Cluster
from tests.support.kills import recover_from_kills
from tests.support.soaking import soaked

EPOCHS = 3


def undisturbed(folder: Path, *overrides: str) -> tuple[records.Record, list[float], float]:
    """The same run in a world of one without faults: summary, losses, final weight."""
    folder.mkdir()
    with Cluster(folder) as other:
        summary = run_once(other, tracer(), *overrides, nproc=1)
        losses = [event["loss"] for event in records.step_events(other.url)]
        return summary, losses, final_weight(other.url)


def assert_as_undisturbed(cluster: Cluster, folder: Path, n: int, *overrides: str) -> None:
    """Check samples, steps, losses and the final weight against the run without faults."""
    expected, losses, weight = undisturbed(folder, *overrides)
    summary = records.summary(cluster.url)
    assert (summary["status"], summary["steps"]) == ("complete", expected["steps"])
    assert summary["samples"] == expected["samples"] == n * EPOCHS
    assert_each_sample_once(cluster.url, n, EPOCHS)
    found = [event["loss"] for event in records.step_events(cluster.url)]
    assert found == pytest.approx(losses, rel=1e-4)
    assert final_weight(cluster.url) == pytest.approx(weight, rel=1e-5)


@pytest.mark.soak
def test_three_kills_then_the_world_goes_from_2_to_1_to_3_to_2(
    cluster: Cluster, tmp_path: Path
) -> None:
    settings = ("args.n=83", f"train.epochs={EPOCHS}", "train.global_batch_size=4")
    kill = ("args.kill=9@0 12@1 16@0", f"args.marks={tmp_path}/marks")
    overrides = (*settings, *kill, "checkpoint.every=1 step", "train.step_delay=0.5")

    def agent() -> Agent:
        return cluster.start(killed(), *overrides, nproc=1, nnodes="1:4", max_restarts=20)

    def until_world(size: int) -> None:
        def there() -> int | None:
            newest = max(records.started(cluster.url), default=0)
            claim = records.claims(cluster.url).get(newest, {})
            return newest if claim.get("world_size") == size else None

        generation = cluster.until(there, f"a world of {size}")
        cluster.until_step(1, generation=generation)

    host = agent()  # it holds the rendezvous: it stays
    second = agent()
    until_world(2)
    cluster.until_step(17)
    assert len(list((tmp_path / "marks").iterdir())) == 3
    second.signal(signal.SIGTERM)
    second.wait(40)
    until_world(1)
    third, _ = agent(), agent()
    until_world(3)
    third.signal(signal.SIGTERM)
    third.wait(40)
    until_world(2)
    cluster.finish(120)
    assert host.code == 0, host.tail()
    sizes = [g["world_size"] for g in records.summary(cluster.url)["generations"]]
    changes = [size for size, before in zip(sizes[1:], sizes, strict=False) if size != before]
    assert [sizes[0], *changes] in ([2, 1, 3, 2], [1, 2, 1, 3, 2], [1, 2, 1, 2, 3, 2]), sizes
    assert_as_undisturbed(cluster, tmp_path / "undisturbed", 83, *settings)


@pytest.mark.soak
def test_a_batch_that_three_ranks_do_not_divide_and_a_short_last_step(
    cluster: Cluster, tmp_path: Path
) -> None:
    settings = ("args.n=230", f"train.epochs={EPOCHS}", "train.global_batch_size=50")
    run_killed(cluster, "Tracer", "3@0 7@1 10@2", *settings, "checkpoint.every=1 step", nproc=3)
    assert_as_undisturbed(cluster, tmp_path / "undisturbed", 230, *settings)


@pytest.mark.soak
def test_each_killed_agent_costs_the_others_one_restart(cluster: Cluster) -> None:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    recover_from_agent_kills(cluster, 2, seed)


@pytest.mark.parametrize("world", [*soaked(2), 3])
def test_each_kill_costs_one_restart(cluster: Cluster, world: int) -> None:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    recover_from_kills(cluster, world, 10, seed)


def test_of_two_launches_on_one_url_the_older_ends_and_nothing_is_lost(cluster: Cluster) -> None:
    overrides = (
        "args.n=40",
        "train.epochs=6",
        "train.global_batch_size=4",
        "checkpoint.every=1 step",
    )
    older = cluster.start(tracer(), *overrides, SLOW, max_restarts=5, launcher=["--rdzv_id=older"])
    cluster.until_committed(3)
    other = f"--rdzv_endpoint=localhost:{cluster.port + 1}"
    newer = cluster.start(tracer(), *overrides, max_restarts=5, launcher=["--rdzv_id=newer", other])
    assert older.wait(60) == 1
    assert "superseded" in older.output(), older.tail()
    assert newer.wait(60) == 0, newer.tail()
    summary = records.summary(cluster.url)
    assert summary["status"] == "complete"
    assert summary["generations"][-1]["generation"] == summary["generation"] == 2
    assert_each_sample_once(cluster.url, 40, 6)


def test_an_old_primary_that_wakes_up_is_fenced(cluster: Cluster) -> None:
    overrides = (
        "args.n=40",
        "train.epochs=1",
        "train.global_batch_size=4",
        "checkpoint.every=1 step",
        SLOW,
    )
    older = cluster.start(tracer(), *overrides, max_restarts=5, launcher=["--rdzv_id=older"])
    cluster.until_committed(2)
    stopped = older.workers()[0]
    processes.send([stopped], signal.SIGSTOP)
    other = f"--rdzv_endpoint=localhost:{cluster.port + 1}"
    newer = cluster.start(tracer(), *overrides, max_restarts=5, launcher=["--rdzv_id=newer", other])
    cluster.until_started(2)
    cluster.until_step(4, generation=2)
    processes.send([stopped], signal.SIGCONT)
    assert older.wait(60) == 1
    assert "superseded" in older.output(), older.tail()
    assert newer.wait(60) == 0, newer.tail()
    assert records.summary(cluster.url)["restarts"] == 1
    assert [name[0] for name in records.checkpoints(cluster.url)] == [2] * 3
    assert_each_sample_once(cluster.url, 40, 1)


def test_workers_do_not_outlive_their_agent(cluster: Cluster) -> None:
    agent = cluster.start(tracer(), "args.n=400", SLOW)
    cluster.until_step(2)
    agent.signal(signal.SIGKILL)
    agent.wait(5)
    cluster.until(lambda: not cluster.leftovers(), "the workers' end", timeout_s=5, idle=True)


def test_a_sigterm_saves_the_step_and_the_next_start_goes_on(cluster: Cluster) -> None:
    overrides = (
        "args.n=40",
        "train.epochs=1",
        "train.global_batch_size=4",
        "checkpoint.every=off",
        "train.step_delay=0.2",
    )
    agent = cluster.start(tracer(), *overrides)
    cluster.until_step(3)
    agent.signal(signal.SIGTERM)
    assert agent.wait(40) == 1
    assert records.status(cluster.url) == "preempted"
    saved = records.newest_step(cluster.url)
    assert saved >= 3
    assert "Traceback" not in agent.output(), agent.tail()
    summary = run_once(cluster, tracer(), *overrides)
    assert summary["generations"][1]["start_step"] == saved
    assert summary["lost_steps"] == 0
    assert_each_sample_once(cluster.url, 40, 1)
