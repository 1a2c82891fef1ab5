"""What is wrong with a start is one line and code 2, before torch is imported."""

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic.entry import main, set_up_logging
from tests.support.distribution import ROOT

EPOCH = "train.epoch: found an unknown key, expected one of"


@pytest.fixture(autouse=True)
def loggers() -> Iterator[None]:
    names = ("elastic", "checkpoints", "jobs")
    before = [
        (logger, logger.handlers[:], logger.propagate, logger.level)
        for logger in map(logging.getLogger, names)
    ]
    yield
    for logger, handlers, propagate, level in before:
        logger.handlers[:], logger.propagate = handlers, propagate
        logger.setLevel(level)


def start(
    *arguments: str, environ: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Start the script itself, by hand."""
    return subprocess.run(
        [sys.executable, str(ROOT / "elastic/run.py"), *arguments],
        env={**os.environ, **(environ or {})}, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_config_error_is_one_line_and_code_2() -> None:
    found = start("train.epochs=0")
    assert (found.returncode, found.stdout) == (2, "")
    assert found.stderr == ("error: train.epochs: found 0, expected at least 1 (command line)\n"), (
        found.stderr
    )


@pytest.mark.parametrize("argument", ["train.epochs=0", "nowhere.yaml", "train.epoch=3"])
def test_config_error_pays_neither_for_torch_nor_for_fsspec(argument: str) -> None:
    script = (
        "import sys; from elastic.entry import main; code = main(sys.argv[1:], {}); "
        "print(int(code), {'torch', 'fsspec', 'numpy'} & set(sys.modules))"
    )
    found = subprocess.run(
        [sys.executable, "-c", script, argument], cwd=ROOT, capture_output=True, text=True, check=True
    )  # fmt: skip
    assert found.stdout == "2 set()\n"
    assert found.stderr.startswith("error: ")
    assert found.stderr.count("\n") == 1


def test_places_error_is_told_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([], {"RANK": "3"}) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1


def test_one_rank_of_a_node_tells_the_error(capsys: pytest.CaptureFixture[str]) -> None:
    hand = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "1",
    }
    for rank in ("0", "1"):
        assert main(["train.epochs=0"], {**hand, "RANK": rank, "LOCAL_RANK": rank}) == 2
    assert capsys.readouterr().err.count("error: train.epochs: found 0") == 1


def test_help_tells_every_setting_and_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"], {}) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("usage: torchrun [torchrun's options] elastic/run.py [JOB]")
    for key in ("train.epochs", "checkpoint.url", "eval.keep_best", "loader.workers", "timeout"):
        assert key.rpartition(".")[2] in captured.out
    assert "step_delay" not in captured.out
    assert captured.err == ""


def test_only_the_projects_own_loggers_are_set_up(capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger().handlers[:]
    set_up_logging(primary=True)
    logging.getLogger("elastic.loop").info("told")
    set_up_logging(primary=False)
    logging.getLogger("elastic.loop").warning("another rank is quiet")
    logging.getLogger("checkpoints").error("but for errors")
    assert capsys.readouterr().err == (
        "INFO elastic.loop: told\nERROR checkpoints: but for errors\n"
    )
    assert logging.getLogger().handlers == root


def test_jobs_file_that_does_not_exist_is_told(tmp_path: Path) -> None:
    found = start(str(tmp_path / "mine.py:Job"), f"checkpoint.url={tmp_path}/run")
    assert found.returncode == 2
    assert found.stderr.count("\n") == 1, found.stderr
    assert str(tmp_path / "mine.py") in found.stderr
    assert not (tmp_path / "run" / "run.json").exists()
