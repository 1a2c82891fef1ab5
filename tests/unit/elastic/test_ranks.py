"""A worker's place, from the variables that real launchers set."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from elastic.errors import StartError
from elastic.ranks import Place, read_place

ROOT = Path(__file__).parents[3]
TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "TORCHELASTIC_RUN_ID": "abc",
    "TORCHELASTIC_RESTART_COUNT": "3",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "PMIX_NAMESPACE": "3021471745",
}
SLURM = {
    "SLURM_PROCID": "6",
    "SLURM_NTASKS": "9",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "3",
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_JOB_ID": "57",
    "SLURM_STEP_ID": "0",
}
PMI = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}


def test_without_a_launcher_it_is_a_world_of_one() -> None:
    place = read_place({"MASTER_ADDR": "left over"})
    assert (place.rank, place.world_size, place.local_rank, place.nodes) == (0, 1, 0, 1)
    assert (place.launcher, place.address) == ("none", None)


def test_torchruns_variables_are_understood() -> None:
    assert read_place(TORCHRUN) == Place(
        rank=5,
        world_size=8,
        local_rank=1,
        local_world_size=4,
        node_rank=1,
        nodes=2,
        launcher="torchrun",
        group="abc",
        restart_count=3,
        address=("node0", 29500),
        agent_store=True,
    )


def test_variables_set_by_hand_are_understood() -> None:
    env = {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "2000",
    }
    place = read_place(env)
    assert (place.launcher, place.group, place.agent_store) == ("hand", "127.0.0.1:2000", False)
    assert (place.local_world_size, place.nodes, place.node_rank) == (2, 1, 0)


def test_one_process_a_node_needs_no_local_rank() -> None:
    place = read_place({"RANK": "3", "WORLD_SIZE": "8"})
    assert (place.local_rank, place.local_world_size, place.node_rank) == (0, 1, 3)
    assert (place.nodes, place.group, place.address) == (None, "world", None)


def test_open_mpis_variables_are_understood() -> None:
    place = read_place(OPEN_MPI | {"SLURM_PROCID": "0", "SLURM_STEP_ID": "0"})
    assert (place.rank, place.world_size, place.local_rank, place.local_world_size) == (3, 4, 1, 2)
    assert (place.launcher, place.group, place.node_rank) == ("mpirun", "3021471745", 1)
    assert (place.nodes, place.address) == (None, None)


def test_mpichs_variables_are_understood_also_inside_a_slurm_job() -> None:
    for more in ({}, {"SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_LOCALID": "0"}):
        place = read_place(PMI | more)
        assert (place.rank, place.world_size, place.local_world_size) == (2, 4, 2)
        assert place.launcher == "mpirun"


def test_sruns_variables_are_understood() -> None:
    place = read_place(SLURM)
    assert (place.rank, place.world_size, place.local_rank, place.local_world_size) == (6, 7, 0, 1)
    assert (place.node_rank, place.nodes, place.launcher, place.group) == (
        3,
        4,
        "srun",
        "slurm-57.0",
    )
    assert read_place(SLURM | {"PMI_RANK": "6", "PMI_SIZE": "7"}).launcher == "srun"


def test_a_slurm_job_that_was_queued_again_is_another_group() -> None:
    assert read_place(SLURM | {"SLURM_RESTART_COUNT": "2"}).group == "slurm-57.0.2"


@pytest.mark.parametrize("step", [None, "4294967291", "4294967290"])
def test_a_batch_script_is_no_step_of_srun(step: str | None) -> None:
    env = (
        SLURM | {"SLURM_STEP_ID": step}
        if step
        else {k: v for k, v in SLURM.items() if k != "SLURM_STEP_ID"}
    )
    assert read_place(env).launcher == "none"


def test_torchrun_inside_a_slurm_job_counts() -> None:
    assert read_place(TORCHRUN | SLURM | OPEN_MPI).launcher == "torchrun"


@pytest.mark.parametrize(
    ("env", "text"),
    [
        ({"RANK": "0"}, "WORLD_SIZE: missing although RANK is set, expected both or neither"),
        ({"WORLD_SIZE": "2"}, "RANK: missing although WORLD_SIZE is set, expected both or neither"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "rank: found 2, expected less than the world size, 2"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK: found 'x', expected a whole number of 0 or more"),
        (
            {"RANK": "-1", "WORLD_SIZE": "2"},
            "RANK: found '-1', expected a whole number of 0 or more",
        ),
        (
            TORCHRUN | {"LOCAL_RANK": "4"},
            "local rank: found 4, expected less than the workers of the node, 4",
        ),
        (
            TORCHRUN | {"LOCAL_WORLD_SIZE": "9"},
            "local world size: found 9 workers of this node in a world of 8, expected no more than the world has",
        ),
        (TORCHRUN | {"MASTER_PORT": "0"}, "MASTER_PORT: found 0, expected 1 to 65535"),
        (
            TORCHRUN | {"MASTER_PORT": "x"},
            "MASTER_PORT: found 'x', expected a whole number of 0 or more",
        ),
        (
            TORCHRUN | {"MASTER_PORT": ""},
            "MASTER_PORT: missing although MASTER_ADDR is set, expected both or neither",
        ),
        (
            {"OMPI_COMM_WORLD_RANK": "0"},
            "OMPI_COMM_WORLD_LOCAL_SIZE: missing although OMPI_COMM_WORLD_RANK is set, expected both or neither",
        ),
        (
            PMI | {"PMI_SIZE": ""},
            "PMI_SIZE: missing although PMI_RANK is set, expected both or neither",
        ),
        (
            SLURM | {"SLURM_LOCALID": ""},
            "SLURM_LOCALID: missing although SLURM_PROCID is set, expected both or neither",
        ),
        (
            SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2(3)"},
            "SLURM_TASKS_PER_NODE: found '2(3)', expected numbers such as 2(x3),1",
        ),
    ],
)
def test_a_partial_or_impossible_set_is_refused_by_name(env: dict[str, str], text: str) -> None:
    with pytest.raises(StartError) as caught:
        read_place(env)
    assert str(caught.value) == text


def test_a_slurm_step_that_tells_no_tasks_counts_those_it_knows() -> None:
    env = {k: v for k, v in SLURM.items() if "TASKS_PER_NODE" not in k} | {"SLURM_LOCALID": "2"}
    assert read_place(env).local_world_size == 3


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs mpirun (openmpi-bin)")
def test_a_real_mpirun_is_understood() -> None:
    code = """
import json, os, sys
from elastic.ranks import read_place
place = read_place(os.environ)
line = [place.rank, place.world_size, place.local_rank, place.local_world_size, place.nodes, place.launcher, place.group]
sys.stdout.write(json.dumps(line) + chr(10))
"""
    command = [
        "mpirun",
        "--allow-run-as-root",
        "--oversubscribe",
        "-x",
        f"PYTHONPATH={ROOT}",
        "-n",
        "3",
    ]
    done = subprocess.run(
        [*command, sys.executable, "-c", code],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    places = sorted(json.loads(line) for line in done.stdout.splitlines())
    assert [place[:6] for place in places] == [[rank, 3, rank, 3, 1, "mpirun"] for rank in range(3)]
    groups = {place[6] for place in places}
    assert len(groups) == 1
    assert groups != {"world"}
