"""Public cases on signals: C18, C19, C20, C21; a run that is told to end saves a step's state, whenever it is told."""

import random
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support import processes, records
from tests.support.cases import REL, SUPPORT, assert_each_sample_once, run_once, tracer, weight
from tests.support.cluster import MARK, RUN, Agent, Cluster
from tests.support.launched import launch
from tests.support.soaking import soaked

LASTING = f"{SUPPORT}/lasting.py:Lasting"
SHORT = ("args.n=12", "train.epochs=1", "train.global_batch_size=4", "checkpoint.every=off")


def contents(folder: Path) -> dict[str, bytes]:
    """All files below a folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def lasting(cluster: Cluster, at: str, *overrides: str) -> Agent:
    """Start the run that takes long somewhere, with two ranks."""
    told = (f"args.told={cluster.folder / 'told'}", f"args.at={at}")
    return launch(cluster, *SHORT, *overrides, *told, job=LASTING, nproc=2)


def ranks_told(cluster: Cluster) -> list[str]:
    """The ranks that began what lasts, a line for each beginning."""
    path = cluster.folder / "told"
    return path.read_text().splitlines() if path.exists() else []


def until_all_last(cluster: Cluster) -> int:
    """Wait until both ranks are in what lasts; how often it was begun by then."""
    cluster.until(lambda: set(ranks_told(cluster)) == {"0", "1"}, "what lasts on both ranks")
    return len(ranks_told(cluster))


def test_c19_a_signal_in_an_evaluation_ends_it_and_saves_the_last_step(cluster: Cluster) -> None:
    evaluation = ("eval.every=2 steps", "eval.batch_size=1")
    agent = lasting(cluster, "evaluation", *evaluation)
    before = until_all_last(cluster)
    agent.signal(signal.SIGTERM)
    assert agent.wait(40) == 75, agent.tail()
    # On each rank the batch under way, and one more until all have agreed.
    assert len(ranks_told(cluster)) - before <= 4
    assert "Traceback" not in agent.output(), agent.tail()
    assert records.status(cluster.url) == "preempted"
    assert [step for _, step in records.checkpoints(cluster.url)] == [2]
    assert records.events(cluster.url, "eval") == []
    end = lasting(cluster, "", *evaluation)
    assert end.wait(60) == 0, end.tail()
    summary = records.summary(cluster.url)
    assert (summary["status"], summary["lost_steps"]) == ("complete", 0)
    # The evaluation that was cut off is done first.
    assert records.events(cluster.url, "eval")[0]["step"] == 2
    assert_each_sample_once(cluster.url, 12, 1)


@pytest.mark.parametrize("at", [*soaked("restore"), "item"])
def test_c19_a_signal_before_the_first_step_ends_at_once_and_harms_nothing(
    cluster: Cluster, at: str
) -> None:
    first = lasting(cluster, "", "train.max_steps=2", "eval.every=off")
    assert first.wait(60) == 0, first.tail()
    kept = contents(cluster.url / "checkpoints")
    steps = len(records.audit(cluster.url))
    agent = lasting(cluster, at, "eval.every=off")
    before = until_all_last(cluster)
    agent.signal(signal.SIGTERM)
    assert agent.wait(25) == 75, agent.tail()
    assert len(ranks_told(cluster)) == before
    assert "Traceback" not in agent.output(), agent.tail()
    assert contents(cluster.url / "checkpoints") == kept
    assert len(records.audit(cluster.url)) == steps
    end = lasting(cluster, "", "eval.every=off")
    assert end.wait(60) == 0, end.tail()
    assert records.summary(cluster.url)["lost_steps"] == 0
    assert_each_sample_once(cluster.url, 12, 1)


def test_c19_a_signal_that_some_have_before_their_first_step_leaves_a_run_that_says_it_is_preempted(
    cluster: Cluster,
) -> None:
    first = lasting(cluster, "", "train.max_steps=2", "eval.every=off")
    assert first.wait(60) == 0, first.tail()
    kept = contents(cluster.url / "checkpoints")
    agent = lasting(cluster, "item of rank 1", "eval.every=off")
    cluster.until(lambda: ranks_told(cluster) == ["1"], "what lasts on rank 1")
    # Rank 0 is in its step, and waits there for rank 1.
    cluster.until_step(3, generation=2, timeout_s=30)
    agent.signal(signal.SIGTERM)
    assert agent.wait(25) == 75, agent.tail()
    assert "Traceback" not in agent.output(), agent.tail()
    assert contents(cluster.url / "checkpoints") == kept
    assert records.status(cluster.url) == "preempted"
    end = lasting(cluster, "", "eval.every=off")
    assert end.wait(60) == 0, end.tail()
    assert records.summary(cluster.url)["lost_steps"] == 0
    assert_each_sample_once(cluster.url, 12, 1)


def test_c19_a_signal_in_the_first_step_saves_it(cluster: Cluster) -> None:
    agent = lasting(cluster, "step", "eval.every=off")
    until_all_last(cluster)
    agent.signal(signal.SIGTERM)
    assert agent.wait(40) == 75, agent.tail()
    assert records.status(cluster.url) == "preempted"
    # What was told while a step is computed is agreed in it or in the next.
    (saved,) = [step for _, step in records.checkpoints(cluster.url)]
    assert saved == max(line["step"] for line in records.audit(cluster.url)) <= 2


def every_process(cluster: Cluster) -> list[int]:
    """All that the cluster started: agent, workers, loader workers, warm process, writer, watcher."""
    return processes.carrying(MARK, cluster.environment()[MARK])


def assert_is_a_steps_state(cluster: Cluster, step: int, batch: int, n: int) -> None:
    """Check that step, position and w of the newest checkpoint belong together."""
    w = 0.0
    for done in records.committed_steps(cluster.url)[:step]:
        w += 0.1 * (sum(done.indices) / len(done.indices) - w)
    assert weight(cluster.url, step) == pytest.approx(w, rel=REL)
    (info,) = infos(cluster, step)
    assert info["epoch"] * n + info["position"] == step * batch


def infos(cluster: Cluster, step: int) -> list[records.Record]:
    """What the checkpoints of a step say of their place."""
    names = [name for name in records.checkpoints(cluster.url) if name[1] == step]
    return [
        records.read_json(records.checkpoint_path(cluster.url, name) / "manifest.json")["info"]
        for name in names
    ]


@pytest.mark.parametrize("repeats", [1, *soaked(10)])
def test_c18_sigterm_to_loader_workers_too_saves_the_agreed_step(
    cluster: Cluster, repeats: int
) -> None:
    moments = random.Random(seed := secrets.randbits(32))
    print(f"seed {seed}")
    given = (
        "args.n=400",
        "train.global_batch_size=4",
        "train.epochs=1000",
        "train.step_delay=0.02",
    )
    saved = 0
    for repeat in range(1, repeats + 1):
        agent = cluster.start(tracer(), *given, "loader.workers=2", "checkpoint.every=1000 steps")
        cluster.until_step(saved + 5, generation=repeat)
        time.sleep(moments.uniform(0, 0.3))
        processes.send(every_process(cluster), signal.SIGTERM)
        assert agent.wait(60) == 1
        assert "Traceback" not in agent.output(), agent.tail()
        assert records.status(cluster.url) == "preempted", agent.tail()
        before, saved = saved, records.newest_step(cluster.url)
        assert saved >= before + 5
    run_once(cluster, tracer(), *given, f"train.max_steps={saved + 1}")
    summary = records.summary(cluster.url)
    assert (summary["lost_steps"], summary["restarts"]) == (0, repeats)


@pytest.mark.parametrize("repeats", [3, *soaked(50)])
def test_c20_a_signal_at_any_moment_saves_a_steps_state(cluster: Cluster, repeats: int) -> None:
    moments = random.Random(seed := secrets.randbits(32))
    print(f"seed {seed}")
    n, batch = 40, 4
    # A save of 16 MB at each step: one is under way at nearly any moment.
    given = (
        f"args.n={n}",
        f"train.global_batch_size={batch}",
        "train.epochs=1000",
        "args.delay=0.02",
    )
    saves = ("args.ballast_mb=16", "checkpoint.every=1 step", "checkpoint.keep=1000")
    step = 0
    for repeat in range(1, repeats + 1):
        agent = launch(cluster, *given, *saves, nproc=2)
        cluster.until_step(step + 2, generation=repeat)
        time.sleep(moments.uniform(0, 0.3))
        # To the launcher, or to its workers too, once, or twice in quick succession.
        pids = [agent.pid, *(() if repeat % 2 else agent.workers().values())]
        processes.send(pids, signal.SIGTERM)
        if repeat % 4 > 1:
            time.sleep(moments.uniform(0, 0.05))
            processes.send(pids, signal.SIGTERM)
        assert agent.wait(60) == 75, agent.tail()
        assert "Traceback" not in agent.output(), agent.tail()
        assert records.status(cluster.url) == "preempted"
        step = records.newest_step(cluster.url)
        assert step == max(line["step"] for line in records.audit(cluster.url))
        assert_is_a_steps_state(cluster, step, batch, n)
    assert records.summary(cluster.url)["lost_steps"] == 0


def test_c20_the_third_signal_ends_a_step_that_does_not_end_and_harms_nothing(
    cluster: Cluster,
) -> None:
    agent = lasting(cluster, "third step", "eval.every=off", "checkpoint.every=1 step")
    until_all_last(cluster)
    _, step = cluster.until_committed(1)  # the next one waits for the update of this step
    kept = contents(cluster.url / "checkpoints")
    everyone = [agent.pid, *agent.workers().values()]
    for _ in range(10):
        # Signals within a second are one; a busy machine makes one of more.
        if agent.code is None:
            processes.send(everyone, signal.SIGTERM)
            time.sleep(1.5)
    assert agent.wait(25) != 0, agent.tail()
    assert len(ranks_told(cluster)) == 2
    assert contents(cluster.url / "checkpoints").items() >= kept.items()
    assert step <= records.newest_step(cluster.url) <= 2
    command = [sys.executable, "-m", "checkpoints", "verify", str(cluster.url)]
    subprocess.run(command, check=True, env=cluster.environment(), capture_output=True)
    end = lasting(cluster, "", "eval.every=off")
    assert end.wait(60) == 0, end.tail()
    assert_each_sample_once(cluster.url, 12, 1)


def test_c21_plain_python_says_75_and_torchrun_says_1_of_the_same_end(cluster: Cluster) -> None:
    given = (
        "args.n=400",
        "train.global_batch_size=4",
        "train.epochs=1000",
        "train.step_delay=0.05",
    )
    arguments = cluster.run_arguments(tracer(), given)
    alone = cluster.spawn([sys.executable, str(RUN), *arguments])
    cluster.until_step(2)
    alone.signal(signal.SIGTERM)
    assert alone.wait(40) == 75, alone.tail()
    assert records.status(cluster.url) == "preempted"
    saved = records.newest_step(cluster.url)
    under = cluster.start(tracer(), *given)
    cluster.until_step(saved + 2, generation=2)  # so that each rank is past its first step
    under.signal(signal.SIGTERM)
    assert under.wait(40) == 1, under.tail()
    told = [sys.executable, "-m", "elastic", "status", str(cluster.url), "--exit-code"]
    status = cluster.spawn(told)
    assert status.wait(40) == 75, status.tail()
