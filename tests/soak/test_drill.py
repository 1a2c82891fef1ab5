"""Drills of thirty faults on the small GPT: equal bits, exact samples, and a cost within a point of what it had to be."""

import json
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import Cluster
from tests.support.sameness import GPT

FAULTS = 30
STEPS = 1500
ONE_NODE = "kill,kill,stop,agent,preempt,storage"
TWO_NODES = "kill,agent,preempt,stop,storage"


def small_gpt(folder: Path) -> list[str]:
    text = folder / "text.txt"
    text.write_text("".join(f"{number} times {number} is {number**2}. " for number in range(900)))
    return [
        f"args.url={text}",
        f"args.cache={folder / 'cache'}",
        "args.n_layer=1",
        "args.width=16",
        "args.block=24",
        "train.epochs=1000",
        f"train.max_steps={STEPS}",
        "train.global_batch_size=26",
        "train.logical_shards=6",
        "train.micro_batch_size=3",
        "eval.every=100 steps",
        "checkpoint.every=5 steps",
    ]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """What the drill started ends with the test."""
    with Cluster(tmp_path) as made:
        yield made


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("faults", "shape"),
    [
        (ONE_NODE, ("--nproc", "2")),
        (TWO_NODES, ("--nodes", "2", "--nproc", "1")),
    ],
    ids=["one node", "two nodes"],
)
def test_thirty_faults_cost_what_they_have_to(
    cluster: Cluster, faults: str, shape: tuple[str, ...]
) -> None:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    words = ["--faults", faults, "--every", "10s", "--for", f"{10 * FAULTS}s", "--seed", str(seed)]
    command = [sys.executable, "-m", "elastic", "drill", str(GPT), *small_gpt(cluster.folder)]
    place = ["--url", str(cluster.folder / "drills"), "--json"]
    agent = cluster.spawn([*command, *words, *shape, *place])
    code = agent.wait(3000)
    output = agent.output()
    print(output)
    assert code == 0, agent.tail(100)
    found: dict[str, Any] = json.loads(output[output.index("\n{") :])
    assert [verdict["name"] for verdict in found["verdicts"] if not verdict["passed"]] == []
    assert len(found["faults"]) == FAULTS
    assert found["cost"]["steps"] == STEPS
    assert found["cost"]["efficiency"] >= found["cost"]["efficiency_bound"] - 0.01
