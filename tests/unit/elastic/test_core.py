"""Signals, early ends and saves of a run, in a world of one."""

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from checkpoints.errors import TransientStoreError
from checkpoints.options import CheckpointOptions, Interval
from checkpoints.store import Store
from elastic import generation
from elastic.agreement import Agreed
from elastic.core import Run
from elastic.ending import end_worker
from elastic.entry import main
from elastic.errors import ElasticError, OverruledError, PeersLeftError
from elastic.opening import Setup, open_session
from jobs.job import JobRun
from tests.support import records
from tests.support.ranked import Ended, run_alone
from tests.support.tracer import Counter

if TYPE_CHECKING:
    from collections.abc import Callable

HERE = f"{Path(__file__)}:"
SIGNALS = "signals=[SIGTERM, SIGUSR1]"


class Signalled(Counter):
    """Gets a signal from itself in step 4 of its life."""

    def __init__(self, number: int = signal.SIGTERM, n: int = 12, marker: str = "") -> None:
        super().__init__(n=n)
        self.number = number
        self.marker = marker

    def on_step(self, run: JobRun) -> None:
        if run.step == 4 and not Path(self.marker).exists():
            Path(self.marker).touch()
            os.kill(os.getpid(), self.number)


def start(url: Path, *overrides: str) -> Ended:
    fixed = ("train.global_batch_size=4", "train.epochs=3", f"args.marker={url}.mark", SIGNALS)
    return run_alone(main, [f"{HERE}Signalled", f"checkpoint.url={url}", *fixed, *overrides], {})


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_signal_saves_the_state_and_ends_with_75_and_the_next_start_goes_on(
    number: int, tmp_path: Path
) -> None:
    url = tmp_path / "run"
    ended = start(url, f"args.number={int(number)}", "checkpoint.every=off")
    assert (ended.code, ended.err) == (
        75,
        "told to leave: the state of step 5 is saved; it goes on from there at the next start\n",
    )
    assert records.status(url) == "preempted"
    assert records.checkpoints(url) == [(1, 5)]
    ended = start(url, f"args.number={int(number)}", "checkpoint.every=off")
    assert (ended.code, ended.err) == (0, "")
    found = records.summary(url)
    assert (found["status"], found["steps"], found["lost_steps"]) == ("complete", 9, 0)
    assert [row["cause"] for row in found["generations"]] == ["start", "start"]


