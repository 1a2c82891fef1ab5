import gc
import logging
import multiprocessing
import os
from collections.abc import Callable, Iterator

import fsspec
import pytest

from checkpoints.errors import PermanentStoreError, SupersededError, TransientStoreError
from checkpoints.generations import check_fence, claim, read_claims
from checkpoints.journal import Journal, read_audit, read_events
from checkpoints.layout import AgentId, Claim
from checkpoints.store import Store, open_store
from tests.stores.contract import CompareAndSetContract, Opener
from tests.support.fault_proxy import Fault, FaultProxy, Kind
from tests.support.object_stores import SECRET, S3Server, s3_options
from tests.support.other_stores import MiniServer
from tests.support.ports import free_port


class TestSecondS3Store(CompareAndSetContract):
    """ministack: slower, and its conditions hold for many at once."""

    large_bytes = 40 << 20
    race_rounds = 5

    @pytest.fixture
    def open_one(self, mini_server: MiniServer) -> Opener:
        url = mini_server.url()
        return lambda: open_store(url, mini_server.options)


class TestS3Store(CompareAndSetContract):
    large_bytes = 48 << 20
    race_rounds = 3  # the server makes losers wait for a second and more

    @pytest.fixture
    def open_one(self, s3_server: S3Server) -> Opener:
        url = s3_server.url()
        return lambda: open_store(url, s3_server.options)

    def test_more_names_than_one_page_holds_are_all_listed_and_deleted(self, store: Store) -> None:
        names = [f"many/{number:04d}" for number in range(1005)]
        for name in names:
            store.put(name, b"1")
        assert store.list("many/") == names
        assert store.children("many") == [name.removeprefix("many/") for name in names]
        store.delete_tree("many")
        assert store.list() == []

    def test_c32_other_code_that_opened_the_url_with_a_cache_changes_nothing(
        self, s3_server: S3Server
    ) -> None:
        url = s3_server.url()
        cached = fsspec.filesystem("s3", **s3_server.options)
        cached.pipe_file(f"{url}/checkpoints/1/manifest.json", b"1")
        assert len(cached.ls(f"{url}/checkpoints")) == 1
        store = open_store(url, {**s3_server.options, "use_listings_cache": True})
        assert store.children("checkpoints") == ["1"]
        writer = open_store(url, s3_server.options)
        writer.put("checkpoints/2/manifest.json", b"2")
        writer.delete_tree("checkpoints/1")
        assert len(cached.ls(f"{url}/checkpoints")) == 1  # what this library would have shown
        assert store.children("checkpoints") == ["2"]
        assert not store.exists("checkpoints/1/manifest.json")
        for one in (store, writer):
            one.close()
        cached.close_session(cached.loop, cached.s3)

    def test_a_forked_child_uses_a_client_of_its_own(self, store: Store) -> None:
        store.put("x", b"before the fork")
        receiver, sender = multiprocessing.Pipe(duplex=False)
        pid = os.fork()
        if not pid:
            try:
                sender.send(store.get("x"))
            finally:
                os._exit(0)
        assert receiver.poll(30), "the child hangs"
        assert receiver.recv() == b"before the fork"
        os.waitpid(pid, 0)

    def test_a_bucket_root_serves_as_a_url(self, s3_server: S3Server) -> None:
        store = open_store(f"s3://{s3_server.bucket}/", s3_server.options)
        store.put("in-the-root/x", b"1")
        assert "in-the-root" in store.children("")
        assert store.list("in-the-root/") == ["in-the-root/x"]
        store.delete_tree("in-the-root")
        store.close()


def test_claims_and_journal_live_on_an_object_store(s3_server: S3Server) -> None:
    store = open_store(s3_server.url(), s3_server.options)
    agents = [AgentId(host="h", boot_id="b", pid=1, start=number) for number in range(2)]

    def making(agent: AgentId) -> Callable[[int, str], Claim]:
        return lambda generation, launch: Claim(
            generation=generation,
            run_id="run",
            launch=launch,
            agents=(agent,),
            world_size=1,
            nodes=1,
            hosts=("h",),
        )

    first = claim(store, agents=agents[:1], make=making(agents[0]))
    with Journal(store, first.generation, rank=0) as journal:
        journal.event("start")
        journal.audit({"step": 1})
        journal.flush()
        journal.event("end")
    second = claim(store, agents=agents[1:], make=making(agents[1]))
    check_fence(store, second)
    with pytest.raises(SupersededError):
        check_fence(store, first)
    assert read_claims(store) == [first, second]
    assert [event["event"] for event in read_events(store)] == ["start", "end"]
    assert list(read_audit(store)) == [{"step": 1}]
    store.close()


