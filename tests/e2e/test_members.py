"""Agents of the rendezvous as real processes on loopback: killed, stopped, ended, started again; and 64 of them."""

import os
import signal
import time
from pathlib import Path

import pytest

from tests.support.members import Members, members
from tests.support.soaking import soaked


def pids(world: list[dict[str, object]]) -> list[object]:
    return [event["pid"] for event in world]


@pytest.mark.parametrize("whom", ["leader", *soaked("follower")])
def test_killed_agent_is_noticed_at_once_and_the_others_keep_their_order(
    whom: str, tmp_path: Path
) -> None:
    with members(tmp_path) as found:
        found.start(3)
        first = found.world(3)
        victim = found.leader() if whom == "leader" else found.follower()
        killed = found.kill(victim)
        second = found.world(2, after=killed)
        assert pids(second) == [pid for pid in pids(first) if pid != victim.pid]
        found.start(1)
        third = found.world(3, after=killed)
        assert pids(third)[:2] == pids(second)
        assert found.finish() == [0, 0, 0]


def test_each_of_three_is_killed_and_replaced(tmp_path: Path) -> None:
    with members(tmp_path) as found:
        found.start(3)
        found.world(3)
        for agent in list(found.agents):
            killed = found.kill(agent)
            found.world(2, after=killed)
            found.start(1)
            found.world(3, after=killed)
        assert len({event["launch"] for event in found.events("world")}) == 1
        assert found.finish() == [0, 0, 0]


@pytest.mark.parametrize("whom", ["leader", *soaked("follower")])
def test_stopped_agent_is_given_up_and_taken_back_when_it_wakes(whom: str, tmp_path: Path) -> None:
    with members(tmp_path) as found:
        found.start(3)
        found.world(3)
        victim = found.leader() if whom == "leader" else found.follower()
        began = time.monotonic()
        victim.signal(signal.SIGSTOP)
        second = found.world(2, after=began)
        assert victim.pid not in pids(second)
        began = time.monotonic()
        victim.signal(signal.SIGCONT)
        found.world(3, after=began)
        assert found.finish() == [0, 0, 0]


@pytest.mark.parametrize("whom", ["leader", *soaked("follower")])
def test_agent_that_leaves_in_order_ends_nothing(whom: str, tmp_path: Path) -> None:
    with members(tmp_path) as found:
        found.start(3)
        found.world(3)
        victim = found.leader() if whom == "leader" else found.follower()
        began = time.monotonic()
        victim.signal(signal.SIGTERM)
        found.world(2, after=began)
        assert victim.wait(20) == 1
        found.agents.remove(victim)
        assert found.finish() == [0, 0]


def test_closed_ends_one_launch_only(tmp_path: Path) -> None:
    with members(tmp_path) as found:
        found.start(2, nodes="2:2")
        found.world(2)
        assert found.finish() == [0, 0]
        first = found.record()
        assert first.closed
        found.agents.clear()
        began = time.monotonic()
        found.start(2, nodes="2:2")
        second = found.world(2, after=began)
        assert found.record().launch != first.launch
        assert found.record().token != first.token
        assert found.record().epoch > first.epoch
        assert second[0]["launch"] == found.record().launch
        assert found.finish() == [0, 0]


def test_agent_of_an_ended_launch_is_told_so(tmp_path: Path) -> None:
    with members(tmp_path) as found:
        found.start(2)
        found.world(2)
        sleeper = found.follower()
        began = time.monotonic()
        sleeper.signal(signal.SIGSTOP)
        found.world(1, after=began)
        found.agents.remove(sleeper)
        assert found.finish() == [0]
        sleeper.signal(signal.SIGCONT)
        Path(f"{found.log}.stop").unlink(missing_ok=True)
        # Its own world goes on until it has to join again, as torchrun's would.
        time.sleep(1)
        assert sleeper.code is None
        found.start(1)
        found.world(1, after=began)


def test_node_in_no_world_gives_up_in_one_line(tmp_path: Path) -> None:
    with members(tmp_path) as found:
        (agent,) = found.start(1, "join_timeout=2", nodes="2:3")
        assert agent.wait(20) == 4
        (event,) = found.events("late")
        assert "no world formed with this node within 2 s: waiting for nodes" in event["text"]
        began = time.monotonic()
        found.start(2, nodes="2:3")  # nothing was closed
        found.world(2, after=began)


def test_only_the_leader_asks_the_store_while_all_is_well(tmp_path: Path) -> None:
    with members(tmp_path) as found:
        found.start(3)
        began = found.world(3)
        time.sleep(5)
        found.finish()
        ended = {event["pid"]: event for event in found.events("stop")}
        for event in began:
            after = ended[event["pid"]]
            spent_s = after["time"] - event["time"]
            requests = after["reads"] + after["writes"] - event["reads"] - event["writes"]
            if event["leads"]:
                assert 2 <= requests <= spent_s + 2
            else:
                assert requests == 0


def test_stranger_is_told_nothing_and_disturbs_nobody(tmp_path: Path) -> None:
    import socket

    with members(tmp_path) as found:
        found.start(2, nodes="2:2")
        found.world(2)
        leader = found.record().leader
        assert leader is not None
        with socket.create_connection(("127.0.0.1", leader.port), timeout=10) as stranger:
            stranger.sendall(b'{"id":"x","for":"join","challenge":"0","proof":"0"}\n')
            said = b""
            while chunk := stranger.recv(1000):
                said += chunk
        assert b"challenge" in said
        assert said.count(b"\n") == 1
        assert found.record().token.encode() not in said
        time.sleep(0.5)
        assert len(found.events("world")) == 2
        texts = "".join(agent.output() for agent in found.agents)
        assert found.record().token not in texts


def test_64_agents_meet_lose_their_leader_and_go_on(tmp_path: Path) -> None:
    with members(tmp_path) as found:
        many(found, 64)


def many(found: Members, count: int) -> None:
    """Start agents, kill the leader and another, and let one come back."""
    conf = ("keep_alive_max_attempt=20", "last_call_timeout=3")  # 64 processes on few cores
    found.start(count, *conf, nodes=f"{count - 2}:{count}")
    began = time.monotonic()
    found.world(count, timeout_s=120)
    first_s = time.monotonic() - began
    killed = found.kill(found.leader())
    found.world(count - 1, after=killed, timeout_s=60)
    leader_s = max(e["time"] for e in found.events("world") if e["size"] == count - 1) - killed
    killed = found.kill(found.follower())
    found.world(count - 2, after=killed, timeout_s=60)
    follower_s = max(e["time"] for e in found.events("world") if e["size"] == count - 2) - killed
    found.start(2, *conf, nodes=f"{count - 2}:{count}")
    found.world(count, after=killed, timeout_s=60)
    assert set(found.finish()) == {0}
    print(
        f"{count} agents, {os.cpu_count()} cores: first {first_s:.2f} s, leader killed {leader_s:.2f} s, follower killed {follower_s:.2f} s"
    )
