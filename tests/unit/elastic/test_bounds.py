"""How long a phase may go without a sign of life."""

import pytest

from elastic.bounds import LONG_S, Bounds


def bounds(
    given: float | None = None,
    *,
    alone: bool = False,
    timeout_s: float = 600,
    long_s: float = LONG_S,
) -> Bounds:
    return Bounds(given, long_s, timeout_s=timeout_s, alone=alone)


def test_what_is_not_measured_yet_has_the_long_bound() -> None:
    found = bounds()
    for phase in ("start", "restore", "step", "evaluate", "save", "hook", "own code"):
        assert found[phase] == 1800
    assert found["meeting"] == 1800 + 600
    assert found["prepare"] == 0


def test_the_first_step_is_judged_before_the_others_give_up_on_it() -> None:
    assert bounds()["first step"] == 480
    assert bounds(alone=True)["first step"] == 1800
    assert bounds(timeout_s=7200)["first step"] == 1800


@pytest.mark.parametrize(
    ("seconds", "alone", "bound"),
    [(0.1, True, 300), (60, True, 600), (60, False, 540), (0.1, False, 300), (700, False, 1180)],
)
def test_a_step_is_judged_by_the_longest_so_far(seconds: float, alone: bool, bound: float) -> None:
    found = bounds(alone=alone)
    assert found["step"] == 1800
    for took in (seconds / 2, seconds, seconds / 3):
        found.took("step", took)
    assert found["step"] == pytest.approx(bound)
    assert found["evaluate"] == 1800


def test_what_is_rare_is_not_measured() -> None:
    found = bounds()
    found.took("save", 1.0)
    assert found["save"] == 1800


def test_a_given_bound_is_taken_as_it_is() -> None:
    found = bounds(2.0)
    found.took("step", 10.0)
    assert [found[phase] for phase in ("load", "step", "evaluate")] == [2.0] * 3
    assert found["restore"] == 1800
    assert bounds(7200.0)["restore"] == 7200


def test_off_judges_nothing() -> None:
    found = bounds(0.0)
    assert [found[phase] for phase in ("start", "step", "save")] == [0.0] * 3
