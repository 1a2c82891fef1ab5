"""Public cases on what people see, and must not see: C51, C53."""

import re
from collections.abc import Iterator

import pytest

from tests.support import records
from tests.support.cases import SUPPORT, final_weight, run_once, tracer
from tests.support.cgroups import memory_limit
from tests.support.cluster import RUN, Agent, Cluster, torchrun_command

FAULTY = ("args.step=3", "train.epochs=1", "train.global_batch_size=4", "checkpoint.every=1 step")


def test_c51a_a_killed_worker_is_named_everywhere(cluster: Cluster) -> None:
    overrides = (*FAULTY, "args.kind=kill", f"args.marker={cluster.folder}/once")
    agent = cluster.start(tracer("Faulty"), *overrides, nproc=3, max_restarts=1)
    summary = cluster.complete()
    assert summary["generations"][1]["cause"] == "worker killed (SIGKILL, rank 1)"
    faults = [event["fault"] for event in records.events(cluster.url, "fault")]
    # Told by a survivor as it happens and by the next generation: one fault all the same.
    fault, *again = [fault for fault in faults if fault["kind"] == "killed"]
    assert all(other == fault for other in again)
    assert (fault["rank"], fault["step"], fault["signal"]) == (1, 3, "SIGKILL")
    assert fault["host"]
    assert "worker killed (SIGKILL, rank 1)" in agent.output()
    assert "Traceback" not in agent.output(), agent.tail()


@pytest.mark.soak
def test_c51a_without_restarts_the_last_lines_tell_it(cluster: Cluster) -> None:
    agent = cluster.start(tracer("Faulty"), *FAULTY, "args.kind=kill", nproc=3)
    assert agent.wait(60) != 0
    last = "\n".join(agent.output().splitlines()[-10:])
    assert "rank 1" in last
    assert "SIGKILL" in last
    assert "Traceback" not in agent.output(), agent.tail()


def test_c51b_an_exception_of_the_users_code_is_told_with_its_place(cluster: Cluster) -> None:
    agent = cluster.start(tracer("Faulty"), *FAULTY, "args.kind=raise", nproc=3, max_restarts=5)
    assert agent.wait(60) != 0
    message = "the fault of step 3 on rank 1"
    place = r"tracer\.py:\d+"
    last = "\n".join(agent.output().splitlines()[-10:])
    assert message in last
    assert "ValueError" in last
    assert re.search(place, last), last
    assert "rank 1" in last
    assert "step 3" in last
    assert agent.output().count("Traceback") == 1, agent.tail()
    summary = records.summary(cluster.url)
    assert summary["status"] == "failed"  # the same exception at the same step: a person must look
    assert (summary["restarts"], summary["steps"]) == (1, 2)
    for faults in (
        summary["faults"],
        [event["fault"] for event in records.events(cluster.url, "fault")],
    ):
        fault = next(fault for fault in faults if fault["kind"] == "exception")
        assert (fault["rank"], fault["step"], fault["type"]) == (1, 3, "ValueError")
        assert fault["message"] == message
        assert re.search(place, fault["where"])


LIMIT_BYTES = 2 << 30


@pytest.fixture
def limited(cluster: Cluster) -> Iterator[list[str]]:
    """Words in front of a command that run it under a limit of memory, until the cluster has ended it."""
    with memory_limit(LIMIT_BYTES) as words:
        yield words
        cluster.close()


def start_limited(
    cluster: Cluster, words: list[str], job: str, *overrides: str, restarts: int
) -> Agent:
    """Start three workers, as a container with a limit would."""
    torchrun = [*torchrun_command(), "--nproc_per_node=3", f"--max_restarts={restarts}"]
    run = [
        "--rdzv_backend=c10d",
        str(RUN),
        *cluster.run_arguments(f"{SUPPORT}/hungry.py:{job}", (*FAULTY, *overrides)),
    ]
    return cluster.spawn([*words, *torchrun, *run])


