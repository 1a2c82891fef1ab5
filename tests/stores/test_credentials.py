"""Credentials that run out in the middle of a run: read anew from where they come, and told if not."""

import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from checkpoints.errors import PermanentStoreError, TransientStoreError
from checkpoints.manager import CheckpointManager
from checkpoints.store import Store, open_store
from tests.support.fault_proxy import Fault, FaultProxy, Kind
from tests.support.object_stores import (
    FRESH_KEY,
    FRESH_SECRET,
    KEY,
    SECRET,
    S3Server,
    s3_options,
)
from tests.support.states import name, same, state

Renewal = Callable[[], None]


@pytest.fixture
def expiring(proxy: FaultProxy) -> Fault:
    """After ten requests the first key is told to have expired, for ever."""
    fault = Fault(
        kind=Kind.REFUSE, headed=f"Credential={KEY}/", status=400, code="ExpiredToken", skip=10
    )
    proxy.faults.append(fault)
    return fault


@pytest.fixture(params=["environment", "file", "options"])
def opened(
    request: pytest.FixtureRequest,
    s3_server: S3Server,
    proxy: FaultProxy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[tuple[Store, Renewal]]:
    """A store with the first key, and how to put the second one where the first came from."""
    options = s3_options(proxy.endpoint)
    file = tmp_path / "credentials"

    def write(key: str, secret: str) -> None:
        if request.param == "environment":
            monkeypatch.setenv("AWS_ACCESS_KEY_ID", key)
            monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
        elif request.param == "file":
            lines = ["[default]", f"aws_access_key_id={key}", f"aws_secret_access_key={secret}"]
            file.write_text("\n".join(lines) + "\n")
        else:
            options.update(key=key, secret=secret)

    if request.param != "options":
        del options["key"], options["secret"]
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    write(KEY, SECRET)
    store = open_store(s3_server.url(), options, retry_s=3)
    yield store, lambda: write(FRESH_KEY, FRESH_SECRET)
    store.close()


def test_c35_a_pending_snapshot_is_saved_with_credentials_that_were_renewed(
    opened: tuple[Store, Renewal], expiring: Fault, caplog: pytest.LogCaptureFixture
) -> None:
    store, renew = opened
    manager = CheckpointManager(store)
    told: list[str] = []
    step = 0
    with caplog.at_level(logging.WARNING, logger="checkpoints"):
        while not told:
            step += 1
            snapshot = manager.stage(state(step), name=name(step), parent=None, run_id="r", info={})
            try:
                manager.commit(snapshot)
            except TransientStoreError as error:
                told.append(str(error))
    assert expiring.hits > 1
    assert store.display_url in told[0]
    assert "the credentials have expired: renew them where they come from" in told[0]
    assert "ExpiredToken" in caplog.text
    renew()
    manager.commit(snapshot)
    assert manager.latest() == name(step)
    assert same(manager.restore(name(step)), state(step))
    for secret in (SECRET, FRESH_SECRET):
        assert secret not in f"{told} {caplog.text}"
    manager.close()


def test_c35_credentials_renewed_in_time_are_used_without_a_word(
    opened: tuple[Store, Renewal], expiring: Fault, caplog: pytest.LogCaptureFixture
) -> None:
    store, renew = opened
    store.put("x", b"1")
    time.sleep(1.1)  # a client younger than this is fresh enough
    renew()
    expiring.skip = 0
    with caplog.at_level(logging.WARNING, logger="checkpoints"):
        store.put("x", b"2")
    assert expiring.hits == 1
    assert not caplog.records
    assert store.get("x") == b"2"


def test_c35_a_large_upload_goes_on_from_where_the_credentials_ran_out(
    opened: tuple[Store, Renewal], expiring: Fault, proxy: FaultProxy
) -> None:
    store, renew = opened
    store.put("x", b"1")
    time.sleep(1.1)
    renew()
    expiring.skip = 2
    store.put("large", [bytes([number]) * (1 << 20) for number in range(70)])
    parts = [target for method, target in proxy.requests if "partNumber" in target]
    assert len(parts) - expiring.hits == 5
    assert store.get_range("large", (69 << 20) - 1, 2) == b"\x44\x45"


def test_credentials_that_have_expired_before_the_first_request_are_told_at_once(
    s3_server: S3Server, proxy: FaultProxy
) -> None:
    proxy.faults.append(Fault(kind=Kind.REFUSE, status=400, code="ExpiredToken"))
    store = open_store(s3_server.url(), s3_options(proxy.endpoint))
    with pytest.raises(PermanentStoreError, match="have expired"):
        store.check()
    assert len(proxy.requests) == 1
    store.close()
