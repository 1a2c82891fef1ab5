"""Every way to start the runner that the docs name, with real processes."""

import sys
from pathlib import Path

import pytest

from tests.support import records
from tests.support.cases import REL, assert_each_sample_once, final_weight, tracer
from tests.support.cluster import RUN, Cluster
from tests.support.ports import free_port
from tests.support.tools import need_tool

OVERRIDES = ("args.n=12", "train.epochs=1", "train.global_batch_size=4")


def assert_trained(cluster: Cluster, world: int) -> None:
    """Check that all ended well and trained together."""
    assert cluster.finish(90) == [0] * len(cluster.agents), cluster.agents[0].tail()
    summary = records.summary(cluster.url)
    assert summary["status"] == "complete"
    assert summary["generations"][0]["world_size"] == world
    assert_each_sample_once(cluster.url, 12, 1)
    assert final_weight(cluster.url) == pytest.approx(1.488, rel=REL)


def command(cluster: Cluster, *overrides: str) -> list[str]:
    """Plain Python with the runner."""
    return [sys.executable, str(RUN), *cluster.run_arguments(tracer(), [*OVERRIDES, *overrides])]


def spawn_ranks(cluster: Cluster, world: int, *overrides: str, **more: str) -> None:
    """Start each rank by hand."""
    for rank in range(world):
        ranks = {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
        cluster.spawn(command(cluster, *overrides), env={**ranks, **more})


def test_plain_python_is_a_world_of_one(bare_cluster: Cluster) -> None:
    bare_cluster.spawn(command(bare_cluster))
    assert_trained(bare_cluster, 1)


def test_ranks_set_by_hand(bare_cluster: Cluster) -> None:
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    spawn_ranks(bare_cluster, 2, **address)
    assert_trained(bare_cluster, 2)


def test_ranks_that_meet_in_a_file(bare_cluster: Cluster, tmp_path: Path) -> None:
    spawn_ranks(bare_cluster, 2, f"init_method=file://{tmp_path}/meet")
    assert_trained(bare_cluster, 2)


def test_ranks_that_meet_at_an_address(bare_cluster: Cluster) -> None:
    spawn_ranks(bare_cluster, 2, f"init_method=tcp://127.0.0.1:{free_port()}")
    assert_trained(bare_cluster, 2)


def test_the_old_launcher_with_its_local_rank_argument(bare_cluster: Cluster) -> None:
    launch = [sys.executable, "-m", "torch.distributed.launch", "--nproc_per_node=2"]
    arguments = bare_cluster.run_arguments(tracer(), OVERRIDES)
    bare_cluster.spawn([*launch, f"--master_port={free_port()}", str(RUN), *arguments])
    assert_trained(bare_cluster, 2)


def test_mpirun(bare_cluster: Cluster) -> None:
    mpirun = [need_tool("mpirun"), "-np", "2", "--allow-run-as-root", "--oversubscribe"]
    bare_cluster.spawn([*mpirun, *command(bare_cluster)])
    assert_trained(bare_cluster, 2)


def test_slurms_rank_variables(bare_cluster: Cluster) -> None:
    for rank in range(2):
        step = {
            "SLURM_JOB_ID": "7",
            "SLURM_STEP_ID": "0",
            "SLURM_PROCID": str(rank),
            "SLURM_NTASKS": "2",
            "SLURM_LOCALID": str(rank),
            "SLURM_NNODES": "1",
            "SLURM_STEP_NUM_TASKS": "2",
            "SLURM_STEP_NUM_NODES": "1",
            "SLURM_STEP_TASKS_PER_NODE": "2",
            "SLURM_NODEID": "0",
        }
        bare_cluster.spawn(command(bare_cluster), env=step)
    assert_trained(bare_cluster, 2)


def test_a_back_end_that_this_torch_lacks_is_one_line(bare_cluster: Cluster) -> None:
    agent = bare_cluster.spawn(command(bare_cluster, "backend=mpi"))
    assert agent.wait(60) == 2
    (line,) = [line for line in agent.output().splitlines() if "backend" in line]
    assert "mpi" in line
    assert "gloo" in line
    assert "Traceback" not in agent.output()