def test_c51c_a_worker_that_takes_all_memory_is_told_as_out_of_memory(
    cluster: Cluster, limited: list[str]
) -> None:
    marker = f"args.marker={cluster.folder}/once"
    agent = start_limited(cluster, limited, "Hungry", marker, restarts=1)
    summary = cluster.complete()
    told = (
        "worker killed (SIGKILL, rank 1): out of memory: the kernel ended a process of this cgroup"
    )
    assert summary["generations"][1]["cause"] == told
    faults = [event["fault"] for event in records.events(cluster.url, "fault")]
    fault, *again = [fault for fault in faults if fault["kind"] == "killed"]
    assert all(other == fault for other in again)
    assert (fault["rank"], fault["step"]) == (1, 3)
    assert fault["message"].startswith("out of memory")
    assert fault["host"]
    assert told in agent.output()
    assert "Traceback" not in agent.output(), agent.tail()


@pytest.mark.soak
def test_c51c_without_restarts_the_last_lines_and_the_summary_tell_it(
    cluster: Cluster, limited: list[str]
) -> None:
    agent = start_limited(cluster, limited, "Hungry", restarts=0)
    assert agent.wait(90) != 0
    last = "\n".join(agent.output().splitlines()[-10:])
    assert re.search(r"rank 1\): out of memory: .* at step 3", last), agent.tail()
    (fault,) = records.summary(cluster.url)["faults"]
    assert (fault["rank"], fault["step"]) == (1, 3)
    assert fault["message"].startswith("out of memory")


def test_c51c_a_loader_worker_that_takes_all_memory_is_told_as_that(
    cluster: Cluster, limited: list[str]
) -> None:
    given = ("loader.workers=1", f"args.marker={cluster.folder}/once")
    start_limited(cluster, limited, "HungryLoader", *given, restarts=1)
    summary = cluster.complete()
    cause = summary["generations"][1]["cause"]
    assert re.match(
        r"worker raised RuntimeError: out of memory: .*DataLoader worker .*rank 1", cause
    )


SECRETS = {
    "key": "AKIASECRETKEYID",
    "secret": "verysecretvalue",
    "token": "sessiontokenvalue",
    "account_key": "accountkeyvalue",
    "sas_token": "sv=2020&sig=sasvalue",
}
OPTIONS = tuple(f"checkpoint.storage_options.{name}={value}" for name, value in SECRETS.items())


def assert_no_secret(text: str, *more: str) -> None:
    """Check that none of the secret values stands in a text."""
    assert [value for value in (*SECRETS.values(), *more) if value in text] == []


@pytest.mark.parametrize(
    ("url", "password"),
    [
        ("s3://nowhere/run", "unused-password"),
        ("sftp://user:pa55word@127.0.0.1/run", "pa55word"),
    ],
)
def test_c53_no_secret_is_told_where_the_store_cannot_be_reached(
    cluster: Cluster, url: str, password: str
) -> None:
    endpoint = "checkpoint.storage_options.endpoint_url=http://user:pa55@127.0.0.1:9"
    agent = cluster.start(
        tracer(),
        *OPTIONS,
        endpoint,
        f"checkpoint.url={url}",
        "timeout=20 s",
        env={"LOGLEVEL": "INFO"},
    )
    assert agent.wait(120) != 0
    assert_no_secret(agent.output(), password, "pa55")
    assert url.partition("://")[0] in agent.output()


def test_c53_no_secret_is_written_at_the_url(cluster: Cluster) -> None:
    run_once(
        cluster, tracer(), *OPTIONS, "args.n=12", "train.epochs=1", "train.global_batch_size=4"
    )
    assert_no_secret(records.all_text(cluster.url))
    assert_no_secret(cluster.agents[-1].output())
    assert "***" in (cluster.url / "generations" / "000001.json").read_text()
    assert final_weight(cluster.url) > 0
