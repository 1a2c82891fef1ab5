"""Two hosts, and a worker of one of them that hangs: its host tells its stack and ends it, and the run goes on over both."""

import re

import pytest

from tests.hosts.test_rendezvous import folder
from tests.support import records
from tests.support.cases import SUPPORT, assert_each_sample_once
from tests.support.hosts import Hosts

JOB = f"{SUPPORT / 'hanging.py'}:Hanging"


@pytest.mark.soak
def test_a_worker_that_hangs_on_one_host_is_told_there_and_both_go_on(hosts: Hosts) -> None:
    given = (
        "args.hangs=loss:loop:4@1",
        f"args.marks={hosts.cluster.folder}/marks",
        "hang_after=3 s",
        "checkpoint.every=1 step",
        "train.global_batch_size=4",
        "train.epochs=1",
        "train.step_delay=0.2",
        "eval.every=off",
        "timeout=60 s",
    )
    for number in (1, 2):
        hosts.start(number, JOB, *given, rdzv=folder(hosts), nnodes="2")
    for agent in hosts.agents.values():
        assert agent.wait(240) == 0, agent.tail(60)
    summary = records.summary(hosts.cluster.url)
    assert summary["status"] == "complete"
    assert [row["world_size"] for row in summary["generations"]] == [2, 2]
    cause = summary["generations"][1]["cause"]
    assert re.fullmatch(
        r"worker hung \(rank 1, step 4, step, \S+hanging\.py:\d+\): no sign of life for \d+ s",
        cause,
    )
    # Of the two agents the one beside the worker tells its stack; the other's worker waits and is not accused.
    fault = next(event["fault"] for event in records.events(hosts.cluster.url, "fault"))
    assert (fault["kind"], fault["rank"], fault["step"]) == ("hung", 1, 4)
    there = [agent for number, agent in hosts.agents.items() if f"h{number}" == fault["host"]]
    (beside,) = there
    (other,) = [agent for agent in hosts.agents.values() if agent is not beside]
    assert re.search(r"--- rank 1 \(pid \d+, step 4, step\) hangs:\n", beside.output())
    assert "in hang" in beside.output()
    assert "hangs:" not in other.output()
    assert_each_sample_once(hosts.cluster.url, 40, 1)
