"""Constants: equal or not, merged, told."""

import math
from collections import Counter
from typing import Any

import pytest
import torch

from elastic.constants import merge, plain, same, tell_change


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (1, 1.0),
        ((0.9, 0.999), [0.9, 0.999]),
        (math.nan, math.nan),
        ({"a": [1, None]}, {"a": (1, None)}),
        (Counter([4, 4]), Counter([4, 4])),
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0])),
    ],
)
def test_equal_constants_are_the_same(a: Any, b: Any) -> None:
    assert same(a, b)
    assert same(b, a)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (1, True),
        (0, None),
        (0.1, math.nextafter(0.1, 1)),
        (math.nan, 1.0),
        ([1], [1, 2]),
        ({"a": 1}, {"b": 1}),
        ("min", "max"),
        (torch.tensor(1.0), 1.0),
        (torch.tensor(1.0), torch.tensor(1.0, dtype=torch.float64)),
        (torch.ones(1), torch.ones(2)),
    ],
)
def test_other_constants_are_not(a: Any, b: Any) -> None:
    assert not same(a, b)
    assert not same(b, a)


def test_a_merge_takes_the_saved_value_where_the_constant_is_unchanged() -> None:
    built = {"kept": 1, "moved": 1, "changed": 2, "new": 5}
    was = {"kept": 1, "moved": 1, "changed": 1, "dropped": 1}
    now = {"kept": 1, "moved": 7, "changed": 9, "dropped": 1, "added": 3}
    assert merge(built, was, now) == {"kept": 1, "moved": 7, "changed": 2, "new": 5, "added": 3}


def test_a_plain_copy_shares_nothing_and_holds_no_code() -> None:
    rate = torch.tensor(0.1, requires_grad=True)
    value = {"lr": rate, "fn": math.cos, "list": [math.cos, 1, (2, {"x": math.sin})]}
    copied = plain(value)
    assert copied == {"lr": copied["lr"], "list": [None, 1, (2, {})]}
    assert not copied["lr"].requires_grad
    with torch.no_grad():
        rate.fill_(1)
    assert copied["lr"].item() == pytest.approx(0.1)
    assert type(plain(Counter([3]))) is Counter


def test_a_change_is_one_short_line() -> None:
    assert tell_change("optimizer.lr", 0.001, torch.tensor(0.5)) == (
        "optimizer.lr: 0.001 -> 0.5 (from code and config)"
    )
    assert tell_change("s.milestones", Counter([3, 3]), Counter([4])) == (
        "s.milestones: [3, 3] -> [4] (from code and config)"
    )
    long = tell_change("x", list(range(100)), list(range(99)))
    assert long == "x: changed (from code and config)"
    assert tell_change("x", torch.ones(3), [1]) == "x: [3] -> [1] (from code and config)"
