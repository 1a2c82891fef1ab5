"""Who takes which sample: each exactly once, whatever the world does."""

import pickle
from collections import Counter
from itertools import chain, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from elastic.errors import ConfigError, StartError
from elastic.sampler import ElasticSampler, Plan, epoch_order, part, steps_in_epoch
from jobs.sampling import Weighted


class Data(Dataset[int]):
    """The numbers below n."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        return index


def sets(plan: Plan, epoch: int, first: int = 0) -> list[list[int]]:
    """What all shards together take in each step from one on, in the order's own order."""
    return [
        [i for shard in range(plan.shards) for i in plan.indices(epoch, step, shard)]
        for step in range(first, plan.steps)
    ]


# ------------------------------------------------------------------------------------------- numbers
@given(st.integers(0, 200), st.integers(0, 200), st.integers(1, 40))
def test_parts_are_contiguous_cover_all_and_differ_by_one(
    start: int, size: int, shards: int
) -> None:
    parts = [part(start, start + size, shard, shards) for shard in range(shards)]
    assert parts[0][0] == start
    assert parts[-1][1] == start + size
    assert all(left[1] == right[0] for left, right in pairwise(parts))
    sizes = [b - a for a, b in parts]
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    ("n", "batch", "drop_last", "steps"),
    [
        (10, 4, False, 3),
        (10, 4, True, 2),
        (8, 4, False, 2),
        (8, 4, True, 2),
        (9, 4, False, 3),
        (3, 4, True, 0),
    ],
)
def test_the_last_step_is_smaller_or_dropped(
    n: int, batch: int, drop_last: bool, steps: int
) -> None:
    assert steps_in_epoch(n, batch, drop_last) == steps


@pytest.mark.parametrize("n", [1, 7, 60, 1000])
def test_the_order_is_that_of_torchs_distributed_sampler(n: int) -> None:
    for seed, epoch in ((0, 0), (3, 4), (2**40, 1)):
        theirs: DistributedSampler[int] = DistributedSampler(
            Data(n), num_replicas=1, rank=0, seed=seed
        )
        theirs.set_epoch(epoch)
        assert epoch_order(n, seed, epoch).tolist() == list(theirs)


def test_an_order_that_is_none_is_refused() -> None:
    for make in (
        lambda: epoch_order(4, 0, 0, "other"),
        lambda: Plan(n=4, global_batch_size=2, order="other"),
    ):
        with pytest.raises(
            ConfigError, match=r"^order: found other, expected one of auto, torch, feistel$"
        ):
            make()


# ------------------------------------------------------------------------------------------- plan
@pytest.mark.parametrize("shards", [1, 2, 3, 4, 5])
def test_c01_the_rest_of_an_epoch_is_the_rest_of_its_order(shards: int) -> None:
    plan = Plan(n=12, global_batch_size=4, shards=shards)
    assert sets(plan, 0) == [[8, 0, 5, 9], [7, 4, 2, 10], [3, 1, 11, 6]]
    assert sets(plan, 0, plan.step_at(4)) == [[7, 4, 2, 10], [3, 1, 11, 6]]


def test_c02_an_offset_is_that_of_one_epoch_alone() -> None:
    plan = Plan(n=20, global_batch_size=4, shards=2)
    done = sets(plan, 0)[:3] + sets(plan, 0, plan.step_at(12)) + sets(plan, 1) + sets(plan, 2)
    assert len(done) == 15
    for epoch in range(3):
        assert sorted(chain(*done[epoch * 5 : epoch * 5 + 5])) == list(range(20))


def test_c03_each_epoch_has_its_own_order() -> None:
    plan = Plan(n=8, global_batch_size=4)
    assert sets(plan, 0) == [[4, 0, 7, 3], [2, 5, 1, 6]]
    assert sets(plan, 1, plan.step_at(4)) == [[7, 3, 1, 0]]
    assert sets(plan, 2) == [[0, 4, 7, 2], [6, 5, 1, 3]]


