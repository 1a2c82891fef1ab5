"""The drill's arguments, what it sets by itself, and the pieces that need no torchrun."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from elastic import drill as room
from elastic import kin, namespaces
from elastic.__main__ import main
from elastic.drill import Request, add_arguments, read_request
from elastic.errors import ElasticError
from elastic.following import Follower
from elastic.strikes import exchange, is_exchangeable
from elastic.undisturbed import Reference, key_of
from tests.support.distribution import ROOT

JOB = "jobs/digits.yaml"


def request(folder: Path, *words: str) -> Request:
    import argparse

    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return read_request(parser.parse_intermixed_args([*words, "--url", str(folder)]))


def test_settings_may_stand_before_and_behind_options(tmp_path: Path) -> None:
    found = request(
        tmp_path, JOB, "train.epochs=2", "--faults", "kill", "--every", "5s", "args.width=4", "--for", "1 min",
        "--nproc", "3", "--seed", "9",
    )  # fmt: skip
    assert found.given == ("train.epochs=2", "args.width=4")
    assert (found.job, found.workers, found.seed) == (JOB, 3, 9)
    assert [one.kind for one in found.planned] == ["kill"] * 12
    assert found.settings.train.epochs == 2
    assert found.folder == tmp_path


def test_a_seed_is_drawn_where_none_is_given(tmp_path: Path) -> None:
    assert request(tmp_path, JOB).seed != request(tmp_path, JOB).seed


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--faults", "fire"], "--faults: found 'fire', expected some of kill, stop,"),
        (["--every", "soon"], "--every: found 'soon', expected a duration"),
        (["--every", "1 min", "--for", "30s"], "--for: found 30 s, expected at least --every (60 s)"),
        (["--nproc", "0"], "--nproc: found 0, expected at least 1"),
        (["--nodes", "0"], "--nodes: found 0, expected at least 1"),
        (["--url", "s3://bucket/drills"], "--url: found s3://bucket/drills, expected a local folder"),
        (["checkpoint.url=here"], "checkpoint.url: found a value, expected none: runs lie below --url"),
        (["train.epoch=3"], "train.epoch: unknown key, did you mean train.epochs?"),
        (["nothing.yaml"], "command line: found a second job 'nothing.yaml'"),
        (["--faults", "partition"], "partition: found --nodes 1, expected at least 2"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_one_line_and_code_2(
    words: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["drill", JOB, "--url", str(tmp_path / "drills"), *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {told}")
    assert error.count("\n") == 1
    assert not (tmp_path / "drills").exists()


@pytest.mark.parametrize("words", [["--nproc", "many"], ["--unknown"]])
def test_options_that_are_no_options_are_code_2(words: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["drill", JOB, *words])
    assert ended.value.code == 2


def test_what_this_machine_cannot_do_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(room, "serves_nodes", lambda: True)
    monkeypatch.setattr(namespaces, "why_impossible", lambda: "there is no program `ip`")
    words = ["drill", JOB, "--url", str(tmp_path), "--nodes", "2", "--faults"]
    assert main([*words, "partition"]) == 2
    assert "partition: there is no program `ip`, expected root" in capsys.readouterr().err
    monkeypatch.setattr(room, "is_exchangeable", lambda _folder: False)
    assert main([*words, "storage"]) == 2
    assert "expected a local file system" in capsys.readouterr().err
    monkeypatch.setattr(room, "serves_nodes", lambda: False)
    assert main([*words, "kill"]) == 2
    assert "--nodes: found no rendezvous of several nodes" in capsys.readouterr().err


def test_help_is_told() -> None:
    words = [sys.executable, "-m", "elastic", "drill", "--help"]
    told = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for word in ("--faults", "--every", "--for", "--nproc", "--nodes", "--seed", "--url", "--json"):
        assert word in told


def test_arguments_are_refused_without_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from elastic.__main__ import main; "
        f"code = main(['drill', '--every', 'x', '--url', {str(tmp_path)!r}]); "
        "sys.exit(code + 10 * ('torch' in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False, capture_output=True)
    assert done.returncode == 2


# ------------------------------------------------------------------------------------ what it sets
class Asked:
    """What `_undisturbed` asks of the runs that it compares with."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, fails: str = "") -> None:
        self.calls: list[tuple[list[str], int]] = []
        self._fails = fails
        monkeypatch.setattr(room, "reference", self._reference)

    def _reference(self, folder: Path, words: list[str], *, workers: int, say: object) -> Reference:
        del say
        self.calls.append((words, workers))
        if self._fails and any(self._fails in word for word in words):
            raise ElasticError("the undisturbed run failed: no deterministic implementation")
        return Reference(folder=folder, steps=100, epochs=2, step_s=0.1, reused=False)


