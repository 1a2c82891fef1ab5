import json
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from checkpoints.store import open_store
from elastic.channels import GivenStore, Record, UrlChannel, connect, host_store, own_addresses
from elastic.errors import StartError

RECORD = Record(addresses=("127.0.0.1",), port=4711, world_size=2, nonce="abc", group="g")


def wait_for(what: Callable[[], object]) -> object:
    deadline = time.monotonic() + 10
    while not (found := what()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


def test_record_survives_its_json_form() -> None:
    assert Record.from_json(RECORD.to_json()) == RECORD


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b"7",
        b'{"port": 1}',
        json.dumps({**json.loads(RECORD.to_json()), "port": 0}).encode(),
        json.dumps({**json.loads(RECORD.to_json()), "port": 70000}).encode(),
        json.dumps({**json.loads(RECORD.to_json()), "addresses": None}).encode(),
    ],
)
def test_anything_else_is_no_record(data: bytes) -> None:
    assert Record.from_json(data) is None


def test_given_store_holds_the_newest_record_of_each_group() -> None:
    store = host_store()
    mine = GivenStore(("127.0.0.1", store.port), "g", serve=False, may_give_way=False, hint="")
    theirs = GivenStore(("127.0.0.1", store.port), "g", serve=False, may_give_way=False, hint="")
    other = GivenStore(("127.0.0.1", store.port), "h", serve=False, may_give_way=False, hint="")
    assert theirs.read() is None
    assert mine.publish(RECORD)
    assert theirs.read() == RECORD
    assert other.read() is None
    assert mine.answered


def test_given_store_that_is_dead_is_an_empty_one_with_the_reason() -> None:
    store = host_store()
    address = ("127.0.0.1", store.port)
    del store
    dead = GivenStore(address, "g", serve=False, may_give_way=False, hint="")
    assert dead.read() is None
    assert not dead.publish(RECORD)
    assert "refused" in dead.trouble


def test_rank_0_serves_the_given_store_where_no_agent_does() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    host = GivenStore(("127.0.0.1", port), "g", serve=True, may_give_way=False, hint="")
    assert host.publish(RECORD)
    guest = GivenStore(("127.0.0.1", port), "g", serve=False, may_give_way=False, hint="")
    assert guest.read() == RECORD


def test_c17_taken_port_is_told_with_the_port_and_the_way_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("elastic.channels._TAKEN_FOR_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = ("127.0.0.1", taken.getsockname()[1])
        with pytest.raises(
            StartError, match=rf"MASTER_PORT: port {address[1]} of 127.0.0.1 is taken.*; change it"
        ):
            GivenStore(address, "g", serve=True, may_give_way=False, hint="change it")
        # With another way to meet it is an empty channel: nothing is asked of the stranger on that port.
        silent = GivenStore(address, "g", serve=True, may_give_way=True, hint="change it")
        assert silent.read() is None
        assert not silent.publish(RECORD)


def test_port_that_becomes_free_in_time_is_waited_for() -> None:
    taken = socket.create_server(("127.0.0.1", 0))
    address = ("127.0.0.1", taken.getsockname()[1])
    timer = threading.Timer(0.3, taken.close)
    timer.start()
    host = GivenStore(address, "g", serve=True, may_give_way=False, hint="")
    timer.join()
    assert host.publish(RECORD)


def test_object_at_a_url_is_a_channel(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    one = UrlChannel(store, "meeting/g.json", every_s=0)
    other = UrlChannel(store, "meeting/g.json", every_s=0)
    assert other.read() is None
    wait_for(lambda: other.trouble == "no address there")
    assert wait_for(lambda: one.publish(RECORD))
    assert wait_for(other.read) == RECORD
    assert str(one) == f"{tmp_path}/meeting/g.json"


def test_url_that_fails_is_an_empty_channel_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "meeting").touch()
    broken = UrlChannel(open_store(str(tmp_path), retry_s=0.1), "meeting/g.json", every_s=0)
    assert not broken.publish(RECORD)
    assert wait_for(lambda: "meeting" in broken.trouble)
    assert broken.read() is None


def test_name_that_does_not_resolve_is_told_with_the_flag_that_helps() -> None:
    store, trouble = connect(("no-such-host.invalid", 1))
    assert store is None
    assert "no-such-host.invalid does not resolve" in trouble
    assert "--local_addr" in trouble


@pytest.mark.timeout(60)
def test_stranger_on_a_port_is_no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic.channels._CLIENT_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        stranger.listen()
        store, trouble = connect(("127.0.0.1", stranger.getsockname()[1]))
        assert store is None
        assert trouble


def test_own_addresses_begin_with_the_likeliest() -> None:
    assert own_addresses(one_node=True, given=None)[0] == "127.0.0.1"
    several = own_addresses(one_node=False, given="master.example")
    assert several[-1] == "127.0.0.1" or several[-1] == "::1" or "127.0.0.1" in several[-2:]
    assert "master.example" in several
    assert len(set(several)) == len(several)
