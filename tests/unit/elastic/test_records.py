"""What a generation writes down, and what happens where it cannot."""

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest

from checkpoints.errors import TransientStoreError
from checkpoints.generations import write_started
from checkpoints.journal import read_audit, read_events
from checkpoints.layout import AgentId, CheckpointName, Claim, Started, claim_name
from checkpoints.store import Store, open_store
from elastic import summary
from elastic.__main__ import main
from elastic.monitor import Fault
from elastic.progress import Progress
from elastic.records import Records

KILLED = Fault(
    rank=1, local_rank=1, host="h", step=3, phase="step", kind="killed", signal="SIGKILL"
)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path))


def make(store: Store, *, generation: int = 1, rank: int = 0, audit: bool = True) -> Records:
    claim = Claim(
        generation=generation, run_id="r", launch="l", world_size=2, nodes=1, hosts=("h", "h"),
        agents=(AgentId(host="h", boot_id="b", pid=1, start=1),), cause="start" if generation == 1 else str(KILLED),
    )  # fmt: skip
    if rank == 0:
        store.put_new(claim_name(generation), claim.to_json())
    return Records(store, claim, rank=rank, run_id="r", audit=audit)


def begin(records: Records, store: Store, *, generation: int = 1, step: int = 0) -> Progress:
    progress = Progress(step=step, position=4 * step, samples=4 * step)
    parent = None if step == 0 else CheckpointName(generation - 1, step)
    source = "store" if parent else "fresh"
    write_started(
        store,
        Started(
            generation=generation, parent=None if parent is None else str(parent),
            source="store" if parent else "fresh", start_step=step, position=(0, 4 * step),
        ),
    )  # fmt: skip
    records.started(progress, parent=parent, source=source, began=summary.now_s() - 1)
    records.ledger.start()
    return progress


def do_step(records: Records, progress: Progress, indices: list[int]) -> None:
    records.audit(progress, indices)
    progress.count_step(4, skipped=False)
    records.step(progress, 4, loss=0.5, skipped=False, values={"lr": 0.1})


def read_summary(store: Store) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(store.get("summary.json"))
    return found