@pytest.fixture
def faulty(s3_server: S3Server, proxy: FaultProxy) -> Iterator[Store]:
    """A store behind the proxy; transient errors are retried for 20 s."""
    store = open_store(s3_server.url(), s3_options(proxy.endpoint), retry_s=20)
    yield store
    store.close()


def test_a_lost_reply_to_an_exclusive_create_is_believed_ours(
    faulty: Store, proxy: FaultProxy
) -> None:
    lost = Fault(kind=Kind.LOSE_REPLY, method="PUT", times=1)
    proxy.faults.append(lost)
    assert faulty.put_new("generations/000001.json", b"our token")
    assert lost.hits == 1
    assert [method for method, _ in proxy.requests] == ["PUT", "PUT", "GET"]
    assert not faulty.put_new("generations/000001.json", b"their token")


def test_a_lost_reply_to_a_compare_and_set_is_believed_ours(
    faulty: Store, proxy: FaultProxy
) -> None:
    tag = faulty.put_if("leader", b"one", None)
    proxy.faults.append(Fault(kind=Kind.LOSE_REPLY, method="PUT", times=1))
    assert (new := faulty.put_if("leader", b"two", tag)) is not None
    assert faulty.get_tagged("leader") == (b"two", new)


def test_throttling_is_retried_until_it_is_over(
    faulty: Store, proxy: FaultProxy, caplog: pytest.LogCaptureFixture
) -> None:
    busy = [
        Fault(kind=Kind.REFUSE, status=503, code="SlowDown", times=2),
        Fault(kind=Kind.REFUSE, status=500, code="InternalError", times=1),
        Fault(kind=Kind.REFUSE, status=429, code="TooManyRequests", times=1),
        Fault(kind=Kind.RESET, times=1),
        Fault(kind=Kind.REFUSE, status=409, code="ConditionalRequestConflict", times=1),
    ]
    proxy.faults.extend(busy)
    with caplog.at_level(logging.WARNING):
        faulty.put("x", b"1")
    assert [fault.hits for fault in busy] == [2, 1, 1, 1, 1]
    # One try of ours is one request: the library's own retries are off.
    assert len(proxy.requests) == 7
    assert len(caplog.records) == 1
    assert faulty.get("x") == b"1"


def test_a_page_of_something_on_the_way_is_neither_a_list_nor_an_answer(
    faulty: Store, proxy: FaultProxy
) -> None:
    faulty.put("x/1", b"1")
    for method in ("GET", "PUT"):
        proxy.faults.append(
            Fault(kind=Kind.REFUSE, method=method, status=200, code="Portal", times=1)
        )
    assert faulty.list("x/") == ["x/1"]
    faulty.put("x/2", b"2")
    assert faulty.get("x/2") == b"2"
    assert [fault.hits for fault in proxy.faults] == [1, 1]


def test_a_reply_cut_short_is_read_again(faulty: Store, proxy: FaultProxy) -> None:
    faulty.put("x", b"0123456789" * 10_000)
    proxy.faults.append(Fault(kind=Kind.TRUNCATE, method="GET", times=2, keep_bytes=500))
    assert faulty.get("x") == b"0123456789" * 10_000
    proxy.faults.append(Fault(kind=Kind.TRUNCATE, method="GET", times=1, keep_bytes=500))
    assert faulty.get_range("x", 10, 50_000) == b"0123456789" * 5_000


def test_a_part_refused_once_does_not_leave_a_short_object(
    faulty: Store, proxy: FaultProxy
) -> None:
    blocks = [bytes([number]) * (1 << 20) for number in range(70)]
    refused = Fault(kind=Kind.REFUSE, method="PUT", contains="partNumber=2", times=1)
    proxy.faults.append(refused)
    faulty.put("large", blocks)
    assert refused.hits == 1
    assert faulty.size("large") == 70 << 20
    assert faulty.get_range("large", (69 << 20) - 1, 2) == b"\x44\x45"


