"""Randomness by address: what is drawn depends on what it is drawn for, never on the history of a process.

A sample's draws depend on (run's seed, epoch, sample), a forward's on the key that its caller mixes, in torch, `random` and numpy
alike. So nothing per rank or loader worker has to be saved, and a restart or another world draws the same numbers.

What the runner reads is seeded without being asked. In a loop of one's own: `Seeded(dataset, seed)` around any map-style dataset, or
`seed_sample(seed, epoch, index)` first in a `__getitem__`; `sample_key` is the number for a generator of one's own.

Limits: a dataset's own generators and shuffle buffers are its own, and a dataset that only reads a seed (`torch.initial_seed()`)
without drawing is not seen to be random.
"""

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch.utils.data import Dataset, get_worker_info

__all__ = [
    "Addressed",
    "Addresses",
    "Seeded",
    "kept_random_state",
    "mix",
    "sample_key",
    "seed_all",
    "seed_sample",
]

_Sample_co = TypeVar("_Sample_co", covariant=True)
_LOW = (1 << 32) - 1
_ALL = (1 << 64) - 1
_BATCH = 0xBA7C
_NUMPY = 0x6E756D70
"""numpy's and torch's generators are of one kind: with the same seed both would draw the very same numbers."""
_WATCH_KEY = 0x0DD5EED
_LEARNING_SAMPLES = 256


def mix(*numbers: int) -> int:
    """One 64-bit key from any numbers, negative or large ones too; their order counts."""
    key = 0x9E3779B97F4A7C15
    for n in numbers:
        # splitmix64's finaliser after each number; the increment keeps runs of zeros apart.
        key = ((key ^ (n & _ALL)) + 0x9E3779B97F4A7C15) & _ALL
        key = ((key ^ (key >> 30)) * 0xBF58476D1CE4E5B9) & _ALL
        key = ((key ^ (key >> 27)) * 0x94D049BB133111EB) & _ALL
        key ^= key >> 31
        if not -1 << 63 <= n <= _ALL:
            key = mix(key, n >> 64)
    return key


def sample_key(seed: int, epoch: int, index: int) -> int:
    """The key of one sample in one epoch.

    torch's CPU generator and numpy use its low 32 bits alone; these are a permutation of the index, so that within an epoch no two
    samples share a stream (mixed freely, a million would have some hundred pairs).
    """
    return _key_in_epoch(mix(seed, epoch), index)


def seed_sample(seed: int, epoch: int, index: int) -> None:
    """Seed torch's CPU generator, `random` and numpy for one sample, as the runner does before it reads one.

    In the process that trains, put `kept_random_state()` around it, or dropout would follow the sample that was read last.
    """
    seed_all(sample_key(seed, epoch, index))


def _key_in_epoch(epoch_key: int, index: int) -> int:
    x = (index + epoch_key) & _LOW
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _LOW
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _LOW
    x ^= x >> 16
    return (((epoch_key + (index >> 32)) << 32) & _ALL) | x


def seed_all(key: int, device: torch.device | None = None) -> None:
    """Seed torch's CPU generator, `random`, numpy, and a CUDA device's generator.

    Not torch.manual_seed, which asks every kind of device and costs 70 times as much.
    """
    for library in _LIBRARIES:
        library.seed(key)
    if device is not None and device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(key)


@contextlib.contextmanager
def kept_random_state(device: torch.device | None = None) -> Iterator[None]:
    """Put torch's, Python's and numpy's random states back at the end, whatever was drawn or seeded."""
    states = [(library, library.save()) for library in _LIBRARIES]
    cuda = device is not None and device.type == "cuda"
    on_device = torch.cuda.get_rng_state(device) if device is not None and cuda else None
    try:
        yield
    finally:
        for library, state in states:
            library.restore(state)
        if device is not None and on_device is not None:
            torch.cuda.set_rng_state(on_device, device)


class Addresses(NamedTuple):
    """The samples of one micro-batch, as they go to a loader worker."""

    epoch: int
    indices: list[int]
    """With `n` given to Addressed: sample + n * how often it was drawn before in the epoch."""