def test_journal_audit_and_summary_of_a_short_run(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    records = make(store)
    progress = begin(records, store)
    assert read_summary(store)["status"] == "running"
    do_step(records, progress, [3, 1])
    records.log({"accuracy": 0.75})
    do_step(records, progress, [2, 0])
    records.summarize("complete", progress, weights_sha256="ab")
    records.close()
    events = list(read_events(store))
    assert [event["event"] for event in events] == ["start", "step", "step"]
    last = events[-1]
    assert (last["step"], last["position"], last["samples"], last["loss"]) == (2, 8, 4, 0.5)
    assert (last["lr"], last["accuracy"]) == (0.1, 0.75)
    assert "accuracy" not in events[1]
    assert list(read_audit(store)) == [
        {"generation": 1, "epoch": 0, "step": 1, "rank": 0, "indices": [3, 1]},
        {"generation": 1, "epoch": 0, "step": 2, "rank": 0, "indices": [2, 0]},
    ]
    found = read_summary(store)
    assert (found["status"], found["steps"], found["weights_sha256"]) == ("complete", 2, "ab")
    assert found["generations"][0]["end_step"] == 2
    assert capsys.readouterr().out == (
        "generation 1 (start): W=2, from the start, epoch 1, position 0, step 0 at "
        f"{store.display_url}\n"
    )


def test_skipped_step_has_a_further_line_without_samples(store: Store) -> None:
    records = make(store)
    progress = begin(records, store)
    records.audit(progress, [3, 1])
    records.audit(progress, [], skipped=True)
    progress.count_step(4, skipped=True)
    records.step(progress, 4, loss=float("nan"), skipped=True, values={})
    records.close()
    assert list(read_audit(store)) == [
        {"generation": 1, "epoch": 0, "step": 1, "rank": 0, "indices": [3, 1]},
        {"generation": 1, "epoch": 0, "step": 1, "rank": 0, "indices": [], "skipped": True},
    ]
    event = list(read_events(store))[-1]
    assert (event["skipped"], event["loss"]) == (True, "nan")


def test_audit_line_is_there_before_the_step_is_done(store: Store) -> None:
    records = make(store, rank=1)
    records.audit(Progress(step=6, epoch=1), [5])
    assert list(read_audit(store)) == [
        {"generation": 1, "epoch": 1, "step": 7, "rank": 1, "indices": [5]}
    ]
    records.close()


def test_other_ranks_write_no_journal_and_no_summary(store: Store, tmp_path: Path) -> None:
    records = make(store, rank=1, audit=False)
    progress = Progress()
    records.event("start")
    do_step(records, progress, [1])
    records.flush()
    records.summarize("running", progress)
    records.close()
    assert not list(tmp_path.rglob("*.json*"))


def test_next_generation_knows_what_the_killed_one_did(store: Store) -> None:
    first = make(store)
    progress = begin(first, store)
    for _ in range(5):
        do_step(first, progress, [1])
    # No close: it was killed.
    second = make(store, generation=2)
    second.faults([KILLED])
    progress = begin(second, store, generation=2, step=4)
    do_step(second, progress, [1])
    second.summarize("running", progress)
    second.close()
    first.close()
    found = read_summary(store)
    assert (found["steps"], found["lost_steps"], found["restarts"]) == (5, 1, 1)
    assert [row["end_step"] for row in found["generations"]] == [5, 5]
    assert found["generations"][1]["cause"] == "worker killed (SIGKILL, rank 1)"
    assert [fault["signal"] for fault in found["faults"]] == ["SIGKILL"]
    assert store.exists("journal/000002.history.json")


def test_status_of_a_running_run_is_what_its_journal_tells(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    first = make(store, audit=False)
    progress = begin(first, store)
    for _ in range(5):
        do_step(first, progress, [1])
    second = make(store, generation=2, audit=False)
    progress = begin(second, store, generation=2, step=4)
    for _ in range(3):
        do_step(second, progress, [1])
    second.event(
        "eval", step=progress.step, epoch=0, metrics={"accuracy": 0.5}, spent=second.ledger.totals()
    )
    second.flush()
    assert read_summary(store)["steps"] == 4
    capsys.readouterr()
    assert main(["status", store.url]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(
        r".*: running, generation 2, epoch 0, step 7, as of [0-9.]+ s ago", lines[0]
    )
    assert lines[1].startswith("restarts 1, lost steps 1, goodput ")
    assert lines[2] == "accuracy 0.5"
    assert [line.partition(", fresh")[0].partition(", store")[0] for line in lines[-2:]] == [
        "generation 1: W=2, steps 0 to 5",
        "generation 2: W=2, steps 4 to 7",
    ]
    first.close()
    second.close()


def test_own_fault_is_written_by_any_rank_and_ends_the_run_where_it_must(store: Store) -> None:
    primary = make(store, audit=False)
    progress = begin(primary, store)
    other = make(store, rank=1, audit=False)
    for _ in range(3):
        do_step(primary, progress, [1, 2])
    primary.flush()
    other.own_fault(KILLED, progress, failed=False)
    assert read_summary(store)["status"] == "running"
    other.own_fault(KILLED, progress, failed=True)
    found = read_summary(store)
    assert found["status"] == "failed"
    # Nobody after it says how far it came.
    assert (found["steps"], found["samples"]) == (3, progress.samples)
    assert [row["end_step"] for row in found["generations"]] == [3]
    assert found["goodput"] > 0
    assert [fault["rank"] for fault in found["faults"]] == [1, 1]
    faults = [event for event in read_events(store) if event["event"] == "fault"]
    assert [event["told"] for event in faults] == ["worker killed (SIGKILL, rank 1)"] * 2
    primary.close()


def test_summary_of_a_newer_generation_is_left_alone(store: Store) -> None:
    old, new = make(store, audit=False), make(store, generation=2, audit=False)
    begin(old, store)
    begin(new, store, generation=2, step=0)
    old.own_fault(KILLED, Progress(), failed=True)
    assert read_summary(store)["status"] == "running"
    old.close()
    new.close()


def test_store_that_fails_is_told_and_harms_nothing(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    records = make(store)
    progress = begin(records, store)

    def fail(*_: object, **__: object) -> None:
        raise TransientStoreError("busy")

    monkeypatch.setattr(store, "put", fail)
    monkeypatch.setattr(store, "get", fail)
    with caplog.at_level(logging.WARNING, "elastic"):
        records.summarize("complete", progress)
        records.own_fault(KILLED, progress, failed=True)
    assert caplog.messages == [
        "summary.json was not written: busy",
        "the fault was not written down: busy",
    ]
    records.close()


def test_audit_in_parts_is_sent_when_asked_and_tells_where_it_was_not() -> None:
    store = open_store("memory://records-audit")
    records = make(store, rank=1)
    assert records.audits_in_parts
    records.audit(Progress(), [1, 2])
    real = store.put, store.put_new

    def fail(*_: object, **__: object) -> Any:
        raise TransientStoreError("busy")

    store.put = store.put_new = fail  # type: ignore[method-assign]
    assert records.flush_audit() is False
    store.put, store.put_new = real  # type: ignore[method-assign]
    assert records.flush_audit() is True
    assert [line["indices"] for line in read_audit(store)] == [[1, 2]]
    records.close()
