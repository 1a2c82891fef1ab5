import errno
import logging
import resource
from pathlib import Path

import pytest

from checkpoints.backend_local import LocalBackend
from checkpoints.errors import (
    DamagedError,
    ObjectMissingError,
    PermanentStoreError,
    TransientStoreError,
)
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


class Linkless(LocalBackend):
    """A real folder on what stands for a file system without hard links: only the call is refused."""

    def create(self, name: str, data: bytes) -> bool:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return self._create_in_place(path, data)


def test_without_hard_links_a_creation_that_fails_leaves_the_name_free(tmp_path: Path) -> None:
    store = Store(str(tmp_path), Linkless(str(tmp_path)), retry_s=0.1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))  # a disk that is full after so much
    try:
        with pytest.raises(PermanentStoreError, match="File too large"):
            store.put_new("checkpoints/x/manifest.json", b"t" * 4000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert store.list() == []
    assert store.put_new("checkpoints/x/manifest.json", b"t" * 4000)
    assert not store.put_new("checkpoints/x/manifest.json", b"u" * 4000)


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


def test_pieces_are_filled_one_after_the_other_however_many(tmp_path: Path) -> None:
    for url in (str(tmp_path), "memory://pieces"):
        store = open_store(url)
        data = bytes(range(256)) * 20
        store.put("file", data)
        pieces = [memoryview(bytearray(size)) for size in (0, 1, 7, 0, 300, *[1] * 2500, 4)]
        store.read_pieces("file", 3, pieces)
        assert b"".join(pieces) == data[3 : 3 + 2812]
        with pytest.raises(DamagedError, match="truncated"):
            store.read_pieces("file", len(data) - 2, [memoryview(bytearray(2)) for _ in range(2)])
        with pytest.raises(ObjectMissingError):
            store.read_pieces("none", 0, pieces)
