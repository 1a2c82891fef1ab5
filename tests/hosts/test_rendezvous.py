"""Three hosts under `--rdzv_backend=fsspec`: any of them dies, is cut off, comes back, is replaced; the run finishes."""

import pytest

from tests.support import records
from tests.support.cases import EACH_STEP, REL, assert_each_sample_once, final_weight, tracer
from tests.support.hosts import Hosts

TWO_EPOCHS = ("args.n=60", "train.epochs=2", "train.global_batch_size=6")
FINAL = 26.262978  # of the public case C09: the same for every number of workers and history
BOUND_S = 60  # no figure: tests/bench/rendezvous_speed.py has those; a loaded machine is slow


def folder(hosts: Hosts) -> list[str]:
    """The rendezvous in a folder that all hosts see."""
    return ["--rdzv_backend=fsspec", f"--rdzv_endpoint={hosts.cluster.folder / 'rdzv'}"]


def start(
    hosts: Hosts, *numbers: int, delay: float = 1.5, rdzv: list[str] | None = None, **more: object
) -> None:
    """Start the tracer's run on hosts."""
    for number in numbers:
        hosts.start(
            number, tracer(), *EACH_STEP, *TWO_EPOCHS, f"train.step_delay={delay}", "timeout=20s",
            rdzv=rdzv or folder(hosts), **more,  # type: ignore[arg-type]  # passed through
        )  # fmt: skip


def finish(hosts: Hosts, timeout_s: float = 150) -> records.Record:
    """Wait for the end of the agents that were not killed, and check the result."""
    for agent in hosts.agents.values():
        assert agent.wait(timeout_s) == 0, agent.tail(60)
    summary = records.summary(hosts.cluster.url)
    assert summary["status"] == "complete"
    assert summary["steps"] == 20
    assert_each_sample_once(hosts.cluster.url, 60, 2)
    assert final_weight(hosts.cluster.url) == pytest.approx(FINAL, rel=REL)
    return summary


def sizes(summary: records.Record) -> list[int]:
    """The world sizes of the generations."""
    return [generation["world_size"] for generation in summary["generations"]]


def leader_of(hosts: Hosts) -> int:
    """The host whose agent leads, as the record tells."""
    from elastic.ballot import Ballot

    ballot = Ballot(str(hosts.cluster.folder / "rdzv"), hosts.cluster.rdzv_id)
    found = ballot.peek()
    assert found is not None
    assert found.leader is not None
    return int(found.leader.name[1])


def follower_of(hosts: Hosts) -> int:
    """A host whose agent does not lead."""
    leader = leader_of(hosts)
    return next(number for number in hosts.agents if number != leader)


@pytest.mark.parametrize("whom", ["follower", "leader"])
def test_c14_c15_host_is_killed_and_comes_back(whom: str, hosts: Hosts) -> None:
    start(hosts, 1, 2, 3)
    first = hosts.world(3)
    victim = leader_of(hosts) if whom == "leader" else follower_of(hosts)
    hosts.kill(victim)
    second = hosts.world(2, after=first, timeout_s=BOUND_S)
    start(hosts, victim)
    hosts.world(3, after=second, timeout_s=BOUND_S)
    summary = finish(hosts)
    assert sizes(summary)[-1] == 3


@pytest.mark.parametrize("whom", ["follower", "leader"])
def test_c15_host_is_cut_off_without_a_reset_and_healed(whom: str, hosts: Hosts) -> None:
    start(hosts, 1, 2, 3)
    first = hosts.world(3)
    victim = leader_of(hosts) if whom == "leader" else follower_of(hosts)
    hosts.cut(victim)
    second = hosts.world(2, after=first, timeout_s=BOUND_S)
    told = "\n".join(agent.output() for number, agent in hosts.agents.items() if number != victim)
    assert "has been silent for" in told, told
    hosts.heal(victim)
    hosts.world(3, after=second, timeout_s=BOUND_S)
    finish(hosts)


def test_c14_every_host_is_killed_one_after_another_and_replaced(hosts: Hosts) -> None:
    start(hosts, 1, 2, 3, delay=3)
    newest = hosts.world(3)
    for number in (1, 2, 3):
        hosts.kill(number)
        newest = hosts.world(2, after=newest, timeout_s=BOUND_S)
        start(hosts, number, delay=3)
        newest = hosts.world(3, after=newest, timeout_s=BOUND_S)
    finish(hosts)
