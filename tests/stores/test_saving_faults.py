"""Checkpoints on real stores while something goes wrong with them."""

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkpoints.errors import CheckpointError, DamagedError, StoreError, StoreFullError
from checkpoints.manager import CheckpointManager
from checkpoints.store import Store, open_store
from tests.support.disks import small_disk
from tests.support.fault_proxy import Fault, FaultProxy, Kind
from tests.support.object_stores import S3Server, s3_options
from tests.support.saving_worker import is_whole, save, sized
from tests.support.states import name, same
from tests.support.tools import ROOT

__all__ = ["small_disk"]


# ----------------------------------------------------------------------------------------- one file
@pytest.mark.parametrize("number", [1, 2, 3])
def test_c28_a_file_that_cannot_be_written_means_no_manifest_and_an_error_at_once(
    s3_server: S3Server, proxy: FaultProxy, number: int
) -> None:
    manager = CheckpointManager(open_store(s3_server.url(), s3_options(proxy.endpoint), retry_s=1))
    save(manager, 1)
    proxy.requests.clear()
    refused = Fault(
        kind=Kind.REFUSE, method="PUT", contains=f"{name(2)}/", status=400, code="Odd", skip=number
    )
    proxy.faults.append(refused)
    with pytest.raises(StoreError, match=f"{name(2)}/.*: write failed: .*Odd"):
        save(manager, 2)
    asked = [method for method, target in proxy.requests if f"{name(2)}/manifest" in target]
    assert set(asked) <= {"GET", "HEAD"}  # whether the name is free
    assert manager.names() == [name(1)]
    proxy.faults.clear()
    assert not manager.store.list(name(2).folder)
    save(manager, 3)
    assert manager.names() == [name(3), name(1)]
    manager.store.close()


def test_c26_small_objects_that_overtake_large_ones_point_to_nothing_missing(
    s3_server: S3Server, proxy: FaultProxy
) -> None:
    options = s3_options(proxy.endpoint)
    proxy.faults.append(Fault(kind=Kind.DELAY, method="PUT", delay_s=0, delay_s_per_mb=0.3))
    for _ in range(2):
        url = s3_server.url()
        manager = CheckpointManager(open_store(url, s3_server.options))
        command = [sys.executable, "-m", "tests.support.saving_worker", url, json.dumps(options)]
        writer = subprocess.Popen([*command, str(1 << 20)], cwd=ROOT)
        try:
            seen: set[object] = set()
            deadline = time.monotonic() + 60
            while len(seen) < 3 and time.monotonic() < deadline:
                newest = manager.latest()
                if newest is not None:
                    try:
                        assert is_whole(manager, newest)
                        seen.add(newest)
                    except CheckpointError:
                        # What retention takes away while it is being read is not listed any more.
                        assert newest not in manager.names()
                time.sleep(0.05)
        finally:
            writer.send_signal(signal.SIGKILL)
            writer.wait()
        assert len(seen) == 3
        for which in manager.names():
            assert is_whole(manager, which)
        manager.store.close()


def test_c34_a_file_that_shifted_on_a_store_without_sums_is_found_at_restore(
    sftp_files: Store, caplog: pytest.LogCaptureFixture
) -> None:
    manager = CheckpointManager(sftp_files)
    save(manager, 1, size=1 << 20)
    save(manager, 2, size=1 << 20)
    file = name(2).file("model.safetensors")
    data = sftp_files.get(file)
    sftp_files.put(file, data[:300_000] + data[300_001:] + b"\0")
    with pytest.raises(DamagedError, match=r"model\.safetensors"):
        manager.restore(name(2))
    found = CheckpointManager(sftp_files).restore_newest()
    assert found is not None
    assert found[0].name == name(1)
    assert "model.safetensors" in caplog.text


@pytest.fixture
def sftp_files(request: pytest.FixtureRequest) -> Iterator[Store]:
    server = request.getfixturevalue("sftp_server")
    store = open_store(server.url(), server.options)
    yield store
    store.close()


# --------------------------------------------------------------------------------------- the server
def test_a_server_killed_and_started_again_during_saves_loses_nothing_that_was_committed(
    s3_server: S3Server,
) -> None:
    store = open_store(s3_server.url(), s3_server.options, retry_s=60)
    manager = CheckpointManager(store, keep=2)
    save(manager, 1, size=24 << 20)
    for step in (2, 3):
        failed: list[Exception] = []

        def saving(step: int = step, failed: list[Exception] = failed) -> None:
            try:
                save(manager, step, size=24 << 20)
            except CheckpointError as error:
                failed.append(error)

        thread = threading.Thread(target=saving)
        thread.start()
        time.sleep(0.25 * step)
        s3_server.kill()
        time.sleep(0.5)
        s3_server.start()
        thread.join()
        assert not failed
        assert manager.latest() == name(step)
        assert is_whole(manager, name(step))
        assert is_whole(manager, name(step - 1))
    store.close()


# ----------------------------------------------------------------------------------------- the disk
def test_c31_a_full_disk_harms_nothing_and_saving_resumes_once_there_is_room(
    small_disk: Path,
) -> None:
    manager = CheckpointManager(open_store(str(small_disk / "run")), keep=2)
    size = 3_200_000  # two files of that: two checkpoints and a half fit
    ballast = small_disk / "ballast"
    save(manager, 1, size=size)
    ballast.write_bytes(bytes(4 << 20))
    used = [path for path in small_disk.rglob("*") if path.is_file()]
    for step in (2, 3, 4):
        with pytest.raises(
            StoreFullError, match=r"MB are needed, [\d.]+ MB are free.*full"
        ) as caught:
            save(manager, step, size=size)
        assert "\n" not in str(caught.value)
        # Nothing piles up, and what is committed is as it was.
        assert [path for path in small_disk.rglob("*") if path.is_file()] == used
        assert manager.names() == [name(1)]
        assert is_whole(manager, name(1))
    ballast.unlink()
    save(manager, 5, size=size)
    assert manager.names() == [name(5), name(1)]
    assert is_whole(manager, name(5))
    assert same(manager.restore(name(1)), sized(1, size))
