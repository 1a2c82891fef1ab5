"""Which samples a rank reads, as a pure function of (n, seed, epoch, position, W, rank).

Promises:
* The order of epoch e is the permutation of torch's DistributedSampler for (seed, e), whatever W is.
* Step s of an epoch takes positions [s*B, (s+1)*B) of that order; the last step is smaller. A step is cut into contiguous parts, one
  for each shard, that differ by one sample at most. Each position is in exactly one part: nothing is padded, nothing is dropped
  (unless `drop_last` asks for it).
* Position is counted by who trains (`advance`), never by who reads ahead.

Nothing here knows of processes or of what a sample is.
"""

from collections.abc import Iterator, Mapping, Sized
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import distributed
from torch.utils.data import Dataset, Sampler

from elastic.errors import ConfigError, StartError

__all__ = ["ElasticSampler", "Plan", "epoch_order", "part", "steps_in_epoch"]


def steps_in_epoch(n: int, batch: int, drop_last: bool) -> int:
    """Steps that n samples make; the last one may be smaller than the batch."""
    return n // batch if drop_last else -(-n // batch)


def part(start: int, stop: int, shard: int, shards: int) -> tuple[int, int]:
    """The positions of [start, stop) that a shard owns; the first parts are the larger ones.

    So shard 0 is empty only where all are.
    """
    small, larger = divmod(stop - start, shards)
    begin = start + shard * small + min(shard, larger)
    return begin, begin + small + (shard < larger)


def epoch_order(n: int, seed: int, epoch: int, order: str = "torch") -> torch.Tensor:
    """The permutation of [0, n) in which an epoch takes its samples.

    Raises:
        ConfigError: the order is not one that this version knows.
    """
    if order != "torch":
        raise ConfigError(
            f"train.order: not yet served by this version (found {order}); write torch"
        )
    generator = torch.Generator()
    generator.manual_seed(seed + epoch)
    return torch.randperm(n, generator=generator)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Who takes what in each step of an epoch; the same on every rank.

    The order of the epoch asked for last is kept, so that a step costs a slice.
    """

    n: int
    """Samples of the dataset."""
    global_batch_size: int
    """Samples of one step over all shards."""
    seed: int = 0
    """Of the order."""
    shards: int = 1
    """Parts of a step: the world size, or the logical shards."""
    micro_batch_size: int | None = None
    """Most samples of one micro-batch; None: a part is one micro-batch."""
    drop_last: bool = False
    """Leave out the last step of an epoch where it is smaller."""
    order: str = "torch"
    """Kind of permutation."""
    _orders: dict[int, torch.Tensor] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        """Refuse numbers that make no plan."""
        for name in ("n", "global_batch_size", "shards"):
            found = getattr(self, name)
            if found < 1:
                raise StartError(f"{name}: found {found}, expected at least 1")
        if self.micro_batch_size is not None and self.micro_batch_size < 1:
            raise StartError(
                f"micro_batch_size: found {self.micro_batch_size}, expected at least 1"
            )
        if self.steps == 0:
            found = f"a dataset of {self.n} samples with drop_last"
            expected = f"a global batch at least ({self.global_batch_size})"
            raise StartError(f"drop_last: found {found}, expected {expected}: no step is left")

    @property
    def steps(self) -> int:
        """Steps of one epoch."""
        return steps_in_epoch(self.n, self.global_batch_size, self.drop_last)

    @property
    def samples(self) -> int:
        """Samples of one epoch: all, or those that drop_last leaves."""
        return min(self.n, self.steps * self.global_batch_size)

    def size(self, step_in_epoch: int) -> int:
        """Samples of a step over all shards."""
        return self._stop(step_in_epoch) - step_in_epoch * self.global_batch_size

    def step_at(self, position: int) -> int:
        """The step of the epoch that begins at a position; `steps` where the epoch is over.

        Raises:
            StartError: no step begins there; the position is of another global batch size or dataset.
        """
        if position == self.samples:
            return self.steps
        step, within = divmod(position, self.global_batch_size)
        if within or not 0 <= position < self.samples:
            expected = f"a multiple of {self.global_batch_size} up to {self.samples}"
            raise StartError(
                f"position: found {position} samples into the epoch, expected {expected}"
            )
        return step

    def order_of(self, epoch: int) -> torch.Tensor:
        """The whole order of an epoch."""
        order = self._orders.get(epoch)
        if order is None:
            order = epoch_order(self.n, self.seed, epoch, self.order)
            # One is enough: epochs follow each other, and 1e8 samples are 0.8 GB.
            self._orders.clear()
            self._orders[epoch] = order
        return order

    def first(self, epoch: int, step_in_epoch: int) -> int:
        """The first sample of a step, which no rank's part can lack."""
        return int(self.order_of(epoch)[step_in_epoch * self.global_batch_size])

    def indices(self, epoch: int, step_in_epoch: int, shard: int) -> list[int]:
        """The samples of a shard's part, in order; empty where the step is smaller than the shards."""
        start = step_in_epoch * self.global_batch_size
        begin, end = part(start, self._stop(step_in_epoch), shard, self.shards)
        indices: list[int] = self.order_of(epoch)[begin:end].tolist()
        return indices

    def micro_batches(self, epoch: int, step_in_epoch: int, shard: int) -> list[list[int]]:
        """A shard's part, cut into micro-batches; none for an empty part."""
        indices = self.indices(epoch, step_in_epoch, shard)
        most = self.micro_batch_size
        if not indices:
            return []
        if most is None or len(indices) <= most:
            return [indices]
        return [indices[i : i + most] for i in range(0, len(indices), most)]

    def _stop(self, step_in_epoch: int) -> int:
        if not 0 <= step_in_epoch < self.steps:
            raise IndexError(f"step {step_in_epoch} of an epoch of {self.steps} steps")
        return min(self.n, (step_in_epoch + 1) * self.global_batch_size)


