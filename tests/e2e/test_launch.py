"""`python -m elastic launch`: its exit codes, its lines, its first workers, and what it does when a host is lost."""

import json
import os
import signal
from pathlib import Path

import pytest

from checkpoints.store import open_store
from elastic.launching import rdzv_id
from tests.support import processes, records
from tests.support.cases import SUPPORT, assert_each_sample_once, tracer
from tests.support.cluster import Cluster
from tests.support.launched import LAUNCH, launch, said, two_nodes
from tests.support.object_stores import S3Server, s3_server
from tests.support.soaking import soaked
from tests.support.tools import missing

__all__ = ["s3_server"]

SHORT = ("args.n=40", "args.delay=0.2", "train.global_batch_size=4", "train.epochs=1")
LONG = ("args.n=400", "args.delay=0.05", "train.global_batch_size=4", "train.epochs=1000")
TOLD = f"{SUPPORT}/warmed.py:Told"


def until_facts(cluster: Cluster, restart: int) -> list[records.Record]:
    """Wait until both workers of a start have told their facts; by rank."""
    path = cluster.folder / "facts"

    def told() -> list[records.Record] | None:
        whole, _, _ = (path.read_text() if path.exists() else "").rpartition("\n")
        found = [fact for fact in map(json.loads, whole.splitlines()) if fact["restart"] == restart]
        return sorted(found, key=lambda fact: fact["rank"]) if len(found) == 2 else None

    found = cluster.until(told, f"the facts of start {restart + 1}")
    cluster.until_step(1, generation=restart + 1)
    return found


def test_the_first_workers_are_forks_and_so_are_those_after_a_kill(cluster: Cluster) -> None:
    overrides = (f"args.folder={cluster.folder}", "train.global_batch_size=4", "train.epochs=1")
    agent = launch(cluster, *overrides, "args.delay=0.1", job=TOLD, nproc=2)
    first = until_facts(cluster, 0)
    (warm,) = {fact["parent"] for fact in first}
    assert warm != agent.pid
    cluster.kill(1)
    assert {fact["parent"] for fact in until_facts(cluster, 1)} == {warm}
    # What has imported from the config alone is as good as what torchrun starts.
    processes.send([warm], signal.SIGKILL)
    ordinary = until_facts(cluster, 2)
    assert {fact["parent"] for fact in ordinary} == {agent.pid}
    for forked, cold in zip(first, ordinary, strict=True):
        one, other = (
            {**fact["same"], **fact["same"]["environ"], "environ": ""} for fact in (forked, cold)
        )
        names = {*one, *other} - {"TORCHINDUCTOR_CACHE_DIR"}
        assert {
            name: (one.get(name), other.get(name))
            for name in names
            if one.get(name) != other.get(name)
        } == {}
    (cluster.folder / "hurry").touch()
    assert agent.wait(60) == 0, agent.tail()
    assert records.summary(cluster.url)["restarts"] == 2
    assert_each_sample_once(cluster.url, 400, 1)
    assert said(agent) == []
    cluster.until(
        lambda: not cluster.leftovers(), "the end of all processes", timeout_s=10, idle=True
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, *soaked(signal.SIGINT)])
def test_c21_told_to_end_it_saves_and_says_75_and_the_same_command_finishes(
    cluster: Cluster, number: signal.Signals
) -> None:
    agent = launch(cluster, *LONG, "checkpoint.every=off", nproc=2)
    cluster.until_step(1)
    agent.signal(number)
    assert agent.wait(40) == 75, agent.tail()
    assert records.status(cluster.url) == "preempted"
    assert "Traceback" not in agent.output()
    done = records.newest_step(cluster.url)
    assert launch(cluster, *LONG, f"train.max_steps={done + 3}").wait(60) == 0
    summary = records.summary(cluster.url)
    assert (summary["status"], summary["lost_steps"]) == ("complete", 0)
    assert [row["source"] for row in summary["generations"]] == ["fresh", "store"]


def test_told_to_end_when_its_workers_have_just_begun_it_says_so(cluster: Cluster) -> None:
    agent = launch(cluster, *LONG, nproc=2)
    folders = Path(cluster.environment()["TMPDIR"])
    cluster.until(lambda: [*folders.glob("elastic-trainer-*/*/slot-*.crash")], "a worker's place")
    agent.signal(signal.SIGTERM)
    assert agent.wait(40) == 75, agent.tail()
    (line,) = [line for line in agent.output().splitlines() if "told to " in line]
    # A busy machine may have let them come to a step by then.
    assert line == "launch: told to end before there was anything new to save" or "is saved" in line


def test_a_worker_that_the_job_ends_with_0_has_not_finished_the_run(cluster: Cluster) -> None:
    (cluster.folder / "exit-0").write_text("0")
    overrides = (f"args.folder={cluster.folder}", *SHORT)
    agent = launch(cluster, *overrides, job=TOLD, nproc=1)
    assert agent.wait(60) == 1
    (line,) = said(agent)
    assert "the workers ended with 0 and the run is not over" in line
    agent = launch(cluster, *overrides, job=TOLD, nproc=1)
    assert agent.wait(60) == 0, agent.tail()
    assert_each_sample_once(cluster.url, 40, 1)


