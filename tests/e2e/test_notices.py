"""A node that is told to leave by its cloud, and a run that ends before a limit."""

import time

import pytest

from tests.support import records
from tests.support.cases import SUPPORT
from tests.support.cluster import Cluster
from tests.support.launched import launch, two_nodes
from tests.support.metadata import AWS_PATH, GCP_PREEMPTED, INTERRUPTION, aws, gcp

LONG = ("args.n=400", "args.delay=0.05", "train.global_batch_size=4", "train.epochs=1000")
HINT = "python -m elastic launch, with the same arguments, gives the run's"


@pytest.mark.soak
def test_a_spot_interruption_takes_its_node_away_and_the_other_goes_on(cluster: Cluster) -> None:
    with aws() as staying, aws() as leaving:
        addresses = [{"AWS_EC2_METADATA_SERVICE_ENDPOINT": fake.url} for fake in (staying, leaving)]
        overrides = (*LONG, "notices=[aws]", "checkpoint.every=off")
        first, second = two_nodes(cluster, *overrides, env=addresses)
        leaving.answers[AWS_PATH] = INTERRUPTION
        assert second.wait(40) == 75, second.tail()
        line = "AWS: spot instance: terminate at 2027-01-01T08:22:00Z: this node leaves with exit code 75"
        assert line in second.output().splitlines()
        cluster.until_started(3)
        cluster.until_step(1, generation=3)
        assert first.code is None
        staying.answers[AWS_PATH] = INTERRUPTION
        assert first.wait(40) == 75, first.tail()
    summary = records.summary(cluster.url)
    assert (summary["status"], summary["lost_steps"]) == ("preempted", 0)
    assert [row["world_size"] for row in summary["generations"]] == [1, 2, 1]


@pytest.mark.soak
def test_a_preempted_google_machine_saves_and_leaves(cluster: Cluster) -> None:
    with gcp() as fake:
        host = {"GCE_METADATA_HOST": fake.url.removeprefix("http://")}
        agent = launch(cluster, *LONG, "notices=[gcp]", "checkpoint.every=off", nproc=2, env=host)
        cluster.until_step(5)
        fake.answers[GCP_PREEMPTED] = "TRUE"
        assert agent.wait(40) == 75, agent.tail()
    assert records.status(cluster.url) == "preempted"
    assert agent.output().count("this instance is preempted: this node leaves") == 1


def test_a_run_ends_before_its_limit_with_its_state_saved(cluster: Cluster) -> None:
    limit = ("train.stop_before=slurm", "checkpoint.every=1 s", f"args.told={cluster.folder}/end")
    for left_s in (35, 60, 120):  # more than 25 s are needed before there is a checkpoint
        cluster.url = cluster.folder / f"run-{left_s}"
        # Plain torchrun, which says what it lacks.
        job = f"{SUPPORT}/limited.py:Tracer"
        agent = cluster.start(job, *LONG, *limit, f"args.left_s={left_s}", nproc=1, max_restarts=3)
        cluster.until_step(1)
        end = float((cluster.folder / "end").read_text())
        if end - time.time() > 29:
            break
        agent.wait(60)  # this machine is so busy that the start alone took the time
    assert agent.wait(150) == 1, agent.tail()
    early_s = end - time.time()
    print(f"ended {early_s:.1f} s before the limit")
    assert early_s > 0
    assert agent.output().count(HINT) == 1
    line = "train.stop_before: the time is nearly up: this node leaves with exit code 75"
    assert line in agent.output().splitlines()
    summary = records.summary(cluster.url)
    assert (summary["status"], summary["restarts"]) == ("preempted", 0)
    assert records.newest_step(cluster.url) == summary["steps"] > 5