def test_c04_the_first_resumed_step_begins_at_the_position() -> None:
    plan = Plan(n=64, global_batch_size=8, shards=2)
    assert set(sets(plan, 0, plan.step_at(24))[0]) == {48, 60, 55, 16, 61, 54, 9, 1}


@pytest.mark.parametrize("shards", [1, 2, 3, 4])
def test_c05_nothing_is_padded_and_nothing_is_dropped(shards: int) -> None:
    plan = Plan(n=10, global_batch_size=4, shards=shards)
    assert (plan.steps, plan.size(0), plan.size(2), plan.samples) == (3, 4, 2, 10)
    w = 0.0
    for epoch in range(3):
        taken = sets(plan, epoch)
        assert sorted(chain(*taken)) == list(range(10))
        for step in taken:
            w = 0.9 * w + 0.1 * sum(step) / len(step)
        if epoch == 0:
            assert w == pytest.approx(1.19425, rel=1e-5)
    assert w == pytest.approx(2.673095, rel=1e-5)


def test_c05_the_tail_goes_only_where_it_is_asked_for() -> None:
    plan = Plan(n=10, global_batch_size=4, shards=3, drop_last=True)
    assert (plan.steps, plan.samples, plan.step_at(8)) == (2, 8, 2)
    w = 0.0
    for step in sets(plan, 0):
        w = 0.9 * w + 0.1 * sum(step) / len(step)
    assert w == pytest.approx(0.8825, rel=1e-5)


@pytest.mark.parametrize("n", [8, 9])
def test_c06_the_end_of_an_epoch_is_a_position_with_nothing_left(n: int) -> None:
    plan = Plan(n=n, global_batch_size=4)
    assert plan.step_at(n) == plan.steps
    assert sets(plan, 0, plan.step_at(n)) == []
    assert plan.step_at(0) == 0


def test_c06_the_next_step_after_an_end_is_the_next_epochs_first() -> None:
    plan = Plan(n=8, global_batch_size=4)
    assert sets(plan, 1)[0] == [5, 4, 2, 6]


@pytest.mark.parametrize("position", [3, -4, 11, 12])
def test_a_position_at_which_no_step_begins_is_refused(position: int) -> None:
    with pytest.raises(
        StartError, match=f"^position: found {position} samples into the epoch, expected a multiple"
    ):
        Plan(n=10, global_batch_size=4).step_at(position)


def test_a_part_is_cut_into_micro_batches() -> None:
    plan = Plan(n=12, global_batch_size=10, shards=2, micro_batch_size=2)
    order = plan.order_of(0).tolist()
    assert plan.micro_batches(0, 0, 0) == [order[0:2], order[2:4], order[4:5]]
    assert plan.micro_batches(0, 1, 1) == [order[11:12]]
    assert Plan(n=12, global_batch_size=10, shards=2).micro_batches(0, 0, 0) == [order[:5]]
    assert Plan(n=12, global_batch_size=10, shards=3).micro_batches(0, 1, 2) == []
    assert plan.first(0, 1) == order[10]


def test_the_order_of_one_epoch_is_kept() -> None:
    plan = Plan(n=100, global_batch_size=10)
    first = plan._epoch(0)
    assert plan._epoch(0) is first
    plan._epoch(1)
    assert list(plan._epochs) == [1]
    assert plan._epoch(0) is not first
    assert pickle.loads(pickle.dumps(plan)) == plan  # noqa: S301 (its own)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"n": 0}, "n: found 0, expected at least 1"),
        ({"global_batch_size": 0}, "global_batch_size: found 0, expected at least 1"),
        ({"shards": 0}, "shards: found 0, expected at least 1"),
        ({"micro_batch_size": 0}, "micro_batch_size: found 0, expected at least 1"),
        (
            {"drop_last": True},
            "drop_last: found a dataset of 3 samples with drop_last, expected a global batch",
        ),
    ],
)
def test_numbers_that_make_no_plan_are_refused(changed: dict[str, int], text: str) -> None:
    with pytest.raises(StartError) as caught:
        Plan(**({"n": 3, "global_batch_size": 4} | changed))  # type: ignore[arg-type] # (one at a time)
    assert str(caught.value).startswith(text)


