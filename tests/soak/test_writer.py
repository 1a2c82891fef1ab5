"""Fifty kills of writers and of trainers at random moments of their saves; the newest is whole after each."""

import random
import secrets
from pathlib import Path

import pytest

from tests.support.saving import Node
from tests.support.writer_kills import kill_trainers, kill_writers

KILLS = 50


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kill", [kill_writers, kill_trainers])
def test_fifty_kills_leave_the_newest_whole(tmp_path: Path, kill: object) -> None:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    assert callable(kill)
    with Node(str(tmp_path / "run")) as node:
        kill(node, KILLS, random.Random(seed))
