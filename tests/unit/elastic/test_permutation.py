"""Permutations without a table: bijections whatever n is, that look random, and stay what they are.

The quality tests are chi-squares, told as z; a good permutation stays below Z, and the last tests show that
weaker ones do not.
"""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.permutation import LARGEST_TABLE, Chunks, Feistel, Indices, choose_order
from elastic.seeding import mix

Z = 4.5
LARGE = (10**9, 1 << 40)
DRAWS = 1 << 19
BINS = 1024
EPOCHS = 1500
EDGES = [2**k + d for k in range(1, 17) for d in (-1, 0, 1)]

Make = Callable[..., Feistel]


def order(n: int, *key: int) -> list[int]:
    """A whole permutation."""
    return Feistel(n, *key)(np.arange(n)).tolist()  # type: ignore[no-any-return]


# ------------------------------------------------------------------------------------------- bijections
@pytest.mark.parametrize(
    "sizes", [range(1, 301), EDGES, [1_000_003]], ids=["small", "edges", "large"]
)
def test_it_is_a_bijection(sizes: list[int]) -> None:
    for n in sizes:
        counts = np.bincount(Feistel(n, 0, 0)(np.arange(n)), minlength=n)
        assert len(counts) == n, n
        assert counts.min() == counts.max() == 1, n


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 5000), key=st.lists(st.integers(), min_size=1, max_size=3))
def test_it_is_a_bijection_for_every_key(n: int, key: list[int]) -> None:
    assert sorted(order(n, *key)) == list(range(n))


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 200), first=st.integers(0, 2**40), passes=st.integers(1, 5))
def test_each_pass_is_a_bijection_of_its_own(n: int, first: int, passes: int) -> None:
    numbers = np.repeat(np.arange(first, first + passes), n)
    found = Feistel(n, 1)(np.tile(np.arange(n), passes), numbers).reshape(passes, n)
    assert (np.sort(found, axis=1) == np.arange(n)).all()
    if n > 100:
        assert len({tuple(row) for row in found.tolist()}) == passes
    alone = Feistel(n, 1)(np.arange(n), np.full(n, first))
    assert found[0].tolist() == alone.tolist()


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 2**62), data=st.data())
def test_any_positions_may_be_asked_for_in_any_order(n: int, data: st.DataObject) -> None:
    positions = data.draw(st.lists(st.integers(0, n - 1), max_size=20, unique=True))
    network = Feistel(n, 3)
    together = network(np.array(positions, dtype=np.int64)).tolist()
    assert together == [int(network(np.array([p]))[0]) for p in positions]
    assert len(set(together)) == len(positions)
    assert all(0 <= value < n for value in together)


@pytest.mark.parametrize("n", [1, 5, 1000])
@pytest.mark.parametrize("outside", [-1, 0])
def test_a_position_outside_is_refused_and_does_not_walk_for_ever(n: int, outside: int) -> None:
    position = outside if outside < 0 else n
    with pytest.raises(
        IndexError,
        match=f"^positions: found 0 to {n}|^positions: found -1 to 0, expected 0 to {n - 1}$",
    ):
        Feistel(n, 0)(np.array([0, position]))


@pytest.mark.parametrize("n", [0, -1, 2**62 + 1])
def test_sizes_that_cannot_be_are_refused(n: int) -> None:
    with pytest.raises(ValueError, match=rf"^n: found {n}, expected 1 to 2\*\*62$"):
        Feistel(n, 0)


