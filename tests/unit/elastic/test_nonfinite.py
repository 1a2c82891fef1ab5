"""Bounds on skipping and going back, and which saved state is fit to return to."""

import math
from typing import Any

import pytest
import torch

from checkpoints.layout import CheckpointName, Rollback
from elastic.errors import AttentionError
from elastic.nonfinite import (
    MOST_OVERFLOWS,
    MOST_ROLLBACKS,
    MOST_SKIPS,
    check_rollbacks,
    check_skips,
    unfit,
)
from elastic.progress import Progress

TO = CheckpointName(generation=1, step=4)


def back(generation: int, step: int = 4) -> Rollback:
    return Rollback(generation=generation, to=CheckpointName(generation=1, step=step))


def test_only_skips_in_a_row_count() -> None:
    progress = Progress()
    for skipped in (True, True, False, True):
        progress.count_step(4, skipped=skipped)
    assert (progress.skipped_steps, progress.skipped_in_row) == (3, 1)
    assert Progress.from_tree(progress.to_tree()) == progress
    older = {key: value for key, value in progress.to_tree().items() if key != "skipped_in_row"}
    assert Progress.from_tree(older).skipped_in_row == 0


@pytest.mark.parametrize(
    ("precision", "limit"), [("fp32", MOST_SKIPS), ("bf16", MOST_SKIPS), ("fp16", MOST_OVERFLOWS)]
)
def test_too_many_skips_in_a_row_call_a_person(precision: str, limit: int) -> None:
    check_skips(limit - 1, precision, "step 9: nan")
    with pytest.raises(AttentionError, match=f"found {limit} skipped steps in a row.*step 9: nan"):
        check_skips(limit, precision, "step 9: nan")
    with pytest.raises(AttentionError, match="may be ruined; python -m elastic rollback"):
        check_skips(limit, precision, None)


def test_rollbacks_to_one_checkpoint_are_bounded_and_others_do_not_count() -> None:
    same = [back(generation) for generation in range(2, 2 + MOST_ROLLBACKS)]
    check_rollbacks(same[1:], TO, "step 9: nan")
    check_rollbacks([*same, back(9, step=6)], TO, "step 9: nan")
    with pytest.raises(AttentionError, match=f"found {MOST_ROLLBACKS} rollbacks to .*step 9: nan"):
        check_rollbacks([back(1, step=2), *same], TO, "step 9: nan")


def tree(**changed: Any) -> dict[str, Any]:
    moments = {"exp_avg": torch.ones(2), "step": torch.tensor(3)}
    found = {
        "model": {"w": torch.ones(2), "mask": torch.full((2,), -math.inf)},
        "optimizer": {"main": {"state": {"w": moments}, "groups": [{"lr": 0.1}]}},
    }
    return {**found, **changed}


def test_state_is_fit_where_parameters_and_moments_are_finite() -> None:
    assert unfit(tree(), {"w"}) is None
    ruined = {"w": torch.tensor([1.0, math.inf])}
    assert unfit(tree(model=ruined), {"w"}) == "parameter w is not finite"
    ruined = {"w": torch.tensor([complex(1, math.inf)])}
    assert unfit(tree(model=ruined), {"w"}) == "parameter w is not finite"
    moments = {"main": {"state": {"w": [torch.ones(1), torch.tensor(math.nan)]}}}
    assert unfit(tree(optimizer=moments), {"w"}) == "optimizer.main.state.w.1 is not finite"
