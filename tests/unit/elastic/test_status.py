"""`python -m elastic status URL`, and the codes that a run's status stands for."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from elastic.__main__ import main
from elastic.status import code_of
from tests.support.distribution import ROOT


def content(**changes: Any) -> dict[str, Any]:
    return {
        "status": "running", "generation": 2, "epochs": 1, "steps": 30, "restarts": 1, "lost_steps": 4,
        "goodput": 0.75, "metrics": {"accuracy": 0.5, "loss": None}, "best": None,
        "generations": [
            {"generation": 1, "world_size": 2, "start_step": 0, "end_step": 14, "source": "fresh", "cause": "start"},
            {"generation": 2, "world_size": 3, "start_step": 10, "end_step": 30, "source": "store", "cause": "node joined"},
        ],
        **changes,
    }  # fmt: skip


def write(folder: Path, found: object) -> str:
    (folder / "summary.json").write_text(json.dumps(found))
    return str(folder)


@pytest.mark.parametrize(
    ("status", "code"),
    [
        ("complete", 0), ("stopped", 0), ("running", 1), ("preempted", 75), ("failed", 76), ("unheard of", 1),
    ],
)  # fmt: skip
def test_each_status_has_its_code(
    status: str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = write(tmp_path, content(status=status))
    assert code_of(content(status=status)) == code
    assert main(["status", url, "--exit-code"]) == code
    assert main(["status", url]) == 0
    assert capsys.readouterr().err == ""


def test_options_may_be_nested_and_of_any_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def note(_url: str, options: Any, **_: Any) -> int:
        seen.append(options)
        return 0

    monkeypatch.setattr("elastic.__main__.status", note)
    words = ["client_kwargs.region_name=us-east-1", "use_ssl=false", "secret=123"]
    assert main(["status", str(tmp_path), *(w for word in words for w in ("--option", word))]) == 0
    assert seen == [
        {"client_kwargs": {"region_name": "us-east-1"}, "use_ssl": False, "secret": "123"}
    ]


def test_lines_tell_where_the_run_stands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    best = {"metric": "accuracy", "value": 0.5, "step": 20, "checkpoint": "000002-000000000020"}
    url = write(tmp_path, content(best=best))
    assert main(["status", url]) == 0
    assert capsys.readouterr().out == (
        f"{url}: running, generation 2, epoch 1, step 30\n"
        "restarts 1, lost steps 4, goodput 0.750\n"
        "accuracy 0.5\n"
        "best accuracy 0.5 at step 20: 000002-000000000020\n"
        "generation 1: W=2, steps 0 to 14, fresh (start)\n"
        "generation 2: W=3, steps 10 to 30, store (node joined)\n"
    )


def test_json_is_the_whole_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", write(tmp_path, content()), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == content()


def test_url_without_a_run_says_so_and_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", str(tmp_path), "--exit-code"]) == 2
    assert capsys.readouterr().out == f"{tmp_path}: there is no run\n"
    (tmp_path / "generations").mkdir()
    (tmp_path / "generations/000003.json").write_text("{}")
    assert main(["status", str(tmp_path), "--exit-code"]) == 2
    assert capsys.readouterr().out == f"{tmp_path}: generation 3 is starting\n"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("{", "not JSON (Expecting property name enclosed in double quotes: line 1 column 2 (char 1))"),
        ("[" * 200_000, "not JSON (maximum recursion depth exceeded while decoding a JSON array from a unicode string)"),
        ("[]", "found no object, expected a summary"),
        ("{}", "found something else or an older kind, expected a run's summary"),
        ('{"metrics": 3}', "found something else or an older kind, expected a run's summary"),
    ],
)  # fmt: skip
def test_file_that_is_no_summary_is_told_in_one_line(
    text: str, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "summary.json").write_text(text)
    assert main(["status", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"error: {tmp_path}/summary.json: {line}\n"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["report", "x"], "error: python -m elastic report: not yet served by this version; served: launch, doctor, status, rollback, drill\n"),
        (["status", "x", "--option", "key"], "error: --option: found 'key', expected key=value\n"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_told_in_one_line(
    arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert capsys.readouterr().err == line


def test_command_imports_no_torch(tmp_path: Path) -> None:
    script = (
        "import sys; from elastic.__main__ import main; "
        "print(main(['status', sys.argv[1]]), 'torch' in sys.modules)"
    )
    found = subprocess.run(
        [sys.executable, "-c", script, write(tmp_path, content())],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert found.stdout.splitlines()[-1] == "0 False"


def test_module_can_be_run(tmp_path: Path) -> None:
    found = subprocess.run(
        [sys.executable, "-m", "elastic", "status", str(tmp_path), "--exit-code"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (found.returncode, found.stdout) == (2, f"{tmp_path}: there is no run\n")
