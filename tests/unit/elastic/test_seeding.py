"""Randomness by address: the same draws for the same sample, whoever reads it and after whatever."""

import pickle
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, Subset

from elastic import seeding
from elastic.sampler import ElasticSampler
from elastic.seeding import (
    Addressed,
    Addresses,
    Seeded,
    kept_random_state,
    mix,
    sample_key,
    seed_all,
    seed_sample,
)
from tests.support import drawing

N = 16


def draw(library: str) -> float:
    """One number from torch, Python, numpy, or Python's gauss, which draws two and keeps one."""
    match library:
        case "t":
            return torch.rand(()).item()
        case "p":
            return random.random()
        case "n":
            return float(np.random.rand())
    return random.gauss(0, 1)


class Drawing(Dataset[tuple[Any, ...]]):
    """Item i is i and a draw from each library asked for, from the sample `first` on; it counts what is read."""

    def __init__(self, libraries: str = "tpn", first: int = 0) -> None:
        self.libraries = libraries
        self.first = first
        self.read: list[int] = []

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        self.read.append(index)
        if index < self.first:
            return (index,)
        return (index, *(draw(library) for library in self.libraries))


class Many(Drawing):
    """The same, read a batch at once."""

    def __getitems__(self, indices: list[int]) -> list[tuple[Any, ...]]:
        return [self[index] for index in indices]


def wanted(dataset: Dataset[Any], epoch: int, indices: list[int], seed: int = 0) -> list[Any]:
    """Each sample read alone, with all seeded: what every other way of reading must give."""
    alone = Addressed(dataset, seed)
    return [alone[epoch, index] for index in indices]


# ------------------------------------------------------------------------------------------- keys
@given(st.lists(st.integers(), min_size=1, max_size=5), st.integers(0, 4), st.integers())
def test_a_key_depends_on_every_number_and_its_place(
    numbers: list[int], place: int, other: int
) -> None:
    key = mix(*numbers)
    assert 0 <= key < 1 << 64
    assert mix(*numbers) == key
    changed = [*numbers]
    changed[place % len(numbers)] = other
    if changed != numbers:
        assert mix(*changed) != key
    assert mix(*numbers, 0) != key


def test_keys_stay_what_they_are() -> None:
    # Other numbers would give running trainings other draws after an update.
    assert mix() == 0x9E3779B97F4A7C15
    assert mix(0, 1, 2) == 0xDA3826A47A61577A
    assert sample_key(0, 1, 2) == 0xE0946BA03406A5F3


def test_no_two_samples_of_an_epoch_share_torchs_32_bits() -> None:
    low = {sample_key(3, 5, index) & 0xFFFFFFFF for index in range(100_000)}
    assert len(low) == 100_000
    assert sample_key(3, 5, 7) != sample_key(3, 5, 7 + 2**32)


def test_neighbouring_samples_draw_unrelated_numbers() -> None:
    draws = []
    for index in range(4000):
        seed_all(sample_key(0, 0, index))
        draws.append((torch.rand(()).item(), random.random(), np.random.rand()))
    table = np.array(draws)
    limit = 4 / np.sqrt(len(table))
    for column in table.T:
        assert abs(np.corrcoef(column[1:], column[:-1])[0, 1]) < limit
        assert abs(column.mean() - 0.5) < limit
    assert np.abs(np.corrcoef(table.T) - np.eye(3)).max() < limit


def test_seeding_all_seeds_all() -> None:
    seen = []
    for key in (7, 7, 2**64 - 1, 7 + 2**63):
        seed_all(key, torch.device("cpu"))
        seen.append((torch.rand(()).item(), random.random(), np.random.rand()))
    assert seen[0] == seen[1]
    assert seen[0] != seen[2] != seen[3]


def test_the_random_state_can_be_kept() -> None:
    def draw_all() -> tuple[float, ...]:
        return torch.randn(()).item(), random.gauss(0, 1), np.random.randn()

    seed_all(1)
    draw_all()  # so that gauss and randn hold a second number back
    with kept_random_state():
        pass
    after = draw_all()
    seed_all(1)
    draw_all()
    with kept_random_state():
        seed_all(99)
        draw_all()
    assert draw_all() == after


