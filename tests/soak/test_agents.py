"""Twenty kills of random agents with their workers, each at the cost of one restart of the others."""

import secrets
from pathlib import Path

import pytest

from tests.support.agent_kills import recover_from_agent_kills
from tests.support.cluster import Cluster

KILLS = 20


@pytest.mark.timeout(3600)
def test_twenty_agents_are_killed_and_replaced(tmp_path: Path) -> None:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    with Cluster(tmp_path) as cluster:
        recover_from_agent_kills(cluster, KILLS, seed)