class ElasticSampler(Sampler[int]):
    """Takes DistributedSampler's place in one's own loop, and can go on in another world.

    It yields the samples of this rank that are left of the epoch. `set_epoch` chooses the epoch as ever; `advance` tells how many
    samples all ranks together have trained on; `state_dict` holds epoch and position, the same on every rank, and can be loaded in a
    world of any size: what is left is shared out anew. Setting the epoch that is set already keeps the position, another one begins
    at 0. A position is never moved by reading.

    Without `global_batch_size` what is left is dealt in turn, as DistributedSampler does it, so that with a DataLoader of batch size b
    each step takes the next W*b samples of the order. With it a step is cut into contiguous parts of `batch_size` samples, the
    DataLoader's batch size on this rank; it may differ from rank to rank by one.

    Limits: nothing is padded. Where n is not a multiple of the global batch the last step is smaller, and ranks' numbers of samples
    differ by one; a rank may even have none in it. Give DDP its `join()`, or ask for `drop_last`, or use `run.loader`, which
    weighs uneven parts exactly.
    """

    def __init__(
        self,
        dataset: Sized | Dataset[Any],
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        global_batch_size: int | None = None,
    ) -> None:
        grouped = distributed.is_available() and distributed.is_initialized()
        if (num_replicas is None or rank is None) and not grouped:
            found = f"num_replicas {num_replicas} and rank {rank} without a process group"
            raise StartError(
                f"ElasticSampler: found {found}, expected both, or init_process_group before"
            )
        self.num_replicas = distributed.get_world_size() if num_replicas is None else num_replicas
        self.rank = distributed.get_rank() if rank is None else rank
        if not 0 <= self.rank < self.num_replicas:
            expected = f"0 to {self.num_replicas - 1}"
            raise ConfigError(
                f"rank: found {self.rank}, expected {expected} for {self.num_replicas} replicas"
            )
        if global_batch_size is not None and global_batch_size < 1:
            raise ConfigError(f"global_batch_size: found {global_batch_size}, expected at least 1")
        self.dataset = dataset
        self.n = len(dataset)  # type: ignore[arg-type] # (torch's Dataset declares no __len__)
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.global_batch_size = global_batch_size
        self.epoch = 0
        self.position = 0

    @property
    def batch_size(self) -> int | None:
        """The batch size of this rank's DataLoader; None without a global batch size: any equal on all ranks."""
        if self.global_batch_size is None:
            return None
        begin, end = part(0, self.global_batch_size, self.rank, self.num_replicas)
        return end - begin

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch; its position is kept where it is the one that is set already."""
        if epoch != self.epoch:
            self.epoch = epoch
            self.position = 0

    def advance(self, samples: int | None = None) -> None:
        """Count samples that all ranks together have trained on, by default one global batch.

        The last step of an epoch may be smaller: what goes beyond the end is not counted.

        Raises:
            ConfigError: samples is negative, or neither it nor the global batch size is given.
        """
        if samples is None:
            if self.global_batch_size is None:
                expected = "the samples of the step over all ranks, or a global_batch_size"
                raise ConfigError(f"samples: found None, expected {expected}")
            samples = self.global_batch_size - self.position % self.global_batch_size
        if samples < 0:
            raise ConfigError(f"samples: found {samples}, expected 0 or more")
        self.position = min(self.position + samples, self.n)

    def __iter__(self) -> Iterator[int]:
        """Yield this rank's samples of what is left of the epoch."""
        n = self.n
        order = epoch_order(n, self.seed, self.epoch) if self.shuffle else torch.arange(n)
        if self.global_batch_size is None:
            end = self._end()
            if self.position < end:
                yield from order[self.position + self.rank : end : self.num_replicas].tolist()
            return
        for start, stop in self._steps(self.global_batch_size):
            begin, end = part(start, stop, self.rank, self.num_replicas)
            yield from order[begin:end].tolist()

    def __len__(self) -> int:
        """Samples that this rank has left in the epoch."""
        if self.global_batch_size is None:
            return len(range(self.position + self.rank, self._end(), self.num_replicas))
        parts = (
            part(a, b, self.rank, self.num_replicas) for a, b in self._steps(self.global_batch_size)
        )
        return sum(end - begin for begin, end in parts)

    def state_dict(self) -> dict[str, int | bool]:
        """Where the run is, the same on every rank, and what must not change."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "samples": self.n,
            "seed": self.seed,
            "shuffle": self.shuffle,
        }

    def load_state_dict(self, state: Mapping[str, int | bool]) -> None:
        """Go on where a state was taken, in whatever world.

        Raises:
            ConfigError: the state is of another dataset, seed or order, or holds no position of it.
        """
        own = self.state_dict()
        for key in ("samples", "seed", "shuffle"):
            if state.get(key) != own[key]:
                found = f"{own[key]} here and {state.get(key)} in the state"
                raise ConfigError(
                    f"{key}: found {found}, expected no change: another order cannot be gone on with"
                )
        epoch, position = state.get("epoch"), state.get("position")
        if not isinstance(epoch, int) or epoch < 0:
            raise ConfigError(f"epoch: found {epoch!r} in the state, expected 0 or more")
        if not isinstance(position, int) or not 0 <= position <= self.n:
            raise ConfigError(f"position: found {position!r} in the state, expected 0 to {self.n}")
        self.epoch, self.position = epoch, position

    def _end(self) -> int:
        """The end of what is dealt; with drop_last all ranks get as many."""
        n = self.n
        if not self.drop_last:
            return n
        unit = self.global_batch_size or self.num_replicas
        base = 0 if self.global_batch_size else min(self.position, n)
        return base + (n - base) // unit * unit

    def _steps(self, batch: int) -> Iterator[tuple[int, int]]:
        """The steps that are left; a position inside one leaves its rest, so that the next begins on the grid."""
        end, start = self._end(), self.position
        while start < end:
            stop = min(end, (start // batch + 1) * batch)
            yield start, stop
            start = stop
