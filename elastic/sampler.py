"""Which samples a rank reads, as a pure function of (n, seed, epoch, position, W, rank).

Promises:
* The order of epoch e is a permutation that depends on (seed, e) alone, whatever W is: that of torch's DistributedSampler, or one
  that needs no table. With weights or a mixture it is what an epoch draws (`elastic.draws`) that has an order.
* Step s of an epoch takes positions [s*B, (s+1)*B) of that order; the last step is smaller. A step is cut into contiguous parts, one
  for each shard, that differ by one sample at most. Each position is in exactly one part: nothing is padded, nothing is dropped
  (unless `drop_last` asks for it).
* Position is counted by who trains (`advance`), never by who reads ahead.

Nothing here knows of processes or of what a sample is.
"""

from collections.abc import Iterator, Mapping, Sized
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import distributed
from torch.utils.data import Dataset, Sampler

from elastic.draws import Draws, Epoch, Once, draws_of, permutation
from elastic.errors import ConfigError, StartError
from elastic.permutation import choose_order
from jobs.sampling import Sampling

__all__ = ["ElasticSampler", "Plan", "epoch_order", "part", "steps_in_epoch"]

_ORDERS = ("auto", "torch", "feistel")
_BLOCK = 1 << 14


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


def epoch_order(n: int, seed: int, epoch: int, order: str = "auto") -> torch.Tensor:
    """The whole permutation of [0, n) in which an epoch takes its samples.

    Raises:
        ConfigError: the order is none of auto, torch and feistel.
    """
    return torch.from_numpy(permutation(n, seed, epoch, _checked_order(order, n))(0, n))


def _checked_order(order: str, length: int) -> str:
    if order not in _ORDERS:
        raise ConfigError(f"order: found {order}, expected one of {', '.join(_ORDERS)}")
    return choose_order(order, length)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Who takes what in each step of an epoch; the same on every rank.

    What belongs to the epoch asked for last is kept, so that a step costs a slice.
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
    order: str = "auto"
    """Kind of permutation; of `auto` it becomes the one that the number of draws decides."""
    draws: Draws | None = None
    """What an epoch draws; None: each sample once."""
    _epochs: dict[int, Epoch] = field(default_factory=dict, init=False, repr=False, compare=False)

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
        object.__setattr__(self, "order", _checked_order(self.order, self.length))
        if self.steps == 0:
            found = f"a dataset of {self.length} samples with drop_last"
            expected = f"a global batch at least ({self.global_batch_size})"
            raise StartError(f"drop_last: found {found}, expected {expected}: no step is left")

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        """What is kept of an epoch does not travel."""
        given = {f.name: getattr(self, f.name) for f in fields(self) if f.init}
        return partial(Plan, **given), ()

    @property
    def length(self) -> int:
        """Draws of one epoch: the dataset's samples, where each is taken once."""
        return self.n if self.draws is None else self.draws.length

    @property
    def repeats(self) -> bool:
        """Whether a sample may come again in an epoch, so that addresses and samples differ."""
        return bool(self.sampling)

    @property
    def sampling(self) -> dict[str, Any]:
        """What of the draws belongs to a run's identity; nothing where each sample is taken once."""
        identity = None if self.draws is None else self.draws.identity
        return {} if identity is None else {"sampling": identity}

    @property
    def steps(self) -> int:
        """Steps of one epoch."""
        return steps_in_epoch(self.length, self.global_batch_size, self.drop_last)

    @property
    def samples(self) -> int:
        """Samples that one epoch uses: all its draws, or those that drop_last leaves."""
        return min(self.length, self.steps * self.global_batch_size)

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
                f"position: found {position} samples into the epoch, expected {expected}: what run.accept lets in"
                " has to fit there; go on with the old value to the end of the epoch, or roll back to a checkpoint at"
                " the end of one (python -m elastic rollback)"
            )
        return step

    def order_of(self, epoch: int) -> torch.Tensor:
        """All samples of an epoch in order; only for a look, since training asks for slices."""
        return torch.from_numpy(self._epoch(epoch)(0, self.length)) % self.n

    def first(self, epoch: int, step_in_epoch: int) -> int:
        """The address of a step's first sample, which no rank's part can lack."""
        start = step_in_epoch * self.global_batch_size
        return int(self._epoch(epoch)(start, start + 1)[0])

    def addresses(self, epoch: int, step_in_epoch: int, shard: int) -> list[int]:
        """A shard's part, in order; empty where the step is smaller than the shards.

        A sample that is drawn again in an epoch has another address each time: sample + n * times before.
        """
        start = step_in_epoch * self.global_batch_size
        begin, end = part(start, self._stop(step_in_epoch), shard, self.shards)
        addresses: list[int] = self._epoch(epoch)(begin, end).tolist()
        return addresses

    def samples_at(self, addresses: list[int]) -> list[int]:
        """The samples that addresses stand for."""
        return [address % self.n for address in addresses] if self.repeats else addresses

    def indices(self, epoch: int, step_in_epoch: int, shard: int) -> list[int]:
        """The samples of a shard's part."""
        return self.samples_at(self.addresses(epoch, step_in_epoch, shard))

    def micro_batches(self, epoch: int, step_in_epoch: int, shard: int) -> list[list[int]]:
        """The addresses of a shard's part, cut into micro-batches; none for an empty part."""
        addresses = self.addresses(epoch, step_in_epoch, shard)
        most = self.micro_batch_size
        if not addresses:
            return []
        if most is None or len(addresses) <= most:
            return [addresses]
        return [addresses[i : i + most] for i in range(0, len(addresses), most)]

    def _epoch(self, epoch: int) -> Epoch:
        found = self._epochs.get(epoch)
        if found is None:
            draws = self.draws or Once(self.n)
            found = draws.epoch(self.seed, epoch, self.order)
            # One is enough: epochs follow each other, and torch's order of 1e8 samples is 0.8 GB.
            self._epochs.clear()
            self._epochs[epoch] = found
        return found

    def _stop(self, step_in_epoch: int) -> int:
        if not 0 <= step_in_epoch < self.steps:
            raise IndexError(f"step {step_in_epoch} of an epoch of {self.steps} steps")
        return min(self.length, (step_in_epoch + 1) * self.global_batch_size)


