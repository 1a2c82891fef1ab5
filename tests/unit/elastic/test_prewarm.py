"""What the warm process is told before there was any worker; that it fits is told by the runs (tests/e2e/test_launch.py)."""

import os
import sys
from pathlib import Path

import pytest

from checkpoints.options import CheckpointOptions
from elastic.agent import agent_of
from elastic.launching import RUNNER
from elastic.options import Settings, TrainOptions
from elastic.prewarm import Prewarm, is_wanted, plan_of
from elastic.warming import Plan

ROOT = str(Path(RUNNER).parent.parent)


def settings(job: str = "jobs.digits:Digits", url: str = "runs/x", warm: str = "auto") -> Settings:
    train = TrainOptions(warm_start=warm)  # type: ignore[arg-type]  # one of two texts
    return Settings(job=job, train=train, checkpoint=CheckpointOptions(url=url))


def plan(tmp_path: Path, **given: str) -> Plan:
    return plan_of(
        settings(**given),
        agent=agent_of(os.getpid()),
        folder=tmp_path,
        script=RUNNER,
        arguments=["a=1"],
        environ={"PATH": "/bin", "RANK": "3", "TORCHELASTIC_X": "y"},
    )


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, True),
        ({"restarts": "0"}, False),
        ({"restarts": "0", "nnodes": "1:4"}, True),
        ({"restarts": "0", "nnodes": "2:2"}, False),
        ({"environ": {"ELASTIC_WARM": "0"}}, False),
        ({"environ": {"PYTHON_EXEC": "/opt/mine"}}, False),
        ({"settings": settings(warm="off")}, False),
    ],
)
def test_where_there_is_use_for_one(given: dict[str, object], expected: bool) -> None:
    asked = {"settings": settings(), "environ": {}, "restarts": "9", "nnodes": "1:1", **given}
    found = asked.pop("settings"), asked.pop("environ")
    assert is_wanted(*found, **asked) is expected  # type: ignore[arg-type]  # as given


def test_it_imports_the_job_and_what_each_worker_needs(tmp_path: Path) -> None:
    made = plan(tmp_path)
    assert made.modules[:2] == ["elastic.worker", "jobs.digits"]
    assert "checkpoints.backend_fsspec" not in made.modules
    assert made.argv == [RUNNER, "a=1"]
    assert made.environ == {"PATH": "/bin", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    assert str(Path(RUNNER).parent) not in made.path
    assert ROOT in [os.path.realpath(entry) for entry in made.path]
    assert str(Path.cwd()) in made.path
    assert plan(tmp_path, url="s3://b/r").modules[-2:] == ["checkpoints.backend_fsspec", "s3fs"]


def test_a_job_of_ones_own_file_is_imported_from_its_folder(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.touch()
    made = plan(tmp_path, job=f"{file}:Job")
    assert made.modules[1] == "mine"
    assert str(tmp_path) in made.path
    assert made.files == [str(file)]


def test_one_that_has_given_up_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ends(*_: object) -> int:
        return os.posix_spawn(sys.executable, [sys.executable, "-c", ""], {})

    monkeypatch.setattr("elastic.prewarm.spawn", ends)
    Prewarm(plan(tmp_path)).wait()
    Prewarm(None).wait()
