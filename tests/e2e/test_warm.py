"""Warm starts: workers that a process of the node forks at a restart, under an unmodified torchrun."""

import contextlib
import json
import os
import re
import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from elastic.relay import SOCKET, pack
from tests.support import processes, records
from tests.support.cases import SUPPORT, assert_each_sample_once
from tests.support.cluster import MARK, Agent, Cluster
from tests.support.soaking import soaked

Facts = dict[str, Any]
DELAY = 0.05
SHARED = Path("/dev/shm")  # noqa: S108 - where the C library keeps them


def start(
    cluster: Cluster, *overrides: str, job: str | None = None, nproc: int = 2, **given: Any
) -> Agent:
    """Start an agent over a job that tells its facts."""
    return cluster.start(
        job or f"{SUPPORT}/warmed.py:Told",
        f"args.folder={cluster.folder}",
        f"args.delay={DELAY}",
        "train.global_batch_size=4",
        "train.epochs=1000",
        "checkpoint.tier.memory=1 step",
        *overrides,
        nproc=nproc,
        **{"max_restarts": 20, **given},
    )


def facts(cluster: Cluster, restart: int) -> list[Facts]:
    """What the workers of a start told, by rank; empty until all have."""
    path = cluster.folder / "facts"
    whole, _, _ = (path.read_text() if path.exists() else "").rpartition("\n")
    found = [json.loads(line) for line in whole.splitlines()]
    return sorted(
        (fact for fact in found if fact["restart"] == restart), key=lambda fact: fact["rank"]
    )


def until_told(cluster: Cluster, restart: int, nproc: int = 2) -> list[Facts]:
    """Wait until all workers of a start have told their facts and stepped."""
    cluster.until(
        lambda: len(facts(cluster, restart)) == nproc, f"the facts of start {restart + 1}"
    )
    cluster.until(lambda: len(records.started(cluster.url)) > restart, f"generation {restart + 1}")
    cluster.until_step(1, generation=restart + 1)
    return facts(cluster, restart)


def differences(before: Facts, after: Facts) -> dict[str, tuple[Any, Any]]:
    """What two workers should have in common and have not."""
    one, other = (
        {**fact["same"], **fact["same"]["environ"], "environ": ""} for fact in (before, after)
    )
    # An import deep in torch sets it, in an ordinary worker after its facts are told.
    names = sorted({*one, *other} - {"TORCHINDUCTOR_CACHE_DIR"})
    return {
        name: (one.get(name), other.get(name)) for name in names if one.get(name) != other.get(name)
    }


def temporary(cluster: Cluster) -> Path:
    """Where the cluster's agents keep their private folders."""
    return Path(cluster.environment()["TMPDIR"])


def sockets(cluster: Cluster) -> list[Path]:
    """The warm processes' sockets."""
    return sorted(temporary(cluster).glob(f"elastic-trainer-*/*/{SOCKET}"))


def warm_processes(cluster: Cluster) -> list[int]:
    """The pids of living warm processes."""
    token = cluster.environment()[MARK]
    return [pid for pid in processes.carrying(MARK, token) if name_of(pid) == "elastic warm"]


