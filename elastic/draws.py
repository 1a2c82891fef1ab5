"""What an epoch draws, as a function of (seed, epoch, position) alone: each sample once, by weight, or mixed.

Promises:
* Any slice of an epoch's draws can be asked for by itself, in whatever world; nothing is carried along.
* Counts are worked out in whole numbers: they are exact, and the same on every machine.
* A draw is told as an *address*: sample + n * (how often it was drawn before in this epoch). So a sample that
  comes twice has two addresses, and its random draws differ.

Cost: `Once` by feistel takes no memory and no time to begin; by torch one randperm for an epoch. `ByWeight` takes
40 bytes a sample and some 0.1 µs a sample at the start of an epoch; a draw costs a binary search. `Mixed` is as `Once`.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final, Protocol, TypeAlias

import numpy as np
import torch

from elastic.errors import StartError
from elastic.permutation import Chunks, Feistel, Indices
from elastic.seeding import mix
from jobs.sampling import Mixture, Sampling, Weighted

__all__ = ["Draws", "Epoch", "Once", "draws_of", "permutation"]

Epoch: TypeAlias = Callable[[int, int], Indices]
"""The addresses of a slice of one epoch's draws."""

_TOTAL_BITS: Final = 60
_MOST_DRAWS: Final = 1 << 50  # up to here the estimate in _divide is off by a few at most
_WEIGHT_KEY: Final = 0x3E16
_LAYOUT_KEY: Final = 0x1A1D
_PART_KEY: Final = 0x9A27


class Draws(Protocol):
    """What the epochs of a run draw."""

    @property
    def length(self) -> int:
        """Draws of one epoch."""

    @property
    def identity(self) -> dict[str, Any] | None:
        """What must not change while the run goes on, beside seed and order; None: nothing."""

    def epoch(self, seed: int, epoch: int, order: str) -> Epoch:
        """The draws of one epoch."""


def permutation(length: int, seed: int, epoch: int, order: str) -> Epoch:
    """The order of an epoch's positions: that of torch's DistributedSampler, or a feistel one."""
    if order == "feistel":
        network = Feistel(length, seed, epoch)
        return Chunks(lambda start, stop: network(np.arange(start, stop)), length)
    generator = torch.Generator()
    generator.manual_seed(seed + epoch)
    table: Indices = torch.randperm(length, generator=generator).numpy()
    return lambda start, stop: table[start:stop]


@dataclass(frozen=True, slots=True)
class Once:
    """Each sample exactly once."""

    length: int

    @property
    def identity(self) -> None:
        """The order says it all."""

    def epoch(self, seed: int, epoch: int, order: str) -> Epoch:
        """A permutation of the samples."""
        return permutation(self.length, seed, epoch, order)


class ByWeight:
    """`jobs.sampling.Weighted`: systematic sampling.

    The weights lie one after the other on a line, in an order that is drawn for each epoch: by the dataset's own,
    which may alternate between classes, a stride would meet one class alone. The line is cut into m equal strides,
    and in each stride one point is marked, all with the same offset, which is drawn for each epoch, too. A sample is
    drawn as often as its weight is marked. The draws then come in the epoch's order.
    """

    def __init__(self, n: int, asked: Weighted) -> None:
        """Take the weights.

        Raises:
            StartError: they are not n numbers of 0 or more, or all are 0.
        """
        self._n, self.length = n, _length_of(asked, n)
        self._units = _in_units(n, asked.weights)
        self._total = int(self._units.sum())
        # All are drawn equally often then: how they lie changes nothing, and the draws are the plain order's.
        self._is_even = self.length % n == 0 and bool((self._units == self._units[0]).all())
        self._digest = hashlib.sha256(self._units.tobytes()).hexdigest()[:16]

    @property
    def identity(self) -> dict[str, Any]:
        """The weights and the draws of an epoch."""
        return {
            "kind": "weighted",
            "laid": "by epoch",
            "samples": self.length,
            "weights": self._digest,
        }

    def epoch(self, seed: int, epoch: int, order: str) -> Epoch:
        """The draws of one epoch; a chunk at a time, since small slices would cost as much."""
        places = permutation(self.length, seed, epoch, order)
        offset = mix(seed, epoch, _WEIGHT_KEY) % self._total
        laid: Indices
        if self._is_even:
            laid = np.arange(self._n)
        else:
            generator = torch.Generator()
            generator.manual_seed(mix(seed, epoch, _LAYOUT_KEY))
            laid = torch.randperm(self._n, generator=generator).numpy()
        ends = np.zeros(self._n + 1, dtype=np.int64)
        np.cumsum(self._units[laid], out=ends[1:])
        strides, rest = _divide(ends, self.length, self._total)
        # Draws of the samples before each one: the marks that lie before its weight begins.
        before = strides + (rest > offset)

        def compute(start: int, stop: int) -> Indices:
            marks = places(start, stop)
            # In order of size, since then the searches share what they touch of a large table.
            by_size = np.argsort(marks)
            found = np.empty(len(marks), dtype=np.int64)
            found[by_size] = np.searchsorted(before, marks[by_size], side="right") - 1
            return laid[found] + self._n * (marks - before[found])

        return Chunks(compute, self.length)


