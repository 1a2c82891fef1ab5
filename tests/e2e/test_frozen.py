"""Frozen weights in a real run: sent once, in whatever generation, and always there."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from checkpoints import commands
from checkpoints.manager import CheckpointManager
from checkpoints.store import open_store
from tests.support import records
from tests.support.cluster import Cluster
from tests.support.distribution import ROOT

JOB = f"{ROOT / 'tests' / 'support' / 'frozen_job.py'}:Frozen"
BACKBONE = 4 << 19


def test_frozen_weights_are_stored_once_through_kills_and_retention(
    cluster: Cluster, tmp_path: Path
) -> None:
    overrides = ("args.n=40", "train.epochs=2", "train.global_batch_size=4")
    kills = ("args.kill=5@1 9@0", f"args.marks={tmp_path}/marks")
    keep = ("checkpoint.every=1 step", "checkpoint.keep=2")
    agent = cluster.start(JOB, *overrides, *kills, *keep, nproc=2, max_restarts=2)
    assert agent.wait(150) == 0, agent.tail(80)
    summary = records.summary(cluster.url)
    assert (summary["status"], summary["steps"], summary["restarts"]) == ("complete", 20, 2)
    files = [path for path in cluster.url.rglob("*.safetensors") if path.is_file()]
    large = [path for path in files if path.stat().st_size > BACKBONE]
    assert len(large) == 1, large
    # What a generation begins from in memory may bring its own; what it commits then refers to that.
    assert not large[0].parent.name.startswith("000003-")
    manager = CheckpointManager(open_store(str(cluster.url)))
    assert len(manager.names()) >= 2
    assert commands.main(["verify", str(cluster.url)]) == 0
    folder = cluster.url / manager.names()[0].folder
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    path = folder / index["weight_map"]["backbone"]
    assert path.resolve() == large[0].resolve()
    assert torch.equal(load_file(path)["backbone"], torch.arange(1 << 19, dtype=torch.float32))
    target = tmp_path / "w.safetensors"
    assert commands.main(["export", f"{cluster.url}@latest", str(target)]) == 0
    assert set(load_file(target)) == {"w", "backbone"}
