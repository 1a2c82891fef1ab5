"""What a process has after it has imported: looked at in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from elastic.agent import process_start
from tests.support.distribution import ROOT

PROGRAM = """
import json, os, random, sys
from checkpoints.layout import AgentId
from elastic.preloading import preload
from elastic.warming import Plan
given = json.loads(sys.argv[1])
plan = Plan(agent=AgentId(**given.pop("agent")), **given)
found = preload(plan, lean="lean" in sys.argv)
found.set_up_worker(plan)
import numpy
print(json.dumps({
    "unfit": found.unfit, "set": found.set_in_environ, "taken": found.taken_from_environ,
    "drawn": [random.random(), float(numpy.random.random())],
    "modules": [name for name in ("torch", "imported") if name in sys.modules],
    "environ": dict(os.environ), "main": sys.modules["__main__"].__file__,
}))
"""


def preload(folder: Path, text: str, *words: str) -> dict[str, Any]:
    """Import a module with this text as a warm process would; returns what came of it."""
    (folder / "imported.py").write_text(text)
    (folder / "broken.py").write_text("raise SystemExit(3)")
    me = os.getpid()
    plan = {
        "agent": {"host": "h", "boot_id": "b", "pid": me, "start": process_start(me)},
        "folder": str(folder), "argv": ["run.py"], "cwd": str(folder), "environ": {},
        "path": [str(folder), *sys.path], "modules": ["broken", "imported"], "files": [],
        "script": "/a/run.py", "module": None,
    }  # fmt: skip
    command = [sys.executable, "-c", PROGRAM, json.dumps(plan), *words]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "GIVEN": "before", "RANK": ""}
    del environ["RANK"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("import os; os.environ.get('LOCAL_RANK', 0)", "reads LOCAL_RANK while it is imported"),
        ("import os; os.getenv('TORCHELASTIC_RUN_ID')", "reads TORCHELASTIC_RUN_ID while"),
        ("import os; 'WORLD_SIZE' in os.environ", "reads WORLD_SIZE while"),
        ("import os; os.environ['RANK']", "reads RANK while"),
        (
            "import threading as t; t.Thread(target=t.Event().wait, daemon=True, name='mine').start()",
            "starts threads while it is imported (mine)",
        ),
        (
            "import torch; torch.set_num_threads(2); torch.ones(2000, 2000) @ torch.ones(2000, 2000)",
            "threads while it is imported",
        ),
        (
            "import subprocess; child = subprocess.Popen(['sleep', '2'])",
            "starts processes while it is imported",
        ),
        ("import socket; held = socket.socket()", "opens a connection while it is imported"),
    ],
)
def test_what_a_fork_would_tear_makes_it_unfit(tmp_path: Path, text: str, why: str) -> None:
    assert why in preload(tmp_path, text)["unfit"]


def test_lean_it_leaves_out_what_the_job_needs(tmp_path: Path) -> None:
    found = preload(tmp_path, "import os; os.environ.get('RANK')", "lean")
    assert (found["unfit"], found["modules"]) == ("", ["torch"])


def test_a_worker_gets_what_imports_did_to_the_environment(tmp_path: Path) -> None:
    found = preload(tmp_path, "import os; os.environ['NEW'] = '1'; del os.environ['GIVEN']")
    assert found["unfit"] == ""
    assert found["modules"] == ["torch", "imported"]
    assert found["set"]["NEW"] == "1"
    assert found["taken"] == ["GIVEN"]
    assert "PYTORCH_NVML_BASED_CUDA_CHECK" not in found["environ"]
    assert found["main"] == "/a/run.py"


def test_a_seed_that_an_import_sets_is_every_workers(tmp_path: Path) -> None:
    text = "import random, numpy; random.seed(7); numpy.random.seed(7)"
    one, other = preload(tmp_path, text), preload(tmp_path, text)
    assert one["unfit"] == ""
    assert one["drawn"] == other["drawn"]


def test_without_a_seed_no_two_workers_draw_the_same(tmp_path: Path) -> None:
    one, other = preload(tmp_path, "pass"), preload(tmp_path, "pass")
    assert not set(one["drawn"]) & set(other["drawn"])
