from pathlib import Path

import pytest

from tests.support.worlds import kill_often, worlds


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("size", [2, 3])
def test_a_hundred_kills_cost_a_hundred_restarts(size: int, tmp_path: Path) -> None:
    with worlds(tmp_path) as found:
        kill_often(found, size, 100)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("size", "late"), [(2, 0), (3, 2)])
def test_kills_cost_one_restart_each_with_a_rank_that_is_late(
    size: int, late: int, tmp_path: Path
) -> None:
    with worlds(tmp_path) as found:
        kill_often(found, size, 30, f"late_rank={late}", "late_s=2")
