"""summary.json: lost steps, lineage, and seconds that add up to the wall time."""

import logging
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest

from checkpoints.generations import write_started
from checkpoints.journal import Journal
from checkpoints.layout import AgentId, Claim, Started, claim_name
from checkpoints.store import Store, open_store
from elastic import summary
from elastic.progress import Best, Progress
from elastic.summary import Row

T0 = datetime.fromisoformat("2026-01-01T00:00:00+00:00").timestamp()


def row(generation: int, start: int, end: int, parent: str | None, at: float, **more: float) -> Row:
    """A generation that came up at `at` seconds after the first start and was ready 2 s later."""
    return Row(
        generation=generation, world_size=2, nodes=1, parent=parent, source="store" if parent else "fresh",
        start_step=start, end_step=end, cause="start", began=T0 + at, ready=T0 + at + 2,
        ended=T0 + at + more.pop("lasted", 20.0), **more,
    )  # fmt: skip


def walk_back() -> list[Row]:
    """Generation 2 dies; its checkpoint is damaged, so generation 3 goes on from that of generation 1."""
    return [
        row(1, 0, 12, None, 0, steps_s=12.0, checkpoint_s=1.0, lasted=17),
        row(2, 10, 18, "000001-000000000010", 20, steps_s=8.0, checkpoint_s=2.0, lasted=15),
        row(3, 6, 20, "000001-000000000006", 40, steps_s=14.0, eval_s=3.0, lasted=25),
    ]


def build(rows: list[Row], steps: int, now: float) -> dict[str, object]:
    progress = Progress(step=steps, epoch=2, samples=steps * 4)
    return summary.build(rows, progress, status="running", run_id="r", now=T0 + now)


def test_undisturbed_run_has_lost_nothing() -> None:
    found = build([row(1, 0, 20, None, 0, steps_s=15.0, eval_s=2.0, checkpoint_s=1.0)], 20, 20.0)
    assert (found["lost_steps"], found["restarts"], found["goodput"]) == (0, 0, 0.75)
    assert found["seconds"] == {
        "steps": 15.0, "checkpoint": 1.0, "restart": 0.0, "lost": 0.0, "eval": 2.0, "down": 0.0, "other": 2.0,
    }  # fmt: skip


def test_a_generation_reaches_what_the_next_began_from_though_its_journal_ends_before() -> None:
    rows = [
        row(1, 0, 0, None, 0),
        row(2, 1, 1, "000001-000000000001", 30),
        row(3, 3, 9, "000002-000000000003", 60),
    ]
    found = build(rows, 9, 80.0)
    public = found["generations"]
    assert isinstance(public, list)
    assert [(one["start_step"], one["end_step"]) for one in public] == [(0, 1), (1, 3), (3, 9)]
    assert found["lost_steps"] == 0


def test_walk_back_over_two_generations_loses_all_that_is_not_in_the_lineage() -> None:
    found = build(walk_back(), 20, 65.0)
    # Generation 1 gave its first 6 of 12 steps, generation 2 none of its 8, generation 3 all of its 14.
    assert found["lost_steps"] == 6 + 8
    assert found["seconds"] == {
        "steps": 6.0 + 14.0, "checkpoint": 3.0, "restart": 4.0, "lost": 6.0 + 8.0, "eval": 3.0,
        "down": 3.0 + 5.0, "other": 65.0 - 20 - 3 - 4 - 14 - 3 - 8,
    }  # fmt: skip
    assert found["goodput"] == round(20 / 65, 4)


@pytest.mark.parametrize("now", [65.0, 65.4321, 300.0])
def test_seconds_add_up_to_the_wall_time(now: float) -> None:
    seconds = build(walk_back(), 20, now)["seconds"]
    assert isinstance(seconds, dict)
    assert sum(seconds.values()) == pytest.approx(now, abs=0.005)


def test_generation_that_did_no_step_costs_no_lost_step() -> None:
    rows = [
        row(1, 0, 4, None, 0, steps_s=4.0),
        row(3, 4, 4, "000001-000000000004", 30),
        row(4, 4, 9, "000001-000000000004", 60, steps_s=5.0),
    ]
    found = build(rows, 9, 90.0)
    assert (found["lost_steps"], found["restarts"], found["generation"]) == (0, 2, 4)