# ------------------------------------------------------------------------------------------- it stays what it is
def plainly(n: int, position: int, *key: int) -> int:
    """The definition, one number at a time."""
    bits = max(2, (n - 1).bit_length())
    low = bits - bits // 2
    value = position
    while True:
        widths = (bits // 2, low)
        left, right = value >> low, value & ((1 << low) - 1)
        for i in range(12 if n < 4096 else 6):
            x = (right + mix(*key, i, n)) % 2**64
            x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
            x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
            x ^= x >> 31
            left, right = right, left ^ (x >> (64 - widths[0]))
            widths = widths[::-1]
        value = left << low | right
        if value < n:
            return value


@settings(max_examples=100, deadline=None)
@given(n=st.integers(1, 2**62), key=st.integers(), data=st.data())
def test_it_is_its_definition(n: int, key: int, data: st.DataObject) -> None:
    position = data.draw(st.integers(0, n - 1))
    assert Feistel(n, key, 2)(np.array([position]))[0] == plainly(n, position, key, 2)


def test_it_stays_what_it_is() -> None:
    # Other numbers would give running trainings another order after an update.
    assert order(10, 0, 0) == [2, 8, 9, 0, 4, 5, 7, 1, 6, 3]
    assert Feistel(10**9, 0, 1)(np.arange(3)).tolist() == [694824090, 485871117, 273481274]
    assert Feistel(10**12, 7, 2)(np.array([10**12 - 1])).tolist() == [83064923775]


# ------------------------------------------------------------------------------------------- it looks random
def z_of(counts: Indices, expected: float) -> float:
    """How far a chi-square lies from its mean, in standard deviations."""
    freedom = counts.size - 1
    chi = float(((counts - expected) ** 2 / expected).sum())
    return abs(chi - freedom) / float(np.sqrt(2 * freedom))


def binned(values: Indices, n: int) -> float:
    """Z of values that should be spread evenly over [0, n)."""
    counts = np.bincount((values.astype(np.float64) * (BINS / n)).astype(np.int64), minlength=BINS)
    return z_of(counts, len(values) / BINS)


def differences(make: Make, n: int, stride: int) -> float:
    """Z of the differences between draws a stride apart."""
    network = make(n, 0, 0)
    here = np.arange(DRAWS)
    return binned((network(here + stride) - network(here)) % n, n)


def places(make: Make, n: int) -> float:
    """Z of how often each value stands at each place, over many epochs."""
    counts = np.zeros((n, n), dtype=np.int64)
    for epoch in range(EPOCHS):
        counts[np.arange(n), make(n, 0, epoch)(np.arange(n))] += 1
    # Rows and columns have fixed sums, so that (n - 1)^2 cells are free.
    chi = float(((counts - EPOCHS / n) ** 2 / (EPOCHS / n)).sum())
    free = (n - 1) ** 2
    return (chi - free) / float(np.sqrt(2 * free))


@pytest.mark.parametrize("n", LARGE)
def test_values_are_spread_evenly(n: int) -> None:
    for epoch in range(3):
        assert binned(Feistel(n, 0, epoch)(np.arange(DRAWS)), n) < Z


@pytest.mark.parametrize("n", LARGE)
@pytest.mark.parametrize("stride", [1, 2, 64, 1024, 1 << 15, 1 << 20])
def test_differences_are_spread_evenly(n: int, stride: int) -> None:
    assert differences(Feistel, n, stride) < Z


@pytest.mark.parametrize("n", LARGE)
def test_low_bits_are_spread_evenly(n: int) -> None:
    counts = np.bincount(Feistel(n, 5, 0)(np.arange(DRAWS)) & 255, minlength=256)
    assert z_of(counts, DRAWS / 256) < Z


@pytest.mark.parametrize("n", LARGE)
def test_pairs_of_neighbours_are_spread_evenly(n: int) -> None:
    values = Feistel(n, 0, 0)(np.arange(DRAWS)).astype(np.float64) * (32 / n)
    pairs = values[0::2].astype(np.int64) * 32 + values[1::2].astype(np.int64)
    assert z_of(np.bincount(pairs, minlength=1024), DRAWS / 2 / 1024) < Z


@pytest.mark.parametrize("n", LARGE)
def test_neighbours_epochs_and_seeds_are_uncorrelated(n: int) -> None:
    limit = Z / np.sqrt(DRAWS)
    here = np.arange(DRAWS)
    first = Feistel(n, 0, 0)(here)
    assert abs(np.corrcoef(first[1:], first[:-1])[0, 1]) < limit
    for key in ((0, 1), (1, 0)):
        other = Feistel(n, *key)(here)
        assert abs(np.corrcoef(first, other)[0, 1]) < limit
        assert (first == other).sum() < 10


@pytest.mark.parametrize("n", [5, 16, 37, 64])
def test_every_value_comes_to_every_place_in_small_ones(n: int) -> None:
    assert places(Feistel, n) < Z


def two_rounds(n: int, *key: int) -> Feistel:
    """Too few."""
    return Feistel(n, *key, rounds=2)


class Multiplied(Feistel):
    """A hash that only multiplies."""

    @staticmethod
    def scramble(
        words: "np.ndarray[tuple[int], np.dtype[np.uint64]]",
    ) -> "np.ndarray[tuple[int], np.dtype[np.uint64]]":
        words *= np.uint64(0x9E3779B97F4A7C15)
        return words


def test_the_tests_fail_with_two_rounds() -> None:
    assert differences(two_rounds, 10**9, 1024) > 20 * Z
    assert places(two_rounds, 37) > 10 * Z


def test_the_tests_fail_with_a_hash_that_only_multiplies() -> None:
    def four(n: int, *key: int) -> Feistel:
        return Multiplied(n, *key, rounds=4)

    worst = max(
        differences(four, n, stride) for n in LARGE for stride in (1, 1024, 1 << 15, 1 << 20)
    )
    assert worst > 2 * Z


# ------------------------------------------------------------------------------------------- chunks, choice
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_slices_are_slices_of_one_sequence_whatever_was_asked_before(data: st.DataObject) -> None:
    calls: list[tuple[int, int]] = []

    def compute(start: int, stop: int) -> Indices:
        calls.append((start, stop))
        return np.arange(start, stop) * 3

    length = data.draw(st.integers(0, 60_000))
    chunks = Chunks(compute, length)
    for _ in range(6):
        start = data.draw(st.integers(0, length))
        stop = data.draw(st.integers(start, length))
        assert (chunks(start, stop) == np.arange(start, stop) * 3).all()
    assert all(stop <= length for _, stop in calls)


def test_steps_that_follow_each_other_share_a_chunk_and_so_do_those_fetched_ahead() -> None:
    calls: list[int] = []

    def compute(start: int, stop: int) -> Indices:
        calls.append(start)
        return np.arange(start, stop)

    chunks = Chunks(compute, 1 << 40)
    for step in range(1000):
        for ahead in (30_000, 0):
            chunks(step * 64 + ahead, step * 64 + ahead + 16)
    assert len(calls) < 20


def test_auto_is_a_matter_of_the_length_alone() -> None:
    assert choose_order("auto", 1) == "torch"
    assert choose_order("auto", LARGEST_TABLE) == "torch"
    assert choose_order("auto", LARGEST_TABLE + 1) == "feistel"
    assert choose_order("torch", LARGEST_TABLE + 1) == "torch"
    assert choose_order("feistel", 1) == "feistel"
