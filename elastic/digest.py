"""The digest of a state tree: every bit of its tensors, their types and shapes, every number and text."""

from collections.abc import Mapping
from typing import Any

import xxhash
from torch import Tensor

from checkpoints.tensorfile import byte_view

__all__ = ["digest_of"]


def digest_of(tree: object, *, part: int = 0, parts: int = 1) -> str:
    """XXH3 over a tree of containers, tensors and plain values, in hex; keys count, their order does not.

    Of the tensors only those of one part out of `parts` are read: a large state is looked at in turns.
    """
    digest = xxhash.xxh3_128()
    _feed(digest, tree, _Part(part, parts))
    return digest.hexdigest()


class _Part:
    """Which tensors are looked at: every n-th."""

    def __init__(self, part: int, parts: int) -> None:
        self._part, self._parts, self._seen = part % parts, parts, 0

    def takes(self) -> bool:
        """Whether the next tensor is one of them."""
        self._seen += 1
        return self._seen % self._parts == self._part


def _feed(digest: Any, value: object, part: _Part) -> None:
    if isinstance(value, Tensor):
        digest.update(f"t{value.dtype}{list(value.shape)}\0".encode())
        if part.takes():
            digest.update(byte_view(value))
    elif isinstance(value, Mapping):
        digest.update(f"d{len(value)}\0".encode())
        for key in sorted(value, key=repr):
            digest.update(f"{key!r}\0".encode())
            _feed(digest, value[key], part)
    elif isinstance(value, list | tuple):
        digest.update(f"l{len(value)}\0".encode())
        for item in value:
            _feed(digest, item, part)
    else:
        text = value.hex() if isinstance(value, float) else repr(value)
        digest.update(f"{type(value).__name__}{text}\0".encode())