def test_parent_that_is_not_known_ends_the_lineage_and_not_the_summary() -> None:
    found = build([row(5, 8, 9, "000002-000000000008", 0, steps_s=1.0)], 9, 10.0)
    assert (found["steps"], found["lost_steps"], found["restarts"]) == (9, 0, 0)


def test_faces_of_section_10_are_all_there() -> None:
    progress = Progress(step=3, epoch=1, samples=12, skipped_steps=1, metrics={"loss": 0.5})
    progress.bests = [Best(metric="loss", value=0.5, step=3, checkpoint="000001-000000000003")]
    found = summary.build(
        [row(1, 0, 3, None, 0)], progress, status="complete", run_id="r", now=T0 + 9,
        weights_sha256="ab", faults=[{"rank": 1}],
    )  # fmt: skip
    seconds, generations = found.pop("seconds"), found.pop("generations")
    assert list(seconds) == ["steps", "checkpoint", "restart", "lost", "eval", "down", "other"]
    assert generations == [
        {
            "generation": 1, "world_size": 2, "nodes": 1, "parent": None, "source": "fresh",
            "start_step": 0, "end_step": 3, "cause": "start",
        }
    ]  # fmt: skip
    assert found == {
        "status": "complete", "run_id": "r", "generation": 1, "steps": 3, "samples": 12, "epochs": 1,
        "skipped_steps": 1, "restarts": 0, "lost_steps": 0, "metrics": {"loss": 0.5},
        "best": {"metric": "loss", "value": 0.5, "step": 3, "checkpoint": "000001-000000000003"},
        "stopped": None, "bits_until": None, "weights_sha256": "ab", "goodput": 0.0, "faults": [{"rank": 1}],
    }  # fmt: skip


def test_metric_that_is_not_finite_is_null(tmp_path: Path) -> None:
    progress = Progress(metrics={"loss": float("nan"), "score": float("inf"), "good": 1.0})
    store = open_store(str(tmp_path))
    content = summary.build([row(1, 0, 0, None, 0)], progress, status="failed", run_id="r", now=T0)
    summary.write(store, content)
    found = summary.read(store)
    assert found is not None
    assert found["metrics"] == {"loss": None, "score": None, "good": 1.0}


