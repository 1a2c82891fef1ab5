"""Permutations of [0, n) that any position can be asked of: no table, no start-up, for n up to 2**62.

Promises: `Feistel` is a bijection for every n; what it gives depends on its key, n and the position alone, on
every machine, and never changes between versions (a running training would change its order). Memory and the
time to any position do not depend on n.

A Feistel network over the smallest power of two that holds n; what falls beyond n is encrypted again until it
does not (cycle walking: fewer than two passes on average).
"""

from collections.abc import Callable
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from elastic.seeding import mix

__all__ = ["LARGEST_TABLE", "Chunks", "Feistel", "Indices", "choose_order"]

Indices: TypeAlias = NDArray[np.int64]
_Words: TypeAlias = NDArray[np.uint64]

LARGEST_TABLE: Final = 1 << 24
"""Most positions for which `auto` takes torch's randperm: 0.13 GB on each rank and half a second an epoch."""

_LARGEST: Final = 1 << 62
_ROUNDS: Final = 6
_ROUNDS_IF_SMALL: Final = 12  # a small domain needs more of them to look random
_SMALL: Final = 1 << 12
_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
_FIRST: Final = np.uint64(0xBF58476D1CE4E5B9)
_SECOND: Final = np.uint64(0x94D049BB133111EB)
# A call for 64 costs as much as one for 1000, and 2**14 about a millisecond; the first index is there sooner.
_FIRST_CHUNK: Final = 1 << 10
_CHUNK: Final = 1 << 14


def choose_order(order: str, length: int) -> str:
    """The kind of order that `auto` stands for with so many positions; any other is itself."""
    if order != "auto":
        return order
    return "torch" if length <= LARGEST_TABLE else "feistel"


class Feistel:
    """A permutation of [0, n), or with `passes` as many as one likes."""

    def __init__(self, n: int, *key: int, rounds: int | None = None) -> None:
        """Choose the permutation by its key.

        Args:
            n: how many positions.
            key: any numbers; another key is another permutation.
            rounds: for tests of the quality; an even number.

        Raises:
            ValueError: n is not in 1 to 2**62.
        """
        if not 1 <= n <= _LARGEST:
            raise ValueError(f"n: found {n}, expected 1 to 2**62")
        self.n = n
        if rounds is None:
            rounds = _ROUNDS_IF_SMALL if n < _SMALL else _ROUNDS
        bits = max(2, (n - 1).bit_length())
        self._left, self._right = bits // 2, bits - bits // 2
        self._keys: list[Any] = [np.uint64(mix(*key, i, n)) for i in range(rounds)]

    def __call__(self, positions: Indices, passes: Indices | None = None) -> Indices:
        """What stands at each position; with `passes`, each in the permutation of its number.

        Raises:
            IndexError: a position is outside [0, n); it would walk for ever.
        """
        if len(positions) and not (positions.min() >= 0 and positions.max() < self.n):
            found = f"{positions.min()} to {positions.max()}"
            raise IndexError(f"positions: found {found}, expected 0 to {self.n - 1}")
        keys, many = self._keys, False
        if passes is not None and len(passes):
            # In a large part they are mostly one.
            many = bool((passes != passes[0]).any())
            drift = (passes if many else passes[:1]).astype(np.uint64) * _GOLDEN
            keys = [self.scramble(drift + key) for key in keys]
        values = self._encrypt(positions.astype(np.uint64), keys)
        outside = np.flatnonzero(values >= self.n)
        while len(outside):
            part = [key[outside] for key in keys] if many else keys
            again = self._encrypt(values[outside], part)
            values[outside] = again
            outside = outside[again >= self.n]
        return values.astype(np.int64)

    def _encrypt(self, values: _Words, keys: list[Any]) -> _Words:
        left_bits, right_bits = self._left, self._right
        left = values >> np.uint64(right_bits)
        right = values & np.uint64((1 << right_bits) - 1)
        for key in keys:
            mixed = self.scramble(right + key)
            mixed >>= np.uint64(64 - left_bits)
            mixed ^= left
            left, right = right, mixed
            left_bits, right_bits = right_bits, left_bits
        left <<= np.uint64(right_bits)
        left |= right
        return left

    @staticmethod
    def scramble(words: _Words) -> _Words:
        """splitmix64's finaliser, in place; with a hash that only multiplies the order shows."""
        words ^= words >> np.uint64(30)
        words *= _FIRST
        words ^= words >> np.uint64(27)
        words *= _SECOND
        words ^= words >> np.uint64(31)
        return words


class Chunks:
    """Any slice of a sequence that is worked out in pieces.

    The last two pieces are kept: slices follow each other, and who fetches ahead for loader workers is a piece before who trains.
    """

    def __init__(self, compute: Callable[[int, int], Indices], length: int) -> None:
        """`compute(start, stop)` gives a slice of `length` numbers."""
        self._compute, self._length = compute, length
        self._size = _FIRST_CHUNK
        self._kept: list[tuple[int, Indices]] = []

    def __call__(self, start: int, stop: int) -> Indices:
        """The numbers of [start, stop)."""
        for first, values in self._kept:
            if first <= start and stop <= first + len(values):
                return values[start - first : stop - first]
        # A rank asks for the same part of each step, so the piece begins where it asks.
        values = self._compute(start, min(self._length, max(stop, start + self._size)))
        self._size = min(_CHUNK, 4 * self._size)
        self._kept = [*self._kept[-1:], (start, values)]
        return values[: stop - start]
