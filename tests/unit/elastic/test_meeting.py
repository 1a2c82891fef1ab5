import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from checkpoints.store import open_store
from elastic.channels import GivenStore, Record, connect, host_store
from elastic.errors import MeetingError, StartError
from elastic.meeting import Meeting, meet
from elastic.ranks import Place


def make_place(rank: int, size: int, port: int | None, **other: Any) -> Place:
    fields: dict[str, Any] = {
        "local_rank": rank, "local_world_size": size, "node_rank": 0, "nodes": 1, "launcher": "torchrun", "group": "g",
        "restart_count": 0, "address": ("127.0.0.1", port) if port else None, "agent_store": True,
    }  # fmt: skip
    return Place(rank=rank, world_size=size, **{**fields, **other})


class Ranks:
    """Ranks as threads, each with a meeting of its own."""

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(16)

    def __call__(self, place: Place, hello: Any = None, **given: Any) -> "Future[Meeting]":
        arguments = {"channel": None, "init_method": None, "timeout_s": 20.0, **given}
        return self.pool.submit(lambda: meet(place, hello or {"rank": place.rank}, **arguments))


@pytest.fixture
def ranks() -> Ranks:
    return Ranks()


def settle(futures: "list[Future[Meeting]]") -> list[Meeting]:
    meetings = [future.result(30) for future in futures]
    assert len({meeting.session for meeting in meetings}) == 1
    assert all(meeting.hellos == meetings[0].hellos for meeting in meetings)
    return meetings


def test_world_of_one_meets_without_any_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a socket was made")

    monkeypatch.setattr("socket.socket", refuse)
    meeting = meet(
        make_place(0, 1, None), {"host": "h"}, channel=None, init_method=None, timeout_s=1
    )
    assert meeting.hellos == [{"host": "h"}]
    assert meeting.kv is not None
    meeting.kv.set("a", "b")
    assert meeting.kv.get("a") == b"b"
    meeting.close()
    assert meeting.kv is None


@pytest.mark.parametrize("size", [2, 3, 7])
def test_all_ranks_learn_the_same_session_and_each_others_hellos(size: int, ranks: Ranks) -> None:
    agent = host_store()
    order = list(range(size))[::-1]
    meetings = settle([ranks(make_place(rank, size, agent.port)) for rank in order])
    assert meetings[0].hellos == [{"rank": rank} for rank in range(size)]
    first, second = meetings[0].kv, meetings[1].kv
    assert first is not None
    assert second is not None
    first.set("word", "there")
    assert second.get("word") == b"there"


def test_store_of_an_earlier_generation_is_no_obstacle(ranks: Ranks) -> None:
    agent = host_store()
    sessions = set()
    for _ in range(3):
        meetings = settle([ranks(make_place(rank, 2, agent.port)) for rank in (1, 0)])
        sessions.add(meetings[0].session)
        for meeting in meetings:
            meeting.close()
    assert len(sessions) == 3


def test_address_of_a_dead_rank_0_is_passed_by(ranks: Ranks) -> None:
    agent = host_store()
    dead = host_store()
    given = GivenStore(("127.0.0.1", agent.port), "g", serve=False, may_give_way=False, hint="")
    given.publish(
        Record(addresses=("127.0.0.1",), port=dead.port, world_size=2, nonce="dead", group="g")
    )
    del dead
    guest = ranks(make_place(1, 2, agent.port))
    time.sleep(0.5)
    settle([guest, ranks(make_place(0, 2, agent.port))])


def test_stranger_on_a_stale_port_is_passed_by(ranks: Ranks) -> None:
    agent = host_store()
    stranger = host_store()
    stranger.set("id", "somebody")
    given = GivenStore(("127.0.0.1", agent.port), "g", serve=False, may_give_way=False, hint="")
    given.publish(
        Record(addresses=("127.0.0.1",), port=stranger.port, world_size=2, nonce="stale", group="g")
    )
    guest = ranks(make_place(1, 2, agent.port))
    time.sleep(0.5)
    settle([guest, ranks(make_place(0, 2, agent.port))])
    assert not stranger.check(["hello/1"])


def test_rank_0_that_lives_but_has_met_already_is_left_for_the_new_one(ranks: Ranks) -> None:
    agent = host_store()
    old = settle([ranks(make_place(rank, 2, agent.port)) for rank in range(2)])
    guest = ranks(make_place(1, 2, agent.port))
    time.sleep(1)
    assert not guest.done()
    new = settle([guest, ranks(make_place(0, 2, agent.port))])
    assert new[0].session != old[0].session


def test_rank_that_is_replaced_while_others_wait_makes_all_begin_anew(ranks: Ranks) -> None:
    agent = host_store()
    first = [
        ranks(make_place(0, 3, agent.port)),
        ranks(make_place(1, 3, agent.port), {"who": "older"}),
    ]
    time.sleep(0.6)
    newer = ranks(make_place(1, 3, agent.port), {"who": "newer"})
    with pytest.raises(
        MeetingError, match="a newer process has rank 1; this one, the older, leaves"
    ):
        first[1].result(10)
    meetings = settle([first[0], newer, ranks(make_place(2, 3, agent.port))])
    assert meetings[0].hellos[1] == {"who": "newer"}


