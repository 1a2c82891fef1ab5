"""The same bits in every world: whole schedules of worlds and kills, and what would break them."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elastic.errors import StartError
from tests.support.exact import Case, bits, run
from tests.support.pool import Pool, pool
from tests.support.ranked import world_of

WORLDS = (1, 2, 3, 4)


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[int, Pool]]:
    with pool(1) as one, pool(2) as two, pool(3) as three, pool(4) as four:
        yield {1: one, 2: two, 3: three, 4: four}


def train(pools: dict[int, Pool], world: int, case: Case, steps: int) -> dict[str, Any]:
    """An undisturbed run; its ranks hold the same."""
    ranks = pools[world].call(run, case, None, 0, steps)
    assert len({bits(rank["states"]) for rank in ranks}) == 1
    assert all(rank["losses"] == ranks[0]["losses"] for rank in ranks)
    return {**ranks[0], "samples": joined(ranks)}


def joined(ranks: list[dict[str, Any]]) -> list[list[int]]:
    """The samples of each step over all ranks."""
    steps = zip(*(rank["samples"] for rank in ranks), strict=True)
    return [[*chain(*parts)] for parts in steps]


cases = st.builds(
    Case,
    n=st.integers(9, 60),
    batch=st.integers(2, 17),
    shards=st.integers(1, 9),
    micro=st.one_of(st.none(), st.integers(2, 4)),
    weighted=st.booleans(),
).filter(lambda case: case.shards <= case.batch)
# Each entry: a world, the steps it takes, and how many of them were saved when it was killed.
schedules = st.lists(
    st.tuples(st.sampled_from(WORLDS), st.integers(1, 6), st.integers(0, 6)), min_size=2, max_size=4
)


@given(case=cases, schedule=schedules)
@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_schedule_of_worlds_and_kills_gives_the_bits_of_one_worker(
    pools: dict[int, Pool], case: Case, schedule: list[tuple[int, int, int]]
) -> None:
    check_schedule(pools, case, schedule)


def check_schedule(
    pools: dict[int, Pool], case: Case, schedule: list[tuple[int, int, int]]
) -> None:
    """Train by a schedule, then compare states, losses, samples and metrics with one worker's."""
    state: dict[str, Any] | None = None
    done = 0
    states, losses, samples = [], [], []
    metrics = None
    for number, (world, steps, saved) in enumerate(schedule):
        ranks = pools[world].call(run, case, state, done, steps)
        assert len({bits(rank["states"]) for rank in ranks}) == 1
        last = number == len(schedule) - 1
        kept = steps if last else min(saved, steps)
        states += ranks[0]["states"][:kept]
        losses += ranks[0]["losses"][:kept]
        samples += joined(ranks)[:kept]
        metrics = ranks[0]["metrics"]
        if kept:
            state = ranks[0]["states"][kept - 1]
        done += kept
    expected = train(pools, 1, case, done)
    assert [bits(one) for one in states] == [bits(one) for one in expected["states"]]
    assert losses == expected["losses"]
    assert [sorted(step) for step in samples] == [sorted(step) for step in expected["samples"]]
    assert metrics == expected["metrics"]
    epoch = case.plan.steps
    for start in range(0, done - epoch + 1, epoch):
        assert sorted(chain(*samples[start : start + epoch])) == list(range(case.n))


@pytest.mark.parametrize(
    "case", [Case(shards=6, batch=11), Case(shards=5, batch=7, micro=2, weighted=True)]
)
def test_default_mode_differs_from_it_by_rounding_alone(pools: dict[int, Pool], case: Case) -> None:
    exact = train(pools, 1, case, 7)
    for world in (1, 2, 3, 4):
        plain = train(pools, world, replace(case, bitwise=False), 7)
        for (loss, count, norm), found in zip(exact["losses"], plain["losses"], strict=True):
            assert found[0] == pytest.approx(loss, rel=1e-4)
            assert found[1] == count
            assert found[2] == pytest.approx(norm, rel=1e-3)
        # Buffers are merged the same way, and steps are counted, not shards.
        assert int(plain["states"][-1]["model"]["norm.num_batches_tracked"]) == 7


def test_ranks_beyond_the_shards_hold_the_state(pools: dict[int, Pool]) -> None:
    case = Case(shards=2)
    assert bits(train(pools, 4, case, 6)["states"]) == bits(train(pools, 1, case, 6)["states"])


def test_parameter_that_no_shard_uses_is_left_alone(pools: dict[int, Pool]) -> None:
    # Weight decay would move it, were its gradient a zero.
    states = train(pools, 3, Case(), 3)["states"]
    assert bits(states[0]["model"]["never.weight"]) == bits(states[2]["model"]["never.weight"])
    assert bits(states[0]["model"]["last.weight"]) != bits(states[2]["model"]["last.weight"])


def test_gradients_that_come_in_parts_are_added_like_the_others(pools: dict[int, Pool]) -> None:
    case = Case(n=16, parts_from=0)
    assert len({bits(train(pools, world, case, 2)["states"]) for world in (1, 2, 4)}) == 1


def test_gradients_that_come_in_parts_in_later_shards_alone_are_refused(tmp_path: Path) -> None:
    message = (
        r"parameter first\.(weight|bias) came in parts in a later shard .* use_reentrant=False$"
    )
    with world_of(0, 1, tmp_path) as world, pytest.raises(StartError, match=message):
        run(world, Case(parts_from=1), None, 0, 1)


# ------------------------------------------------------------------------- what would break the bits
def test_breaker_order_of_the_sum(pools: dict[int, Pool]) -> None:
    # Plain sums of the same shards' gradients have other bits in worlds of 3 than of 1.
    case = Case(n=64, batch=16, shards=6, bitwise=False)
    found = {world: bits(train(pools, world, case, 4)["states"]) for world in (1, 3, 4)}
    assert len(set(found.values())) > 1
    exact = replace(case, bitwise=True)
    assert len({bits(train(pools, world, exact, 4)["states"]) for world in (1, 3, 4)}) == 1


def test_breaker_shape_of_a_shard(pools: dict[int, Pool]) -> None:
    # So the shards, and the micro-batches in them, belong to the run's identity.
    case = Case(n=64, batch=16, shards=4)
    found = [case, replace(case, shards=2), replace(case, micro=2)]
    assert len({bits(train(pools, 1, one, 4)["states"]) for one in found}) == len(found)


def test_breaker_last_partial_batch(pools: dict[int, Pool]) -> None:
    # Steps of 7, 7 and 2 samples in 5 shards: the last one has empty shards, which are absent leaves.
    case = Case(n=16, batch=7, shards=5)
    found = [train(pools, world, case, 6) for world in WORLDS]
    assert [len(step) for step in found[0]["samples"]] == [7, 7, 2] * 2
    assert len({bits(one["states"]) for one in found}) == 1


def test_breaker_type_of_the_arithmetic(pools: dict[int, Pool]) -> None:
    case = Case(precision="bf16")
    found = [bits(train(pools, world, case, 5)["states"]) for world in WORLDS]
    assert len(set(found)) == 1
    assert found[0] != bits(train(pools, 1, Case(), 5)["states"])