class Addressed(Dataset[_Sample_co]):
    """A map-style dataset whose random draws depend on (seed, epoch, sample) alone.

    An item is asked for as (epoch, index). A DataLoader asks for the items of one Addresses at once: then what the dataset does
    not draw from is not seeded, for that would cost more than reading a small sample does (`random` alone takes 4 us). Which
    libraries it draws from is learned from its first samples; the others are watched, and where one is drawn from after all, the
    batch is read again with that one seeded, and so are all to come. So the outcome is as if every sample had been seeded.

    A dataset with `__getitems__` is read with it, a whole micro-batch at once, unless it draws: then sample by sample.
    """

    def __init__(
        self,
        dataset: Dataset[_Sample_co],
        seed: int,
        *,
        seeds_collate: bool = False,
        n: int | None = None,
    ) -> None:
        """Wrap a dataset.

        Args:
            dataset: map-style.
            seed: the run's.
            seeds_collate: whether a collate function's draws depend on (seed, epoch, first sample).
            n: where a sample may come again in an epoch: address n * k + i is sample i, with draws of its own for each k.
        """
        self.dataset = dataset
        self._seed = seed
        self._n = n
        self._seeds_collate = seeds_collate
        many: Callable[[list[int]], list[_Sample_co]] | None
        many = getattr(dataset, "__getitems__", None)
        self._many = many
        # A batch at a time is what such a dataset is good at, so nothing is learned one by one.
        self._left_to_learn = 0 if many else _LEARNING_SAMPLES
        self._drawn: list[_Library] = []
        self._watched: list[_Library] = list(_LIBRARIES)

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type] # (torch's Dataset declares no __len__)

    def __getitem__(self, address: tuple[int, int]) -> _Sample_co:
        """Read one sample with every library seeded for it."""
        epoch, index = address
        seed_all(sample_key(self._seed, epoch, index))
        return self._one(index)

    def __getitems__(self, addresses: Addresses) -> list[_Sample_co]:
        """Read the samples of a micro-batch; what DataLoader calls."""
        epoch_key = mix(self._seed, addresses.epoch)
        if self._left_to_learn > 0:
            self._left_to_learn -= len(addresses.indices)
            samples = self._learn(epoch_key, addresses.indices)
        else:
            samples = self._watch(epoch_key, addresses.indices)
        if self._seeds_collate:
            seed_all(mix(epoch_key, addresses.indices[0], _BATCH))
        return samples

    def _learn(self, epoch_key: int, indices: list[int]) -> list[_Sample_co]:
        """Seed everything for each sample, and see what it draws from."""
        samples = []
        for index in indices:
            key = _key_in_epoch(epoch_key, index)
            for library in _LIBRARIES:
                library.seed(key)
            samples.append(self._one(index))
            for library in [*self._watched]:
                after = library.peek()
                library.seed(key)
                if library.peek() != after:
                    self._note_drawn(library)
        return samples

    def _watch(self, epoch_key: int, indices: list[int]) -> list[_Sample_co]:
        """Seed for each sample what is drawn from; read again where more is drawn from than was known."""
        while True:
            watched = [(library, library.watch()) for library in self._watched]
            try:
                samples = self._read(epoch_key, indices)
            except Exception:
                # It may fail for a number that it would never have drawn.
                if not self._find_drawn(watched):
                    raise
                continue
            if not self._find_drawn(watched):
                return samples

    def _find_drawn(self, watched: "list[tuple[_Library, object]]") -> bool:
        drawn = [library for library, untouched in watched if library.peek() != untouched]
        for library in drawn:
            self._note_drawn(library)
        return bool(drawn)

    def _note_drawn(self, library: "_Library") -> None:
        self._watched.remove(library)
        self._drawn.append(library)

    def _read(self, epoch_key: int, indices: list[int]) -> list[_Sample_co]:
        drawn = self._drawn
        if not drawn:
            if self._many is not None:
                return list(self._many(self._samples(indices)))
            dataset = self.dataset
            return [dataset[index] for index in self._samples(indices)]
        samples = []
        seeds = [library.seed for library in drawn]
        plain = self._many is None and self._n is None
        one = self.dataset.__getitem__ if plain else self._one
        for index in indices:
            key = _key_in_epoch(epoch_key, index)
            for seed in seeds:
                seed(key)
            samples.append(one(index))
        return samples

    def _samples(self, addresses: list[int]) -> list[int]:
        n = self._n
        return addresses if n is None else [address % n for address in addresses]

    def _one(self, address: int) -> _Sample_co:
        index = address if self._n is None else address % self._n
        if self._many is None:
            return self.dataset[index]
        only: _Sample_co = self._many([index])[0]
        return only