# ------------------------------------------------------------------------------------------- Addressed
@pytest.mark.parametrize("kind", [Drawing, Many])
@pytest.mark.parametrize("libraries", ["", "t", "p", "n", "g", "tpn"])
def test_c08_draws_are_the_samples_own_however_they_are_read(
    kind: type[Drawing], libraries: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seeding, "_LEARNING_SAMPLES", 8)
    dataset = kind(libraries)
    addressed = Addressed(dataset, 0)
    for epoch in range(2):
        expected = wanted(kind(libraries), epoch, list(range(N)))
        for batch in (list(range(4)), [3, 2], [9], list(range(N)), [15, 0]):
            random.seed(random.getrandbits(30))
            assert addressed.__getitems__(Addresses(epoch, batch)) == [expected[i] for i in batch]


def test_c08_all_draws_of_two_epochs_differ() -> None:
    addressed = Addressed(Drawing(), 0)
    draws = [
        d
        for epoch in range(2)
        for _, *d in addressed.__getitems__(Addresses(epoch, list(range(N))))
    ]
    for column in zip(*draws, strict=True):
        assert len(set(column)) == 2 * N


def test_another_seed_draws_other_numbers() -> None:
    assert wanted(Drawing(), 0, [1], seed=1) != wanted(Drawing(), 0, [1], seed=2)


@pytest.mark.parametrize("kind", [Drawing, Many])
@pytest.mark.parametrize("libraries", ["t", "p", "n", "g", "tpn"])
def test_a_dataset_that_draws_late_and_rarely_is_seen(kind: type[Drawing], libraries: str) -> None:
    first = 1000
    addressed = Addressed(kind(libraries, first), 0)
    for start in range(0, first, 50):
        addressed.__getitems__(Addresses(0, list(range(start, start + 50))))
    batch = list(range(first - 3, first + 3))
    for _ in range(2):
        assert addressed.__getitems__(Addresses(0, batch)) == wanted(
            kind(libraries, first), 0, batch
        )


def test_a_dataset_that_draws_from_the_start_is_read_once() -> None:
    dataset = Drawing()
    addressed = Addressed(dataset, 0)
    batches = [list(range(start, start + 32)) for start in range(0, 512, 32)]
    for batch in batches:
        addressed.__getitems__(Addresses(0, batch))
    assert dataset.read == list(range(512))


def test_a_failure_that_only_a_wrong_draw_brings_is_none() -> None:
    class Picky(Drawing):
        """Fails where the draw is not the sample's own."""

        def __getitem__(self, index: int) -> tuple[Any, ...]:
            draw = random.random()
            if index >= 300 and draw not in allowed:
                raise ValueError(f"sample {index} drew {draw}")
            return index, draw

    allowed: set[float] = set()
    for index in range(300, 310):
        seed_all(sample_key(0, 0, index))
        allowed.add(random.random())
    addressed = Addressed(Picky(), 0)
    addressed._left_to_learn = 0
    samples = addressed.__getitems__(Addresses(0, list(range(300, 310))))
    assert {draw for _, draw in samples} == allowed


@pytest.mark.parametrize("learn", [True, False])
def test_a_failure_of_the_dataset_is_its_own(learn: bool) -> None:
    class Broken(Drawing):
        """Has no sample 3."""

        def __getitem__(self, index: int) -> tuple[Any, ...]:
            if index == 3:
                raise KeyError("sample 3 is broken")
            return (index,)

    addressed = Addressed(Broken(), 0)
    if not learn:
        addressed._left_to_learn = 0
    with pytest.raises(KeyError, match="sample 3 is broken"):
        addressed.__getitems__(Addresses(0, [1, 2, 3]))


def test_the_draws_of_a_collate_function_are_addressed_too() -> None:
    addressed = Addressed(Drawing(""), 0, seeds_collate=True)
    draws = []
    for epoch, batch in ((0, [1, 2]), (0, [3]), (0, [1, 2]), (1, [1, 2])):
        addressed.__getitems__(Addresses(epoch, batch))
        draws.append((torch.rand(()).item(), random.random(), np.random.rand()))
    assert draws[0] == draws[2]
    assert len(set(draws)) == 3


def test_an_addressed_dataset_travels_to_another_process() -> None:
    addressed = Addressed(Drawing(), 0)
    addressed.__getitems__(Addresses(0, list(range(300))))
    copy = pickle.loads(pickle.dumps(addressed))  # noqa: S301 (its own)
    assert copy.__getitems__(Addresses(1, [4, 5])) == wanted(Drawing(), 1, [4, 5])
    assert len(copy) == 10_000


