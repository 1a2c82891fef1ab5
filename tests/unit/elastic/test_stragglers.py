"""Who keeps the others waiting: own seconds, verdicts once, and no opinion without enough steps."""

from types import SimpleNamespace
from typing import Any

import pytest

from elastic.stragglers import Paces


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def paces(rank: int = 0, size: int = 3) -> tuple[Paces, Clock, Any]:
    clock, slot = Clock(), SimpleNamespace(waited_s=0.0)
    world: Any = SimpleNamespace(rank=rank, world_size=size, hosts=("a", "b", "c"))
    given: Any = slot
    return Paces(world, given, clock=clock), clock, slot


def judged(found: Paces, clock: Clock, *own: float, steps: int = 16) -> list[str]:
    said = []
    for _ in range(steps):
        clock.now += 0.4
        said += [str(one) for one in found.judge(own)]
    return said


def test_a_ranks_own_seconds_leave_its_wait_out() -> None:
    found, clock, slot = paces(rank=1)
    found.stop()
    assert found.told() == (
        0.0,
        0.0,
        0.0,
    )  # nothing is known of a step whose beginning was not seen
    found.start()
    clock.now += 3.0
    slot.waited_s += 2.0
    found.stop()
    assert found.told() == (0.0, 1.0, 0.0)
    assert paces(size=1)[0].told() == ()


def test_what_is_little_of_a_step_is_not_told() -> None:
    found, clock, _ = paces()
    assert judged(found, clock, 0.02, 0.02, 0.03) == []
    assert judged(found, clock, 0.02, 0.02, 0.04) != []


def test_a_slow_rank_is_told_once_and_again_when_it_is_not_slow_any_more() -> None:
    found, clock, _ = paces()
    found.shards = lambda rank: (rank, rank + 3)
    assert judged(found, clock, 0.1, 0.1, 0.2) == [
        "rank 2 on c (shards 2, 5) is slow: 0.200 s of its own in a step, the others take 0.100 s and wait for it"
    ]
    assert judged(found, clock, 0.1, 0.1, 0.2, steps=64) == []
    assert judged(found, clock, 0.1, 0.1, 0.12) == []
    (said,) = judged(found, clock, 0.1, 0.1, 0.1)
    assert said.startswith("rank 2 on c (shards 2, 5) is as fast as the others again")


@pytest.mark.parametrize("own", [(0.1, 0.1, 0.12), (0.001, 0.001, 0.0025), (0.0, 0.1, 0.9)])
def test_what_is_small_or_not_known_is_nobodys_concern(own: tuple[float, ...]) -> None:
    found, clock, _ = paces()
    assert judged(found, clock, *own, steps=64) == []


def test_one_slow_step_is_no_verdict() -> None:
    found, clock, _ = paces()
    assert judged(found, clock, 0.1, 5.0, 0.1, steps=1) == []
    assert judged(found, clock, 0.1, 0.1, 0.1, steps=40) == []
