"""Intervals that pace themselves: Young and Daly, within a budget, told when they change."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpoints.options import Interval
from checkpoints.policy import best_interval, failure_rate
from elastic.pacing import Pace


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_interval_is_young_and_dalys() -> None:
    rate = 1 / 3600
    assert best_interval(2.0, rate, budget=1.0) == pytest.approx(math.sqrt(2 * 2 * 3600), rel=0.02)
    assert best_interval(2.0, rate / 100, budget=1.0) > best_interval(2.0, rate, budget=1.0)


def test_the_budget_and_the_upload_bound_it() -> None:
    assert best_interval(10.0, 1 / 60, budget=0.01) == 1000.0
    assert best_interval(0.001, 1 / 60, budget=0.5, shortest_s=500.0) == 500.0


@given(
    cost=st.floats(0, 1e4), failures=st.integers(0, 10**6), observed=st.floats(0, 1e9),
    budget=st.floats(1e-4, 1.0),
)  # fmt: skip
def test_saving_never_costs_more_than_its_budget(
    cost: float, failures: int, observed: float, budget: float
) -> None:
    rate = failure_rate(failures, observed)
    found = best_interval(cost, rate, budget=budget)
    assert math.isfinite(found)
    assert cost <= found * budget * (1 + 1e-9)


def test_failures_make_saves_more_frequent() -> None:
    assert failure_rate(0, 0) > 0
    rates = [failure_rate(n, 36_000) for n in (0, 1, 10)]
    assert rates == sorted(rates)


def test_auto_is_due_at_once_and_then_by_its_cost() -> None:
    clock = Clock()
    pace = Pace("checkpoint.every", Interval("auto"), budget=0.01, clock=clock)
    assert pace.is_due
    pace.restart()
    assert not pace.is_due  # its cost is not known before it is done
    told = pace.cost(0.5)
    assert told is not None
    assert told.startswith("checkpoint.every: every ")
    assert "1.00%" in told
    assert not pace.is_due
    clock.now += pace.seconds + 1
    assert pace.is_due


def test_only_a_change_that_matters_is_told() -> None:
    pace = Pace("checkpoint.every", Interval("auto"), budget=0.01, clock=Clock())
    assert pace.cost(1.0) is not None
    assert pace.cost(1.1) is None
    assert pace.cost(50.0) is not None


@pytest.mark.parametrize("interval", [Interval("off"), Interval("steps", 5), Interval("epochs", 1)])
def test_what_is_not_timed_is_never_due_by_the_clock(interval: Interval) -> None:
    clock = Clock()
    pace = Pace("checkpoint.every", interval, budget=0.01, clock=clock)
    clock.now = 1e9
    assert not pace.is_due
    assert pace.cost(1.0) is None


def test_a_given_time_is_counted_from_the_last_save() -> None:
    clock = Clock()
    pace = Pace("checkpoint.every", Interval("seconds", 10), budget=0.01, clock=clock)
    clock.now = 9.0
    assert not pace.is_due
    clock.now = 10.0
    assert pace.is_due
    pace.restart()
    assert not pace.is_due
