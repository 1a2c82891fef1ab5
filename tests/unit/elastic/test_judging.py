"""A drill is failed by every wrong outcome: other bits, a sample too few, a restart too many, a process left behind."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints.generations import write_started
from checkpoints.layout import JSON, CheckpointName, Claim, RunRecord, Started, claim_name
from checkpoints.manager import CheckpointManager
from checkpoints.store import Store, open_store
from elastic.judging import Verdict, judge
from elastic.strikes import Struck
from elastic.timetable import Kind
from elastic.trial import Outcome

N, BATCH, STEPS = 8, 4, 4


def name(generation: int, step: int) -> CheckpointName:
    return CheckpointName(generation=generation, step=step)


def write_run(folder: Path, *, ends: list[int], weight: float = 1.0) -> Store:
    """A complete run of two epochs, whose generations ended at these steps, all of them saved."""
    store = open_store(str(folder))
    identity: dict[str, JSON] = {"dataset": {"length": N}, "train.drop_last": False}
    store.put_new("run.json", RunRecord(run_id="r", identity=identity).to_json())
    manager = CheckpointManager(store, keep=100)
    parent: CheckpointName | None = None
    for generation, end in enumerate(ends, start=1):
        begin = 0 if parent is None else parent.step
        claim = Claim(
            generation=generation, run_id="r", launch="l", agents=(), world_size=1, nodes=1, hosts=("h",)
        )  # fmt: skip
        store.put(claim_name(generation), claim.to_json())
        write_started(
            store,
            Started(
                generation=generation,
                parent=None if parent is None else str(parent),
                source="fresh" if parent is None else "store",
                start_step=begin,
                position=(0, 0),
            ),
        )
        lines = [audit_line(generation, step) for step in range(begin + 1, end + 1)]
        store.put(f"audit/{generation:06d}.rank0.jsonl", "".join(lines).encode())
        at = name(generation, end)
        tree = {"model": {"w": torch.full((3,), weight + end)}}
        manager.commit(manager.stage(tree, name=at, parent=parent, run_id="r", info={"step": end}))
        parent = at
    content = {
        "status": "complete", "generation": len(ends), "steps": STEPS, "epochs": 2, "skipped_steps": 0,
        "lost_steps": 0, "metrics": {"loss": weight}, "bits_until": None, "weights_sha256": f"sha of {weight}",
    }  # fmt: skip
    store.put("summary.json", json.dumps(content).encode())
    return store


def audit_line(generation: int, step: int) -> str:
    epoch, within = divmod(step - 1, N // BATCH)
    indices = list(range(within * BATCH, (within + 1) * BATCH))
    line = {"generation": generation, "epoch": epoch, "step": step, "rank": 0, "indices": indices}
    return json.dumps(line) + "\n"


def struck(kind: Kind = "kill", **changes: Any) -> Struck:
    made = Struck(
        number=1, kind=kind, time=100.0, after_s=1.0, lasts_s=0.0, victim="rank 1", generation=1, step=2,
        committed=name(1, 2), recovery_s=1.0, whole_s=1.0, claims=["worker killed (SIGKILL, rank 1)"], restarts=1,
    )  # fmt: skip
    for key, value in changes.items():
        setattr(made, key, value)
    return made


def outcome(*faults: Struck, **changes: Any) -> Outcome:
    made = Outcome(struck=list(faults or [struck()]), planned=max(1, len(faults)), codes=[0])
    for key, value in changes.items():
        setattr(made, key, value)
    return made


class Runs:
    """A drilled run that is all right, and the undisturbed one."""

    def __init__(self, folder: Path) -> None:
        self.reference = write_run(folder / "undisturbed", ends=[STEPS])
        self.folder = folder / "run"
        self.store = write_run(self.folder, ends=[2, STEPS])

    def judge(
        self, found: Outcome | None = None, *, nodes: int = 1, bits: str | None = None
    ) -> dict[str, Verdict]:
        verdicts = judge(self.store, self.reference, found or outcome(), nodes=nodes, bits=bits)
        return {verdict.name: verdict for verdict in verdicts}

    def change(self, path: str, **changes: Any) -> None:
        file = self.folder / path
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path)


def failed(verdicts: dict[str, Verdict]) -> dict[str, str]:
    return {found.name: found.told for found in verdicts.values() if found.passed is False}


def test_a_run_that_is_all_right_passes(runs: Runs) -> None:
    verdicts = runs.judge()
    assert failed(verdicts) == {}
    assert verdicts["weights"].told == "the bits of the undisturbed run (sha of 1.0)"
    assert verdicts["samples"].told == "16 samples in 4 steps, each once an epoch, 0 steps skipped"
    assert verdicts["checkpoints"].told == "2 in the store verify, none was lost"


# ------------------------------------------------------------------------------------ the state
def test_changed_bytes_of_the_weights_fail(runs: Runs) -> None:
    (file,) = (runs.folder / "checkpoints" / "000002-000000000004").glob("model*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    found = failed(runs.judge())
    assert "model.safetensors" in found["weights"]
    assert "000002-000000000004" in found["checkpoints"]


def test_other_weights_that_verify_fail(tmp_path: Path, runs: Runs) -> None:
    shutil.rmtree(runs.folder)
    runs.store = write_run(tmp_path / "run", ends=[2, STEPS], weight=1.5)
    told = failed(runs.judge())["weights"]
    assert told.startswith("found weights_sha256 sha of 1.5, undisturbed sha of 1.0; found metrics")
    assert told.endswith("other bytes than undisturbed in model.safetensors")


def test_the_same_sum_over_other_files_fails(tmp_path: Path, runs: Runs) -> None:
    shutil.rmtree(runs.folder)
    runs.store = write_run(tmp_path / "run", ends=[2, STEPS], weight=2.0)
    runs.change("summary.json", weights_sha256="sha of 1.0", metrics={"loss": 1.0})
    assert failed(runs.judge()) == {"weights": "other bytes than undisturbed in model.safetensors"}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"weights_sha256": None}, "found weights_sha256 None, undisturbed sha of 1.0"),
        ({"bits_until": 3}, "equal bits are promised up to step 3 only"),
        ({"steps": 3}, "found 3 steps, expected 4"),
    ],
)
def test_a_summary_that_tells_of_other_bits_fails(
    runs: Runs, changes: dict[str, Any], told: str
) -> None:
    runs.change("summary.json", **changes)
    assert failed(runs.judge())["weights"] == told


def test_bits_that_cannot_be_compared_are_told_and_fail_nothing(runs: Runs) -> None:
    runs.change("summary.json", weights_sha256="another", metrics={"loss": 3.0})
    verdicts = runs.judge(bits="train.reproducible=off was asked for")
    assert failed(verdicts) == {}
    assert verdicts["weights"].passed is None
    assert verdicts["weights"].told.startswith("not compared: train.reproducible=off was asked for")


# ------------------------------------------------------------------------------------ the samples
def test_an_audit_with_a_missing_sample_fails(runs: Runs) -> None:
    file = runs.folder / "audit" / "000002.rank0.jsonl"
    file.write_text(file.read_text().replace("[0, 1, 2, 3]", "[0, 1, 2]"))
    told = failed(runs.judge())
    assert told == {
        "samples": "epoch 1: 1 samples in no step: 3; 1 steps with other samples than undisturbed: 3"
    }


def test_an_audit_without_a_generation_fails(runs: Runs) -> None:
    (runs.folder / "audit" / "000001.rank0.jsonl").unlink()
    assert "2 steps are not in the audit: 1, 2" in failed(runs.judge())["samples"]


def test_a_lineage_with_a_hole_fails(runs: Runs) -> None:
    (runs.folder / "generations" / "000001.started.json").unlink()
    assert "generation 1 has no started record" in failed(runs.judge())["samples"]


# ------------------------------------------------------------------------------------ the faults
@pytest.mark.parametrize(
    ("fault", "nodes"),
    [
        (struck(claims=["a", "b"]), 1),
        (struck(claims=[]), 1),
        (struck(restarts=2), 1),
        (struck("stop"), 1),
        (struck("storage"), 2),
        (struck("agent", claims=["node lost", "node joined"]), 1),
        (struck("agent", claims=["node lost", "node lost"]), 2),
        (struck("agent", claims=["node lost", "node joined", "node joined"]), 2),
        (struck(claims=["worker killed", "node joined"]), 2),
    ],
)
def test_restarts_too_many_or_too_few_fail(runs: Runs, fault: Struck, nodes: int) -> None:
    told = failed(runs.judge(outcome(fault), nodes=nodes))
    assert told.keys() == {"restarts"}
    assert told["restarts"].startswith(f"fault 1 ({fault.kind}): found ")


@pytest.mark.parametrize(
    ("fault", "nodes"),
    [
        (struck(), 1),
        (struck("stop", claims=[], restarts=0), 1),
        (struck("agent", restarts=0), 1),
        (struck("agent", claims=["node lost", "node joined"]), 2),
        (struck("partition", claims=["node lost", "node joined"]), 3),
        (struck("preempt", claims=["node joined"]), 2),
        (struck(claims=[], restarts=0, ended=True, recovery_s=None), 1),
    ],
)
def test_restarts_as_many_as_a_fault_costs_pass(runs: Runs, fault: Struck, nodes: int) -> None:
    assert failed(runs.judge(outcome(fault), nodes=nodes)) == {}


def test_no_fault_at_all_fails(runs: Runs) -> None:
    found = Outcome(struck=[], planned=3, codes=[0])
    assert failed(runs.judge(found))["faults"].startswith("0 of 3 faults struck: the run ended")


def test_a_fault_without_recovery_fails(runs: Runs) -> None:
    found = failed(runs.judge(outcome(struck(recovery_s=None))))
    assert found == {"recovery": "fault 1 (kill): no new step"}


def test_a_run_that_did_not_end_fails(runs: Runs) -> None:
    runs.change("summary.json", status="running")
    found = failed(runs.judge(outcome(struck(), problem="no step for 240 s", codes=[1])))
    assert found["end"] == (
        "no step for 240 s; found status running, expected complete; "
        "found exit codes [1] of agents that no fault ended"
    )


def test_a_generation_that_began_from_less_than_was_committed_fails(runs: Runs) -> None:
    found = failed(runs.judge(outcome(struck(committed=name(1, 3)))))
    assert found == {
        "checkpoints": "fault 1: generation 2 began at step 2, although 000001-000000000003 was committed"
    }


def test_what_is_left_behind_fails(runs: Runs) -> None:
    left = ["process 17 (python)", "a snapshot"]
    found = failed(runs.judge(outcome(struck(), leftovers=left)))
    assert found == {"clean": "; ".join(left)}


def test_a_run_that_never_began_fails_without_an_error(tmp_path: Path, runs: Runs) -> None:
    runs.store = open_store(str(tmp_path / "nothing"))
    found = failed(runs.judge(outcome(struck(), problem="the agents ended")))
    assert {"end", "weights", "samples"} <= found.keys()