class ElasticSampler(Sampler[int]):
    """Takes DistributedSampler's place in one's own loop, and can go on in another world.

    It yields the samples of this rank that are left of the epoch. `set_epoch` chooses the epoch as ever; `advance` tells how many
    samples all ranks together have trained on; `state_dict` holds epoch and position, the same on every rank, and can be loaded in a
    world of any size: what is left is shared out anew. Setting the epoch that is set already keeps the position, another one begins
    at 0. A position is never moved by reading.

    Without `global_batch_size` what is left is dealt in turn, as DistributedSampler does it, so that with a DataLoader of batch size b
    each step takes the next W*b samples of the order. With it a step is cut into contiguous parts of `batch_size` samples, the
    DataLoader's batch size on this rank; it may differ from rank to rank by one.

    `order` is as `train.order`: `auto` is DistributedSampler's permutation up to 2**24 samples, and beyond that one that needs no
    table, as `feistel` always is. `sampling` is as a job's: Weighted or Mixture from `elastic`.

    Limits: nothing is padded. Where n is not a multiple of the global batch the last step is smaller, and ranks' numbers of samples
    differ by one; a rank may even have none in it. Give DDP its `join()`, or ask for `drop_last`, or use `run.loader`, which
    weighs uneven parts exactly.
    """

    def __init__(  # noqa: PLR0913 (DistributedSampler's own, and three more)
        self,
        dataset: Sized | Dataset[Any],
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        global_batch_size: int | None = None,
        order: str = "auto",
        sampling: Sampling | None = None,
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
        if sampling is not None and not shuffle:
            found = f"{type(sampling).__name__} with shuffle=False"
            raise ConfigError(f"sampling: found {found}, expected shuffle=True: draws are shuffled")
        self.dataset = dataset
        self.n = len(dataset)  # type: ignore[arg-type] # (torch's Dataset declares no __len__)
        self._draws = draws_of(self.n, sampling, dataset) if self.n else Once(0)
        self.length = self._draws.length
        self.order = _checked_order(order, self.length)
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
        self.position = min(self.position + samples, self.length)

    def __iter__(self) -> Iterator[int]:
        """Yield this rank's samples of what is left of the epoch."""
        draws: Epoch = np.arange
        if self.shuffle and self.length:
            draws = self._draws.epoch(self.seed, self.epoch, self.order)
        n = self.n
        for begin, end, stride in self._slices():
            yield from (draws(begin, end)[::stride] % n).tolist()

    def __len__(self) -> int:
        """Samples that this rank has left in the epoch."""
        end, batch = self._end(), self.global_batch_size
        if batch is None:
            return len(range(self.position + self.rank, end, self.num_replicas))
        # The rest of the step in which the position lies, whole steps, and the last one.
        first = min(end, -(-self.position // batch) * batch)
        whole, last = divmod(max(0, end - first), batch)
        sizes = [(first - self.position, 1), (batch, whole), (last, 1)]
        return sum(count * self._own_part(size) for size, count in sizes if size > 0)

    def state_dict(self) -> dict[str, Any]:
        """Where the run is, the same on every rank, and what must not change."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "samples": self.n,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "order": self.order,
            "sampling": self._draws.identity,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a state was taken, in whatever world.

        Raises:
            ConfigError: the state is of another dataset, seed or order, or holds no position of it.
        """
        own = self.state_dict()
        # States of the first version tell no order.
        before = {"order": "torch", "sampling": None, **state}
        for key in ("samples", "seed", "shuffle", "order", "sampling"):
            if before.get(key) != own[key]:
                found = f"{own[key]} here and {before.get(key)} in the state"
                raise ConfigError(
                    f"{key}: found {found}, expected no change: another order cannot be gone on with"
                )
        epoch, position = state.get("epoch"), state.get("position")
        if not isinstance(epoch, int) or epoch < 0:
            raise ConfigError(f"epoch: found {epoch!r} in the state, expected 0 or more")
        if not isinstance(position, int) or not 0 <= position <= self.length:
            expected = f"0 to {self.length}"
            raise ConfigError(f"position: found {position!r} in the state, expected {expected}")
        self.epoch, self.position = epoch, position

    def _end(self) -> int:
        """The end of what is dealt; with drop_last all ranks get as many."""
        length = self.length
        if not self.drop_last:
            return length
        unit = self.global_batch_size or self.num_replicas
        base = 0 if self.global_batch_size else min(self.position, length)
        return base + (length - base) // unit * unit

    def _own_part(self, size: int) -> int:
        begin, end = part(0, size, self.rank, self.num_replicas)
        return end - begin

    def _slices(self) -> Iterator[tuple[int, int, int]]:
        """What this rank reads of what is left: begin, end and stride of each slice, a bounded number at a time."""
        end, start, batch = self._end(), self.position, self.global_batch_size
        if batch is None:
            block = self.num_replicas * max(1, _BLOCK // self.num_replicas)
            for begin in range(start + self.rank, end, block):
                yield begin, min(end, begin + block), self.num_replicas
            return
        while start < end:
            # A position inside a step leaves its rest, so that the next one begins on the grid.
            stop = min(end, (start // batch + 1) * batch)
            yield *part(start, stop, self.rank, self.num_replicas), 1
            start = stop
