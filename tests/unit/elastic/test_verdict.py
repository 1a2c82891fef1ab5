from pathlib import Path

import pytest

from elastic.verdict import clear_verdict, judge, read_verdicts, write_verdict


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ([0, 0], 0),
        ([75, 75], 75),
        ([75, 0], 75),
        ([75, 1], 1),
        ([0, 1], 1),
        ([-9, 1], 1),
        ([3], 1),
        ([], 1),
        ([1, 76, 75], 76),
        ([2, 76, 1], 2),
        ([77, 2, 1], 77),
    ],
)
def test_one_code_of_many(codes: list[int], expected: int) -> None:
    assert judge(codes) == expected


def test_only_the_newest_workers_count(tmp_path: Path) -> None:
    write_verdict(tmp_path, 0, 75)
    write_verdict(tmp_path, 1, 1)
    write_verdict(tmp_path, 1, 75)
    assert read_verdicts(tmp_path) == [75, 75]
    clear_verdict(tmp_path, 1)
    clear_verdict(tmp_path, 1)
    assert read_verdicts(tmp_path) == [75]
    (tmp_path / "verdict-2").write_text("half a")
    assert read_verdicts(tmp_path) == [75]


def test_a_folder_that_is_gone_harms_nobody(tmp_path: Path) -> None:
    write_verdict(tmp_path / "gone", 0, 75)
    clear_verdict(tmp_path / "gone", 0)
    assert read_verdicts(tmp_path / "gone") == []
