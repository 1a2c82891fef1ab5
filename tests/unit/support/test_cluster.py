"""The cluster starts, finds, kills and cleans up real processes; here without torchrun, to be fast."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import processes
from tests.support.cluster import Agent, Cluster, ClusterError
from tests.support.distribution import python_path
from tests.support.ports import free_port

# An agent with two workers in sessions of their own, as torchrun starts them.
AGENT = """
import os, subprocess, sys, time
workers = [
    subprocess.Popen([sys.executable, "-c", "import time; print('worker', flush=True); time.sleep(60)"],
        env={**os.environ, "RANK": str(rank), "TORCHELASTIC_RESTART_COUNT": "2"}, start_new_session=True)
    for rank in range(2)
]
for worker in workers:
    worker.wait()
print("all workers ended", flush=True)
"""


def spawn(cluster: Cluster) -> Agent:
    agent = cluster.spawn([sys.executable, "-c", AGENT])
    cluster.until(lambda: len(agent.workers()) == 2, "two workers", timeout_s=10)
    return agent


def test_workers_are_found_by_rank_and_killed(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster:
        agent = spawn(cluster)
        assert agent.restart_count() == 2
        pid = cluster.kill(1)
        cluster.until(lambda: not processes.is_alive(pid), "the worker's end", timeout_s=5)
        assert sorted(agent.workers()) == [0]
        cluster.kill(0, signal.SIGTERM)
        assert cluster.finish(5) == [0]
        assert "all workers ended" in agent.output()


def test_orphans_in_their_own_session_are_cleaned_up(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster:
        agent = spawn(cluster)
        workers = agent.workers()
        agent.signal(signal.SIGKILL)
        assert agent.wait(5) == -signal.SIGKILL
        assert len(cluster.leftovers()) == 2
    assert not any(processes.is_alive(pid) for pid in workers.values())


def test_a_wait_that_runs_out_shows_the_output(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster:
        spawn(cluster)
        with pytest.raises(
            ClusterError, match=r"(?s)waited 0.2 s for the moon.*agent-1.log.*worker"
        ):
            cluster.until(lambda: None, "the moon", timeout_s=0.2)


def test_a_wait_ends_with_the_last_agent(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster:
        cluster.spawn([sys.executable, "-c", "raise SystemExit('no such thing')"])
        with pytest.raises(
            ClusterError, match=r"(?s)all agents ended before step 1.*no such thing"
        ):
            cluster.until_step(1, timeout_s=30)


def test_the_overrides_win_over_the_clusters_own_arguments(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster:
        arguments = cluster.run_arguments("job.yaml", ["--checkpoint.url=other", "train.seed=1"])
    assert arguments == ["job.yaml", "audit.samples=true", "--checkpoint.url=other", "train.seed=1"]


@pytest.mark.parametrize("installed", [True, False])
def test_the_entry_point_is_there_only_where_the_project_is_installed(
    tmp_path: Path, installed: bool
) -> None:
    code = (
        "from importlib.metadata import entry_points\n"
        "print([point.value for point in entry_points(group='torchrun.handlers')])"
    )
    out = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": python_path(tmp_path, installed=installed)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert ("elastic.hook:handlers" in out) is installed


def test_a_free_port_is_a_port() -> None:
    assert 1024 < free_port() < 65536
