"""Whole runs, by torchrun, on real stores and full disks."""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkpoints.manager import CheckpointManager
from checkpoints.store import open_store
from tests.support import records
from tests.support.cluster import Cluster
from tests.support.disks import small_disk
from tests.support.object_stores import S3Server
from tests.support.tools import ROOT

__all__ = ["small_disk"]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path) as made:
        yield made


def test_c33_loader_workers_forked_after_the_store_was_used_read_from_it_too(
    cluster: Cluster, s3_server: S3Server
) -> None:
    data, url = s3_server.url(), s3_server.url()
    with_options = open_store(data, s3_server.options)
    for index in range(24):
        with_options.put(str(index), str(index % 3).encode())
    with_options.close()
    options = json.dumps(s3_server.options)
    arguments = [
        f"{ROOT}/tests/support/s3_job.py:Remote",
        f"args.url={data}",
        f"args.options={options}",
        "args.count=24",
        f"checkpoint.url={url}",
        f"checkpoint.storage_options={options}",
        "train.global_batch_size=4",
        "loader.workers=2",
        "loader.start_method=fork",
    ]
    for epochs in (
        1,
        2,
    ):  # the second one resumes, so that the store is used before the loader starts
        agent = cluster.start(arguments[0], *arguments[1:], f"train.epochs={epochs}", nproc=1)
        assert agent.wait(120) == 0, agent.tail()
    store = open_store(url, s3_server.options)
    newest = CheckpointManager(store).latest()
    assert newest is not None
    assert newest.step == 12
    store.close()


def test_c31_training_goes_on_beside_a_full_disk_and_saving_resumes_by_itself(
    cluster: Cluster, small_disk: Path
) -> None:
    url = small_disk / "run"
    ballast = small_disk / "ballast"
    agent = cluster.start(
        f"{ROOT}/tests/support/s3_job.py:Heavy",
        f"checkpoint.url={url}",
        "checkpoint.every=2 steps",
        "checkpoint.keep=1",
        "train.global_batch_size=2",
        "train.epochs=100",
        "train.step_delay=0.2",
        nproc=1,
    )

    def newest() -> int:
        found = CheckpointManager(open_store(str(url))).latest() if url.exists() else None
        return found.step if found else 0

    cluster.until(lambda: newest() >= 4, "two checkpoints", timeout_s=90)

    def is_told() -> bool:
        # Again and again, since a save under way gives its room back.
        facts = os.statvfs(small_disk)
        with ballast.open("ab") as file:
            file.write(bytes(max(0, facts.f_bavail * facts.f_frsize - (1 << 20))))
        return "MB are needed" in agent.output()

    cluster.until(is_told, "the disk to be told full", timeout_s=60)
    before = newest()
    time.sleep(3)
    assert agent.code is None
    assert newest() == before
    lines = [line for line in agent.output().splitlines() if "MB are needed" in line]
    assert "training goes on" in lines[0]
    assert str(newest()) in lines[0]
    ballast.unlink()
    cluster.until(lambda: newest() > before, "saving to resume", timeout_s=90)
    records.status(url)
