"""The closed-form schedules of the shipped jobs."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jobs.schedule import warmup_cosine


def rates(total: int, steps: int, **kwargs: float) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=1.0)
    scheduler = warmup_cosine(optimizer, total, **kwargs)
    seen = []
    for _ in range(steps):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return seen


def test_rate_rises_to_its_peak_and_falls_to_the_floor() -> None:
    seen = rates(100, 101, warmup=0.1, floor=0.1)
    assert seen[:10] == pytest.approx([(i + 1) / 11 for i in range(10)])
    assert seen[10] == 1.0
    assert seen[10:] == sorted(seen[10:], reverse=True)
    assert seen[100] == pytest.approx(0.1)


@given(total=st.integers(1, 40), beyond=st.integers(0, 5), warmup=st.floats(0, 1))
def test_every_rate_is_within_0_and_the_peak_also_beyond_the_end(
    total: int, beyond: int, warmup: float
) -> None:
    assert all(0 <= rate <= 1 for rate in rates(total, total + beyond, warmup=warmup))
