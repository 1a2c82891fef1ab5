"""`python -m elastic drill` as a whole: real faults on real torchruns, passed, failed, and broken off."""

import json
import signal
import sys
from typing import Any

import pytest

from checkpoints.segments import SHM
from tests.support import processes, records
from tests.support.cases import SUPPORT, tracer
from tests.support.cluster import Agent, Cluster

SMALL = (
    "args.n=60",
    "train.epochs=2",
    "train.global_batch_size=6",
    "checkpoint.every=2 steps",
)  # 20 steps


def start(cluster: Cluster, job: str, *words: str) -> Agent:
    command = [sys.executable, "-m", "elastic", "drill", job, *SMALL, *words]
    return cluster.spawn([*command, "--url", str(cluster.folder / "drills")])


def result(agent: Agent) -> dict[str, Any]:
    """The JSON behind the lines of progress."""
    output = agent.output()
    found = json.loads(output[output.index("\n{") :])
    assert isinstance(found, dict)
    return found


def verdicts(found: dict[str, Any]) -> dict[str, Any]:
    return {verdict["name"]: verdict["passed"] for verdict in found["verdicts"]}


def test_drill_of_a_kill_a_stop_and_a_new_agent_passes(cluster: Cluster) -> None:
    agent = start(
        cluster, tracer(), "--faults", "kill,stop,agent", "--every", "5s", "--for", "15s", "--json",
        "--seed", "3",
    )  # fmt: skip
    assert agent.wait(240) == 0, agent.tail(80)
    found = result(agent)
    assert found["passed"]
    assert set(verdicts(found).values()) == {True}
    assert sorted(fault["kind"] for fault in found["faults"]) == ["agent", "kill", "stop"]
    restarts = {fault["kind"]: len(fault["claims"]) for fault in found["faults"]}
    assert restarts == {"agent": 1, "kill": 1, "stop": 0}
    assert all(fault["recovery_s"] > 0 for fault in found["faults"])
    cost = found["cost"]
    assert cost["steps"] == 20
    assert cost["lost_steps"] == sum(fault["lost_steps"] for fault in found["faults"])
    assert 0 < cost["efficiency"] <= 1
    assert 0 < cost["goodput"] < cost["goodput_bound"] + 0.05 < 1.05
    assert cluster.leftovers() == []


@pytest.mark.soak
def test_drill_of_a_job_that_trains_by_chance_fails(cluster: Cluster) -> None:
    job = f"{SUPPORT / 'haphazard.py'}:Haphazard"
    agent = start(cluster, job, "--faults", "stop", "--every", "4s", "--for", "4s")
    assert agent.wait(180) == 1, agent.tail(80)
    output = agent.output()
    assert "FAIL weights: found weights_sha256 " in output
    assert "ok   samples: 120 samples in 20 steps, each once an epoch" in output
    assert "drill: FAILED (weights); seed " in output


@pytest.mark.soak
def test_drill_that_is_broken_off_leaves_nothing_behind(cluster: Cluster) -> None:
    agent = start(cluster, tracer(), "--faults", "storage", "--every", "5s", "--for", "60s")

    def away() -> bool:
        return "storage of drill-" in agent.output() or bool(
            list(cluster.folder.glob("drills/*.away"))
        )

    cluster.until(away, "the store is away", timeout_s=200)
    processes.send([agent.pid], signal.SIGINT)
    assert agent.wait(60) == 130, agent.tail(80)
    assert agent.output().endswith("drill: broken off; all that it started is ended\n")
    assert cluster.leftovers() == []
    # What was taken away is given back.
    (run,) = cluster.folder.glob("drills/drill-*/run.json")
    run_id = records.read_json(run)["run_id"]
    assert [path for path in SHM.iterdir() if run_id in path.name] == []
    assert not list(cluster.folder.glob("drills/*.away"))