class Mixed:
    """`jobs.sampling.Mixture`: a fixed number of draws from each part, in the epoch's order.

    Each part has its own stream of samples, pass after pass over it, each in another feistel order; an epoch takes
    the next ones of each stream.
    """

    def __init__(self, n: int, asked: Mixture, lengths: Sequence[int]) -> None:
        """Share out the draws of an epoch.

        Raises:
            StartError: weights and parts do not fit each other or the dataset.
        """
        self._n, self.length = n, _length_of(asked, n)
        self._lengths = _checked_parts(n, asked.weights, lengths)
        self._counts = _share_out(self.length, asked.weights)
        for part, (weight, count) in enumerate(zip(asked.weights, self._counts, strict=True)):
            if weight and not count:
                found = f"{weight} for part {part}, which is no draw of an epoch's {self.length}"
                raise StartError(f"Mixture.weights: found {found}, expected 0, or more samples=")
        self._begins = np.concatenate([[0], np.cumsum(self._lengths)])
        self._ends = np.cumsum(self._counts)

    @property
    def identity(self) -> dict[str, Any]:
        """The parts and how much of each an epoch takes."""
        return {
            "kind": "mixture",
            "samples": self.length,
            "lengths": list(self._lengths),
            "draws": list(self._counts),
        }

    def epoch(self, seed: int, epoch: int, order: str) -> Epoch:
        """The draws of one epoch."""
        places = permutation(self.length, seed, epoch, order)
        parts = [
            Feistel(length, seed, part, _PART_KEY) if count else None
            for part, (length, count) in enumerate(zip(self._lengths, self._counts, strict=True))
        ]

        def compute(start: int, stop: int) -> Indices:
            marks = places(start, stop)
            part_of = np.searchsorted(self._ends, marks, side="right")
            found = np.empty(len(marks), dtype=np.int64)
            for part in np.flatnonzero(np.bincount(part_of)).tolist():
                network = parts[part]
                assert network is not None  # a part without draws has no marks
                here = part_of == part
                length, count = self._lengths[part], self._counts[part]
                stream = marks[here] + (epoch * count - (self._ends[part] - count))
                passes, within = np.divmod(stream, length)
                repeat = passes - epoch * count // length
                found[here] = self._begins[part] + network(within, passes) + self._n * repeat
            return found

        return Chunks(compute, self.length)


def draws_of(n: int, sampling: Sampling | None, dataset: object = None) -> Draws:
    """What a job's answer means for a dataset of n samples.

    Raises:
        StartError: it does not fit the dataset, or is none of the kinds.
    """
    if sampling is None:
        return Once(n)
    if isinstance(sampling, Weighted):
        return ByWeight(n, sampling)
    if isinstance(sampling, Mixture):
        return Mixed(n, sampling, _parts_of(sampling, dataset))
    found = type(sampling).__name__
    raise StartError(f"sampling: found {found}, expected None, Weighted(...) or Mixture(...)")


