"""Runs whose agents meet through a service: etcd, and a c10d store in a process of its own (docs/rendezvous.md)."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import processes, records
from tests.support.cases import (
    EACH_STEP,
    REL,
    assert_each_sample_once,
    final_weight,
    run_once,
    tracer,
)
from tests.support.cluster import Agent, Cluster
from tests.support.launched import launch, said
from tests.support.meetings import EtcdServer, StoreServer, options
from tests.support.soaking import soaked

N = 40
GIVEN = (*EACH_STEP, f"args.n={N}", "args.delay=0.2", "train.global_batch_size=4")
SERVERS = {"etcd": EtcdServer, "store": StoreServer}


@pytest.fixture
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[EtcdServer | StoreServer]:
    """The service of this name, with nothing in it."""
    with SERVERS[request.param](tmp_path / "service").running() as made:
        yield made


def start(cluster: Cluster, server: EtcdServer | StoreServer, by: str, *overrides: str) -> Agent:
    """Start a node with one worker."""
    rdzv_id = None if by == "launch" else cluster.rdzv_id
    given = options(server, rdzv_id=rdzv_id)
    if by == "launch":
        return launch(cluster, *GIVEN, *overrides, options=given)
    return cluster.start(
        tracer(), *GIVEN, *overrides, nproc=1, nnodes="1:2", max_restarts=20, launcher=given
    )


def until_world(cluster: Cluster, size: int, *, after: int) -> int:
    """Wait until a later world of a size has done a step; its generation."""

    def stepped() -> int | None:
        claims = records.claims(cluster.url)
        done = {name[0] for name in records.checkpoints(cluster.url)}
        found = [n for n, one in claims.items() if n > after and one["world_size"] == size]
        return max((n for n in found if n in done), default=None)

    return cluster.until(stepped, f"a world of {size} after generation {after}", timeout_s=240)


def expected_weight(url: Path) -> float:
    """The tracer's w after the lineage's steps."""
    w = 0.0
    for step in records.committed_steps(url):
        w += 0.1 * (sum(step.indices) / len(step.indices) - w)
    return w


def assert_right_model(cluster: Cluster) -> None:
    """Finish the epoch that was begun, alone, and check samples and model."""
    epochs = max(line["epoch"] for line in records.audit(cluster.url)) + 1
    run_once(cluster, tracer(), *GIVEN, f"train.epochs={epochs}", nproc=1)
    assert_each_sample_once(cluster.url, N, epochs)
    assert final_weight(cluster.url) == pytest.approx(expected_weight(cluster.url), rel=REL)


@pytest.mark.parametrize(
    ("server", "by"),
    [("etcd", "torchrun"), *soaked(("store", "launch"), ("etcd", "launch"), ("store", "torchrun"))],
    indirect=["server"],
)
def test_a_worker_and_the_first_agent_die_and_a_node_joins(
    cluster: Cluster, server: EtcdServer | StoreServer, by: str
) -> None:
    first = start(cluster, server, by, "train.epochs=1000")
    until_world(cluster, 1, after=0)
    second = start(cluster, server, by, "train.epochs=1000")
    newest = until_world(cluster, 2, after=0)
    cluster.kill(1)
    newest = until_world(cluster, 2, after=newest)
    processes.send([first.pid, *first.workers().values()], signal.SIGKILL)
    newest = until_world(cluster, 1, after=newest)
    third = start(cluster, server, by, "train.epochs=1000")
    until_world(cluster, 2, after=newest)
    for agent in (second, third):
        agent.signal(signal.SIGTERM)
    ended = 75 if by == "launch" else 1
    assert [agent.wait(60) for agent in (second, third)] == [ended, ended], second.tail()
    assert records.status(cluster.url) == "preempted"
    assert "Traceback" not in second.output() + third.output(), second.tail()
    assert_right_model(cluster)


@pytest.mark.soak
@pytest.mark.parametrize("server", ["etcd", "store"], indirect=True)
def test_a_finished_run_is_started_again_by_the_same_command(
    cluster: Cluster, server: EtcdServer | StoreServer
) -> None:
    for epochs in (1, 2):
        agent = start(cluster, server, "launch", f"train.epochs={epochs}", "args.delay=0")
        assert agent.wait(200) == 0, agent.tail()
        assert said(agent) == []
        assert_each_sample_once(cluster.url, N, epochs)
    # Plain torchrun cannot take another id by itself, and says which way is out.
    again = cluster.start(
        tracer(), *GIVEN, "train.epochs=3", nproc=1, launcher=options(server, rdzv_id="given")
    )
    assert again.wait(200) == 0, again.tail()
    again = cluster.start(
        tracer(), *GIVEN, "train.epochs=4", nproc=1, launcher=options(server, rdzv_id="given")
    )
    assert again.wait(200) == 1
    (line,) = [line for line in again.output().splitlines() if line.startswith("torchrun: ")]
    assert "the rendezvous given at" in line
    assert "give all nodes another --rdzv_id" in line
    assert "Traceback" not in again.output()


@pytest.mark.soak
@pytest.mark.parametrize("server", ["etcd", "store"], indirect=True)
def test_the_service_dies_and_comes_back(
    cluster: Cluster, server: EtcdServer | StoreServer
) -> None:
    agents = [start(cluster, server, "launch", "train.epochs=1000") for _ in range(2)]
    newest = until_world(cluster, 2, after=0)
    server.kill()
    cluster.kill(1)
    cluster.until(lambda: any(map(said, agents)), "a word on the rendezvous")
    server.start()
    until_world(cluster, 2, after=newest)
    for agent in agents:
        agent.signal(signal.SIGTERM)
    assert [agent.wait(60) for agent in agents] == [75, 75]
    assert_right_model(cluster)
