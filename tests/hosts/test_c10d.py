"""Three hosts under plain c10d: what it survives, and what it says where it does not (docs/rendezvous.md)."""

import pytest

from tests.hosts.test_rendezvous import BOUND_S, finish, start
from tests.support import records
from tests.support.hosts import Hosts
from tests.support.soaking import soaked

HOST = 1


def c10d(number: int, run: str = "first") -> list[str]:
    """The rendezvous on the first host."""
    conf = f"last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3,read_timeout=5,is_host={number == HOST}"
    endpoint = f"--rdzv_endpoint={Hosts.address(HOST)}:29400"
    return ["--rdzv_backend=c10d", endpoint, f"--rdzv_conf={conf}", f"--rdzv_id={run}"]


@pytest.mark.soak
@pytest.mark.parametrize("how", ["killed", *soaked("cut")])
def test_c15_another_host_is_lost_and_comes_back(how: str, hosts: Hosts) -> None:
    for number in (1, 2, 3):
        start(hosts, number, rdzv=c10d(number))
    first = hosts.world(3)
    if how == "killed":
        hosts.kill(3)
        second = hosts.world(2, after=first, timeout_s=BOUND_S)
        start(hosts, 3, rdzv=c10d(3))
    else:
        hosts.cut(3)
        second = hosts.world(2, after=first, timeout_s=BOUND_S)
        hosts.heal(3)
    hosts.world(3, after=second, timeout_s=90)
    finish(hosts)


@pytest.mark.soak
def test_c14_the_store_host_is_lost_the_others_say_so_and_a_new_start_goes_on(hosts: Hosts) -> None:
    for number in (1, 2, 3):
        start(hosts, number, rdzv=c10d(number))
    hosts.world(3)
    hosts.cluster.until_committed(3)
    hosts.kill_processes(HOST)
    for agent in hosts.agents.values():
        assert agent.wait(90) == 1
        (line,) = [
            line
            for line in agent.output().splitlines()
            if line.startswith("torchrun: no rendezvous at")
        ]
        assert f"{Hosts.address(HOST)}:29400" in line
        assert "give all nodes another --rdzv_endpoint=HOST:PORT and start again" in line
    done = records.newest_step(hosts.cluster.url)
    assert done >= 3
    hosts.agents.clear()
    for number in (1, 2, 3):
        start(hosts, number, rdzv=c10d(number, "second"))
    summary = finish(hosts)
    assert summary["generations"][-1]["start_step"] >= done
