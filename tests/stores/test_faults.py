"""What networks and overloaded servers do, to each of the object stores, by way of a proxy."""

import hashlib
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import fsspec
import pytest

from checkpoints.backend_objects import ObjectBackend
from checkpoints.errors import PermanentStoreError, TransientStoreError
from checkpoints.store import Store, open_store
from tests.support.fault_proxy import Fault, FaultProxy, Kind
from tests.support.object_stores import S3Server, s3_options
from tests.support.other_stores import AzureServer, GcsServer

PART_BYTES = 5 << 20
"""The least that S3 takes, so that three parts are soon sent."""
LARGE = [bytes([number]) * (PART_BYTES // 4) for number in range(10)]
LARGE_SHA = hashlib.sha256(b"".join(LARGE)).hexdigest()
PART = {"s3": "partNumber=", "azure": "comp=block&", "gcs": "upload_id="}
"""What the requests have in their targets that send a part."""
FINISH = {"s3": "uploadId=", "azure": "comp=blocklist", "gcs": ""}


@dataclass
class Faulty:
    """A store behind a proxy."""

    kind: str
    proxy: FaultProxy
    url: str
    options: dict[str, object]

    def open(self, *, retry_s: float = 20, **more: object) -> Store:
        """Open it."""
        return open_store(self.url, {**self.options, **more}, retry_s=retry_s)

    def count(self, contains: str) -> int:
        """How many requests had that in their targets."""
        return sum(contains in target for _, target in self.proxy.requests)


@pytest.fixture(params=["s3", "gcs", "azure"])
def faulty(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Faulty]:
    monkeypatch.setattr(ObjectBackend, "part_bytes", PART_BYTES)
    server: S3Server | GcsServer | AzureServer = request.getfixturevalue(f"{request.param}_server")
    with FaultProxy(server.port) as proxy:
        if isinstance(server, AzureServer | GcsServer):
            options = server.options(proxy.port)
        else:
            options = s3_options(proxy.endpoint)
        yield Faulty(request.param, proxy, server.url(), options)


@pytest.fixture
def store(faulty: Faulty) -> Iterator[Store]:
    store = faulty.open()
    yield store
    store.close()


def sha_of(store: Store, name: str) -> str:
    size = store.size(name)
    buffer = bytearray(size)
    store.readinto(name, 0, memoryview(buffer))
    return hashlib.sha256(buffer).hexdigest()


def test_one_try_is_one_request_whatever_the_library_would_do(
    faulty: Faulty, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    busy = [
        Fault(kind=Kind.REFUSE, status=503, code="ServerBusy", times=2),
        Fault(kind=Kind.REFUSE, status=500, code="InternalError", times=1),
        Fault(kind=Kind.REFUSE, status=429, code="TooManyRequests", times=1),
        Fault(kind=Kind.RESET, times=1),
    ]
    faulty.proxy.faults.extend(busy)
    with caplog.at_level(logging.WARNING, logger="checkpoints"):
        store.put("x", b"1")
    assert [fault.hits for fault in busy] == [2, 1, 1, 1]
    assert len(faulty.proxy.requests) == 6
    assert len([record for record in caplog.records if record.name.startswith("checkpoints")]) == 1
    assert store.get("x") == b"1"


def test_a_small_operation_is_one_request(faulty: Faulty, store: Store) -> None:
    store.put("x", b"0123")
    operations: dict[str, Callable[[], object]] = {
        "put": lambda: store.put("y", b"1"),
        "put_new": lambda: store.put_new("z", b"token"),
        "get": lambda: store.get("x"),
        "get_range": lambda: store.get_range("x", 0, 2),
        "size": lambda: store.size("x"),
        "exists": lambda: store.exists("never"),
        "list": store.list,
        "children": lambda: store.children(""),
        "check": store.check,
        "delete": lambda: store.delete("y"),
        "get_tagged": lambda: store.get_tagged("x"),
    }
    taken = {}
    for name, operation in operations.items():
        faulty.proxy.requests.clear()
        operation()
        taken[name] = len(faulty.proxy.requests)
    assert taken == dict.fromkeys(operations, 1)


def test_c32_other_code_that_opened_the_url_with_a_cache_changes_nothing(
    faulty: Faulty, store: Store
) -> None:
    scheme, _, path = faulty.url.partition("://")
    more = {} if scheme == "s3" else {"skip_instance_cache": False}
    cached = fsspec.filesystem(scheme, **faulty.options, use_listings_cache=True, **more)
    store.put("checkpoints/1/manifest.json", b"1")
    if (
        scheme != "gs"
    ):  # gcsfs asks a service of Google's first, unless its environment forbids that
        assert len(cached.ls(f"{path}/checkpoints")) == 1
    other = faulty.open(use_listings_cache=True)
    assert other.children("checkpoints") == ["1"]
    store.put("checkpoints/2/manifest.json", b"2")
    store.delete_tree("checkpoints/1")
    assert other.children("checkpoints") == ["2"]
    assert other.list() == ["checkpoints/2/manifest.json"]
    assert not other.exists("checkpoints/1/manifest.json")
    other.close()


def test_a_lost_reply_to_an_exclusive_create_is_believed_ours(faulty: Faulty, store: Store) -> None:
    store.check()
    lost = Fault(kind=Kind.LOSE_REPLY, times=1)
    faulty.proxy.faults.append(lost)
    assert store.put_new("generations/000001.json", b"our token")
    assert lost.hits == 1
    assert not store.put_new("generations/000001.json", b"their token")
    assert store.get("generations/000001.json") == b"our token"


def test_a_lost_reply_to_a_compare_and_set_is_believed_ours(faulty: Faulty, store: Store) -> None:
    tag = store.put_if("leader", b"one", None)
    faulty.proxy.faults.append(Fault(kind=Kind.LOSE_REPLY, times=1))
    assert (new := store.put_if("leader", b"two", tag)) is not None
    assert store.get_tagged("leader") == (b"two", new)


@pytest.mark.parametrize("which", [0, 1, 2, 3, 4])
def test_whichever_reply_of_a_large_upload_is_lost_the_object_is_whole(
    faulty: Faulty, store: Store, which: int
) -> None:
    store.check()
    lost = Fault(kind=Kind.LOSE_REPLY, skip=which, times=1)
    faulty.proxy.faults.append(lost)
    store.put("large", LARGE)
    faulty.proxy.faults.clear()
    assert lost.hits == 1 or which == 4  # not every store needs five requests
    assert sha_of(store, "large") == LARGE_SHA


@pytest.mark.parametrize(
    "fault",
    [
        Fault(kind=Kind.REFUSE, status=503),
        Fault(kind=Kind.RESET),
        Fault(kind=Kind.CUT, keep_bytes=300_000),
    ],
    ids=["503", "reset", "cut"],
)
def test_a_part_that_fails_is_sent_again_and_no_other(
    faulty: Faulty, store: Store, fault: Fault
) -> None:
    fault.contains, fault.least_bytes, fault.times, fault.skip = (
        PART[faulty.kind],
        PART_BYTES // 2,
        2,
        0,
    )
    fault.hits = 0
    faulty.proxy.faults.append(fault)
    store.put("large", LARGE)
    assert fault.hits == 2
    faulty.proxy.faults.clear()
    if faulty.kind != "gcs":  # there the server is also asked how far it has got
        assert faulty.count(PART[faulty.kind]) == 5
    assert sha_of(store, "large") == LARGE_SHA


def test_c34_bytes_that_shift_on_their_way_are_found_before_the_object_counts(
    faulty: Faulty, store: Store
) -> None:
    block = bytes(range(256)) * (PART_BYTES // 1024)
    blocks = [bytes([number]) + block[1:] for number in range(10)]
    shift = Fault(kind=Kind.SHIFT, keep_bytes=300_000, least_bytes=PART_BYTES // 2, times=1)
    faulty.proxy.faults.append(shift)
    store.put("large", blocks)
    assert shift.hits == 1
    assert sha_of(store, "large") == hashlib.sha256(b"".join(blocks)).hexdigest()


def test_a_reply_cut_short_is_read_again(faulty: Faulty, store: Store) -> None:
    data = b"0123456789" * 10_000
    store.put("x", data)
    faulty.proxy.faults.append(Fault(kind=Kind.TRUNCATE, method="GET", times=1, keep_bytes=500))
    assert store.get("x") == data
    faulty.proxy.faults.append(Fault(kind=Kind.TRUNCATE, method="GET", times=1, keep_bytes=500))
    assert store.get_range("x", 10, 50_000) == data[10:50_010]


@pytest.mark.timeout(60)
def test_a_server_that_never_answers_gives_a_transient_error_in_bounded_time(
    faulty: Faulty,
) -> None:
    limits: dict[str, dict[str, object]] = {
        "s3": {"config_kwargs": {"read_timeout": 1}},
        "gcs": {"requests_timeout": 1},
        "azure": {"read_timeout": 1},
    }
    store = faulty.open(retry_s=2, **limits[faulty.kind])
    faulty.proxy.faults.append(Fault(kind=Kind.HANG))
    with pytest.raises(TransientStoreError):
        store.put("x", b"1")
    store.close()


def test_an_upload_that_breaks_off_leaves_no_object_and_the_old_one_in_place(
    faulty: Faulty,
) -> None:
    store = faulty.open(retry_s=0.5)
    store.put("old", b"the old one")
    faulty.proxy.faults.append(
        Fault(kind=Kind.RESET, contains=PART[faulty.kind], least_bytes=PART_BYTES // 2, skip=1)
    )
    faulty.proxy.faults.append(Fault(kind=Kind.RESET, method="DELETE"))
    for name in ("new", "old"):
        with pytest.raises(TransientStoreError, match=f"{name}: write failed"):
            store.put(name, LARGE)
    faulty.proxy.faults.clear()
    if faulty.kind != "gcs":
        # fake-gcs-server takes the question how much has arrived for the end of the upload.
        assert not store.exists("new")
        assert store.get("old") == b"the old one"
        assert store.list() == ["old"]
    store.close()


def test_a_missing_bucket_is_permanent_and_never_an_empty_store(faulty: Faulty) -> None:
    scheme = faulty.url.partition("://")[0]
    store = open_store(f"{scheme}://no-such-bucket/run", faulty.options, retry_s=5)
    calls: list[Callable[[], object]] = [
        store.check,
        lambda: store.put("x", b"1"),
        lambda: store.put_new("x", b"1"),
        lambda: store.children("checkpoints"),
        lambda: store.list("generations/"),
    ]
    for call in calls:
        with pytest.raises(PermanentStoreError, match="create the bucket"):
            call()
    store.close()


def test_credentials_that_are_refused_after_they_were_good_are_read_anew(
    faulty: Faulty, store: Store
) -> None:
    store.put("x", b"1")
    before = len(faulty.proxy.requests)
    time.sleep(1.1)  # a client younger than this is fresh enough
    codes = {"s3": "InvalidAccessKeyId", "azure": "AuthenticationFailed", "gcs": "authError"}
    status = 401 if faulty.kind == "gcs" else 403
    refused = Fault(kind=Kind.REFUSE, status=status, code=codes[faulty.kind], times=1)
    faulty.proxy.faults.append(refused)
    store.put("x", b"2")
    assert len(faulty.proxy.requests) - before == 2
    refused.times = None
    with pytest.raises(PermanentStoreError, match="check the credentials"):
        store.put("x", b"3")
    faulty.proxy.faults.clear()
    assert store.get("x") == b"2"