def test_a_step_that_the_epoch_does_not_have_is_no_step() -> None:
    with pytest.raises(IndexError, match=r"^step 3 of an epoch of 3 steps$"):
        Plan(n=10, global_batch_size=4).size(3)


@settings(max_examples=150, deadline=None)
@given(
    n=st.integers(1, 90),
    batch=st.integers(1, 40),
    seed=st.integers(0, 2**63 - 1),
    micro=st.one_of(st.none(), st.integers(1, 9)),
    order=st.sampled_from(["auto", "feistel"]),
    data=st.data(),
)
def test_every_history_of_worlds_takes_each_sample_exactly_once(
    n: int, batch: int, seed: int, micro: int | None, order: str, data: st.DataObject
) -> None:
    for epoch in range(2):
        position, taken, sizes = 0, Counter[int](), []
        undisturbed = sets(Plan(n=n, global_batch_size=batch, seed=seed, order=order), epoch)
        while position < n:
            plan = Plan(
                n=n,
                global_batch_size=batch,
                seed=seed,
                micro_batch_size=micro,
                order=order,
                shards=data.draw(st.integers(1, 12), label="world size"),
            )
            first = plan.step_at(position)
            # Steps beyond the stop are done, lost and done again by the next world.
            stop = data.draw(st.integers(first, plan.steps - 1), label="last committed step")
            for step in range(first, stop + 1):
                parts = [plan.micro_batches(epoch, step, shard) for shard in range(plan.shards)]
                assert micro is None or all(len(m) <= micro for p in parts for m in p)
                used = [i for p in parts for m in p for i in m]
                assert used == undisturbed[step]
                assert len(used) == plan.size(step)
                taken.update(used)
                sizes.append(len(used))
                position += plan.size(step)
        assert taken == Counter(range(n))
        assert sizes == [len(step) for step in undisturbed]


# ------------------------------------------------------------------------------------------- ElasticSampler
def dealt(samplers: list[ElasticSampler]) -> list[int]:
    """The order in which samplers of one world, read in turn, give samples."""
    return [i for turn in zip(*samplers, strict=True) for i in turn]


@pytest.mark.parametrize("shuffle", [True, False])
def test_the_elastic_sampler_takes_distributed_samplers_place(shuffle: bool) -> None:
    data = Data(24)
    for rank in range(3):
        theirs: DistributedSampler[int] = DistributedSampler(
            data, num_replicas=3, rank=rank, shuffle=shuffle, seed=5
        )
        ours = ElasticSampler(data, num_replicas=3, rank=rank, shuffle=shuffle, seed=5)
        for epoch in range(3):
            theirs.set_epoch(epoch)
            ours.set_epoch(epoch)
            assert list(ours) == list(theirs)
            assert len(ours) == len(theirs)


def test_c01_the_elastic_sampler_goes_on_in_the_epochs_own_order() -> None:
    samplers = [ElasticSampler(range(12), 2, rank) for rank in range(2)]
    assert dealt(samplers) == [8, 0, 5, 9, 7, 4, 2, 10, 3, 1, 11, 6]
    for sampler in samplers:
        sampler.advance(4)
    resumed = [ElasticSampler(range(12), 2, rank) for rank in range(2)]
    for sampler in resumed:
        sampler.load_state_dict(samplers[0].state_dict())
    assert dealt(resumed) == [7, 4, 2, 10, 3, 1, 11, 6]


def test_c02_c03_a_position_is_of_its_epoch_alone() -> None:
    before = ElasticSampler(range(8), 1, 0)
    before.set_epoch(1)
    before.advance(4)
    after = ElasticSampler(range(8), 1, 0)
    after.load_state_dict(before.state_dict())
    after.set_epoch(1)
    assert list(after) == [7, 3, 1, 0]
    after.set_epoch(2)
    assert list(after) == [0, 4, 7, 2, 6, 5, 1, 3]