def _length_of(asked: Sampling, n: int) -> int:
    samples = n if asked.samples is None else asked.samples
    if not isinstance(samples, int) or not 1 <= samples <= _MOST_DRAWS:
        expected = f"a whole number, 1 to {_MOST_DRAWS}"
        raise StartError(f"{type(asked).__name__}.samples: found {samples!r}, expected {expected}")
    return samples


def _in_units(n: int, weights: Any) -> Indices:
    """The weights as whole numbers whose sum is at most 2**60; a weight above 0 is at least one unit.

    By powers of two alone, so that equal weights stay equal, and every machine has the same.
    """
    try:
        values = np.asarray(weights, dtype=np.float64).reshape(-1)
    except (TypeError, ValueError) as error:
        found = type(weights).__name__
        raise StartError(f"Weighted.weights: found {found}, expected numbers") from error
    if len(values) != n:
        raise StartError(
            f"Weighted.weights: found {len(values)}, expected one for each of {n} samples"
        )
    wrong = np.flatnonzero(~(np.isfinite(values) & (values >= 0)))
    if len(wrong):
        where = int(wrong[0])
        found = f"{values[where]} for sample {where}"
        raise StartError(f"Weighted.weights: found {found}, expected finite numbers, 0 or more")
    largest = float(values.max())
    if largest == 0:
        raise StartError("Weighted.weights: found only zeros, expected one above 0 at least")
    # 2**exponent is above the largest weight, and n of them must stay within the total.
    exponent = int(np.frexp(largest)[1])
    units = np.rint(np.ldexp(values, _TOTAL_BITS - n.bit_length() - exponent))
    return np.maximum(units, values > 0).astype(np.int64)


def _divide(ends: Indices, count: int, total: int) -> tuple[Indices, Indices]:
    """Quotient and rest of ends * count / total, exactly, though the product may need 120 bits."""
    quotient = (ends.astype(np.float64) * (count / total)).astype(np.int64)
    # The estimate is off by a few, so that the rest fits 64 bits, whatever the product's upper bits are.
    product = ends.astype(np.uint64) * np.uint64(count)
    rest = (product - quotient.astype(np.uint64) * np.uint64(total)).view(np.int64)
    more = np.floor_divide(rest, total)
    return quotient + more, rest - more * total


def _parts_of(asked: Mixture, dataset: object) -> Sequence[int]:
    if asked.lengths is not None:
        return asked.lengths
    ends = getattr(dataset, "cumulative_sizes", None)
    if ends is None:
        found = type(dataset).__name__
        expected = "a ConcatDataset, or Mixture(weights, lengths=[...])"
        raise StartError(
            f"Mixture.lengths: found none, and {found} as dataset, expected {expected}"
        )
    return [int(length) for length in np.diff([0, *ends])]


def _checked_parts(n: int, weights: Sequence[float], lengths: Sequence[int]) -> list[int]:
    if len(weights) != len(lengths):
        found = f"{len(weights)} for {len(lengths)} parts"
        raise StartError(f"Mixture.weights: found {found}, expected one for each")
    if sum(lengths) != n or any(length < 0 for length in lengths):
        found = f"{list(lengths)}, together {sum(lengths)}"
        raise StartError(f"Mixture.lengths: found {found}, expected the dataset's {n} samples")
    for part, (weight, length) in enumerate(zip(weights, lengths, strict=True)):
        if not 0 <= weight < float("inf"):
            raise StartError(
                f"Mixture.weights: found {weight} for part {part}, expected a finite number, 0 or more"
            )
        if weight and not length:
            found = f"{weight} for part {part}, which is empty"
            raise StartError(f"Mixture.weights: found {found}, expected 0, or samples in it")
    if not any(weights):
        raise StartError("Mixture.weights: found only zeros, expected one above 0 at least")
    return [int(length) for length in lengths]


def _share_out(draws: int, weights: Sequence[float]) -> list[int]:
    """Whole numbers in the ratio of the weights that add up: rounded down, the largest rests then get one more."""
    exact = [Fraction(float(weight)) for weight in weights]
    shares = [draws * weight / sum(exact) for weight in exact]
    counts = [int(share) for share in shares]
    by_rest = sorted(range(len(shares)), key=lambda part: (counts[part] - shares[part], part))
    for part in by_rest[: draws - sum(counts)]:
        counts[part] += 1
    return counts