def test_older_process_of_rank_0_leaves(ranks: Ranks) -> None:
    agent = host_store()
    older = ranks(make_place(0, 2, agent.port), {"who": "older"})
    time.sleep(0.6)
    newer = ranks(make_place(0, 2, agent.port), {"who": "newer"})
    with pytest.raises(MeetingError, match="a newer process has rank 0"):
        older.result(10)
    meetings = settle([newer, ranks(make_place(1, 2, agent.port))])
    assert meetings[0].hellos[0] == {"who": "newer"}


def test_world_of_another_size_is_passed_by(ranks: Ranks) -> None:
    agent = host_store()
    lonely = ranks(make_place(0, 3, agent.port), timeout_s=8.0)
    time.sleep(0.5)
    guest = ranks(make_place(1, 2, agent.port))
    time.sleep(0.5)
    assert not guest.done()
    settle([guest, ranks(make_place(0, 2, agent.port))])
    with pytest.raises(MeetingError, match="a newer process has rank 0"):
        lonely.result(10)


def test_rank_that_dies_after_it_was_welcomed_makes_rank_0_begin_anew(ranks: Ranks) -> None:
    agent = host_store()
    host = ranks(make_place(0, 3, agent.port))
    first = ranks(make_place(1, 3, agent.port))
    given = GivenStore(("127.0.0.1", agent.port), "g", serve=False, may_give_way=False, hint="")
    record = wait_for(given.read)
    kv, _ = connect(("127.0.0.1", record.port))
    assert kv is not None
    kv.set("hello/2", '{"nonce": "gone", "hello": {"who": "gone"}}')
    wait_for(lambda: kv.check(["welcome"]))
    time.sleep(0.3)
    assert not host.done()  # the dead one never acks
    meetings = settle([host, first, ranks(make_place(2, 3, agent.port), {"who": "successor"})])
    assert meetings[0].hellos[2] == {"who": "successor"}


def wait_for(what: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 10
    while not (found := what()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


@pytest.mark.parametrize("dead", ["all", "guest"])
def test_dead_or_disagreeing_address_is_mended_by_the_url(
    dead: str, ranks: Ranks, tmp_path: Path
) -> None:
    agent = host_store()
    gone = host_store()
    port = gone.port
    del gone
    channel = open_store(str(tmp_path))
    nodes = {"nodes": 2, "local_world_size": 1, "local_rank": 0}
    host = make_place(0, 2, port if dead == "all" else agent.port, **nodes)
    settle([ranks(host, channel=channel), ranks(make_place(1, 2, port, **nodes), channel=channel)])


def test_url_is_not_touched_while_the_given_store_answers(ranks: Ranks, tmp_path: Path) -> None:
    agent = host_store()
    channel = open_store(str(tmp_path / "run"))
    settle([ranks(make_place(rank, 3, agent.port), channel=channel) for rank in range(3)])
    assert not (tmp_path / "run").exists()


def test_ranks_without_an_address_meet_at_the_url(ranks: Ranks, tmp_path: Path) -> None:
    channel = open_store(str(tmp_path))
    places = [
        make_place(rank, 3, None, launcher="mpirun", group="ns:1/x", agent_store=False)
        for rank in range(3)
    ]
    settle([ranks(place, channel=channel) for place in places])
    assert [path.name for path in (tmp_path / "meeting").iterdir()] == ["ns-1-x.json"]


def test_ranks_without_any_place_to_meet_are_told_what_to_set() -> None:
    place = make_place(0, 2, None, launcher="mpirun", agent_store=False)
    with pytest.raises(StartError, match="expected one of them; set MASTER_ADDR and MASTER_PORT"):
        meet(place, {}, channel=None, init_method=None, timeout_s=1)


@pytest.mark.parametrize("method", ["tcp://", "tcp://host", "tcp://host:x", "tcp://:1"])
def test_impossible_tcp_address_is_refused(method: str) -> None:
    with pytest.raises(StartError, match="expected tcp://HOST:PORT"):
        meet(make_place(1, 2, None), {}, channel=None, init_method=method, timeout_s=1)


def test_missing_ranks_are_named_in_one_line(ranks: Ranks) -> None:
    agent = host_store()
    host = ranks(make_place(0, 4, agent.port), timeout_s=2.0)
    guest = ranks(make_place(2, 4, agent.port), timeout_s=2.0)
    with pytest.raises(MeetingError) as told:
        host.result(10)
    text = str(told.value)
    assert text.startswith("meeting: found 2 of 4 ranks after 2 s, missing ranks 1, 3;")
    assert "\n" not in text
    with pytest.raises(MeetingError, match="rank 0 of 4 did not answer rank 2 within 2 s"):
        guest.result(10)


def test_rank_0_that_never_comes_is_told_with_where_it_was_looked_for(
    ranks: Ranks, tmp_path: Path
) -> None:
    gone = host_store()
    port = gone.port
    del gone
    guest = ranks(make_place(1, 2, port), channel=open_store(str(tmp_path)), timeout_s=3.0)
    with pytest.raises(MeetingError) as told:
        guest.result(10)
    assert f"127.0.0.1:{port}: " in str(told.value)
    assert f"{tmp_path}/meeting/g.json: no address there" in str(told.value)


def test_many_meetings_leave_no_threads_behind(ranks: Ranks) -> None:
    agent = host_store()
    for meeting in settle([ranks(make_place(rank, 2, agent.port)) for rank in range(2)]):
        meeting.close()
    assert not [thread for thread in threading.enumerate() if thread.name in ("meeting", "bounded")]
