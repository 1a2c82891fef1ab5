"""Whole runs under real torchruns in one world after another, and the bits that they end with."""

import hashlib
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support import processes, records
from tests.support.cluster import Agent, Cluster
from tests.support.distribution import ROOT

DIGITS = ROOT / "jobs" / "digits.yaml"
GPT = ROOT / "jobs" / "gpt.yaml"
# 1437 images in steps of 61, the last of 34: nothing divides anything.
SMALL_DIGITS = (
    "args.width=4",
    "train.epochs=2",
    "train.global_batch_size=61",
    "train.logical_shards=4",
    "checkpoint.every=4 steps",
)
BITWISE = ("train.reproducible=bitwise",)


@dataclass(frozen=True, kw_only=True)
class Bits:
    """What two runs have to have in common."""

    weights: str
    """summary.json's weights_sha256."""
    files: dict[str, str]
    """Of the last checkpoint: every tensor of model and optimizer, as files."""
    losses: list[tuple[Any, ...]]
    """Loss, rate and norm of each step of the lineage, as the journal tells them."""
    metrics: dict[str, float]


def bits_of(url: Path) -> Bits:
    """The bits of a run that is complete."""
    summary = records.summary(url)
    folder = records.checkpoint_path(url, records.checkpoints(url)[-1])
    return Bits(
        weights=summary["weights_sha256"],
        files={
            path.name: hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(folder.glob("*.safetensors"))
        },
        losses=[
            (event["step"], event["loss"], event["lr"], event["grad_norm"])
            for event in records.step_events(url)
        ],
        metrics=summary["metrics"],
    )


def run_worlds(
    folder: Path,
    job: Path | str,
    overrides: Sequence[str],
    worlds: Sequence[tuple[int, int]],
    *,
    last: int,
) -> Bits:
    """Train in one world after another, each killed once a step has begun, the last one to the end.

    `worlds` are (size, step at which everything of it gets SIGKILL).
    """
    folder.mkdir(parents=True, exist_ok=True)
    with Cluster(folder) as cluster:
        for number, (size, step) in enumerate(worlds, start=1):
            agent = cluster.start(job, *overrides, "train.step_delay=0.03", nproc=size)
            cluster.until_step(step, generation=number)
            kill(agent)
        agent = cluster.start(job, *overrides, nproc=last)
        assert agent.wait(180) == 0, agent.tail()
        summary = records.summary(cluster.url)
        assert summary["status"] == "complete"
        assert summary["bits_until"] is None
        sizes = [generation["world_size"] for generation in summary["generations"]]
        assert sizes == [*(size for size, _ in worlds), last]
        return bits_of(cluster.url)


def kill(agent: Agent) -> None:
    """SIGKILL to an agent and its workers at once."""
    pids = [agent.pid, *agent.workers().values()]
    processes.send(pids, signal.SIGKILL)
    agent.process.wait(10)
