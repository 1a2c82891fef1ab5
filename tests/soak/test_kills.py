"""A hundred kills of random workers at random moments, each recovered from at the cost of one restart."""

import secrets
from pathlib import Path

import pytest

from tests.support.cluster import Cluster
from tests.support.kills import recover_from_kills

KILLS = 100


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("world", [2, 3])
def test_a_hundred_kills_are_a_hundred_recoveries(tmp_path: Path, world: int) -> None:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    with Cluster(tmp_path) as cluster:
        recover_from_kills(cluster, world, KILLS, seed)
