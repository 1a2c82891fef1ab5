"""What the ranks tell each other in every step."""

from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.agreement import REQUEST_SLOTS, Agreed, Request

FLAGS = [field.name for field in fields(Request) if field.name != "paces"]
requests = st.builds(Request, **{name: st.booleans() for name in FLAGS})


def asking(name: str) -> Request:
    asked: dict[str, Any] = {name: True}
    return Request(**asked)


def test_request_packs_into_as_many_numbers_as_are_reserved() -> None:
    assert len(Request().pack()) == REQUEST_SLOTS == len(FLAGS)
    assert Agreed.read(Request().pack()) == Agreed()


@pytest.mark.parametrize("name", FLAGS)
def test_each_flag_arrives_under_its_own_name(name: str) -> None:
    agreed = Agreed.read(asking(name).pack())
    assert {flag: bool(getattr(agreed, flag)) for flag in FLAGS} == {f: f == name for f in FLAGS}


@given(st.lists(requests, min_size=1, max_size=5))
def test_what_is_agreed_is_what_any_rank_asked_for(world: list[Request]) -> None:
    summed = [sum(column) for column in zip(*(r.pack() for r in world), strict=True)]
    agreed = Agreed.read(summed)
    assert agreed.leave == sum(r.leave for r in world)
    assert agreed.notice == sum(r.notice for r in world)
    for name in ("save", "evaluate", "stop", "superseded", "parted"):
        assert getattr(agreed, name) is any(getattr(r, name) for r in world)
    assert agreed.leaving is any(r.leave or r.notice for r in world)


def test_each_ranks_pace_comes_to_all() -> None:
    world = [Request(paces=(0.5, 0.0), leave=True), Request(paces=(0.0, 0.25))]
    summed = [sum(column) for column in zip(*(r.pack() for r in world), strict=True)]
    assert Agreed.read(summed) == Agreed(leave=1, paces=(0.5, 0.25))
