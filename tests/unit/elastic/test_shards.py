"""Buffers that belong to a shard, merged the same in every world."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elastic.reduce import Turn
from elastic.shards import ShardBuffers
from elastic.tree import owned
from elastic.world import World
from tests.support.pool import Pool, pool
from tests.support.ranked import world_of

SHARDS = 5


class Counted(nn.Module):
    """A norm, and buffers that a forward changes in place, replaces, or never touches."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("seen", torch.zeros(2))
        self.register_buffer("replaced", torch.zeros(2))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("hidden", torch.zeros(2, 2)[:, 1])
        self.register_buffer("turned", torch.zeros(2, dtype=torch.complex64))
        self.register_buffer("table", torch.arange(4.0))
        self.frozen = nn.BatchNorm1d(3).eval()
        self.seen: Tensor
        self.replaced: Tensor
        self.calls: Tensor
        self.hidden: Tensor
        self.turned: Tensor

    def forward(self, rows: Tensor) -> Tensor:
        out: Tensor = self.frozen(self.norm(rows))
        self.hidden.data += rows.mean()
        self.turned += torch.complex(rows.mean(), rows.std())
        self.seen += rows.mean()
        self.replaced = self.replaced + rows.mean()
        self.calls += 3
        return out


def rows_of(step: int, shard: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + shard)
    return torch.randn(2 + shard % 2, 3, generator=generator)


def train(world: World, steps: int, present: int = SHARDS) -> list[dict[str, Any]]:
    """Forwards of each step's shards; the buffers after each step."""
    model = Counted()
    buffers = ShardBuffers(model, world, SHARDS)
    found = []
    for step in range(steps):
        buffers.begin()
        for shard in owned(world.rank, world.world_size, SHARDS):
            if shard < present:
                turn = Turn(shard=shard)
                buffers.enter(turn)
                rows = rows_of(step, shard)
                model(rows)
                buffers.leave(turn, len(rows))
        buffers.send()
        flags = world.all_sum(buffers.flags)
        buffers.merge(flags)
        found.append({name: buffer.tolist() for name, buffer in model.named_buffers()})
    return found


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[int, Pool]]:
    with pool(1) as one, pool(2) as two, pool(3) as three:
        yield {1: one, 2: two, 3: three}


@pytest.mark.parametrize("present", [SHARDS, 3, 1])
def test_merged_buffers_are_equal_in_every_world(pools: dict[int, Pool], present: int) -> None:
    found = [rank for one in pools.values() for rank in one.call(train, 3, present)]
    assert all(rank == found[0] for rank in found)
    assert found[0][-1]["norm.num_batches_tracked"] == 3
    assert found[0][-1]["frozen.num_batches_tracked"] == 0
    assert found[0][-1]["hidden"] == found[0][-1]["seen"]
    assert found[0][-1]["table"] == [0, 1, 2, 3]
    assert found[0][-1]["calls"] == 9  # shard 0's


def test_running_mean_is_that_of_the_whole_batch(pools: dict[int, Pool]) -> None:
    found = pools[2].call(train, 1)[0][0]
    whole = nn.BatchNorm1d(3)
    whole(torch.cat([rows_of(0, shard) for shard in range(SHARDS)]))
    assert whole.running_mean is not None
    assert torch.tensor(found["norm.running_mean"]).allclose(whole.running_mean, rtol=1e-5)


def test_breaker_running_statistics_in_a_chain_depend_on_who_runs_which_shard(
    pools: dict[int, Pool],
) -> None:
    chain, other = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    for shard in range(SHARDS):
        chain(rows_of(0, shard))
    for shard in reversed(range(SHARDS)):
        other(rows_of(0, shard))
    assert chain.running_mean is not None
    assert other.running_mean is not None
    assert not chain.running_mean.equal(other.running_mean)
    merged = pools[1].call(train, 1)[0][0]["norm.running_mean"]
    assert chain.running_mean.tolist() != merged


def test_forward_without_samples_leaves_no_trace(pools: dict[int, Pool]) -> None:
    for one in pools.values():
        assert one.call(pad)[0] is True


def pad(world: World) -> bool:
    model = Counted()
    before = {name: buffer.tolist() for name, buffer in model.named_buffers()}
    buffers = ShardBuffers(model, world, 1)
    buffers.begin()
    if world.rank != 0 or world.world_size == 1:
        buffers.enter(Turn(shard=9))
        model(rows_of(0, 0))
        buffers.leave(Turn(shard=9), 0)
    else:
        buffers.leave(Turn(shard=0), 2)
    samples = world.all_sum([1.0])[0] > 1
    buffers.merge(world.all_sum(buffers.flags)) if samples else buffers.merge([])
    after = {name: buffer.tolist() for name, buffer in model.named_buffers()}
    ignored = (
        "norm.num_batches_tracked",
        *(n for n in before if n.startswith(("norm", "frozen")) and not samples),
    )
    return all(after[name] == before[name] for name in before if name not in ignored)


def test_buffers_changed_from_outside_between_steps_are_taken_up(pools: dict[int, Pool]) -> None:
    assert pools[1].call(outside) == [([5.0, 5.0], [6.0, 6.0])]


def outside(world: World) -> Any:
    model = Counted()
    buffers = ShardBuffers(model, world, 2)
    model.seen.fill_(5.0)
    model.hidden.data.fill_(6.0)
    buffers.begin()
    for shard in range(2):
        buffers.enter(Turn(shard=shard))
        model(torch.tensor([[1.0, -1.0, 0.0], [-1.0, 1.0, 0.0]]))
        buffers.leave(Turn(shard=shard), 2)
    buffers.merge(buffers.flags)
    return model.seen.tolist(), model.hidden.tolist()


def test_what_no_checkpoint_has_is_told_once_when_it_changes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Module()
    model.register_buffer("kept", torch.zeros(2))
    model.register_buffer("lost", torch.zeros(2), persistent=False)
    model.register_buffer("cache", torch.zeros(2), persistent=False)
    with world_of(0, 1, tmp_path) as world:
        buffers = ShardBuffers(model, world, 1)
        for _ in range(3):
            buffers.begin()
            turn = Turn(shard=0)
            buffers.enter(turn)
            for name in ("kept", "lost"):
                model.get_buffer(name).add_(1)
            buffers.leave(turn, 2)
            buffers.merge(buffers.flags)
    (line,) = caplog.messages
    assert line.startswith("buffer lost is changed in training and is not persistent")