@pytest.mark.parametrize("closed", [*soaked(">&-"), ">&- 2>&- <&-"])
def test_closed_streams_change_nothing(cluster: Cluster, closed: str) -> None:
    words = [
        *LAUNCH,
        "--nproc_per_node=2",
        *cluster.run_arguments(tracer(), SHORT),
    ]
    agent = cluster.spawn(["sh", "-c", f'exec "$@" {closed}', "sh", *words])
    cluster.until_step(2)
    cluster.kill(1)
    assert agent.wait(60) == 0, agent.tail()
    summary = records.summary(cluster.url)
    assert [row["cause"] for row in summary["generations"]] == [
        "start",
        "worker killed (SIGKILL, rank 1)",
    ]
    assert_each_sample_once(cluster.url, 40, 1)


def test_c16_a_host_whose_own_name_does_not_resolve_serves_c10d(cluster: Cluster) -> None:
    if os.geteuid() != 0:
        missing("needs a network namespace: root")
    words = [
        "--nnodes=1:2",
        f"--rdzv_endpoint=10.1.2.3:{cluster.port}",
        *cluster.run_arguments(tracer(), SHORT),
    ]
    alone = [
        "unshare",
        "--uts",
        "--net",
        "sh",
        "-c",
        'ip link set lo up; ip addr add 10.1.2.3 dev lo; hostname nowhere.invalid; exec "$@"',
        "sh",
    ]
    agent = cluster.spawn([*alone, *LAUNCH, *words])
    assert agent.wait(60) == 0, agent.tail()
    assert "nowhere.invalid" not in agent.output()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["train.epoch=3"], "error: train.epoch: unknown key, did you mean train.epochs? (command line)"),
        (["--nnodes=1:x", "train.epochs=1"], "error: launch: --nnodes: found 1:x, expected a number or MIN:MAX"),
        (["--nproc_per_nod", "2", "--x=1"], "error: launch: unrecognized"),
        (["train.py"], "error: launch: found the script train.py, expected elastic/run.py or none"),
        (["no.yaml"], "error: JOB: found no file no.yaml"),
    ],
)  # fmt: skip
def test_what_is_wrong_on_the_command_line_is_one_line_and_2(
    cluster: Cluster, words: list[str], line: str
) -> None:
    agent = cluster.spawn([*LAUNCH, *words])
    assert agent.wait(30) == 2
    (found,) = agent.output().splitlines()
    assert found.startswith(line)


@pytest.mark.parametrize(
    ("overrides", "code", "line"),
    [
        (("args.nan_item=5",), 76, "error: step "),
        (("args.colour=red",), 2, "error: args.colour: Tracer"),
    ],
)
def test_what_workers_find_ends_with_their_code_and_one_line(
    cluster: Cluster, overrides: tuple[str, ...], code: int, line: str
) -> None:
    agent = launch(cluster, *overrides)
    assert agent.wait(60) == code, agent.tail()
    (found,) = said(agent)
    assert found.startswith(line)
    assert "Traceback" not in agent.output()


def test_c22_a_notice_signal_takes_one_node_away_and_the_other_finishes(cluster: Cluster) -> None:
    signals = ("signals=[SIGTERM, SIGUSR1]", "checkpoint.every=off")
    first, second = two_nodes(cluster, *LONG, *signals)
    second.signal(signal.SIGUSR2)
    cluster.until(lambda: said(second), "a line on SIGUSR2")
    (line,) = said(second)
    assert (
        line
        == 'launch: SIGUSR2: nothing is done; with signals="[SIGTERM, SIGUSR1, SIGUSR2]" it is a notice'
    )
    second.signal(signal.SIGUSR1)
    assert second.wait(40) == 75, second.tail()
    assert "SIGUSR1: this node leaves with exit code 75" in second.output()
    cluster.until_started(3)
    cluster.until_step(1, generation=3)
    assert first.code is None
    first.signal(signal.SIGTERM)
    assert first.wait(40) == 75, first.tail()
    rows = records.summary(cluster.url)["generations"]
    assert [row["world_size"] for row in rows] == [1, 2, 1]
    assert records.summary(cluster.url)["lost_steps"] == 0


@pytest.mark.soak
def test_c14_a_new_agent_goes_on_when_the_host_of_the_rendezvous_is_lost(cluster: Cluster) -> None:
    first, second = two_nodes(cluster, *LONG, "checkpoint.every=1 step")
    first.signal(signal.SIGKILL)
    cluster.until_started(3)
    cluster.until_step(1, generation=3)
    (line,) = said(second)
    assert line.startswith(f"launch: the rendezvous at localhost:{cluster.port} is gone (")
    second.signal(signal.SIGTERM)
    assert second.wait(40) == 75, second.tail()
    assert [row["world_size"] for row in records.summary(cluster.url)["generations"]] == [1, 2, 1]


def test_a_run_on_a_store_meets_there_with_its_own_credentials(
    cluster: Cluster, s3_server: S3Server
) -> None:
    url = s3_server.url()
    given = (f"checkpoint.url={url}", f"checkpoint.storage_options={json.dumps(s3_server.options)}")
    hidden = dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), "")
    agent = launch(
        cluster, "args.n=12", "train.epochs=1", *given, options=["--nnodes=1:2"], env=hidden
    )
    assert agent.wait(60) == 0, agent.tail()
    assert said(agent) == []
    store = open_store(f"{url}/rdzv", s3_server.options)
    record = json.loads(store.get(f"{rdzv_id(url)}.json"))
    store.close()
    assert record["closed"]
    assert tracer().endswith("Tracer")
