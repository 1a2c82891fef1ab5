import errno
import logging
from pathlib import Path

import pytest

from checkpoints.backend_local import LocalBackend
from checkpoints.errors import ObjectMissingError, PermanentStoreError, TransientStoreError
from checkpoints.store import Store, open_store


class Moody(LocalBackend):
    """A real folder whose calls fail in a scripted way first."""

    def __init__(self, path: Path, *moods: Exception) -> None:
        super().__init__(str(path))
        self.moods = list(moods)
        self.calls = 0
        self.vanishing = False

    def create(self, name: str, data: bytes) -> bool:
        self.calls += 1
        if self.moods:
            raise self.moods.pop(0)
        made = super().create(name, data)
        if self.vanishing:
            self.delete(name)
        return made

    def size(self, name: str) -> int:
        self.calls += 1
        if self.moods:
            raise self.moods.pop(0)
        return super().size(name)


def busy() -> OSError:
    return OSError(errno.ESTALE, "stale handle")


def test_transient_errors_are_retried_with_growing_waits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    backend = Moody(tmp_path, *(busy() for _ in range(5)))
    waits: list[float] = []
    store = Store(str(tmp_path), backend, retry_s=600, sleep=waits.append)
    with caplog.at_level(logging.WARNING):
        assert store.put_new("x", b"token")
    assert backend.calls == 6
    assert len(waits) == 5
    assert all(0 <= wait <= 0.2 * 2**number for number, wait in enumerate(waits))
    # Told once, not five times.
    assert len(caplog.records) == 1
    assert "try 1 failed" in caplog.text


def test_retries_are_bounded_by_time_not_by_number(tmp_path: Path) -> None:
    backend = Moody(tmp_path, *(busy() for _ in range(10_000)))
    store = Store(str(tmp_path), backend, retry_s=0.3)
    with pytest.raises(
        TransientStoreError, match=r"x: look failed: .*stale handle; given up after"
    ):
        store.size("x")
    assert 1 < backend.calls < 1000


def test_permanent_errors_are_not_retried(tmp_path: Path) -> None:
    backend = Moody(tmp_path, PermissionError(errno.EACCES, "denied"))
    with pytest.raises(PermanentStoreError, match="check the credentials"):
        Store(str(tmp_path), backend).put_new("x", b"token")
    assert backend.calls == 1


def test_a_missing_parent_in_a_write_is_no_missing_object(tmp_path: Path) -> None:
    backend = Moody(tmp_path, FileNotFoundError(errno.ENOENT, "gone"))
    with pytest.raises(PermanentStoreError):
        Store(str(tmp_path), backend).put_new("x", b"token")
    backend.moods = [FileNotFoundError(errno.ENOENT, "gone")]
    with pytest.raises(ObjectMissingError):
        Store(str(tmp_path), backend).size("x")


def test_a_name_that_vanishes_while_it_is_taken_is_tried_again(tmp_path: Path) -> None:
    backend = Moody(tmp_path)
    store = Store(str(tmp_path), backend)
    store.put("x", b"theirs")
    backend.vanishing = True
    assert store.put_new("x", b"ours")


def test_a_name_that_never_settles_is_told(tmp_path: Path) -> None:
    backend = Moody(tmp_path)
    store = Store(str(tmp_path), backend)
    (tmp_path / "x").symlink_to(tmp_path / "nowhere")
    with pytest.raises(TransientStoreError, match="appears and vanishes"):
        store.put_new("x", b"ours")


def test_too_large_for_one_request_is_not_created_exclusively(tmp_path: Path) -> None:
    with pytest.raises(PermanentStoreError, match="found 5000000 bytes to create"):
        open_store(str(tmp_path)).put_new("x", b"1" * 5_000_000)


def test_c53_secrets_are_in_no_message_and_in_no_chained_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    secret = "Xk92Lmq0Secret"  # noqa: S105  # of nothing
    said = OSError(errno.ESTALE, f"server said: {secret} is stale")
    refused = PermissionError(errno.EACCES, f"{secret} is not allowed")
    backend = Moody(tmp_path, said, refused)
    url = f"sftp://me:{secret}@host/run"
    store = Store(url, backend, sleep=lambda _: None)
    with caplog.at_level(logging.DEBUG), pytest.raises(PermanentStoreError) as caught:
        store.put_new("x", b"token")
    assert store.display_url == "sftp://host/run"
    assert secret not in f"{caught.value} {store!r} {caplog.text}"
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


def test_errors_keep_their_cause_where_it_holds_no_secret(tmp_path: Path) -> None:
    backend = Moody(tmp_path, PermissionError(errno.EACCES, "denied"))
    with pytest.raises(PermanentStoreError) as caught:
        Store(str(tmp_path), backend).put_new("x", b"token")
    assert isinstance(caught.value.__cause__, PermissionError)