# ------------------------------------------------------------------------------- a run without a loop
def open_run(url: str, *, every: str = "off", audit: bool = False) -> Run:
    """A run as a loop would have it, trained by hand."""
    options = CheckpointOptions(url=url, every=Interval.parse(every), max_unsaved=3600)
    setup = Setup(checkpoint=options, config={}, audit=audit)
    session = open_session({}, ["SIGTERM"])
    run = Run(session, setup, code="c", prepare=lambda: None)
    run.identify({"job": "by hand"})
    run.claim()
    model = torch.nn.Linear(1, 1)
    run.attach(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    run.restore(lambda: None)
    run.epoch_samples = 8
    run.epochs_planned = 3
    return run


def step(run: Run, agreed: Agreed | None = None) -> None:
    run.count(4, loss=0.5, values={})
    run.settle(agreed or Agreed())


def saved(run: Run) -> list[int]:
    run.drain(60)  # what was begun is made beside the training
    return [name.step for name in run.manager.names()]


def saves_at_an_epochs_end(url: str) -> None:
    run = open_run(url, every="2 steps")
    step(run)
    assert saved(run) == []
    step(run)  # the last step of the epoch: the save waits for the epoch's end
    assert run.at_epoch_end
    assert saved(run) == []
    run.end_epoch()
    assert saved(run) == [2]
    assert run.manager.info(run.manager.names()[0]).info["epoch"] == 1
    run.save()
    assert saved(run) == [2]
    step(run, Agreed(save=True))
    assert saved(run) == [3, 2]
    run.close()


def ends_where_it_was_overtaken(url: str) -> None:
    run = open_run(url)
    expected = (
        f"generation 1 was superseded: a newer launch owns {url}; this one ends, nothing that it saved "
        "is lost"
    )
    with pytest.raises(OverruledError) as superseded:
        step(run, Agreed(superseded=True))
    assert str(superseded.value) == expected
    with pytest.raises(ElasticError) as parted:
        step(run, Agreed(parted=True))
    assert str(parted.value) == "generation 1 was overtaken: the run went on without us"
    assert type(parted.value) is ElasticError
    run.close()


def leaves_where_another_was_told(url: str) -> None:
    from elastic import core

    core._PEER_S = 0.1  # type: ignore[misc]
    run = open_run(url)
    with pytest.raises(PeersLeftError, match="other workers were told to leave: the state of step"):
        step(run, Agreed(notice=1))
    assert saved(run) == [1]
    assert run.left
    session = run._session
    assert end_worker(ElasticError("this one restarts"), session, run) == 1
    record = session.slot.path.read_bytes()
    assert b'"kind": "preempted"' in record
    run.close()


def keeps_the_best_through_a_failing_store(url: str) -> None:
    run = open_run(
        "memory://" + url.strip("/")
    )  # saved in this process, where it can be made to fail
    run.keep_best = 1
    real = Store.put

    def fail(*_: object, **__: object) -> None:
        raise TransientStoreError("busy")

    def judge(value: float) -> None:
        run.count(1, loss=0.5, values={})
        run.progress.judge({"score": value}, monitor="score", mode="min", keep_best=1)
        run.save()

    judge(5.0)
    Store.put = fail  # type: ignore[method-assign]
    judge(3.0)
    Store.put = real  # type: ignore[method-assign]
    first = "000001-000000000001"
    assert run.progress.best is not None
    assert (run.progress.best.value, run.progress.best.checkpoint) == (3.0, None)
    assert run.progress.protected(1) == [first]
    judge(4.0)
    assert saved(run) == [3, 1]
    assert run.manager.info(run.manager.names()[0]).info["best"] == first
    run.close()


def forgets_a_best_that_the_writer_did_not_save(url: str) -> None:
    run = open_run(url)
    run.keep_best = 1
    for outcome in ("failed", "replaced", "dropped"):
        run.count(1, loss=0.5, values={})
        score = {"score": -float(run.step)}
        run.progress.judge(score, monitor="score", mode="min", keep_best=1)
        run.save()
        assert saved(run)[0] == run.step
        best = run.progress.best
        assert best is not None
        assert best.checkpoint == f"000001-{run.step:012}"
        told = {"op": outcome, "name": best.checkpoint, "error": "busy"}
        run.note_saved({**told, "final": False})
        if outcome == "failed":
            assert best.checkpoint is not None  # the writer tries again
        run.note_saved({**told, "final": True})
        assert best.checkpoint is None
    run.close()


def puts_a_save_off_where_the_audit_does_not_go(url: str) -> None:
    run = open_run("memory://" + url.strip("/"), audit=True)
    run.records.audit(run.progress, [1, 2])
    real = Store.put, Store.put_new

    def fail(*_: object, **__: object) -> None:
        raise TransientStoreError("busy")

    run.count(4, loss=0.5, values={})
    Store.put = Store.put_new = fail  # type: ignore[method-assign,assignment]
    assert run.save() is False
    Store.put, Store.put_new = real  # type: ignore[method-assign]
    assert saved(run) == []
    assert run.save() is True
    assert saved(run) == [1]
    run.close()


def refuses_what_comes_too_early(url: str) -> None:
    options = CheckpointOptions(url=url)
    run = Run(
        open_session({}, ["SIGTERM"]),
        Setup(checkpoint=options, config={}),
        code="c",
        prepare=lambda: None,
    )
    assert run.generation == 0
    asked: list[tuple[Callable[[], object], str]] = [
        (lambda: run.records, "records: found no claimed generation, expected claim() before"),
        (lambda: run._claimed, "generation: found none, expected claim() before"),
        (lambda: run._attached, "model: found none, expected attach() before"),
    ]
    for ask, message in asked:
        with pytest.raises(ElasticError) as found:
            ask()
        assert str(found.value) == message
    run.close()


@pytest.mark.parametrize(
    "body",
    [
        saves_at_an_epochs_end,
        ends_where_it_was_overtaken,
        leaves_where_another_was_told,
        keeps_the_best_through_a_failing_store,
        forgets_a_best_that_the_writer_did_not_save,
        puts_a_save_off_where_the_audit_does_not_go,
        refuses_what_comes_too_early,
    ],
    ids=lambda body: body.__name__,
)
def test_run_by_hand(body: object, tmp_path: Path) -> None:
    ended = run_alone(body, str(tmp_path / "run"))  # type: ignore[arg-type]
    assert ended.code == 0, ended.err


def test_generation_is_the_base_of_a_run() -> None:
    assert issubclass(Run, generation.Generation)
