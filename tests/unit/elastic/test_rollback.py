"""`python -m elastic rollback`: claims without training, refuses what it must, needs no torch."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from checkpoints.generations import read_claim, read_claims
from checkpoints.layout import JSON, AgentId, CheckpointName, Claim, RunRecord, claim_name
from checkpoints.manager import CheckpointManager
from checkpoints.store import Store, open_store
from elastic.__main__ import main
from elastic.agent import current_agent, is_known_dead
from elastic.ranks import read_place
from tests.support.distribution import ROOT


def name(generation: int, step: int) -> CheckpointName:
    return CheckpointName(generation=generation, step=step)


def here() -> AgentId:
    return current_agent(read_place({}), {})


ELSEWHERE = AgentId(host="elsewhere", boot_id="b", pid=1, start=1)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A run of one generation with three checkpoints, whose agent was elsewhere."""
    store = open_store(str(tmp_path))
    store.put_new("run.json", RunRecord(run_id="r", identity={}).to_json())
    claim(store, ELSEWHERE)
    manager = CheckpointManager(store, keep=100)
    for step in (2, 4, 6):
        tree = {"model": {"w": torch.ones(2)}}
        info: dict[str, JSON] = {
            "step": step,
            "epoch": step // 4,
            "samples": 4 * step,
            "metrics": {"loss": 0.5},
        }
        at = name(1, step)
        manager.commit(manager.stage(tree, name=at, parent=None, run_id="r", info=info))
    summarize(store, "complete")
    return store


def claim(store: Store, agent: AgentId) -> None:
    made = Claim(
        generation=1, run_id="r", launch="l", agents=(agent,), world_size=1, nodes=1, hosts=("h",)
    )
    store.put(claim_name(1), made.to_json())


def summarize(store: Store, status: str) -> None:
    best = {"metric": "loss", "value": 0.1, "step": 6, "checkpoint": str(name(1, 6))}
    content = {"status": status, "generation": 1, "steps": 6, "best": best, "metrics": {}}
    store.put("summary.json", json.dumps(content).encode())


@pytest.mark.parametrize("to", ["4", str(name(1, 4))])
def test_rollback_claims_a_generation_that_nobody_trains(
    store: Store, capsys: pytest.CaptureFixture[str], to: str
) -> None:
    assert main(["rollback", store.url, "--to", to]) == 0
    told = capsys.readouterr().out
    assert "generation 2 returns to checkpoint 000001-000000000004; 1 newer left behind" in told
    found = read_claim(store, 2)
    assert found.agents == ()
    assert found.rollback is not None
    assert (found.rollback.to, found.rollback.skip) == (name(1, 4), ())
    assert CheckpointManager(store).names() == [name(1, 4), name(1, 2)]
    summary = json.loads(store.get("summary.json"))
    assert (summary["status"], summary["steps"], summary["samples"]) == ("preempted", 4, 16)
    assert summary["best"] is None


def test_checkpoint_that_was_left_behind_is_refused(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["rollback", store.url, "--to", "2"]) == 0
    assert main(["rollback", store.url, "--to", str(name(1, 6))]) == 2
    told = capsys.readouterr().err
    assert "which an earlier rollback left behind, expected one of 000001-000000000002" in told
    assert len(read_claims(store)) == 2


def test_damaged_checkpoint_is_refused(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    file = f"{name(1, 4).folder}/model.safetensors"
    data = bytearray(store.get(file))
    data[-1] ^= 1
    store.put(file, bytes(data))
    assert main(["rollback", store.url, "--to", "4"]) == 2
    assert "model.safetensors" in capsys.readouterr().err
    assert len(read_claims(store)) == 1


@pytest.mark.parametrize("which", ["here", "elsewhere"])
def test_living_run_is_not_touched_without_force(
    store: Store, capsys: pytest.CaptureFixture[str], which: str
) -> None:
    claim(store, here() if which == "here" else ELSEWHERE)
    summarize(store, "complete" if which == "here" else "running")
    assert main(["rollback", store.url, "--to", "4"]) == 2
    told = capsys.readouterr().err
    assert "generation 1 may be at work" in told
    assert len(told.splitlines()) == 1
    assert main(["rollback", store.url, "--to", "4", "--force"]) == 0


def test_what_is_no_run_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rollback", str(tmp_path), "--to", "4"]) == 2
    assert "found no run.json, expected a run" in capsys.readouterr().err


def test_agents_of_this_host_are_seen_and_others_are_not_known() -> None:
    own = here()
    assert is_known_dead(own) is False
    gone = AgentId(host=socket.gethostname(), boot_id=own.boot_id, pid=own.pid, start=own.start + 1)
    assert is_known_dead(gone) is True
    before = AgentId(host=own.host, boot_id="before", pid=own.pid, start=own.start)
    assert is_known_dead(before) is True
    assert is_known_dead(ELSEWHERE) is None


def test_rollback_imports_no_torch(store: Store) -> None:
    code = (
        "import sys; from elastic.__main__ import main; "
        f"code = main(['rollback', {store.url!r}, '--to', '4']); "
        "sys.exit(code or 'torch' in sys.modules)"
    )
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environ, check=False, timeout=60)
    assert done.returncode == 0
