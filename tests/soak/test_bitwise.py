"""Many schedules of worlds and kills, in full."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from tests.support.pool import Pool, pool
from tests.support.sameness import BITWISE, DIGITS, SMALL_DIGITS, run_worlds
from tests.unit.elastic.test_bitwise import cases, check_schedule, schedules


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[int, Pool]]:
    with pool(1) as one, pool(2) as two, pool(3) as three, pool(4) as four:
        yield {1: one, 2: two, 3: three, 4: four}


@pytest.mark.timeout(3600)
@given(case=cases, schedule=schedules)
@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_two_hundred_schedules_give_the_bits_of_one_worker(
    pools: dict[int, Pool], case: object, schedule: list[tuple[int, int, int]]
) -> None:
    check_schedule(pools, case, schedule)  # type: ignore[arg-type]  # a Case


@pytest.mark.timeout(3600)
def test_ten_runs_of_digits_through_random_worlds_and_kills_have_the_same_bits(
    tmp_path: Path,
) -> None:
    overrides = (*SMALL_DIGITS, *BITWISE)
    alone = run_worlds(tmp_path / "alone", DIGITS, overrides, [], last=1)
    for number in range(10):
        seed = random.SystemRandom().randrange(10**6)
        print(f"seed {seed}")
        chance = random.Random(seed)
        steps = sorted(chance.sample(range(2, 44), 4))
        worlds = [(chance.randint(1, 5), step) for step in steps]
        last = chance.randint(1, 5)
        found = run_worlds(tmp_path / str(number), DIGITS, overrides, worlds, last=last)
        assert found == alone, f"seed {seed}: worlds {worlds}, then {last}"
