"""Public cases on what a checkpoint must hold: C37, C38, C43, C44."""

import math
from pathlib import Path

import pytest

from tests.support import records
from tests.support.cases import (
    EACH_STEP,
    REL,
    run_killed,
    run_once,
    tracer,
    weight,
)
from tests.support.cluster import Cluster
from tests.support.soaking import soaked


def test_c37_the_cosine_rate_goes_on_after_a_resume(cluster: Cluster) -> None:
    overrides = (
        "args.n=400",
        "train.epochs=1",
        "train.global_batch_size=4",
        "checkpoint.every=45 steps",
    )
    run_killed(cluster, "Cosine", "46@1", *overrides)
    events = records.step_events(cluster.url)
    assert events[45]["generation"] > events[44]["generation"]
    rates = [event["lr"] for event in events]
    assert rates[45] == pytest.approx(0.000578217232520116, rel=1e-12)
    assert rates[46] == pytest.approx(0.000562666616782152, rel=1e-12)
    assert rates[99] == pytest.approx(2.467198e-07, rel=1e-6)
    closed_form = [0.0005 * (1 + math.cos(math.pi * t / 100)) for t in range(100)]
    assert rates == pytest.approx(closed_form, rel=1e-9)


@pytest.mark.soak
def test_c37_a_schedule_by_epochs_goes_on_after_kills_inside_epochs(cluster: Cluster) -> None:
    overrides = (*EACH_STEP, "args.n=8", "train.epochs=6", "train.global_batch_size=4")
    kill = " ".join(f"{2 * epoch + 2}@{epoch % 2}" for epoch in (2, 3, 4))
    run_killed(cluster, "MultiStep", kill, *overrides)
    rates = [event["lr"] for event in records.step_events(cluster.url)]
    assert rates == pytest.approx([100.0] * 8 + [10.0] * 4, rel=1e-12)


def test_c38_adams_moments_come_back(cluster: Cluster) -> None:
    overrides = (*EACH_STEP, "args.n=32", "train.epochs=1", "train.global_batch_size=4")
    run_killed(cluster, "AdamScalar", "5@0", *overrides)
    weights = [weight(cluster.url, step) for step in range(4, 9)]
    expected = [0.6039391, 0.5079637, 0.4142365, 0.3234208, 0.2362638]
    assert weights == pytest.approx(expected, rel=REL)
    assert records.committed_steps(cluster.url)[4].generation > 1


@pytest.mark.soak
def test_c43_best_and_patience_are_remembered(cluster: Cluster) -> None:
    overrides = (
        *EACH_STEP,
        "args.n=8",
        "args.steps_per_epoch=2",
        "train.epochs=6",
        "train.global_batch_size=4",
        "eval.monitor=score",
        "eval.mode=min",
        "eval.patience=3",
    )
    kill = " ".join(f"{2 * epoch + 2}@{epoch % 2}" for epoch in range(5))
    summary = run_killed(cluster, "Scored", kill, *overrides)
    assert summary["status"] == "stopped"
    assert summary["steps"] == 10
    assert (summary["best"]["metric"], summary["best"]["value"]) == ("score", 3.0)
    assert summary["best"]["step"] == 4
    best = records.parse_state(summary["best"]["checkpoint"])
    assert best in records.checkpoints(cluster.url)


def contents(url: Path) -> dict[str, bytes]:
    """Every file at the URL."""
    files = (path for path in url.rglob("*") if path.is_file())
    return {str(path.relative_to(url)): path.read_bytes() for path in files}


@pytest.mark.parametrize(
    ("change", "telling"),
    [
        ("args.width=8", ("extra.bias", "(4,)", "(8,)", "3 more")),
        *soaked(
            ("args.name=other", ("layer.bias", "(4,)", "missing", "3 more")),
            ("args.extra=false", ("extra.bias", "(4,)", "missing", "1 more")),
        ),
    ],
)
def test_c44_a_changed_model_is_refused(
    cluster: Cluster, change: str, telling: tuple[str, ...]
) -> None:
    overrides = ("args.n=8", "train.epochs=1", "train.global_batch_size=4")
    run_once(cluster, tracer("Shaped"), *overrides, nproc=1)
    before = contents(cluster.url)
    agent = cluster.start(tracer("Shaped"), *overrides, "train.epochs=2", change, max_restarts=3)
    assert agent.wait(60) != 0
    lines = [line for line in agent.output().splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, agent.tail()
    for part in telling:
        assert part in lines[0]
    assert "Traceback" not in agent.output()
    assert contents(cluster.url) == before


@pytest.mark.parametrize("how", ["emptied", *soaked("unmounted")])
def test_a_run_whose_checkpoints_are_gone_is_not_begun_anew_in_silence(
    how: str, cluster: Cluster
) -> None:
    overrides = (*EACH_STEP, "args.n=16", "train.epochs=1", "train.global_batch_size=4")
    run_once(cluster, tracer("Cosine"), *overrides)
    folder = Path(cluster.url) / "checkpoints"
    away = folder.rename(folder.with_name("away"))
    if how == "emptied":
        folder.mkdir()
    else:
        folder.symlink_to("disk")
    agent = cluster.start(tracer("Cosine"), *overrides, "train.epochs=2", nproc=2, max_restarts=0)
    assert agent.wait() == 1
    told = "found none, expected at least " if how == "emptied" else "a link that leads nowhere"
    assert told in agent.output()
    assert "Traceback" not in agent.output()
    assert max(records.started(cluster.url)) == 1
    folder.rmdir() if how == "emptied" else folder.unlink()
    away.rename(folder)
    agent = cluster.start(tracer("Cosine"), *overrides, "train.epochs=2", nproc=2)
    assert agent.wait() == 0, agent.tail()
    assert records.summary(cluster.url)["steps"] == 8