def test_an_upload_that_breaks_off_leaves_no_object_and_the_old_one_in_place(
    s3_server: S3Server, proxy: FaultProxy
) -> None:
    store = open_store(s3_server.url(), s3_options(proxy.endpoint), retry_s=0.5)
    store.put("old", b"the old one")
    # The network is gone from the second part on: the upload cannot even be given up in order.
    proxy.faults.append(Fault(kind=Kind.RESET, contains="partNumber=2"))
    proxy.faults.append(Fault(kind=Kind.RESET, method="DELETE"))
    for name in ("new", "old"):
        with pytest.raises(TransientStoreError, match=f"{name}: write failed"):
            store.put(name, [bytes(1 << 20)] * 70)
    proxy.faults.clear()
    gc.collect()  # a forgotten file must not publish its half either
    assert not store.exists("new")
    assert store.get("old") == b"the old one"
    store.close()


@pytest.mark.timeout(60)
def test_throttling_without_end_gives_a_transient_error_in_bounded_time(
    s3_server: S3Server, proxy: FaultProxy
) -> None:
    proxy.faults.append(Fault(kind=Kind.REFUSE, status=503, code="SlowDown"))
    store = open_store(s3_server.url(), s3_options(proxy.endpoint), retry_s=2)
    with pytest.raises(TransientStoreError, match=r"x: write failed: .*given up after \d+ tries"):
        store.put("x", b"1")
    store.close()


@pytest.mark.timeout(60)
def test_a_refused_connection_gives_a_transient_error_in_bounded_time() -> None:
    store = open_store("s3://bucket/run", s3_options(f"http://127.0.0.1:{free_port()}"), retry_s=2)
    with pytest.raises(
        TransientStoreError, match=r"s3://bucket/run: check failed: .*given up after [2-9]\d* tries"
    ):
        store.check()
    store.close()


@pytest.mark.timeout(60)
def test_a_server_that_never_answers_gives_a_transient_error_in_bounded_time(
    s3_server: S3Server, proxy: FaultProxy
) -> None:
    proxy.faults.append(Fault(kind=Kind.HANG))
    options = {**s3_options(proxy.endpoint), "config_kwargs": {"read_timeout": 1}}
    store = open_store(s3_server.url(), options, retry_s=2)
    with pytest.raises(TransientStoreError):
        store.get("x")
    store.close()


def test_a_wrong_secret_is_permanent_and_asked_once(s3_server: S3Server, proxy: FaultProxy) -> None:
    options = {**s3_options(proxy.endpoint), "secret": "WrongSecret4711"}
    store = open_store(s3_server.url(), options)
    for call in (store.check, lambda: store.put("x", b"1"), lambda: store.put_new("x", b"1")):
        with pytest.raises(PermanentStoreError, match="check the credentials") as caught:
            call()
        assert "WrongSecret4711" not in str(caught.value)
    assert len(proxy.requests) == 3
    store.close()


def test_a_missing_bucket_is_permanent_and_never_an_empty_store(proxy: FaultProxy) -> None:
    store = open_store("s3://no-such-bucket/run", s3_options(proxy.endpoint))
    calls: list[Callable[[], object]] = [
        store.check,
        lambda: store.put("x", b"1"),
        lambda: store.put_new("x", b"1"),
        lambda: store.get("x"),
        lambda: store.children("checkpoints"),
        lambda: store.list("generations/"),
    ]
    for call in calls:
        with pytest.raises(PermanentStoreError, match=r"NoSuchBucket.*create the bucket"):
            call()
    assert len(proxy.requests) == len(calls)
    store.close()


def test_c53_no_secret_is_in_messages_logs_or_chained_errors(
    proxy: FaultProxy, caplog: pytest.LogCaptureFixture
) -> None:
    proxy.faults.append(Fault(kind=Kind.REFUSE, status=503, code=f"SlowDown{SECRET}"))
    store = open_store("s3://bucket/run", s3_options(proxy.endpoint), retry_s=1)
    with (
        caplog.at_level(logging.DEBUG, logger="checkpoints"),
        pytest.raises(TransientStoreError) as caught,
    ):
        store.check()
    shown = [str(caught.value), repr(store), caplog.text]
    link: BaseException | None = caught.value.__cause__
    while link is not None:
        shown.append(str(link))
        link = link.__cause__
    assert not [text for text in shown if SECRET in text]
    store.close()


def test_acknowledged_objects_survive_the_death_of_the_server(
    s3_server: S3Server,
) -> None:
    store = open_store(s3_server.url(), s3_server.options, retry_s=60)
    assert store.put_new("x", b"before")
    s3_server.kill()
    s3_server.start()
    assert store.get("x") == b"before"
    assert store.put_new("y", b"after")
    store.close()