def test_c04_reading_ahead_does_not_move_the_position() -> None:
    sampler = ElasticSampler(range(64), 2, 0, global_batch_size=8)
    loader = DataLoader(Data(64), batch_size=sampler.batch_size, sampler=sampler)
    batches = iter(loader)
    for _ in range(3):
        next(batches)
        sampler.advance()
    for _ in range(4):
        next(batches)
    assert sampler.state_dict()["position"] == 24


def test_with_a_global_batch_a_dataloaders_batches_are_the_steps_parts() -> None:
    order = epoch_order(50, 0, 0).tolist()
    samplers = [ElasticSampler(range(50), 3, rank, global_batch_size=10) for rank in range(3)]
    assert [sampler.batch_size for sampler in samplers] == [4, 3, 3]
    loaders = [DataLoader(Data(50), batch_size=s.batch_size, sampler=s) for s in samplers]
    for step, parts in enumerate(zip(*loaders, strict=True)):
        assert torch.cat(list(parts)).tolist() == order[step * 10 : step * 10 + 10]


def test_dropping_the_tail_leaves_all_ranks_as_many() -> None:
    for batch in (None, 4):
        samplers = [
            ElasticSampler(range(11), 2, rank, drop_last=True, global_batch_size=batch)
            for rank in range(2)
        ]
        assert [len(list(s)) for s in samplers] == [len(s) for s in samplers]
        assert len(samplers[0]) == len(samplers[1]) == (5 if batch is None else 4)
    samplers[0].position = 11
    assert list(samplers[0]) == []


def test_without_a_global_batch_nothing_is_left_at_the_end_and_any_batch_size_will_do() -> None:
    sampler = ElasticSampler(range(6), 2, 1)
    assert sampler.batch_size is None
    sampler.advance(6)
    assert list(sampler) == []
    assert len(sampler) == 0


def test_a_position_inside_a_step_leaves_its_rest() -> None:
    sampler = ElasticSampler(range(20), 1, 0, shuffle=False, global_batch_size=8)
    sampler.advance(5)
    assert list(sampler) == list(range(5, 20))
    sampler.advance()
    assert sampler.position == 8
    for _ in range(3):
        sampler.advance()
    assert sampler.position == 20
    assert list(sampler) == []
    assert len(sampler) == 0


@settings(max_examples=100, deadline=None)
@given(
    n=st.integers(1, 80),
    batch=st.one_of(st.none(), st.integers(1, 30)),
    order=st.sampled_from(["auto", "feistel"]),
    data=st.data(),
)
def test_the_elastic_sampler_takes_each_sample_once_in_every_history(
    n: int, batch: int | None, order: str, data: st.DataObject
) -> None:
    state: dict[str, object] | None = None
    for epoch in range(2):
        taken: list[int] = []
        while True:
            world = data.draw(st.integers(1, 7), label="world size")
            samplers = [
                ElasticSampler(range(n), world, rank, seed=9, global_batch_size=batch, order=order)
                for rank in range(world)
            ]
            for sampler in samplers:
                if state is not None:
                    sampler.load_state_dict(state)
                sampler.set_epoch(epoch)
            left = [list(sampler) for sampler in samplers]
            assert [len(indices) for indices in left] == [len(sampler) for sampler in samplers]
            position = samplers[0].position
            assert sum(map(len, left)) == n - position
            # Some steps are trained on; what was read beyond them is read again.
            step = batch or world * data.draw(st.integers(1, 5), label="batch of a rank")
            count = min(n - position, step * data.draw(st.integers(1, 6), label="steps"))
            expected = epoch_order(n, 9, epoch, order)[position : position + count].tolist()
            if batch is None:
                turns = [
                    i for turn in range(n) for indices in left for i in indices[turn : turn + 1]
                ]
                assert turns[:count] == expected
            else:
                parts = [
                    i
                    for start in range(position, position + count, batch)
                    for rank in range(world)
                    for i in _take(left[rank], *part(start, min(n, start + batch), rank, world))
                ]
                assert parts == expected
            taken += expected
            for sampler in samplers:
                sampler.advance(count)
            state = samplers[-1].state_dict()
            if state["position"] == n:
                break
        assert sorted(taken) == list(range(n))


