"""The digest of a state tree: every bit of its tensors, their types and shapes, every number and text."""

from collections.abc import Mapping
from typing import Any

import xxhash
from torch import Tensor

from checkpoints.tensorfile import byte_view

__all__ = ["digest_of"]


def digest_of(tree: object) -> str:
    """XXH3 over a tree of containers, tensors and plain values, in hex; keys count, their order does not."""
    digest = xxhash.xxh3_128()
    _feed(digest, tree)
    return digest.hexdigest()


def _feed(digest: Any, value: object) -> None:
    if isinstance(value, Tensor):
        digest.update(f"t{value.dtype}{list(value.shape)}\0".encode())
        digest.update(byte_view(value))
    elif isinstance(value, Mapping):
        digest.update(f"d{len(value)}\0".encode())
        for key in sorted(value, key=repr):
            digest.update(f"{key!r}\0".encode())
            _feed(digest, value[key])
    elif isinstance(value, list | tuple):
        digest.update(f"l{len(value)}\0".encode())
        for item in value:
            _feed(digest, item)
    else:
        text = value.hex() if isinstance(value, float) else repr(value)
        digest.update(f"{type(value).__name__}{text}\0".encode())