def name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def semaphores(pid: int) -> list[Path]:
    """The named semaphores that a process holds, e.g. those of its loader's queues."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    held = {int(line.split()[4]) for line in lines if "/sem." in line}
    # By number: a map shows the name under which one was made, before it got its own.
    return [path for path in SHARED.glob("sem.mp-*") if path.stat().st_ino in held]


def until_warm(cluster: Cluster, agents: int = 1) -> list[int]:
    """Wait until there is a warm process for each agent."""

    def there() -> list[int] | None:
        found = warm_processes(cluster)
        return found if len(found) == len(sockets(cluster)) == agents else None

    return cluster.until(there, "the warm process")


def forked_anew(cluster: Cluster) -> tuple[Agent, int]:
    """A run whose workers are forks, after the kill of the first; its agent and its warm process."""
    agent = start(cluster)
    until_told(cluster, 0)
    (warm,) = until_warm(cluster)
    cluster.kill(0)
    until_told(cluster, 1)
    return agent, warm


def until_gone(cluster: Cluster, timeout_s: float) -> None:
    """Wait until nothing of the cluster is left: no process, no socket."""
    cluster.until(
        lambda: not cluster.leftovers() and not sockets(cluster),
        f"the end of {cluster.leftovers()} and {sockets(cluster)}",
        timeout_s=timeout_s,
        idle=True,
    )


def test_a_forked_worker_is_as_if_torchrun_had_started_it(cluster: Cluster) -> None:
    agent = start(cluster)
    cold = until_told(cluster, 0)
    (warm,) = until_warm(cluster)
    cluster.kill(1)
    forked = until_told(cluster, 1)
    assert [fact["parent"] for fact in cold] == [agent.pid] * 2
    assert [fact["parent"] for fact in forked] == [warm] * 2
    for before, after in zip(cold, forked, strict=True):
        # That torchrun's variables say what they should is told by the runs themselves.
        assert differences(before, after) == {}
        assert after["same"]["environ"]["SET_AT_IMPORT"] == "by the job"
        assert "ELASTIC_AGENT_PID" not in after["same"]["environ"]
    # No two processes draw the same unseeded numbers.
    drawn = [number for fact in (*cold, *forked) for number in fact["drawn"]]
    assert len(set(drawn)) == len(drawn)
    causes = [claim["cause"] for claim in records.claims(cluster.url).values()]
    assert causes == ["start", "worker killed (SIGKILL, rank 1)"]
    # By their names on the command line users find as many workers as there are.
    assert [name_of(fact["pid"]) for fact in forked] == ["elastic rank 0", "elastic rank 1"]
    lines = [Path(f"/proc/{pid}/cmdline").read_text() for pid in (warm, forked[0]["pid"])]
    assert not any("run.py" in line for line in lines)


@pytest.mark.soak
@pytest.mark.parametrize("workers", ["fork", "spawn"])
def test_started_as_a_module_with_loader_workers_every_sample_is_used_once(
    cluster: Cluster, workers: str
) -> None:
    overrides = ("train.epochs=1", "loader.workers=1", f"loader.start_method={workers}")
    agent = start(cluster, "args.delay=0.5", *overrides, run=("-m", "elastic.run"))
    until_told(cluster, 0)
    (warm,) = until_warm(cluster)
    cluster.kill(0)
    assert [fact["parent"] for fact in until_told(cluster, 1)] == [warm] * 2
    pairs = zip(facts(cluster, 0), facts(cluster, 1), strict=True)
    assert [differences(*pair) for pair in pairs] == [{}] * 2
    named = [path for fact in facts(cluster, 1) for path in semaphores(fact["pid"])]
    assert bool(named) == (workers == "spawn")
    cluster.kill(0)
    until_told(cluster, 2)
    (cluster.folder / "hurry").touch()
    assert agent.wait(120) == 0, agent.tail()
    assert records.summary(cluster.url)["restarts"] == 2
    assert not [path for path in named if path.exists()]
    assert_each_sample_once(cluster.url, 400, 1)
    until_gone(cluster, 10)


def test_a_killed_stub_takes_its_worker_along_before_the_next_start(cluster: Cluster) -> None:
    agent = start(cluster)
    until_told(cluster, 0)
    until_warm(cluster)
    cluster.kill(0)
    old = {fact["rank"]: fact["pid"] for fact in until_told(cluster, 1)}
    stub = agent.workers()[1]
    assert stub != old[1]
    processes.send([stub], signal.SIGKILL)
    cluster.until(lambda: not processes.is_alive(old[1]), "the worker's end", timeout_s=5)
    assert [fact["siblings"] for fact in until_told(cluster, 2)] == [[], []]
    assert not processes.is_alive(old[0])
    cause = records.claims(cluster.url)[3]["cause"]
    assert cause == "worker killed (SIGKILL, rank 1)"


def test_the_stub_ends_by_the_workers_signal_or_code(cluster: Cluster) -> None:
    # One worker: of several torchrun names the failure that it sees first.
    agent = start(cluster, nproc=1)
    until_told(cluster, 0, nproc=1)
    until_warm(cluster)
    cluster.kill(0)
    (worker,) = until_told(cluster, 1, nproc=1)
    processes.send([worker["pid"]], signal.SIGSEGV)
    (worker,) = until_told(cluster, 2, nproc=1)
    processes.send([worker["pid"]], signal.SIGKILL)
    until_told(cluster, 3, nproc=1)
    (cluster.folder / "exit-0").touch()
    until_told(cluster, 4, nproc=1)
    failed = re.findall(r"failed \(exitcode: (-?\d+)\) local_rank: 0", agent.output())
    assert failed == ["-9", "-11", "-9", "3"], agent.tail()
    causes = [records.claims(cluster.url)[number]["cause"] for number in (2, 3, 4, 5)]
    killed = [f"worker killed ({name}, rank 0)" for name in ("SIGKILL", "SIGSEGV", "SIGKILL")]
    exited = "worker ended with exit code 3 and without an exception (rank 0)"
    assert causes == [*killed, exited]


def test_a_signal_to_the_stub_reaches_the_worker(cluster: Cluster) -> None:
    agent = start(cluster, "signals=[SIGTERM, SIGUSR1]", "checkpoint.every=off")
    until_told(cluster, 0)
    until_warm(cluster)
    cluster.kill(0)
    until_told(cluster, 1)
    processes.send([agent.workers()[1]], signal.SIGUSR1)
    assert agent.wait(60) == 1
    assert records.status(cluster.url) == "preempted"
    assert records.summary(cluster.url)["restarts"] == 1
    assert "Traceback" not in agent.output(), agent.tail()
    until_gone(cluster, 10)


def test_sigterm_to_the_agent_saves_and_leaves_nothing(cluster: Cluster) -> None:
    agent = start(cluster, "checkpoint.every=off")
    until_told(cluster, 0)
    until_warm(cluster)
    cluster.kill(0)
    until_told(cluster, 1)
    agent.signal(signal.SIGTERM)
    assert agent.wait(40) == 1
    assert records.status(cluster.url) == "preempted"
    until_gone(cluster, 10)


def test_sigterm_to_every_process_at_once_saves(cluster: Cluster) -> None:
    # A scheduler that preempts a job signals all of its processes: agent, stubs, workers, warm process and writer.
    agent = start(cluster, "checkpoint.every=off")
    until_told(cluster, 0)
    until_warm(cluster)
    cluster.kill(1)
    told = until_told(cluster, 1)
    assert [name_of(fact["pid"]) for fact in told] == ["elastic rank 0", "elastic rank 1"]
    every = processes.carrying(MARK, cluster.environment()[MARK])
    processes.send(every, signal.SIGTERM)
    assert agent.wait(60) == 1
    assert records.status(cluster.url) == "preempted", agent.tail()
    until_gone(cluster, 10)


@pytest.mark.soak
def test_a_stopped_stub_stops_its_worker(cluster: Cluster) -> None:
    agent = start(cluster)
    until_told(cluster, 0)
    until_warm(cluster)
    cluster.kill(0)
    worker = until_told(cluster, 1)[1]["pid"]
    stub = agent.workers()[1]
    processes.send([stub], signal.SIGSTOP)
    cluster.until(lambda: processes.state(worker) == "T", "the worker's stop", timeout_s=10)
    processes.send([stub], signal.SIGCONT)
    cluster.until(lambda: processes.state(worker) in {"S", "R", "D"}, "its going on", timeout_s=10)


@pytest.mark.parametrize("forked", [*soaked(False), True])
def test_nothing_outlives_a_killed_agent(cluster: Cluster, forked: bool) -> None:
    agent = start(cluster)
    until_told(cluster, 0)
    until_warm(cluster)
    if forked:
        cluster.kill(1)
        until_told(cluster, 1)
    agent.signal(signal.SIGKILL)
    agent.wait(5)
    until_gone(cluster, 10)
    assert "the next start is" not in agent.output()


@pytest.mark.soak
def test_a_warm_process_that_still_imports_ends_with_its_agent(cluster: Cluster) -> None:
    agent = start(cluster)
    until_told(cluster, 0)

    def importing() -> bool:
        return any(temporary(cluster).glob("elastic-trainer-*/*/warm.lock"))

    cluster.until(importing, "the warm process's start")
    agent.signal(signal.SIGKILL)
    agent.wait(5)
    assert not sockets(cluster)
    until_gone(cluster, 10)


@pytest.mark.soak
def test_after_the_warm_process_is_killed_the_next_start_is_ordinary(cluster: Cluster) -> None:
    agent, warm = forked_anew(cluster)
    processes.send([warm], signal.SIGKILL)
    ordinary = until_told(cluster, 2)
    assert [fact["parent"] for fact in ordinary] == [agent.pid] * 2
    assert agent.output().count("the warm process is gone and its workers with it") == 1
    # And again there is one for the time after.
    cluster.until(lambda: warm_processes(cluster) not in ([], [warm]), "another warm process")
    (second,) = until_warm(cluster)
    cluster.kill(1)
    assert [fact["parent"] for fact in until_told(cluster, 3)] == [second] * 2


@pytest.mark.soak
def test_a_stopped_warm_process_costs_its_time_and_forks_nothing_later(cluster: Cluster) -> None:
    agent = start(cluster)
    until_told(cluster, 0)
    (warm,) = until_warm(cluster)
    processes.send([warm], signal.SIGSTOP)
    cluster.kill(0)
    assert [fact["parent"] for fact in until_told(cluster, 1)] == [agent.pid] * 2
    assert agent.output().count("found no answer within 2 s; this start is an ordinary one") == 1
    processes.send([warm], signal.SIGCONT)
    cluster.until_step(int(records.newest_step(cluster.url)) + 20)
    assert processes.children(warm) == []
    cluster.kill(0)
    assert [fact["parent"] for fact in until_told(cluster, 2)] == [warm] * 2


def test_a_warm_process_that_is_stopped_while_its_workers_run_is_continued(
    cluster: Cluster,
) -> None:
    agent, warm = forked_anew(cluster)
    processes.send([warm], signal.SIGSTOP)
    cluster.kill(1)
    assert [fact["parent"] for fact in until_told(cluster, 2)] == [warm] * 2
    assert records.claims(cluster.url)[3]["cause"] == "worker killed (SIGKILL, rank 1)"
    assert agent.output().count(f"the warm process ({warm}) was stopped (SIGSTOP)") == 1


def test_changed_code_is_never_run_from_the_old_copy(cluster: Cluster) -> None:
    job = cluster.folder / "changing.py"
    text = (
        "from tests.support import warmed\nVERSION = 1\n\n\nclass Told(warmed.Told):\n"
        "    def facts(self):\n        return {**super().facts(), 'version': VERSION}\n"
    )
    job.write_text(text)
    agent = start(cluster, job=f"{job}:Told")
    assert [fact["version"] for fact in until_told(cluster, 0)] == [1, 1]
    (warm,) = until_warm(cluster)
    job.write_text(text.replace("VERSION = 1", "VERSION = 22"))
    cluster.kill(0)
    assert [fact["version"] for fact in until_told(cluster, 1)] == [22, 22]
    assert agent.output().count(f"{job} has changed; this start is an ordinary one") == 1
    assert not processes.is_alive(warm)
    (second,) = until_warm(cluster)
    cluster.kill(0)
    assert [fact["version"] for fact in until_told(cluster, 2)] == [22, 22]
    assert {fact["parent"] for fact in facts(cluster, 2)} == {second}


@pytest.mark.soak
@pytest.mark.parametrize(
    ("name", "fact", "expected"),
    [
        ("warm_reading", "rank at import", [0, 1]),
        *soaked(("warm_threading", "thread", [True, True])),
    ],
)
def test_a_job_whose_import_cannot_be_shared_imports_in_each_worker(
    cluster: Cluster, name: str, fact: str, expected: list[object]
) -> None:
    start(cluster, job=f"{SUPPORT}/{name}.py:Told")
    until_told(cluster, 0)
    (warm,) = until_warm(cluster)
    cluster.kill(0)
    told = until_told(cluster, 1)
    assert [each["parent"] for each in told] == [warm] * 2
    assert [each[fact] for each in told] == expected


@pytest.mark.soak
def test_two_launches_at_once_share_no_warm_process(tmp_path: Path) -> None:
    with Cluster(tmp_path / "one") as one, Cluster(tmp_path / "two") as two:
        shared = {"TMPDIR": str(temporary(one))}
        rendezvous = ["--rdzv_id=the-same"]
        for cluster in (one, two):
            start(cluster, nproc=1, launcher=rendezvous, env=shared)
        for cluster in (one, two):
            until_told(cluster, 0, nproc=1)
        one.until(lambda: len(sockets(one)) == 2, "two sockets")
        for cluster in (one, two):
            cluster.kill(0)
        parents = [until_told(cluster, 1, nproc=1)[0]["parent"] for cluster in (one, two)]
        assert [[pid] for pid in parents] == [warm_processes(one), warm_processes(two)]
        for path in (*sockets(one), *(path.parent for path in sockets(one))):
            assert path.stat().st_mode & 0o077 == 0, path


@pytest.mark.soak
@pytest.mark.parametrize(
    ("overrides", "given"),
    [
        ((), {"env": {"ELASTIC_WARM": "0"}}),
        (("train.warm_start=off",), {}),
    ],
)
def test_switched_off_each_start_is_an_ordinary_one(
    cluster: Cluster, overrides: tuple[str, ...], given: dict[str, Any]
) -> None:
    agent = start(cluster, *overrides, **given)
    until_told(cluster, 0)
    cluster.until_step(40)
    assert not any(temporary(cluster).glob("elastic-trainer-*/*/warm.*"))
    cluster.kill(0)
    assert [fact["parent"] for fact in until_told(cluster, 1)] == [agent.pid] * 2


def test_nothing_is_kept_warm_where_nothing_will_be_started_again(cluster: Cluster) -> None:
    start(cluster, max_restarts=0)
    until_told(cluster, 0)
    cluster.until_step(40)
    assert not any(temporary(cluster).glob("elastic-trainer-*/*/warm.*"))


def test_a_stranger_gets_no_worker(cluster: Cluster) -> None:
    agent = start(cluster)
    until_told(cluster, 0)
    (warm,) = until_warm(cluster)
    environ = processes.environment(agent.workers()[0])
    argv = facts(cluster, 0)[0]["same"]["argv"]
    message = pack(
        argv, str(cluster.folder), {os.fsencode(k): os.fsencode(v) for k, v in environ.items()}
    )
    for sent in (message, b"\xff" * 8, message[:100], b""):
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.settimeout(5)
            stranger.connect(str(sockets(cluster)[0]))
            heard = b""
            with contextlib.suppress(ConnectionError):  # it may hang up before it has heard all
                if sent:
                    socket.send_fds(stranger, [sent], [0, 1, 2])
                stranger.shutdown(socket.SHUT_WR)
                heard = stranger.recv(100)
            assert heard == b""
    assert processes.children(warm) == []
    cluster.kill(0)
    assert [fact["parent"] for fact in until_told(cluster, 1)] == [warm] * 2