def _take(indices: list[int], begin: int, end: int) -> list[int]:
    taken = indices[: end - begin]
    del indices[: end - begin]
    return taken


def test_the_elastic_sampler_needs_a_group_or_both_numbers() -> None:
    with pytest.raises(
        StartError,
        match=r"^ElasticSampler: found num_replicas 2 and rank None without a process group",
    ):
        ElasticSampler(range(4), 2)
    with pytest.raises(ConfigError, match=r"^rank: found 2, expected 0 to 1 for 2 replicas"):
        ElasticSampler(range(4), 2, 2)
    with pytest.raises(ConfigError, match=r"^global_batch_size: found 0, expected at least 1"):
        ElasticSampler(range(4), 2, 1, global_batch_size=0)


def test_the_elastic_sampler_asks_the_process_group(tmp_path: object) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1
    )
    try:
        sampler = ElasticSampler(range(4))
    finally:
        torch.distributed.destroy_process_group()
    assert (sampler.num_replicas, sampler.rank) == (1, 0)


@pytest.mark.parametrize(
    ("samples", "text"),
    [
        (None, "samples: found None, expected the samples of the step"),
        (-1, "samples: found -1, expected 0 or more"),
    ],
)
def test_an_advance_that_cannot_be_is_refused(samples: int | None, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ElasticSampler(range(4), 2, 0).advance(samples)
    assert str(caught.value).startswith(text)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"samples": 13}, "samples: found 12 here and 13 in the state, expected no change"),
        ({"seed": 1}, "seed: found 0 here and 1 in the state"),
        ({"shuffle": False}, "shuffle: found True here and False in the state"),
        ({"order": "feistel"}, "order: found torch here and feistel in the state"),
        ({"epoch": -1}, "epoch: found -1 in the state, expected 0 or more"),
        ({"epoch": "0"}, "epoch: found '0' in the state, expected 0 or more"),
        ({"position": 13}, "position: found 13 in the state, expected 0 to 12"),
        ({"position": None}, "position: found None in the state, expected 0 to 12"),
    ],
)
def test_a_state_of_something_else_is_refused(changed: dict[str, int], text: str) -> None:
    sampler = ElasticSampler(range(12), 2, 0)
    with pytest.raises(ConfigError) as caught:
        sampler.load_state_dict(sampler.state_dict() | changed)
    assert str(caught.value).startswith(text)


def test_a_state_of_the_first_version_is_of_torchs_order() -> None:
    sampler = ElasticSampler(range(12), 2, 0)
    sampler.advance(4)
    state = sampler.state_dict()
    del state["order"], state["sampling"]
    ElasticSampler(range(12), 3, 0).load_state_dict(state)
    with pytest.raises(ConfigError, match=r"^order: found feistel here and torch in the state"):
        ElasticSampler(range(12), 3, 0, order="feistel").load_state_dict(state)


def test_draws_without_a_shuffle_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^sampling: found Weighted with shuffle=False"):
        ElasticSampler(range(2), 1, 0, shuffle=False, sampling=Weighted([1, 2]))


@pytest.mark.parametrize("batch", [None, 512])
def test_a_billion_samples_are_gone_on_with_anywhere_at_once(batch: int | None) -> None:
    n = 10**9
    sampler = ElasticSampler(range(n), 2, 1, global_batch_size=batch)
    assert sampler.order == "feistel"
    assert len(sampler) == n // 2
    sampler.advance(n - 1024)
    assert len(sampler) == 512
    left = list(sampler)
    assert len(set(left)) == 512
    plan = Plan(n=n, global_batch_size=512, shards=2)
    assert plan.order == "feistel"
    assert plan.step_at(n - 512) == plan.steps - 1
    if batch:
        assert left == plan.indices(0, plan.steps - 2, 1) + plan.indices(0, plan.steps - 1, 1)
