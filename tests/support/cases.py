"""The public cases' common inputs: the tracer jobs' names, weights of a step, and a kill after a checkpoint."""

from pathlib import Path

from tests.support import records
from tests.support.cluster import Agent, Cluster
from tests.support.distribution import ROOT

TRACER_FILE = ROOT / "tests" / "support" / "tracer.py"
EACH_STEP = ("checkpoint.every=1 step", "checkpoint.keep=1000")
SLOW = "train.step_delay=0.4"  # long enough to kill a worker between two checkpoints
REL = 1e-5


def tracer(name: str = "Tracer") -> str:
    """The JOB argument of one of the tracer's jobs."""
    return f"{TRACER_FILE}:{name}"


def weight(url: Path, step: int) -> float:
    """The tracer's w after a step, read from the newest checkpoint of that step."""
    (value,) = records.weights_at(url, step).values()
    return float(value)


def final_weight(url: Path) -> float:
    """The tracer's w in the newest checkpoint."""
    (value,) = records.final_weights(url).values()
    return float(value)


def sets(url: Path) -> list[set[int]]:
    """The samples of each step of the lineage."""
    return [set(step.indices) for step in records.committed_steps(url)]


def assert_each_sample_once(url: Path, n: int, epochs: int) -> None:
    """Check that the committed indices of each epoch are 0 to n - 1, each once."""
    found = {epoch: sorted(used) for epoch, used in records.committed_indices(url).items()}
    assert found == {epoch: list(range(n)) for epoch in range(epochs)}


def kill_after(cluster: Cluster, step: int, *, rank: int = 1) -> None:
    """SIGKILL a worker once a step's checkpoint is committed, and wait until the run has started again."""
    before = max(records.started(cluster.url), default=0)
    generation, committed = cluster.until_committed(step)
    cluster.kill(rank)
    assert committed == step, f"meant to kill after step {step}, found {generation}-{committed}"
    cluster.until_started(before + 1)


def run_once(cluster: Cluster, job: str, *overrides: str, nproc: int = 2) -> records.Record:
    """Start one agent, wait for its end, check that it is complete, and return the summary."""
    agent: Agent = cluster.start(job, *overrides, nproc=nproc)
    assert agent.wait(90) == 0, agent.tail()
    return records.summary(cluster.url)
