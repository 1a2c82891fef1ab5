"""Three hosts under `--rdzv_backend=fsspec`: any of them dies, is cut off, comes back, is replaced; the run finishes."""

import signal
import subprocess
import sys
import time

import pytest

from tests.support import records
from tests.support.cases import EACH_STEP, REL, assert_each_sample_once, final_weight, tracer
from tests.support.hosts import BridgeS3, Hosts
from tests.support.soaking import soaked

TWO_EPOCHS = ("args.n=60", "train.epochs=2", "train.global_batch_size=6")
FINAL = 26.262978  # of the public case C09: the same for every number of workers and history
BOUND_S = 60  # no figure: tests/bench/rendezvous_speed.py has those; a loaded machine is slow


def folder(hosts: Hosts) -> list[str]:
    """The rendezvous in a folder that all hosts see."""
    return ["--rdzv_backend=fsspec", f"--rdzv_endpoint={hosts.cluster.folder / 'rdzv'}"]


def start(
    hosts: Hosts, *numbers: int, delay: float = 1.5, rdzv: list[str] | None = None,
    timeout: str = "20s", **more: object,
) -> None:  # fmt: skip
    """Start the tracer's run on hosts."""
    for number in numbers:
        hosts.start(
            number, tracer(), *EACH_STEP, *TWO_EPOCHS, f"train.step_delay={delay}", f"timeout={timeout}",
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


@pytest.mark.parametrize("whom", ["leader", *soaked("follower")])
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


@pytest.mark.soak
@pytest.mark.parametrize("whom", ["leader", "follower"])
def test_c15_host_is_cut_off_without_a_reset_and_healed(whom: str, hosts: Hosts) -> None:
    # A collective would wait for ten minutes: it is the agents' word that ends those who wait in vain.
    start(hosts, 1, 2, 3, timeout="600s")
    first = hosts.world(3)
    victim = leader_of(hosts) if whom == "leader" else follower_of(hosts)
    hosts.cut(victim)
    second = hosts.world(2, after=first, timeout_s=BOUND_S)
    told = "\n".join(agent.output() for number, agent in hosts.agents.items() if number != victim)
    assert "has been silent for" in told, told
    assert "forcefully exiting" not in told, told  # torchrun's way, after 30 s
    hosts.heal(victim)
    hosts.world(3, after=second, timeout_s=BOUND_S)
    finish(hosts)


@pytest.mark.soak
def test_c15_a_leader_that_went_on_alone_gives_way_to_the_two_it_has_lost(hosts: Hosts) -> None:
    start(hosts, 1, 2, 3, timeout="600s", delay=0.5)
    first = hosts.world(3)
    leader = leader_of(hosts)
    others = [number for number in hosts.agents if number != leader]
    # So that their complaints come when the leader has formed a world alone.
    for number in others:
        hosts.agents[number].signal(signal.SIGSTOP)
    hosts.cut(leader)
    alone = hosts.world(1, after=first, timeout_s=BOUND_S)
    for number in others:
        hosts.agents[number].signal(signal.SIGCONT)
    second = hosts.world(2, after=alone, timeout_s=BOUND_S)
    time.sleep(3)
    newest = max(records.claims(hosts.cluster.url))
    assert records.claims(hosts.cluster.url)[newest]["world_size"] == 2, "both worlds go on"
    hosts.heal(leader)
    hosts.world(3, after=second, timeout_s=BOUND_S)
    finish(hosts)


@pytest.mark.soak
def test_c14_every_host_is_killed_one_after_another_and_replaced(hosts: Hosts) -> None:
    start(hosts, 1, 2, 3, delay=3)
    newest = hosts.world(3)
    for number in (1, 2, 3):
        hosts.kill(number)
        newest = hosts.world(2, after=newest, timeout_s=BOUND_S)
        start(hosts, number, delay=3)
        newest = hosts.world(3, after=newest, timeout_s=BOUND_S)
    finish(hosts)


def on_s3(bridge_s3: BridgeS3) -> list[str]:
    """The rendezvous on an S3 server that hosts reach over their links alone."""
    return ["--rdzv_backend=fsspec", f"--rdzv_endpoint={bridge_s3.url()}"]


def leads(hosts: Hosts) -> int:
    """The host that told last that it leads."""
    found = [
        (line, number)
        for number, agent in hosts.agents.items()
        for line in agent.output().splitlines()
        if "leads epoch" in line
    ]
    assert found
    return max(found, key=lambda one: int(one[0].rpartition(" ")[2]))[1]


@pytest.mark.soak
def test_two_sided_cut_the_leader_without_store_and_followers_steps_down(
    hosts: Hosts, bridge_s3: BridgeS3
) -> None:
    """One host alone is enough for a world here (1:3), and yet the leader that is cut off forms none."""
    rdzv = on_s3(bridge_s3)
    env = bridge_s3.env
    start(hosts, 1, 2, 3, rdzv=rdzv, env=env)
    first = hosts.world(3)
    leader = leads(hosts)
    hosts.cut(leader)
    second = hosts.world(2, after=first, timeout_s=BOUND_S)
    assert leads(hosts) != leader
    time.sleep(6)
    sizes_now = [claim["world_size"] for claim in records.claims(hosts.cluster.url).values()]
    assert sizes_now == [3, 2], "the leader that was cut off went on alone"
    assert "does not lead any more" in hosts.agents[leader].output()
    hosts.heal(leader)
    hosts.world(3, after=second, timeout_s=BOUND_S)
    assert set(sizes(finish(hosts))) == {3, 2}


@pytest.mark.soak
def test_store_that_is_away_stops_no_world(hosts: Hosts, bridge_s3: BridgeS3) -> None:
    env = bridge_s3.env
    start(hosts, 1, 2, rdzv=on_s3(bridge_s3), env=env)
    first = hosts.world(2)
    bridge_s3.kill()
    hosts.cluster.until(
        lambda: (
            any("does not lead any more" in agent.output() for agent in hosts.agents.values())
            or None
        ),
        "the leader to step down",
    )
    bridge_s3.start()
    summary = finish(hosts)
    assert sizes(summary) == [2]
    assert summary["restarts"] == 0
    assert max(records.claims(hosts.cluster.url)) == first


@pytest.mark.soak
def test_finished_run_is_started_again_at_the_same_endpoint(hosts: Hosts) -> None:
    start(hosts, 1, 2, delay=0)
    finish(hosts)
    hosts.agents.clear()
    start(hosts, 1, 2, delay=0)
    for agent in hosts.agents.values():
        assert agent.wait(90) == 0, agent.tail()
        assert "Traceback" not in agent.output()


def test_c16_host_names_that_nobody_resolves_do_no_harm(hosts: Hosts) -> None:
    """The hosts are called h1 and h2, and no hosts file knows them: addresses are published, never names."""
    start(hosts, 1, 2, delay=0)
    finish(hosts)
    assert all("resolve" not in agent.output() for agent in hosts.agents.values())


@pytest.mark.parametrize("by_launch", [True, *soaked(False)])
def test_c16_c10d_at_an_address_needs_no_name_of_any_host(by_launch: bool, hosts: Hosts) -> None:
    """Who serves the store torch asks by the host's own name, and it ends where nobody knows that."""
    where = ["--rdzv_backend=c10d", f"--rdzv_endpoint={hosts.address(1)}:29400", "--rdzv_id=named"]
    for number in (1, 2):
        own = f"--local_addr={hosts.address(number)}"
        start(hosts, number, delay=0.2, rdzv=[*where, own], by_launch=by_launch)
    assert sizes(finish(hosts))[-1] == 2


def test_c16_the_doctor_says_beforehand_that_a_name_does_not_resolve(hosts: Hosts) -> None:
    words = [sys.executable, "-m", "elastic", "doctor", "--nnodes=2", "--peer=h2", "--rdzv_backend=c10d",
             f"--rdzv_endpoint={hosts.address(2)}:29400", tracer(), f"checkpoint.url={hosts.cluster.url}"]  # fmt: skip
    done = subprocess.run(
        hosts.command(1, words),
        capture_output=True,
        text=True,
        check=False,
        cwd=hosts.cluster.folder,
    )
    told = done.stdout
    assert (done.returncode, done.stderr) == (0, ""), told
    assert f"start this node with --local_addr={hosts.address(1)}" in told
    assert "'h2' does not resolve on this host (h1): start h2 with --local_addr=" in told
    assert f"{hosts.address(2)}:29400: that host is there, and no agent listens yet" in told
    hosts.cut(2)
    done = subprocess.run(
        hosts.command(1, words),
        capture_output=True,
        text=True,
        check=False,
        cwd=hosts.cluster.folder,
    )
    assert "does a firewall let this port through?" in done.stdout


@pytest.mark.soak
def test_c17_two_runs_at_one_endpoint_with_different_ids_do_not_mix(hosts: Hosts) -> None:
    from tests.support.cluster import Cluster

    start(hosts, 1, 2, delay=0.2)
    hosts.world(2)
    with Cluster(hosts.cluster.folder / "other") as other:
        assert other.rdzv_id != hosts.cluster.rdzv_id
        overrides = (f"checkpoint.url={hosts.cluster.folder / 'other-run'}", *TWO_EPOCHS)
        agent = hosts.start(
            3,
            tracer(),
            *overrides,
            rdzv=[*folder(hosts), f"--rdzv_id={other.rdzv_id}"],
            nnodes="1:3",
        )
        assert agent.wait(120) == 0, agent.tail()
    assert sizes(finish(hosts)) == [2]
