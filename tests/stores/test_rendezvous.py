"""Agents that meet through each store: the record under many writers, and a leader that dies (docs/rendezvous.md)."""

import asyncio
import dataclasses
import json
import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from elastic.ballot import Ballot
from elastic.election import Leader, Record
from tests.support import processes, records
from tests.support.cases import EACH_STEP, assert_each_sample_once, run_once, tracer
from tests.support.cluster import Cluster
from tests.support.members import members

LEADER = Leader(id="l", addresses=("127.0.0.1",), port=1, place="there", name="h1 (pid 1)")
RECORD = Record(launch="one", token="secret", epoch=1, leader=LEADER)  # noqa: S106 - a test's
STORES = ("gcs", "azure", "sftp")


@dataclasses.dataclass(frozen=True)
class Endpoint:
    """Where agents meet, and how they get there: by options, or by their environment."""

    url: str
    options: Mapping[str, object]
    env: Mapping[str, str]


@pytest.fixture(params=STORES)
def endpoint(request: pytest.FixtureRequest) -> Endpoint:
    """A place on a real server that nobody has used."""
    server: Any = request.getfixturevalue(f"{request.param}_server")
    options = server.options if request.param == "sftp" else server.options()
    variable = {"gcs": "FSSPEC_GCS", "azure": "FSSPEC_ABFS", "sftp": "FSSPEC_SFTP"}[request.param]
    return Endpoint(f"{server.url()}/rdzv", options, {variable: json.dumps(options)})


def test_of_many_that_take_an_epoch_one_wins(endpoint: Endpoint) -> None:
    """Each adds one to the epoch it has read, over and over: every win has an epoch of its own."""
    wins: list[int] = []

    def take() -> None:
        async def main() -> None:
            ballot = Ballot(endpoint.url, "id", endpoint.options)
            while len(wins) < 12:
                found = await ballot.read(20)
                record, tag = found or (dataclasses.replace(RECORD, epoch=0), None)
                wanted = dataclasses.replace(record, epoch=record.epoch + 1)
                if await ballot.write(wanted, tag, 20) is not None:
                    wins.append(wanted.epoch)

        asyncio.run(main())

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert sorted(wins) == list(range(1, len(wins) + 1))
    assert len(wins) >= 12


def test_two_agents_meet_and_each_is_killed_and_replaced(
    endpoint: Endpoint, tmp_path: Path
) -> None:
    # One of the two leads, whichever: it is among the killed.
    with members(tmp_path, endpoint=endpoint.url, env=endpoint.env) as found:
        found.start(2, nodes="1:2")
        found.world(2)
        for agent in list(found.agents):
            killed = found.kill(agent)
            found.world(1, after=killed)
            found.start(1, nodes="1:2")
            found.world(2, after=killed)
        assert len({event["launch"] for event in found.events("world")}) == 1
        assert found.finish() == [0, 0]


@pytest.mark.soak
def test_a_run_outlives_the_agent_that_it_began_with(endpoint: Endpoint, tmp_path: Path) -> None:
    rdzv = ["--rdzv_backend=fsspec", f"--rdzv_endpoint={endpoint.url}"]
    given = (tracer(), *EACH_STEP, "args.n=40", "args.delay=0.2", "train.global_batch_size=4")
    with Cluster(tmp_path) as cluster:

        def start() -> Any:
            return cluster.start(
                *given, "train.epochs=1000", nproc=1, nnodes="1:2", max_restarts=20, launcher=rdzv, env=endpoint.env
            )  # fmt: skip

        first = start()
        cluster.until_committed(1)
        second = start()
        cluster.until_started(2)
        cluster.until_step(1, generation=2)
        processes.send([first.pid, *first.workers().values()], signal.SIGKILL)
        cluster.until_started(3)
        cluster.until_step(1, generation=3)
        second.signal(signal.SIGTERM)
        assert second.wait(60) == 1
        rows = records.summary(cluster.url)["generations"]
        assert [row["world_size"] for row in rows] == [1, 2, 1]
        epochs = max(line["epoch"] for line in records.audit(cluster.url)) + 1
        run_once(cluster, *given, f"train.epochs={epochs}", nproc=1)
        assert_each_sample_once(cluster.url, 40, epochs)
