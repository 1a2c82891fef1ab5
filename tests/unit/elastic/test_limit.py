"""The wall-clock limit: read, and counted down with room for a step and a checkpoint."""

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

import pytest

from elastic.errors import ConfigError, StartError
from elastic.limit import Limit, check_limit, limit_of

BEGAN = 1000.0
"""By the clock, at NOON by the wall's."""
NOON = datetime(2026, 6, 1, 12).astimezone()
HOUR = 3600.0


def left_s(
    text: str | None, environ: Mapping[str, str] | None = None, *, by_slurm: bool = False
) -> float:
    """What a limit leaves at noon, when the launch begins."""
    limit = limit_of(
        text,
        by_slurm=by_slurm,
        began=BEGAN,
        environ=environ or {},
        now=NOON.timestamp,
        clock=lambda: BEGAN,
    )
    assert limit is not None
    return limit.left_s + 5  # what the end takes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("90", 90.0),
        ("11 h", 11 * HOUR),
        ("13:30", 1.5 * HOUR),
        ("11:30:30", 23.5 * HOUR + 30),
        ("12:00", 24 * HOUR),
        ("2026-06-02T12:00", 24 * HOUR),
        ("2026-06-01 12:01:00", 60.0),
        ((NOON + timedelta(hours=2)).astimezone(UTC).isoformat(), 2 * HOUR),
        ((NOON + timedelta(hours=2)).astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"), 2 * HOUR),
    ],
)
def test_a_limit_is_a_duration_since_the_launch_or_a_time(text: str, expected: float) -> None:
    check_limit(text)
    assert left_s(text) == pytest.approx(expected)


@pytest.mark.parametrize("text", ["soon", "25:00", "2026-13-01T00:00", "-5", "0", "10 steps", ""])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="stop_before: found"):
        check_limit(text)


def test_slurms_end_counts_where_it_is_asked_for() -> None:
    end = {"SLURM_JOB_END_TIME": str(int(NOON.timestamp()) + 600)}
    check_limit("slurm")
    assert left_s("slurm", end) == pytest.approx(600)
    assert left_s(None, end, by_slurm=True) == pytest.approx(600)
    assert left_s("5 min", end, by_slurm=True) == pytest.approx(300)
    assert left_s("1 h", end, by_slurm=True) == pytest.approx(600)
    with pytest.raises(StartError, match=r"slurm without SLURM_JOB_END_TIME.*squeue"):
        left_s("slurm")


def test_a_limit_that_was_over_before_the_launch_is_refused() -> None:
    with pytest.raises(StartError, match=r"which was over at .*, before this launch began"):
        left_s("2026-06-01T11:59")


def test_it_is_near_when_two_checkpoints_and_two_steps_no_longer_fit() -> None:
    now = [0.0]
    limit = Limit(105.0, lambda: now[0])
    for _ in range(3):  # steps of 10 s
        limit.count_step()
        now[0] += 10.0
    assert limit.left_s == 70.0
    assert not limit.is_near(24.9)
    assert limit.is_near(25.1)
    now[0] = 61.0
    assert limit.is_near(None)  # 39 s are left: two steps, and what nobody has measured
    assert not limit.is_near(1.0)
    assert limit.is_near(1.0, together=True)
