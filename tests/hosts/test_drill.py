"""A drill over several nodes: an agent that dies, and a link that is cut without a reset."""

import json
import sys

import pytest

from tests.support.cases import tracer
from tests.support.hosts import Hosts


@pytest.mark.soak
def test_drill_of_a_dead_agent_and_a_cut_link_passes(hosts: Hosts) -> None:
    # The fixture is there for its question alone, whether namespaces can be made: the drill makes its own.
    cluster = hosts.cluster
    command = [
        sys.executable, "-m", "elastic", "drill", tracer(), "args.n=60", "train.epochs=2",
        "train.global_batch_size=6", "checkpoint.every=2 steps", "--nodes", "2", "--nproc", "1",
        "--faults", "agent,partition", "--every", "10s", "--for", "20s", "--json",
        "--url", str(cluster.folder / "drills"),
    ]  # fmt: skip
    agent = cluster.spawn(command)
    assert agent.wait(280) == 0, agent.tail(80)
    output = agent.output()
    found = json.loads(output[output.index("\n{") :])
    assert {verdict["passed"] for verdict in found["verdicts"]} == {True}
    assert sorted(fault["kind"] for fault in found["faults"]) == ["agent", "partition"]
    assert cluster.leftovers() == []
