"""The public cases' common inputs: the tracer jobs' names, weights of a step, a kill at an exact place."""

from pathlib import Path

from tests.support import records
from tests.support.cluster import Agent, Cluster
from tests.support.distribution import ROOT

SUPPORT = ROOT / "tests" / "support"
EACH_STEP = ("checkpoint.every=1 step", "checkpoint.keep=1000")
SLOW = "train.step_delay=0.4"  # where something is done to a run from outside while it trains
REL = 1e-5


def tracer(name: str = "Tracer") -> str:
    """The JOB argument of one of the tracer's jobs."""
    return f"{SUPPORT / 'tracer.py'}:{name}"


def killed(name: str = "Tracer") -> str:
    """The JOB argument of one of the tracer's jobs that can be killed at exact places."""
    return f"{SUPPORT / 'killed.py'}:{name}"


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


def run_once(cluster: Cluster, job: str, *overrides: str, nproc: int = 2) -> records.Record:
    """Start one agent, wait for its end, check that it is complete, and return the summary."""
    agent: Agent = cluster.start(job, *overrides, nproc=nproc)
    assert agent.wait(120) == 0, agent.tail()
    return records.summary(cluster.url)


def run_killed(
    cluster: Cluster, job: str, kill: str, *overrides: str, nproc: int = 2
) -> records.Record:
    """Run a job that is killed at these places; check one restart for each kill, each at its step.

    `kill` is a text such as "4@1 9@0": in step 4 on rank 1, in step 9 on rank 0.
    """
    places = kill.split()
    marks = cluster.folder / "marks"
    given = (f"args.kill={kill}", f"args.marks={marks}")
    agent = cluster.start(killed(job), *overrides, *given, nproc=nproc, max_restarts=len(places))
    assert agent.wait(60 + 30 * len(places)) == 0, agent.tail(80)
    assert sorted(path.name for path in marks.iterdir()) == sorted(places)
    summary = records.summary(cluster.url)
    assert summary["restarts"] == len(places), agent.tail(80)
    causes = [generation["cause"] for generation in summary["generations"][1:]]
    assert causes == [
        f"worker killed (SIGKILL, rank {place.partition('@')[2]})" for place in places
    ]
    return summary
