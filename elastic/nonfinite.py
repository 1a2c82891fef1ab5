"""What follows from losses and gradients that are not finite: how often they may be, and what is fit to return to.

Pure. Bounds, so that a run whose weights or data are ruined ends and calls a person, instead of skipping
or going back for ever.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from checkpoints.layout import CheckpointName, Rollback
from checkpoints.rollbacks import in_a_row
from elastic.errors import AttentionError

__all__ = [
    "MOST_OVERFLOWS",
    "MOST_ROLLBACKS",
    "MOST_SKIPS",
    "check_rollbacks",
    "check_skips",
    "unfit",
]

MOST_SKIPS: Final = 10
"""So many steps in a row may be skipped."""
MOST_OVERFLOWS: Final = 50
"""The same with fp16, whose scale is found by skipping: so many halvings leave nothing of it."""
MOST_ROLLBACKS: Final = 3
"""So many rollbacks may go back to one checkpoint, that is, without a newer one in between."""


def check_skips(in_row: int, precision: str, why: str | None) -> None:
    """Raise where too many steps in a row were skipped.

    Raises:
        AttentionError: A person must look.
    """
    limit = MOST_OVERFLOWS if precision == "fp16" else MOST_SKIPS
    if in_row >= limit:
        told = f"; the last one: {why}" if why else ""
        raise AttentionError(
            f"train.on_nonfinite: found {in_row} skipped steps in a row, expected fewer than {limit}: "
            f"the weights or the data may be ruined{told}; python -m elastic rollback URL --to STEP "
            "returns to an older checkpoint"
        )


def check_rollbacks(rollbacks: Sequence[Rollback], to: CheckpointName, why: str) -> None:
    """Raise where going back to this checkpoint has not helped often enough.

    Raises:
        AttentionError: A person must look.
    """
    count = in_a_row(rollbacks, to)
    if count >= MOST_ROLLBACKS:
        raise AttentionError(
            f"train.on_nonfinite: found {count} rollbacks to checkpoint {to} without a newer one, "
            f"expected fewer: {why}; python -m elastic rollback URL --to STEP returns to an older one"
        )


def unfit(tree: Mapping[str, Any], parameters: Collection[str]) -> str | None:
    """Why a saved state is not fit to return to: a parameter or moment that is not finite; None: it is."""
    for name, tensor in tree["model"].items():
        if name in parameters and not _is_finite(tensor):
            return f"parameter {name} is not finite"
    where = _first(tree["optimizer"], "optimizer")
    return None if where is None else f"{where} is not finite"


def _first(value: object, path: str) -> str | None:
    """The path of the first tensor below that is not finite."""
    if isinstance(value, Tensor):
        return None if _is_finite(value) else path
    items: Any = ()
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    found = (_first(item, f"{path}.{key}") for key, item in items)
    return next((where for where in found if where is not None), None)


def _is_finite(tensor: Tensor) -> bool:
    has_values = tensor.is_floating_point() or tensor.is_complex()
    return not has_values or bool(torch.isfinite(tensor).all())
