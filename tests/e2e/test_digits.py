"""The default job as a user starts it: trained to its accuracy, complete on a second start, going on with more epochs."""

import hashlib
import json
from pathlib import Path

import pytest
import torch

from tests.support import records
from tests.support.cluster import RUN, Cluster, torchrun_command
from tests.support.distribution import ROOT

COMMAND = [*torchrun_command(), "--nproc_per_node=2", "--rdzv_backend=c10d", str(RUN)]


def weights_sha256(weights: dict[str, torch.Tensor]) -> str:
    """The summary's hash, by its definition: name, dtype, shape, raw little-endian bytes, in order of name."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        tensor = weights[name].contiguous()
        digest.update(name.encode())
        digest.update(str(tensor.dtype).removeprefix("torch.").encode())
        digest.update(json.dumps(list(tensor.shape)).encode())
        digest.update(tensor.view(torch.uint8).numpy().tobytes() if tensor.numel() else b"")
    return digest.hexdigest()


@pytest.mark.soak
def test_the_default_job_reaches_its_accuracy_and_is_complete(bare_cluster: Cluster) -> None:
    url = bare_cluster.folder / "runs" / "digits"
    agent = bare_cluster.spawn(COMMAND)  # from another working directory: the URL is relative to it
    assert agent.wait(150) == 0, agent.tail()
    summary = records.summary(url)
    assert summary["status"] == "complete"
    assert summary["metrics"]["accuracy"] >= 0.97
    assert summary["restarts"] == 0
    assert summary["lost_steps"] == 0
    assert summary["samples"] == summary["epochs"] * (summary["samples"] // summary["epochs"])
    assert abs(sum(summary["seconds"].values())) > 0
    assert len(records.final_weights(url)) > 4
    before = (url / "summary.json").read_bytes()

    again = bare_cluster.spawn(COMMAND)
    assert again.wait(60) == 0, again.tail()
    assert "complete" in again.output()
    assert "train.epochs" in again.output()
    assert len(records.started(url)) == 1
    assert (url / "summary.json").read_bytes() == before

    epochs = summary["epochs"] + 1
    longer = bare_cluster.spawn([*COMMAND, f"train.epochs={epochs}"])
    assert longer.wait(90) == 0, longer.tail()
    more = records.summary(url)
    assert (more["status"], more["epochs"]) == ("complete", epochs)
    assert more["generations"][-1]["start_step"] == summary["steps"]


def test_a_small_run_installed_and_as_a_module(cluster: Cluster) -> None:
    small = ("train.epochs=1", "args.width=4", "train.max_steps=4", "eval.every=off")
    agent = cluster.start(None, *small, run=["-m", "elastic.run"])
    assert agent.wait(90) == 0, agent.tail()
    assert records.summary(cluster.url)["steps"] == 4


def test_help_tells_the_settings_and_starts_nothing(bare_cluster: Cluster) -> None:
    import sys

    agent = bare_cluster.spawn([sys.executable, str(RUN), "--help"])
    assert agent.wait(60) == 0, agent.tail()
    assert "train.global_batch_size" in agent.output()
    assert "step_delay" not in agent.output()
    assert not (bare_cluster.folder / "runs").exists()


def test_the_package_holds_the_data_it_ships() -> None:
    assert (ROOT / "jobs" / "digits.yaml").exists()
    assert list(Path(ROOT / "jobs" / "data").glob("*.safetensors"))
