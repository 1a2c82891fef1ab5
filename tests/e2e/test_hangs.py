"""Workers that hang: seen, told with all stacks, ended, and the run goes on. Public case C51d and its relatives."""

import re
import signal

import pytest

from tests.support import processes, records
from tests.support.cases import assert_each_sample_once
from tests.support.cluster import Cluster
from tests.support.distribution import ROOT

SUPPORT = ROOT / "tests" / "support"
JOB = f"{SUPPORT / 'hanging.py'}"
BATCH = "train.global_batch_size=4"


def causes(summary: records.Record) -> list[str]:
    return [generation["cause"] for generation in summary["generations"][1:]]


def test_c51d_each_way_to_hang_is_named_and_costs_one_restart(cluster: Cluster) -> None:
    hangs = "loss:gil:2@1 loss:loop:3@0 load:sleep:5@1 loss:alone:8@0 evaluate:sleep:10@1"
    given = (
        f"args.hangs={hangs}",
        f"args.marks={cluster.folder}/marks",
        "hang_after=2 s",
        "checkpoint.every=1 step",
        "train.step_delay=0.2",
        "train.epochs=2",
        "loader.workers=1",
    )
    agent = cluster.start(f"{JOB}:Hanging", BATCH, *given, max_restarts=6)
    cluster.until_step(12, timeout_s=240)
    stopped = cluster.kill(1, signal.SIGSTOP)  # the stub of a warm start, as torchrun knows it
    summary = cluster.complete()
    told = agent.output()
    assert not processes.is_alive(stopped)
    assert_each_sample_once(cluster.url, 40, 2)
    expected = [
        r"worker hung \(rank 1, step 2, step, \S+hanging\.py:\d+\): no sign of life for \d s",
        r"worker hung \(rank 0, step 3, step, \S+hanging\.py:\d+\): no sign of life for \d s",
        r"worker hung \(rank 1, step \d, load, \S+\): no sign of life for \d s",
        r"worker hung \(rank [01], step 8, step, \S+\): no peer came for \d s",
        r"worker hung \(rank 1, step 10, evaluate, \S+hanging\.py:\d+\): no sign of life for \d s",
        r"worker hung \(rank 1, step 1\d, [\w ]+, \S+\): stopped for \d s",
    ]
    for cause, pattern in zip(causes(summary), expected, strict=True):
        assert re.fullmatch(pattern, cause)
    # All threads of all ranks, the loader workers of the one that hangs too.
    first = told.partition("generation 2")[0]
    assert re.search(r"--- rank 0 \(pid \d+, step 2, step\) waits for others:\n", first)
    assert re.search(r"--- rank 1 \(pid \d+, step 2, step\) hangs:\n", first)
    assert "_run_backward" in first
    assert "copier.py" in first
    assert first.count("_worker_loop") == 1
    fault = next(e["fault"] for e in records.events(cluster.url, "fault"))
    assert (fault["kind"], fault["rank"], fault["step"]) == ("hung", 1, 2)
    assert "in hang" in fault["message"]
    # A dead collective alone takes both ranks, and nothing waits for torchrun's 30 seconds.
    assert "forcefully exiting" not in told
    cluster.until(lambda: not cluster.leftovers(), "the watcher's end", timeout_s=10, idle=True)


@pytest.mark.soak
def test_own_loop_that_hangs_is_restarted_and_one_that_evaluates_is_left_alone(
    cluster: Cluster,
) -> None:
    script = f"{SUPPORT / 'own_hanging.py'}"
    agent = cluster.start(
        None, run=(script, str(cluster.url), f"{cluster.folder}/once"), max_restarts=1
    )
    assert agent.wait(120) == 0, agent.tail()
    (cause,) = causes(records.summary(cluster.url))
    pattern = (
        r"worker hung \(rank 1, step 5, step, \S+own_hanging\.py:\d+\): no sign of life for \d s"
    )
    assert re.fullmatch(pattern, cause)
    assert records.status(cluster.url) == "complete"


def test_a_crash_at_the_same_step_ends_the_run_with_a_diagnosis(cluster: Cluster) -> None:
    agent = cluster.start(
        f"{JOB}:Crashing", BATCH, "checkpoint.every=1 step", "train.epochs=1", max_restarts=100
    )
    assert agent.wait(120) == 1
    assert re.search(
        r"error: no progress: 3 times in a row at step 3, phase 'first step', on \S+: worker killed \(SIGSEGV, rank 1\);"
        r" mend it and start again\n",
        agent.output(),
    )
    summary = records.summary(cluster.url)
    assert (summary["status"], summary["restarts"]) == ("failed", 2)


@pytest.mark.soak
def test_a_host_on_which_every_start_fails_leaves_and_the_other_goes_on(cluster: Cluster) -> None:
    given = (BATCH, "args.only=yes", "train.step_delay=0.3", "train.epochs=1000")
    job = f"{JOB}:Crashing"
    rdzv = ("--rdzv_backend=fsspec", f"--rdzv_endpoint={cluster.folder / 'rdzv'}")
    nodes = {"nproc": 1, "nnodes": "1:2", "max_restarts": 20, "launcher": rdzv}
    good = cluster.start(job, *given, **nodes)  # type: ignore[arg-type]
    cluster.until_step(2)
    faulty = {"FAULTY": "yes"}
    bad = cluster.start(job, *given, env=faulty, **nodes)  # type: ignore[arg-type]
    assert bad.wait(90) == 1
    assert re.search(
        r"error: no progress: 3 times in a row at step 0, phase '[a-z ]+', on \S+: worker killed \(SIGSEGV",
        bad.output(),
    )
    newest = cluster.until_started(max(records.started(cluster.url)))
    done = max(line["step"] for line in records.audit(cluster.url))
    cluster.until_step(done + 3, generation=newest)
    good.signal(signal.SIGTERM)
    assert good.wait(40) == 1
    summary = records.summary(cluster.url)
    assert summary["status"] == "preempted"
    assert {generation["world_size"] for generation in summary["generations"]} == {1}


@pytest.mark.soak
def test_a_slow_rank_is_named_once(cluster: Cluster) -> None:
    given = ("train.max_steps=220", "train.logical_shards=2", "checkpoint.every=off")
    agent = cluster.start(f"{JOB}:Slow", BATCH, *given)
    cluster.complete()
    events = records.events(cluster.url, "straggler")
    assert [(e["rank"], e["is_slow"], e["shards"]) for e in events] == [(1, True, [1])]
    assert 0.06 < events[0]["seconds"] < 0.3
    assert events[0]["others"] < 0.05
    assert len(re.findall(r"rank 1 on \S+ \(shards 1\) is slow: ", agent.output())) == 1
