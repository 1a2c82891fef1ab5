import sys
from pathlib import Path

import pytest

from tests.support.cluster import Agent, Cluster
from tests.support.distribution import ROOT
from tests.support.ports import free_port

WORKER = ROOT / "tests" / "support" / "world_worker.py"


def start(cluster: Cluster, size: int, act: str) -> list[Agent]:
    """Start the ranks by hand, so that no agent ends the others when one dies."""
    shared = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [
        cluster.spawn(
            [sys.executable, str(WORKER), act],
            env={"RANK": str(rank), "LOCAL_RANK": str(rank), **shared},
        )
        for rank in range(size)
    ]


@pytest.mark.parametrize("size", [2, 3])
def test_every_collective_gives_what_it_must_and_all_end_in_silence(
    size: int, tmp_path: Path
) -> None:
    with Cluster(tmp_path, installed=False) as cluster:
        agents = start(cluster, size, "use")
        assert cluster.finish(90) == [0] * size, "".join(agent.output() for agent in agents)
        assert [agent.output() for agent in agents] == [""] * size


@pytest.mark.parametrize(("act", "limit_s"), [("lose", 5), ("slow", 12)])
def test_peer_that_dies_or_falls_silent_is_a_collective_error_on_each_rank(
    act: str, limit_s: int, tmp_path: Path
) -> None:
    with Cluster(tmp_path, installed=False) as cluster:
        agents = start(cluster, 3, act)
        for agent in (agents[0], agents[2]):
            assert agent.wait(90) == 1, agent.output()
            (line,) = agent.output().splitlines()
            assert "a peer is gone: " in line
            assert line.endswith("<- RuntimeError") or "<- Dist" in line
            assert int(line.split()[2]) <= limit_s