def test_bitwise_mode_is_set_where_it_was_left_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Asked(monkeypatch)
    _, bits, settings = room._undisturbed(request(tmp_path, JOB, "train.step_delay=1"))
    assert bits is None
    assert settings == [
        "audit.samples=true", "train.reproducible=bitwise", "train.logical_shards=4"
    ]  # fmt: skip
    ((words, workers),) = asked.calls
    assert words == [JOB, *settings, "train.step_delay=0"]
    assert workers == 2


def test_logical_shards_of_the_user_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Asked(monkeypatch)
    found = request(tmp_path, JOB, "train.logical_shards=6")
    assert "train.logical_shards=4" not in room._undisturbed(found)[2]


def test_bits_that_nobody_wants_are_not_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Asked(monkeypatch)
    monkeypatch.setattr(room, "serves_nodes", lambda: True)
    found = request(tmp_path, JOB, "train.reproducible=off", "--nodes", "2")
    _, bits, settings = room._undisturbed(found)
    assert bits == "train.reproducible=off was asked for"
    assert settings == ["audit.samples=true"]
    # Then the number of workers matters.
    assert asked.calls[0][1] == 4


def test_a_job_that_has_no_bitwise_mode_is_drilled_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Asked(monkeypatch, fails="bitwise")
    _, bits, settings = room._undisturbed(request(tmp_path, JOB))
    assert bits is not None
    assert bits.startswith(
        "the job does not run in bitwise mode (the undisturbed run failed: no det"
    )
    assert settings == ["audit.samples=true"]
    assert len(asked.calls) == 2


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--for", "1 min", "--every", "5s"], 0.5),
        (["--for", "5s", "--every", "5s"], None),
        (["--for", "1 min", "train.step_delay=0.2"], None),
    ],
)
def test_a_short_job_is_stretched(tmp_path: Path, words: list[str], expected: float | None) -> None:
    before = Reference(folder=tmp_path, steps=100, epochs=2, step_s=0.1, reused=False)
    assert room._delay(request(tmp_path, JOB, *words), before) == expected


def test_another_code_or_setting_is_another_undisturbed_run(tmp_path: Path) -> None:
    source = tmp_path / "job.py"
    source.write_text("1")

    def key(*words: str, workers: int = 2) -> str:
        return key_of("job.py:Job", words, workers=workers, sources=[source])

    first = key("train.epochs=1", "args.n=3")
    assert key("args.n=3", "train.epochs=1", "train.step_delay=0.5") == first
    assert key("train.epochs=2", "args.n=3") != first
    assert key("train.epochs=1", "args.n=3", workers=3) != first
    source.write_text("2")
    assert key("train.epochs=1", "args.n=3") != first


# ------------------------------------------------------------------------------------ its pieces
def test_exchanged_names_are_never_both_there(tmp_path: Path) -> None:
    folder, file = tmp_path / "run", tmp_path / "run.away"
    folder.mkdir()
    (folder / "inside").write_text("kept")
    file.write_text("")
    exchange(folder, file)
    assert folder.is_file()
    with pytest.raises(NotADirectoryError):
        (folder / "inside").read_text()
    exchange(folder, file)
    assert (folder / "inside").read_text() == "kept"
    assert is_exchangeable(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "run.away"]


def test_processes_are_found_by_what_they_carry_and_ended() -> None:
    mark = f"t{os.getpid()}-{time.monotonic_ns()}"
    process = subprocess.Popen(["sleep", "100"], env={"A_DRILL_TEST": f"{mark}-1"})  # noqa: S607
    try:
        deadline = time.monotonic() + 10
        while kin.carrying("A_DRILL_TEST", mark) != [process.pid]:
            assert time.monotonic() < deadline
        assert process.pid in kin.children(os.getpid())
        assert kin.describe(process.pid) == f"{process.pid} (sleep 100)"
        kin.send([process.pid], signal.SIGSTOP)
        assert kin.end_all("A_DRILL_TEST", mark) == []
    finally:
        process.kill()
    assert process.wait() == -signal.SIGKILL


def event(kind: str, **fields: Any) -> str:
    return json.dumps({"event": kind, "time": 1.5, "generation": 1, **fields}) + "\n"


def test_a_run_is_followed_line_by_line(tmp_path: Path) -> None:
    follower = Follower(tmp_path)
    follower.look()
    assert follower.newest is None
    journal = tmp_path / "journal"
    journal.mkdir()
    file = journal / "000001.jsonl"
    began = event("start", step=4, world_size=2, cause="start", parent=None, source="fresh")
    file.write_text(began + event("step", step=5)[:9])
    (journal / "000001.rank1.jsonl").write_text(event("step", step=99))
    follower.look()
    assert follower.newest is not None
    assert follower.newest.last_step == 4
    file.write_text(began + event("step", step=5) + "torn\n" + event("step", step=6, time=2.0))
    follower.look()
    assert follower.newest.steps == [(5, 1.5), (6, 2.0)]
    assert follower.newest.last_step == 6
    # While the store is away nothing is known, and nothing forgotten.
    journal.rename(tmp_path / "away")
    follower.look()
    assert follower.newest.last_step == 6
