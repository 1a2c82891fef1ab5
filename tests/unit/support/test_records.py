"""The accounting of a run's files: lineage, committed samples, torn lines."""

import json
from pathlib import Path

import pytest

from tests.support import records


def write(path: Path, *lines: records.Record, torn: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + torn)


def start(url: Path, generation: int, parent: str | None, start_step: int) -> None:
    record = {"generation": generation, "parent": parent, "start_step": start_step}
    write(url / f"generations/{generation:06d}.json", {"generation": generation})
    write(url / f"generations/{generation:06d}.started.json", record)


def commit(url: Path, generation: int, step: int, **manifest: object) -> None:
    write(url / f"checkpoints/{generation:06d}-{step:012d}/manifest.json", manifest)


def line(
    generation: int, step: int, rank: int, indices: list[int], **more: object
) -> records.Record:
    told = {"generation": generation, "epoch": 0, "step": step, "rank": rank, "indices": indices}
    return {**told, **more}


@pytest.fixture
def url(tmp_path: Path) -> Path:
    """Two ranks; generation 1 did three steps and was killed, 3 went on from its step 1 and finished step 3."""
    start(tmp_path, 1, None, 0)
    write(tmp_path / "generations/000002.json", {"generation": 2})  # claimed, never started
    start(tmp_path, 3, "000001-000000000001", 1)
    commit(tmp_path, 1, 1)
    commit(tmp_path, 3, 3)
    commit(tmp_path, 4, 9, void=True)
    write(
        tmp_path / "audit/000001.rank0.jsonl",
        line(1, 1, 0, [8, 0]),
        line(1, 2, 0, [7, 4]),
        line(1, 3, 0, [3, 1]),
    )
    torn = '{"generation": 1, "epo'
    write(
        tmp_path / "audit/000001.rank1.jsonl",
        line(1, 1, 1, [5, 9]),
        line(1, 2, 1, [2, 10]),
        torn=torn,
    )
    write(tmp_path / "audit/000003.rank0-000001.jsonl", line(3, 2, 0, [7, 4]))
    write(tmp_path / "audit/000003.rank0-000002.jsonl", line(3, 3, 0, [3, 1]))
    write(tmp_path / "audit/000003.rank1.jsonl", line(3, 2, 1, [2, 10]), line(3, 3, 1, [11, 6]))
    return tmp_path


def test_the_step_of_the_generation_in_the_lineage_counts(url: Path) -> None:
    spans = [(span.generation, span.first, span.last) for span in records.lineage(url)]
    assert spans == [(1, 1, 1), (3, 2, 3)]
    assert records.committed_indices(url) == {0: [8, 0, 5, 9, 7, 4, 2, 10, 3, 1, 11, 6]}
    assert [step.generation for step in records.committed_steps(url)] == [1, 3, 3]


def test_a_skipped_step_used_no_samples(url: Path) -> None:
    write(
        url / "audit/000003.rank1.jsonl",
        line(3, 2, 1, [2, 10]),
        line(3, 2, 1, [], skipped=True),
        line(3, 3, 1, [11, 6]),
    )
    assert records.committed_indices(url) == {0: [8, 0, 5, 9, 3, 1, 11, 6]}
    assert [step.skipped for step in records.committed_steps(url)] == [False, True, False]


def test_a_missing_step_is_told(url: Path) -> None:
    (url / "audit/000003.rank0-000001.jsonl").unlink()
    (url / "audit/000003.rank1.jsonl").unlink()
    with pytest.raises(ValueError, match=r"steps \[2\] are not told once"):
        records.committed_steps(url)


def test_samples_told_twice_by_a_rank_are_an_error(url: Path) -> None:
    write(url / "audit/000003.rank0-000003.jsonl", line(3, 3, 0, [3, 1]))
    with pytest.raises(ValueError, match="rank 0 told its samples twice"):
        records.committed_steps(url)


def test_a_line_torn_in_the_middle_of_a_file_is_an_error(url: Path) -> None:
    write(url / "audit/000003.rank1.jsonl", torn='{"gen\n{}\n')
    with pytest.raises(ValueError, match=r"rank1\.jsonl:1: not JSON"):
        records.audit(url)


def test_the_summary_tells_the_end_only_where_it_is_the_newest_generations(url: Path) -> None:
    write(url / "summary.json", {"generation": 1, "status": "preempted", "steps": 1})
    assert records.lineage(url)[-1].last == 3
    write(url / "summary.json", {"generation": 3, "status": "complete", "steps": 2})
    assert records.lineage(url)[-1].last == 2


def test_void_manifests_are_no_checkpoints(url: Path) -> None:
    assert records.checkpoints(url) == [(1, 1), (3, 3)]
    assert records.newest_step(url) == 3


def test_events_come_by_generation_and_in_their_order(url: Path) -> None:
    tenth = {"event": "fault", "generation": 10, "n": 2}
    write(url / "journal/000010-000001.jsonl", tenth)
    write(
        url / "journal/000002.jsonl",
        {"event": "start", "generation": 2, "n": 0},
        {"event": "fault", "generation": 2, "n": 1},
    )
    assert [event["n"] for event in records.journal(url)] == [0, 1, 2]
    assert [event["n"] for event in records.events(url, "fault")] == [1, 2]


def test_of_a_step_that_was_done_twice_the_journal_line_in_the_lineage_counts(url: Path) -> None:
    for generation, steps in ((1, (1, 2, 3)), (3, (2, 3))):
        lines = [{"event": "step", "generation": generation, "step": step} for step in steps]
        write(url / f"journal/{generation:06d}.jsonl", *lines)
    found = [(event["generation"], event["step"]) for event in records.step_events(url)]
    assert found == [(1, 1), (3, 2), (3, 3)]


def test_nothing_there_reads_as_nothing(tmp_path: Path) -> None:
    assert records.lineage(tmp_path) == []
    assert records.audit(tmp_path) == []
    assert records.checkpoints(tmp_path) == []
    assert records.newest_step(tmp_path) == 0
    assert records.status(tmp_path) is None
