"""States to save, and the question whether two states are the same in every bit."""

import struct

import torch
import xxhash

from checkpoints.canonical import JSON, dump
from checkpoints.layout import CheckpointName
from checkpoints.tensorfile import byte_view


def raw(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor."""
    return bytes(byte_view(tensor))


def same(a: object, b: object) -> bool:
    """Equal in type, order and every bit, at any depth."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float) and isinstance(b, float):
        return struct.pack(">d", a) == struct.pack(">d", b)
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and raw(a) == raw(b)
    if isinstance(a, dict) and isinstance(b, dict):
        factories = getattr(a, "default_factory", None), getattr(b, "default_factory", None)
        return factories[0] is factories[1] and same(list(a.items()), list(b.items()))
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def state(step: int, *, width: int = 8) -> dict[str, object]:
    """A training state of all kinds of things, that tells the step it belongs to."""
    weights = torch.full((width, width), float(step))
    return {
        "model": {"net.weight": weights, "net.bias": torch.arange(width) + step, "tied": weights},
        "optimizer": {
            "state": {0: {"exp_avg": weights / 3, "step": torch.tensor(float(step))}},
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.999), "params": [0, 1]}],
        },
        "position": {"epoch": 1, "samples": step * 4, "step": step},
        "job": {"scores": [float("inf"), -0.0], "table": {(1, "a"): torch.tensor(step)}},
    }


def name(step: int, generation: int = 1) -> CheckpointName:
    """A checkpoint's name."""
    return CheckpointName(generation, step)


def signed(values: dict[str, JSON]) -> bytes:
    """A manifest of these values whose own checksum is right."""
    values.pop("checksum", None)
    return dump({**values, "checksum": xxhash.xxh3_128_hexdigest(dump(values))})
