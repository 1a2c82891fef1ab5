"""The schedule of a drill: the same for the same seed, each kind in turn, one fault in each interval."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.errors import ConfigError
from elastic.timetable import KINDS, plan, read_kinds

kinds = st.lists(st.sampled_from(KINDS), min_size=1, max_size=8)


@given(kinds=kinds, every=st.floats(0.5, 100), count=st.integers(1, 60), seed=st.integers())
def test_one_fault_falls_into_each_interval(
    kinds: list[str], every: float, count: int, seed: int
) -> None:
    planned = plan(kinds, every_s=every, for_s=every * count, seed=seed)  # type: ignore[arg-type]
    assert [one.number for one in planned] == list(range(1, count + 1))
    for number, one in enumerate(planned):
        assert every * number <= one.at_s + 1e-3
        assert one.at_s <= every * (number + 1)
        assert 0 <= one.whom < 1
        assert (one.lasts_s > 0) == (one.kind != "kill")
    assert planned == plan(kinds, every_s=every, for_s=every * count, seed=seed)  # type: ignore[arg-type]


def test_each_kind_comes_once_before_any_comes_again() -> None:
    planned = plan(KINDS, every_s=1, for_s=3 * len(KINDS), seed=7)
    found = [one.kind for one in planned]
    for begin in range(0, len(found), len(KINDS)):
        assert sorted(found[begin : begin + len(KINDS)]) == sorted(KINDS)


def test_another_seed_is_another_schedule() -> None:
    assert plan(KINDS, every_s=1, for_s=30, seed=1) != plan(KINDS, every_s=1, for_s=30, seed=2)


def test_a_kind_named_twice_comes_twice_as_often() -> None:
    planned = plan(read_kinds("kill, kill,stop"), every_s=1, for_s=30, seed=0)
    assert sum(one.kind == "kill" for one in planned) == 20


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("kill,stopp", "--faults: found 'stopp', expected some of kill, stop, agent, preempt, storage, partition"),
        (" , ", "--faults: found none, expected some of kill, stop, agent, preempt, storage, partition"),
    ],
)  # fmt: skip
def test_unknown_kinds_are_told(text: str, told: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_kinds(text)
    assert str(error.value) == told


def test_no_fault_at_all_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"^--for: found 5 s, expected at least --every \(20 s\)$"
    ):
        plan(["kill"], every_s=20, for_s=5, seed=0)