def test_summary_that_is_missing_or_torn_reads_as_none(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    assert summary.read(store) is None
    store.put("summary.json", b'{"status": "run')
    assert summary.read(store) is None


@pytest.mark.parametrize(
    "text",
    ["[" * 200_000, '{"status": ["complete"], "generation": 1, "steps": 1, "epochs": 1}', "{}"],
)
def test_what_is_no_summary_reads_as_none(text: str, tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    store.put("summary.json", text.encode())
    assert summary.read(store) is None


# ------------------------------------------------------------------------------- what earlier ones left
def leave_generation(
    store: Store, generation: int, *, at: float, start: int, steps: int, parent: str | None
) -> None:
    """What a generation leaves that came up at `at`, was ready after 2 s, and died after `steps` of 1 s."""
    claim = Claim(
        generation=generation, run_id="r", launch="l", world_size=2, nodes=1, hosts=("h", "h"),
        agents=(AgentId(host="h", boot_id="b", pid=9, start=generation),), cause=f"cause {generation}",
    )  # fmt: skip
    store.put_new(claim_name(generation), claim.to_json())
    write_started(
        store,
        Started(
            generation=generation, parent=parent, source="store" if parent else "fresh",
            start_step=start, position=(0, start * 4), created_at=datetime.fromtimestamp(T0 + at + 2).astimezone().isoformat(),
        ),
    )  # fmt: skip
    now = [T0 + at + 2]
    journal = Journal(store, generation, clock=lambda: now[0])
    journal.event("fault", told="an earlier one")
    journal.event(
        "start", began=T0 + at, ready=T0 + at + 2, step=start, spent={"steps": 0.0, "checkpoint": 0.0, "eval": 0.0}
    )  # fmt: skip
    for done in range(1, steps + 1):
        now[0] += 1
        spent = {"steps": float(done), "checkpoint": 0.0, "eval": 0.0}
        journal.event("step", step=start + done, spent=spent)
    journal.event("save failed", step=start + steps, error="no room")
    journal.close()
    other = Journal(store, generation, rank=1)
    other.event("fault", told="rank 1's own", spent={"steps": 99.0}, step=99)
    other.close()


def test_past_generations_are_read_from_their_claims_starts_and_journals(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    leave_generation(store, 1, at=0, start=0, steps=5, parent=None)
    leave_generation(store, 2, at=10, start=4, steps=3, parent="000001-000000000004")
    rows = summary.past_rows(store, 3)
    assert rows == [
        replace(row(1, 0, 5, None, 0, lasted=7, steps_s=5.0), cause="cause 1"),
        replace(row(2, 4, 7, "000001-000000000004", 10, lasted=5, steps_s=3.0), cause="cause 2"),
    ]
    assert summary.past_rows(store, 2) == rows[:1]


def test_claimed_generation_that_never_started_is_left_out(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    leave_generation(store, 1, at=0, start=0, steps=5, parent=None)
    claim = store.get(claim_name(1)).replace(b'"generation":1', b'"generation":2')
    store.put_new(claim_name(2), claim)
    assert [found.generation for found in summary.past_rows(store, 3)] == [1]


def test_generation_killed_in_the_middle_of_a_line_counts_its_whole_lines(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    leave_generation(store, 1, at=0, start=0, steps=5, parent=None)
    with (tmp_path / "journal/000001.jsonl").open("a") as file:
        file.write('{"event": "step", "step": 6, "spent": {"st')
    (found,) = summary.past_rows(store, 2)
    assert (found.end_step, found.steps_s, found.began) == (5, 5.0, T0)


def test_checkpoint_that_is_told_after_later_steps_takes_none_of_them_away(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    leave_generation(store, 1, at=0, start=0, steps=5, parent=None)
    journal = Journal(store, 1, clock=lambda: T0 + 8)
    spent = {"steps": 6.0, "checkpoint": 0.5, "eval": 0.0}
    journal.event("checkpoint", step=4, checkpoint="000001-000000000004", spent=spent)
    journal.close()
    (found,) = summary.past_rows(store, 2)
    assert (found.end_step, found.steps_s, found.checkpoint_s) == (5, 6.0, 0.5)


def test_long_journal_is_read_at_its_ends_alone(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    leave_generation(store, 1, at=0, start=0, steps=3000, parent=None)
    assert (tmp_path / "journal/000001.jsonl").stat().st_size > 3 * 64 << 10
    (found,) = summary.past_rows(store, 2)
    assert (found.began, found.ready, found.end_step) == (T0, T0 + 2, 3000)


def test_history_stands_for_what_its_generation_found(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    leave_generation(store, 1, at=0, start=0, steps=5, parent=None)
    leave_generation(store, 2, at=10, start=4, steps=3, parent="000001-000000000004")
    before = summary.past_rows(store, 2)
    summary.write_history(store, 2, before)
    after = summary.past_rows(store, 3)
    (tmp_path / "journal/000001.jsonl").unlink()
    assert summary.past_rows(store, 3) == after
    assert [found.generation for found in after] == [1, 2]


def test_history_that_cannot_be_read_is_told_and_the_one_before_is_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(str(tmp_path))
    leave_generation(store, 1, at=0, start=0, steps=5, parent=None)
    leave_generation(store, 2, at=10, start=4, steps=3, parent="000001-000000000004")
    expected = summary.past_rows(store, 3)
    summary.write_history(store, 2, expected[:1])
    store.put("journal/000003.history.json", b'{"rows": [{"generation": 1}]}')
    with caplog.at_level(logging.WARNING, "elastic"):
        assert summary.past_rows(store, 4) == expected
    assert "the history of generation 3 cannot be read" in caplog.text