class Seeded(Dataset[_Sample_co]):
    """For a DataLoader of one's own: a map-style dataset whose random draws depend on (seed, epoch, index) alone.

    The same numbers for any number of loader workers, however they are started, in any process and world, and after any restart;
    another number in each epoch that `set_epoch` tells, persistent workers too. The random state of a process that reads without
    workers stays as it was.
    """

    def __init__(self, dataset: Dataset[_Sample_co], seed: int = 0) -> None:
        """Wrap a dataset."""
        self.dataset = dataset
        self._addressed = Addressed(dataset, seed)
        # Shared, since the workers of an earlier epoch may live on, each with its copy of all else.
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()

    def set_epoch(self, epoch: int) -> None:
        """Tell the epoch, before the DataLoader is iterated, as with DistributedSampler."""
        self._epoch.fill_(epoch)

    def __len__(self) -> int:
        return len(self._addressed)

    def __getitem__(self, index: int) -> _Sample_co:
        """Read one sample."""
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[_Sample_co]:
        """Read the samples of a batch; what DataLoader calls."""
        addresses = Addresses(int(self._epoch), [int(index) for index in indices])
        with kept_random_state() if get_worker_info() is None else contextlib.nullcontext():
            return self._addressed.__getitems__(addresses)


class _Library(Protocol):
    """One library's global generator."""

    def seed(self, key: int) -> None:
        """Begin the stream of a key."""

    def peek(self) -> object:
        """Something that differs once anything has been drawn since the seeding; may itself draw."""

    def watch(self) -> object:
        """Seed with a fixed key, and tell what peek will say if nothing is drawn."""

    def save(self) -> Any:
        """The whole state."""

    def restore(self, state: Any) -> None:
        """Put a saved state back."""


class _Torch:
    untouched: object = None

    def seed(self, key: int) -> None:
        torch.default_generator.manual_seed(key)

    def peek(self) -> object:
        return torch.default_generator.get_state().numpy().tobytes()

    def watch(self) -> object:
        self.seed(_WATCH_KEY)
        if self.untouched is None:
            self.untouched = self.peek()
        return self.untouched

    def save(self) -> Any:
        return torch.default_generator.get_state()

    def restore(self, state: Any) -> None:
        torch.default_generator.set_state(state)


class _Python:
    untouched = random.Random(_WATCH_KEY).getrandbits(128)  # noqa: S311 (no secret)

    def seed(self, key: int) -> None:
        random.seed(key)

    def peek(self) -> object:
        # 128 bits of its stream; its state, a tuple of 625 numbers, takes a hundred times as long.
        return random.getrandbits(128)

    def watch(self) -> object:
        random.seed(_WATCH_KEY)
        return self.untouched

    def save(self) -> Any:
        return random.getstate()

    def restore(self, state: Any) -> None:
        random.setstate(state)


class _Numpy:
    untouched = np.random.RandomState(_WATCH_KEY).random_sample()

    def seed(self, key: int) -> None:
        np.random.seed((key & _LOW) ^ _NUMPY)

    def peek(self) -> object:
        return np.random.random_sample()

    def watch(self) -> object:
        np.random.seed(_WATCH_KEY)
        return self.untouched

    def save(self) -> Any:
        return np.random.get_state()

    def restore(self, state: Any) -> None:
        np.random.set_state(state)


_LIBRARIES: "tuple[_Library, ...]" = (_Torch(), _Python(), _Numpy())
