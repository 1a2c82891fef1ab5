"""Constants of optimizers, schedulers and scalers: copied, compared, merged and told.

A constant is what code and config set; a state is what training made of it. `merge` decides between
the two for each key. Pure: no object is changed here.
"""

import math
from collections import Counter
from collections.abc import Mapping
from numbers import Number
from typing import Any, Final

import torch
from torch import Tensor

__all__ = ["SOURCE", "merge", "plain", "same", "tell_change"]

SOURCE: Final = "(from code and config)"
_LONGEST: Final = 60


def plain(value: Any) -> Any:
    """A deep copy of constants and counters: tensors cloned, numbers of numpy made Python's.

    Callables are code: left out of dicts, None in lists.
    """
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, Counter):
        return Counter({k: plain(v) for k, v in value.items()})
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items() if not callable(v)}
    if isinstance(value, list | tuple):
        items = [None if callable(item) else plain(item) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    if isinstance(value, Number) and not isinstance(value, bool) and hasattr(value, "item"):
        return value.item()
    return value


def same(a: Any, b: Any) -> bool:
    """Equal in value: a tensor in type, shape and values, NaN to NaN, a list to a tuple, 1 to 1.0."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        if not isinstance(a, Tensor) or not isinstance(b, Tensor) or a.dtype != b.dtype:
            return False
        return a.shape == b.shape and torch.equal(a.cpu(), b.cpu())
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float) and isinstance(b, float) and math.isnan(a):
        return math.isnan(b)
    return bool(isinstance(a, bool) == isinstance(b, bool) and a == b)


def merge(
    built: Mapping[str, Any], was: Mapping[str, Any], now: Mapping[str, Any]
) -> dict[str, Any]:
    """What a state becomes: saved where its constant is unchanged, else as code built it.

    Args:
        built: As code and config make it today.
        was: As they made it then.
        now: What it had become when it was saved.
    """
    result = dict(built)
    for key, value in now.items():
        unchanged = key in built and key in was and same(built[key], was[key])
        if unchanged or (key not in built and key not in was):
            result[key] = value
    return result


def _show(value: Any) -> str:
    if isinstance(value, Counter):
        value = sorted(value.elements())
    if isinstance(value, Tensor):
        value = value.item() if value.numel() == 1 else list(value.shape)
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def tell_change(name: str, was: Any, built: Any) -> str:
    """One line for people: `optimizer.lr: 0.001 -> 0.0005 (from code and config)`."""
    if _show(was) == _show(built):
        return f"{name}: changed {SOURCE}"
    return f"{name}: {_show(was)} -> {_show(built)} {SOURCE}"