def test_a_subset_of_a_dataset_is_read_as_it_reads() -> None:
    addressed = Addressed(Subset(Drawing(), [7, 8, 9]), 0)
    for _ in range(2):
        samples = addressed.__getitems__(Addresses(0, [2, 0]))
        assert [sample[0] for sample in samples] == [9, 7]
        assert samples == [addressed[0, 2], addressed[0, 0]]


@pytest.mark.parametrize("kind", [Drawing, Many])
@pytest.mark.parametrize("libraries", ["", "t", "tpn"])
@pytest.mark.parametrize("learn", [True, False])
def test_a_sample_that_comes_again_draws_anew(
    kind: type[Drawing], libraries: str, learn: bool
) -> None:
    dataset = kind(libraries)
    addressed = Addressed(dataset, 0, n=10)
    if not learn:
        addressed._left_to_learn = 0
    for _ in range(2):
        found = addressed.__getitems__(Addresses(0, [3, 13, 7, 23]))
        assert [sample[0] for sample in found] == [3, 3, 7, 3]
        assert found == [addressed[0, 3], addressed[0, 13], addressed[0, 7], addressed[0, 23]]
        assert not libraries or len({found[0][1], found[1][1], found[3][1]}) == 3
    assert set(dataset.read) == {3, 7}
    assert found[0] == wanted(kind(libraries), 0, [3])[0]


# ------------------------------------------------------------------------------------------- Seeded
def epochs_of(
    loader: "DataLoader[Any]", dataset: Seeded[Any], epochs: list[int]
) -> list[list[Any]]:
    """The samples of some epochs, in order of index."""
    found = []
    for epoch in epochs:
        dataset.set_epoch(epoch)
        columns = [torch.cat(list(column)).tolist() for column in zip(*loader, strict=True)]
        found.append(sorted(zip(*columns, strict=True)))
    return found


@pytest.mark.parametrize(
    ("workers", "method", "persistent"),
    [
        (0, None, False),
        (2, "fork", False),
        (2, "fork", True),
        (4, "fork", True),
        (2, "spawn", True),
        (2, "forkserver", True),
    ],
)
@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
def test_c08_draws_in_a_loop_of_ones_own_are_equal_for_any_workers(
    workers: int, method: str | None, persistent: bool
) -> None:
    plain = drawing.Drawing(N)
    expected: list[list[Any]] = []
    for epoch in range(2):
        expected.append([])
        for index in range(N):
            seed_sample(7, epoch, index)
            expected[-1].append(plain[index])
    dataset = Seeded(plain, 7)
    loader = DataLoader(
        dataset,
        batch_size=4,
        shuffle=True,
        num_workers=workers,
        multiprocessing_context=method,
        persistent_workers=persistent,
    )
    assert epochs_of(loader, dataset, [0, 1, 0]) == [*expected, expected[0]]
    for column in list(zip(*expected[0], *expected[1], strict=True))[1:]:
        assert len(set(column)) == 2 * N


def test_c08_draws_in_a_loop_of_ones_own_do_not_know_ranks_or_restarts() -> None:
    found = []
    for world, position in ((1, 0), (2, 0), (3, 8)):
        for rank in range(world):
            dataset = Seeded(drawing.Drawing(N), 7)
            sampler = ElasticSampler(dataset, world, rank)
            sampler.advance(position)
            found += [dataset[index] for index in sampler]
    assert len(found) == N + N + N - 8
    assert len(set(found)) == N


def test_reading_in_the_process_that_trains_leaves_its_random_state() -> None:
    dataset = Seeded(drawing.Drawing(N), 1)
    seed_all(5)
    expected = [draw(library) for library in "tpn"]
    seed_all(5)
    assert dataset[3] == dataset.__getitems__([3])[0]
    assert [draw(library) for library in "tpn"] == expected
    assert len(dataset) == N


def test_torch_and_numpy_draw_apart() -> None:
    same = 0
    for index in range(1000):
        seed_all(sample_key(0, 0, index))
        same += int(torch.randint(0, 8, (1,))) == np.random.randint(0, 8)
    assert 60 < same < 190  # one in eight by chance
