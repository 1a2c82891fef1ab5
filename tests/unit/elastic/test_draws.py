"""What an epoch draws: each sample once, by weight, or mixed, in exact numbers and any slice alone."""

import math
from collections import Counter
from fractions import Fraction
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import ConcatDataset, Dataset

from elastic.draws import ByWeight, Draws, Mixed, Once, _divide, _share_out, draws_of
from elastic.errors import StartError
from elastic.sampler import ElasticSampler, Plan, epoch_order
from jobs.sampling import Mixture, Weighted

ORDERS = ("torch", "feistel")


class Data(Dataset[int]):
    """The numbers below n."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        return index


def drawn(draws: Draws, n: int, epoch: int, order: str = "feistel", seed: int = 0) -> list[int]:
    """The samples of an epoch in order."""
    return (draws.epoch(seed, epoch, order)(0, draws.length) % n).tolist()  # type: ignore[no-any-return]


weights = st.lists(
    st.one_of(st.just(0.0), st.floats(1e-6, 1e6), st.integers(0, 5).map(float)),
    min_size=1,
    max_size=40,
).filter(any)


# ------------------------------------------------------------------------------------------- once
@pytest.mark.parametrize("order", ORDERS)
def test_without_a_wish_each_sample_is_drawn_once(order: str) -> None:
    draws = draws_of(20, None)
    assert draws == Once(20)
    assert draws.identity is None
    assert sorted(drawn(draws, 20, 3, order)) == list(range(20))
    assert drawn(draws, 20, 3, order) == epoch_order(20, 0, 3, order).tolist()


# ------------------------------------------------------------------------------------------- by weight
@settings(max_examples=150, deadline=None)
@given(
    weights=weights,
    samples=st.integers(1, 300),
    seed=st.integers(0, 2**63 - 1),
    epoch=st.integers(0, 9),
)
def test_each_sample_is_drawn_its_share_rounded_down_or_up(
    weights: list[float], samples: int, seed: int, epoch: int
) -> None:
    n = len(weights)
    draws = ByWeight(n, Weighted(weights, samples))
    counts = Counter(drawn(draws, n, epoch, seed=seed))
    assert sum(counts.values()) == samples
    total = sum(map(Fraction, weights))
    for sample, weight in enumerate(weights):
        # Weights are taken in units of 2^-60/n; a share that is whole but for that may go either way.
        share = samples * Fraction(weight) / total
        assert (
            math.floor(share - Fraction(1, 10**6))
            <= counts[sample]
            <= math.ceil(share + Fraction(1, 10**6))
        )
        assert weight or not counts[sample]


@pytest.mark.parametrize("weight", [1.0, 0.1, 1e-300, 3e307, 7])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("n", [1, 7, 1000, 1 << 17])
def test_equal_weights_are_the_plain_order(n: int, order: str, weight: float) -> None:
    draws = ByWeight(n, Weighted([weight] * n))
    for epoch in range(2):
        assert drawn(draws, n, epoch, order) == drawn(Once(n), n, epoch, order)


def test_over_epochs_the_share_is_the_weight() -> None:
    weights = np.random.default_rng(0).exponential(size=50)
    draws = ByWeight(50, Weighted(weights, 70))
    epochs = 4000
    counts = np.zeros(50)
    for epoch in range(epochs):
        counts += np.bincount(drawn(draws, 50, epoch), minlength=50)
    share = weights / weights.sum() * 70 * epochs
    # Rounding down or up has at most the variance of a fair coin.
    assert np.abs(counts - share).max() < 5 * 0.5 * math.sqrt(epochs)


def test_counts_are_exact_where_the_product_needs_more_than_64_bits() -> None:
    n, samples = 1000, 10**12 + 7
    units = np.round(np.ldexp(np.arange(1, n + 1), 60 - 10 - 10)).astype(object)
    ends, total = np.cumsum(units), int(units.sum())
    strides, rests = _divide(ends.astype(np.int64), samples, total)
    for i in range(n):
        assert (strides[i], rests[i]) == divmod(int(ends[i]) * samples, total)


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor])
def test_weights_come_in_any_form(kind: Any) -> None:
    plain = ByWeight(3, Weighted([1.0, 0.0, 3.0]))
    other = ByWeight(3, Weighted(kind([1.0, 0.0, 3.0])))
    assert other.identity == plain.identity
    assert drawn(other, 3, 0) == drawn(plain, 3, 0)


def test_only_ratios_of_weights_count_and_others_are_another_identity() -> None:
    one = ByWeight(3, Weighted([1.0, 2.0, 3.0]))
    assert one.identity == ByWeight(3, Weighted([4.0, 8.0, 12.0])).identity
    assert one.identity == {
        "kind": "weighted", "laid": "by epoch", "samples": 3, "weights": one.identity["weights"],
    }  # fmt: skip
    assert one.identity != ByWeight(3, Weighted([1.0, 2.0, 3.1])).identity
    assert one.identity != ByWeight(3, Weighted([1.0, 2.0, 3.0], 4)).identity


def test_weighted_draws_stay_what_they_are() -> None:
    draws = ByWeight(6, Weighted([1, 0, 2, 3, 0.5, 0.25], 12))
    assert draws.epoch(3, 1, "feistel")(0, 12).tolist() == [6, 15, 3, 8, 20, 0, 27, 2, 9, 4, 14, 21]


@pytest.mark.parametrize("period", [2, 10, 100])
def test_samples_that_come_together_are_not_those_at_a_distance_in_the_dataset(period: int) -> None:
    """As where the dataset alternates between classes: one stride would meet one class alone."""
    for weights in ([1.0] * 1000, [3.0 if i % period else 1.0 for i in range(1000)]):
        draws = ByWeight(1000, Weighted(weights, 200))
        share = sum(weights[::period]) / sum(weights)
        for epoch in range(5):
            samples = np.array(draws.epoch(0, epoch, "torch")(0, 200)) % 1000
            found = float((samples % period == 0).mean())
            assert abs(found - share) < 4 * (share * (1 - share) / 200) ** 0.5


# ------------------------------------------------------------------------------------------- mixtures
@settings(max_examples=100, deadline=None)
@given(
    parts=st.lists(
        st.tuples(st.integers(1, 30), st.one_of(st.just(0.0), st.floats(0.01, 10))),
        min_size=1,
        max_size=5,
    ).filter(lambda parts: any(weight for _, weight in parts)),
    samples=st.integers(1, 150),
    seed=st.integers(0, 2**40),
    order=st.sampled_from(ORDERS),
)
def test_a_mixture_is_exact_in_each_epoch_and_over_epochs(
    parts: list[tuple[int, float]], samples: int, seed: int, order: str
) -> None:
    lengths, weights = [length for length, _ in parts], [weight for _, weight in parts]
    n = sum(lengths)
    shares = _share_out(samples, weights)
    if any(weight and not count for weight, count in zip(weights, shares, strict=True)):
        with pytest.raises(StartError, match="which is no draw of an epoch's"):
            Mixed(n, Mixture(weights, lengths, samples), lengths)
        return
    draws = Mixed(n, Mixture(weights, lengths, samples), lengths)
    begins = [sum(lengths[:part]) for part in range(len(parts))]
    taken: Counter[int] = Counter()
    counts = [0] * len(parts)
    for epoch in range(4):
        found = Counter(drawn(draws, n, epoch, order, seed))
        taken.update(found)
        for part, (begin, (length, weight)) in enumerate(zip(begins, parts, strict=True)):
            count = sum(found[i] for i in range(begin, begin + length))
            assert count == draws._counts[part]
            assert abs(count - samples * weight / sum(weights)) < 1 + 1e-9
            counts[part] += count
            # As often as any other, give or take once.
            times = [taken[i] for i in range(begin, begin + length)]
            assert max(times) - min(times) <= 1
    assert sum(counts) == 4 * samples


def test_what_is_left_over_goes_to_the_largest_rests() -> None:
    assert Mixed(3, Mixture([1, 1, 1], [1, 1, 1], 10), [1, 1, 1])._counts == [4, 3, 3]
    assert Mixed(3, Mixture([0.7, 0.2, 0.1], [1, 1, 1], 10), [1, 1, 1])._counts == [7, 2, 1]
    assert Mixed(3, Mixture([5, 3, 2], [1, 1, 1], 7), [1, 1, 1])._counts == [4, 2, 1]


def test_a_sample_that_comes_again_has_another_address() -> None:
    for draws in (
        draws_of(5, Weighted([1, 2, 3, 4, 5], 100)),
        draws_of(5, Mixture([1, 3], [2, 3], 100)),
    ):
        for epoch in range(3):
            addresses = draws.epoch(0, epoch, "feistel")(0, 100).tolist()
            assert len(set(addresses)) == 100
            for sample, count in Counter(address % 5 for address in addresses).items():
                repeats = sorted(address // 5 for address in addresses if address % 5 == sample)
                # A mixture's pass may begin in the epoch before.
                assert repeats[-1] in {count - 1, count}
                assert len(repeats) == count


def test_the_parts_of_a_concatenation_are_its_datasets() -> None:
    data: Dataset[int] = ConcatDataset([Data(3), Data(4)])
    assert draws_of(7, Mixture([1, 1]), data).identity == {
        "kind": "mixture",
        "samples": 7,
        "lengths": [3, 4],
        "draws": [4, 3],
    }


def test_mixed_draws_stay_what_they_are() -> None:
    draws = draws_of(7, Mixture([1, 2], [3, 4], 9))
    assert draws.epoch(3, 1, "feistel")(0, 9).tolist() == [1, 10, 3, 5, 11, 12, 13, 2, 0]


# ------------------------------------------------------------------------------------------- any slice, any world
SAMPLINGS: list[Any] = [None, Weighted([0.5, 1, 1.5, 2, 0] * 6, 47), Mixture([1, 4], [10, 20], 71)]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["once", "weighted", "mixture"])
def test_a_slice_is_a_slice_wherever_one_begins(sampling: Any, order: str) -> None:
    draws = draws_of(30, sampling)
    whole = draws.epoch(7, 2, order)(0, draws.length).tolist()
    for start in range(0, draws.length, 7):
        fresh = draws.epoch(7, 2, order)
        assert fresh(start, min(draws.length, start + 5)).tolist() == whole[start : start + 5]


@settings(max_examples=80, deadline=None)
@given(
    sampling=st.sampled_from(SAMPLINGS),
    order=st.sampled_from(ORDERS),
    batch=st.integers(1, 30),
    drop_last=st.booleans(),
    data=st.data(),
)
def test_every_history_of_worlds_draws_the_same(
    sampling: Any, order: str, batch: int, drop_last: bool, data: st.DataObject
) -> None:
    draws = draws_of(30, sampling)

    def plan(shards: int) -> Plan:
        return Plan(
            n=30,
            global_batch_size=batch,
            seed=1,
            shards=shards,
            drop_last=drop_last,
            order=order,
            draws=draws,
        )

    one = plan(1)
    for epoch in range(2):
        position, taken = 0, []
        while position < one.samples:
            other = plan(data.draw(st.integers(1, 9), label="world size"))
            step = other.step_at(position)
            parts = [other.indices(epoch, step, shard) for shard in range(other.shards)]
            together = list(chain(*parts))
            assert together == one.indices(epoch, step, 0)
            taken += together
            position += other.size(step)
        assert taken == drawn(draws, 30, epoch, order, 1)[: one.samples]
        assert one.order_of(epoch).tolist()[: one.samples] == taken


def test_a_plan_tells_what_belongs_to_the_runs_identity() -> None:
    plain = Plan(n=30, global_batch_size=4, draws=draws_of(30, None))
    assert (plain.sampling, plain.repeats, plain.length, plain.order) == ({}, False, 30, "torch")
    mixed = Plan(n=30, global_batch_size=4, draws=draws_of(30, SAMPLINGS[2]), order="feistel")
    assert (mixed.repeats, mixed.length, mixed.samples, mixed.steps) == (True, 71, 71, 18)
    assert mixed.sampling["sampling"]["kind"] == "mixture"
    assert (
        Plan(n=2, global_batch_size=4, draws=draws_of(2, Weighted([1, 2], 1 << 25))).order
        == "feistel"
    )


@pytest.mark.parametrize("sampling", SAMPLINGS[1:], ids=["weighted", "mixture"])
@pytest.mark.parametrize("batch", [None, 6])
def test_the_elastic_sampler_draws_the_same_in_every_world(
    sampling: Any, batch: int | None
) -> None:
    def make(world: int) -> list[ElasticSampler]:
        return [
            ElasticSampler(
                Data(30), world, rank, global_batch_size=batch, order="feistel", sampling=sampling
            )
            for rank in range(world)
        ]

    draws = draws_of(30, sampling)
    wanted = drawn(draws, 30, 0)
    before = make(2)
    assert Counter(i for sampler in before for i in sampler) == Counter(wanted)
    assert sum(len(sampler) for sampler in before) == draws.length
    before[0].advance(12)
    after = make(3)
    for sampler in after:
        sampler.load_state_dict(before[0].state_dict())
    assert Counter(i for sampler in after for i in sampler) == Counter(wanted[12:])
    other = ElasticSampler(Data(30), 1, 0, order="feistel")
    with pytest.raises(StartError, match=r"^sampling: found None here and \{'kind'"):
        other.load_state_dict({**before[0].state_dict(), "samples": 30})


# ------------------------------------------------------------------------------------------- what is refused
@pytest.mark.parametrize(
    ("sampling", "text"),
    [
        ("often", "sampling: found str, expected None, Weighted(...) or Mixture(...)"),
        (Weighted([1, 2]), "Weighted.weights: found 2, expected one for each of 3 samples"),
        (Weighted([1, -2, 3]), "Weighted.weights: found -2.0 for sample 1, expected finite numbers, 0 or more"),
        (Weighted([1, 2, math.nan]), "Weighted.weights: found nan for sample 2, expected finite numbers"),
        (Weighted([1, math.inf, 2]), "Weighted.weights: found inf for sample 1, expected finite numbers"),
        (Weighted([0, 0, 0]), "Weighted.weights: found only zeros, expected one above 0 at least"),
        (Weighted({"a": 1}), "Weighted.weights: found dict, expected numbers"),
        (Weighted([1, 1, 1], 0), "Weighted.samples: found 0, expected a whole number, 1 to"),
        (Weighted([1, 1, 1], 1.5), "Weighted.samples: found 1.5, expected a whole number"),  # type: ignore[arg-type] # (that is the test)
        (Mixture([1]), "Mixture.lengths: found none, and Data as dataset, expected a ConcatDataset"),
        (Mixture([1], [1, 2]), "Mixture.weights: found 1 for 2 parts, expected one for each"),
        (Mixture([1, 1], [1, 1]), "Mixture.lengths: found [1, 1], together 2, expected the dataset's 3 samples"),
        (Mixture([1, 1], [4, -1]), "Mixture.lengths: found [4, -1], together 3, expected"),
        (Mixture([1, -1], [1, 2]), "Mixture.weights: found -1 for part 1, expected a finite number"),
        (Mixture([1, 1], [0, 3]), "Mixture.weights: found 1 for part 0, which is empty, expected 0, or samples"),
        (Mixture([1, 9], [1, 2]), "Mixture.weights: found 1 for part 0, which is no draw of an epoch's 3, expected 0, or more samples="),
        (Mixture([0, 0], [1, 2]), "Mixture.weights: found only zeros"),
        (Mixture([1, 1], [1, 2], -1), "Mixture.samples: found -1, expected a whole number"),
    ],
)  # fmt: skip
def test_a_wish_that_does_not_fit_is_refused(sampling: Any, text: str) -> None:
    with pytest.raises(StartError) as caught:
        draws_of(3, sampling, Data(3))
    assert str(caught.value).startswith(text)
