"""What `python -m checkpoints` says, and with which exit code."""

import json
import os
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from checkpoints import commands
from checkpoints.layout import CheckpointName
from checkpoints.manager import CheckpointManager
from checkpoints.question import read_option
from checkpoints.store import Store, open_store
from tests.support.states import name, state

ROOT = Path(__file__).parents[3]
BEST = CheckpointName(1, 10)


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A run with checkpoints of steps 9, 10 and 100, of which 10 is the best."""
    manager = CheckpointManager(open_store(str(tmp_path / "run")))
    parent = None
    for step in (9, 10, 100):
        info: dict[str, Any] = {"best": {"checkpoint": str(BEST)}, "loss": 0.5}
        snapshot = manager.stage(
            state(step), name=name(step), parent=parent, run_id="run-1", info=info
        )
        parent = manager.commit(snapshot).name
    return str(tmp_path / "run")


def ask(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    try:
        code = commands.main(argv)
    except SystemExit as left:  # the argument parser's way
        code = int(left.code or 0)
    out, err = capsys.readouterr()
    return code, out, err


def ask_json(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, Any]:
    code, out, err = ask(capsys, *argv, "--json")
    assert not err
    return code, json.loads(out)


def flip(store: Store, file: str) -> None:
    data = bytearray(store.get(file))
    data[-1] ^= 1
    store.put(file, bytes(data))


def test_ls_lists_the_newest_first_with_steps_sizes_health_and_the_best(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = ask(capsys, "ls", url)
    lines = [line.split() for line in out.splitlines()]
    assert (code, err) == (0, "")
    assert lines[0] == ["CHECKPOINT", "STEP", "AGE", "SIZE", "HEALTH", "PARENT"]
    assert [line[0] for line in lines[1:]] == [str(name(step)) for step in (100, 10, 9)]
    assert [line[1] for line in lines[1:]] == ["100", "10", "9"]
    assert [line[-1] for line in lines[1:]] == [str(name(10)), "best", "-"]
    assert all("ok" in line for line in lines[1:])


def test_ls_as_json_tells_all_of_it(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = ask_json(capsys, "ls", url)
    assert code == 0
    assert found["url"] == url
    assert found["unfinished"] == []
    first = found["checkpoints"][0]
    assert first["name"] == str(name(100))
    assert (first["generation"], first["step"], first["parent"]) == (1, 100, str(name(10)))
    assert (first["health"], first["problem"], first["best"]) == ("ok", None, False)
    assert first["size_bytes"] > 1000
    assert 0 <= first["age_s"] < 600
    assert [row["best"] for row in found["checkpoints"]] == [False, True, False]


def test_ages_are_told_in_units_that_fit(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    made = CheckpointManager(open_store(url)).info(name(100)).created_at
    began = datetime.fromisoformat(made).timestamp()
    for later, text in (
        (-5, "0 s"),
        (59, "59 s"),
        (600, "10 min"),
        (7200, "2 h"),
        (864000, "10 d"),
    ):
        commands.main(["ls", f"{url}@100"], clock=lambda at=began + later: at)  # type: ignore[misc]  # bound now
        assert text in capsys.readouterr().out


def test_ls_shows_what_is_missing_and_what_was_never_committed(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    store = open_store(url)
    store.delete(name(100).file("optimizer.safetensors"))
    flip(store, name(10).manifest)
    store.put(name(200).file("model.safetensors"), b"half")
    code, found = ask_json(capsys, "ls", url)
    assert code == 0
    assert [row["health"] for row in found["checkpoints"]] == ["damaged", "damaged", "ok"]
    assert "optimizer.safetensors: is missing" in found["checkpoints"][0]["problem"]
    assert found["unfinished"] == [str(name(200))]
    _, out, _ = ask(capsys, "ls", url)
    assert f"{name(200)}: never committed" in out
    assert "optimizer.safetensors: is missing" in out


@pytest.mark.parametrize(
    ("which", "step"),
    [("", 100), ("@latest", 100), ("@best", 10), ("@9", 9), ("@000001-000000000010", 10)],
)
def test_show_tells_of_the_checkpoint_that_is_meant(
    which: str, step: int, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = ask_json(capsys, "show", url + which)
    assert code == 0
    assert found["name"] == str(name(step))
    assert (found["run_id"], found["info"]["loss"]) == ("run-1", 0.5)
    files = {file["name"]: file for file in found["files"]}
    tensors = {tensor["name"]: tensor for tensor in files["model.safetensors"]["tensors"]}
    assert tensors["net.weight"] == {"name": "net.weight", "dtype": "F32", "shape": [8, 8]}
    code, out, _ = ask(capsys, "show", url + which)
    assert code == 0
    assert out.startswith(f"checkpoint {name(step)}\n")
    for text in ("run-1", "model.safetensors", "state.json", "info.loss", "0.5"):
        assert text in out


def test_verify_reads_every_byte_and_ends_with_one_where_a_checkpoint_is_damaged(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ask(capsys, "verify", url)[0] == 0
    store = open_store(url)
    flip(store, name(100).file("model.safetensors"))
    flip(store, name(100).file("state.json"))
    code, found = ask_json(capsys, "verify", url)
    assert code == 1
    assert [row["health"] for row in found["checkpoints"]] == ["damaged", "ok", "ok"]
    problems = found["checkpoints"][0]["problems"]
    assert len(problems) == 2  # all of them, not the first alone
    assert "model.safetensors: bytes 0 to" in problems[0]
    assert "state.json" in problems[1]
    assert ask(capsys, "verify", f"{url}@10")[0] == 0
    assert ask(capsys, "verify", f"{url}@latest")[0] == 1
    assert ask(capsys, "ls", url)[0] == 0


FILES = ["model.safetensors", "optimizer.safetensors", "job.safetensors", "state.json"]


@pytest.mark.parametrize("damage", ["cut", "flip", "remove", "swap"])
@pytest.mark.parametrize("file", [*FILES, "manifest.json"])
def test_verify_finds_damage_of_each_file(
    file: str, damage: str, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    store = open_store(url)
    path = name(100).file(file)
    match damage:
        case "cut":
            store.put(path, store.get(path)[:-1])
        case "flip":
            flip(store, path)
        case "remove":
            store.delete(path)
        case _:
            store.put(path, store.get(name(10).file(file)))
    code, out, _ = ask(capsys, "verify", url)
    if (file, damage) == ("manifest.json", "remove"):  # then there is no such checkpoint
        assert (code, str(name(100)) in out) == (0, False)
    else:
        assert (code, str(name(100)) in out, file in out) == (1, True, True)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["show", "URL@11"], "no checkpoint '11'; newest steps: 100, 10, 9"),
        (["ls", "/nothing/here"], "/nothing/here: no run and no checkpoint is there"),
        (["verify", "/nothing/here"], "no run and no checkpoint is there"),
        (["show", "URL@LATEST"], "URL@latest, URL@best and URL@STEP name one, not @LATEST"),
        (["export", "URL", "URL"], "run: found a folder, expected the name of a file to write"),
        (["ls", "none://x"], "none://x: Protocol not known: none"),
        (["ls", "URL", "--option", "anon"], "--option: found 'anon', expected key=value"),
        (["ls"], "the following arguments are required: URL"),
        (["lst", "URL"], "invalid choice: 'lst'"),
        ([], "the following arguments are required: COMMAND"),
        (["prune", "URL"], "the following arguments are required: --keep"),
        (["prune", "URL", "--keep", "0"], "--keep: found 0, expected at least 1"),
        (["prune", "URL@10", "--keep", "1"], "found one checkpoint, but prune is of a whole run"),
        (["prune", "/nothing/here", "--keep", "1"], "no run and no checkpoint is there"),
        (["sweep", "/nothing/here"], "no run and no checkpoint is there"),
        (["sweep", "URL@latest"], "found one checkpoint, but sweep is of a whole run"),
        (["export", "URL@11", "/nothing/there"], "no checkpoint '11'"),
        (["export", "URL", "/nothing/"], "found no file name at its end"),
        (["export", "URL", "to", "--key", "ema"], "holds no tensors of 'ema', but of model"),
        (["export", "URL", "to", "--to-option", "x"], "--to-option: found 'x'"),
        (["copy", "URL", "URL"], "found the same place twice"),
        (["copy", "/nothing/here", "/nothing/there"], "no run and no checkpoint is there"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_answered_is_one_line_and_two(
    argv: list[str], message: str, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = ask(capsys, *(word.replace("URL", url) for word in argv))
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
    assert not Path("/nothing").exists()


def test_a_reader_that_has_seen_enough_is_no_error(url: str) -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "checkpoints", "show", url]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, check=False, cwd=ROOT)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")


def test_a_run_without_checkpoints_is_no_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    open_store(str(tmp_path)).put("run.json", b"{}")
    for command in ("ls", "verify"):
        code, out, _ = ask(capsys, command, str(tmp_path))
        assert (code, out) == (0, f"{tmp_path}: no checkpoint is committed yet\n")
    assert ask(capsys, "show", str(tmp_path))[0] == 2


def test_options_go_to_the_file_system_as_they_are_meant() -> None:
    read = read_option
    assert read("anon=true") == ("anon", True)
    assert read("endpoint_url=http://h:1/?a=b") == ("endpoint_url", "http://h:1/?a=b")
    assert read("client_kwargs.region_name=eu") == ("client_kwargs", {"region_name": "eu"})
    assert read("secret=12345") == ("secret", "12345")


def test_c53_credentials_are_never_shown(capsys: pytest.CaptureFixture[str]) -> None:
    hidden = "hushhush123"
    argv = [
        *("ls", f"s3://user:{hidden}@bucket/run", "--option", f"secret={hidden}"),
        *("--option", f"key={hidden}", "--option", f"unknown_argument={hidden}"),
        *("--option", "endpoint_url=none"),
    ]
    code, out, err = ask(capsys, *argv)
    assert code == 2
    assert hidden not in out + err


def test_the_commands_need_no_torch(url: str) -> None:
    code = (
        "import sys; from checkpoints.commands import main;"
        f"codes = [main([c, {url!r}]) for c in ('ls', 'show', 'verify')];"
        "sys.exit(sum(codes) + 10 * ('torch' in sys.modules))"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def test_the_module_runs_as_a_program(url: str) -> None:
    command = [sys.executable, "-m", "checkpoints", "verify", url, "--json"]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    assert [row["health"] for row in json.loads(done.stdout)["checkpoints"]] == ["ok"] * 3


def spawned(url: str, redirect: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    shell = f'exec "$0" -m checkpoints ls "$1" {redirect}'
    return subprocess.run(
        ["/bin/sh", "-c", shell, sys.executable, url],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_an_output_that_knows_ascii_alone_or_is_closed_ends_no_command_with_a_traceback(
    url: str, tmp_path: Path
) -> None:
    there = tmp_path / "r\u00fcn"
    Path(url).rename(there)
    plain = {"LC_ALL": "C", "PYTHONIOENCODING": "ascii:strict", "PYTHONUTF8": "0"}
    for redirect in ("", ">&-", "2>&-", ">&- 2>&-"):
        told = spawned(str(there), redirect, **plain)
        assert (told.returncode, told.stderr) == (0, "")
    assert "000001-000000000100" in spawned(str(there), "", **plain).stdout


def test_an_output_on_a_full_disk_is_told_in_one_line(url: str) -> None:
    told = spawned(url, ">/dev/full")
    assert told.returncode == 2
    assert told.stderr == (
        "checkpoints ls: standard output: could not be written: No space left on device\n"
    )
