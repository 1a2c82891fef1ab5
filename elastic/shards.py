"""What belongs to a logical shard beside its samples: the model's buffers while it runs.

Promises: each shard begins with the buffers that the step began with, so that a BatchNorm's running
statistics do not depend on which shards a rank runs, or in which order; after the step the buffers of
all shards are merged, the same on every rank and in every world: floating ones by the mean over
the samples, in float64 and in the order of the shards, others are those of shard 0.
`num_batches_tracked` counts steps. A change is seen however it was made, through `.data` too.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from elastic.buffers import Place, differ, places_of
from elastic.reduce import Turn
from elastic.tree import owned
from elastic.world import World

__all__ = ["ShardBuffers"]

logger = logging.getLogger(__name__)

Carry: TypeAlias = Callable[[Tensor], Callable[[], Tensor] | None]


class ShardBuffers:
    """Keeps the buffers of a model apart for each shard of a step, and merges them."""

    def __init__(self, model: nn.Module, world: World, shards: int) -> None:
        """Look at the buffers of `model`, the plain one."""
        self._world, self._shards = world, shards
        places = places_of(model)
        self._norms = [place for place in places if place.always]
        self._others = [place for place in places if not place.always]
        self._unsaved = {
            number for number, place in enumerate(self._others) if not place.is_persistent
        }
        self._rows: dict[int, dict[int, Tensor]] = {}
        self._samples: dict[int, int] = {}
        self._sent: _Sent | None = None
        self._known: list[bool] | None = None
        self.flags: list[float] = []
        """For each buffer that is not a norm's: 1.0 where one of this rank's shards changed it."""

    @property
    def slots(self) -> int:
        """How many flags there are."""
        return len(self._others)

    @torch.no_grad()
    def begin(self) -> None:
        """Note what the step begins with."""
        self._rows.clear()
        self._samples.clear()
        self.flags[:] = [0.0] * len(self._others)
        for place in self._norms:
            place.base.copy_(place.now)
            place.note()
        self._known = None
        for place, is_changed in zip(self._others, self._changed(), strict=True):
            if is_changed:
                place.base.copy_(place.now)
                place.note()
        self._known = None

    @torch.no_grad()
    def enter(self, turn: Turn) -> None:
        """Before a forward: a shard begins with what the step began with."""
        if turn.opens and self._rows:
            self._restore(self._norms)
            self._restore_changed()
        self._known = None

    @torch.no_grad()
    def leave(self, turn: Turn, samples: int) -> None:
        """After a forward: keep what the shard made of the buffers; without samples it does not count.

        Nothing is written here: the backward may yet look at the buffers.
        """
        if not samples:
            return
        self._samples[turn.shard] = self._samples.get(turn.shard, 0) + samples
        if not turn.closes:
            return
        row = {number: place.now.clone() for number, place in enumerate(self._norms)}
        for number, (place, is_changed) in enumerate(
            zip(self._others, self._changed(), strict=True)
        ):
            if is_changed:
                row[len(self._norms) + number] = place.now.clone()
                self.flags[number] = 1.0
        self._rows[turn.shard] = row

    @torch.no_grad()
    def send(self, carry: Carry | None = None) -> None:
        """After the last forward: where it is known what changes, it travels beside the gradients. Collective.

        Args:
            carry: `Reducer.carry`, which may have room for it.
        """
        if self._norms and not self._others:
            self._sent = self._gather(range(len(self._norms)), self._norms, carry)

    @torch.no_grad()
    def merge(self, changed: Sequence[float]) -> None:
        """Merge the shards' buffers; `changed` are the flags summed over the ranks. Collective."""
        numbers = [*range(len(self._norms))]
        numbers += [len(self._norms) + number for number, count in enumerate(changed) if count]
        for number in [n for n in self._unsaved if changed[n]]:
            self._unsaved.discard(number)
            self._tell_unsaved(self._others[number].name)
        # Where only a forward without samples has changed something, nothing has changed.
        self._restore_changed()
        if not numbers:
            return
        every = self._norms + self._others
        merged = [every[number] for number in numbers]
        floating = [place for place in merged if place.base.is_floating_point()]
        whole = [place for place in merged if not place.base.is_floating_point()]
        sent, self._sent = self._sent or self._gather(numbers, every), None
        weights, rows = sent.wait()
        sizes = [place.base.numel() for place in floating]
        total = sum(sizes)
        mean = torch.zeros(total, dtype=torch.float64, device=rows.device)
        # Whole numbers as weights: where all shards agree, the mean is what they agree on, bit by bit.
        for weight, row in zip(weights, rows, strict=True):
            if weight:
                mean.add_(row[:total] * weight)
        mean.div_(sum(weights))
        for place, value in zip(floating, mean.split(sizes), strict=True):
            place.now.copy_(value.view_as(place.base))
            place.note()
        integers = rows[:, total:].contiguous().view(torch.int64)
        sizes = [place.base.numel() for place in whole]
        for place, ints in zip(whole, integers.split(sizes, dim=1), strict=True):
            if place.tracks:
                # Not where the norm is frozen, and counts nothing.
                place.now.copy_(place.base + (ints != place.base).any())
            else:
                place.now.copy_(ints[0].view_as(place.base))
            place.note()
        for place in merged[len(self._norms) :]:
            place.base.copy_(place.now)

    def _tell_unsaved(self, name: str) -> None:
        if self._world.is_primary:
            logger.warning(
                "buffer %s is changed in training and is not persistent, so no checkpoint has it: after a restart it begins"
                " anew, and what is computed from it may differ; register it with persistent=True",
                name,
            )

    def _changed(self) -> list[bool]:
        """Of each buffer that is not a norm's whether it differs from the step's beginning."""
        if self._known is None:
            self._known = differ(self._others)
        return self._known

    def _restore_changed(self) -> None:
        pairs = zip(self._others, self._changed(), strict=True)
        self._restore([place for place, is_changed in pairs if is_changed])
        self._known = [False] * len(self._others)

    @staticmethod
    def _restore(places: Sequence[Place]) -> None:
        for place in places:
            place.restore()

    def _gather(
        self, numbers: Sequence[int], every: Sequence[Place], carry: Carry | None = None
    ) -> "_Sent":
        """Weight and flattened buffers of each shard, in order; those of absent shards weigh nothing."""
        world = self._world
        ranges = [owned(rank, world.world_size, self._shards) for rank in range(world.world_size)]
        slots = max(len(own) for own in ranges)
        own = [self._flatten(shard, numbers, every) for shard in ranges[world.rank]]
        length = 1 + sum(every[number].base.numel() for number in numbers)
        device = every[numbers[0]].base.device
        empty = torch.zeros(length, dtype=torch.float64, device=device)
        mine = torch.stack([*own, *[empty] * (slots - len(own))])
        if world.world_size == 1:
            return _Sent(rows=mine, places=range(len(own)))
        places = [
            rank * slots + place for rank, of in enumerate(ranges) for place in range(len(of))
        ]
        carried = None if carry is None else carry(mine.view(-1))
        if carried is not None:
            return _Sent(rows=mine, places=places, carried=carried)
        rows = mine.new_empty(world.world_size * slots, length)
        work = dist.all_gather_single(rows, mine, async_op=True)
        return _Sent(rows=rows, places=places, work=work)

    def _flatten(self, shard: int, numbers: Sequence[int], every: Sequence[Place]) -> Tensor:
        """Samples, floating buffers as float64, then the bits of the others."""
        row = self._rows.get(shard, {})
        values = [row.get(number, every[number].base).reshape(-1) for number in numbers]
        weight = torch.tensor(
            [float(self._samples.get(shard, 0))], dtype=torch.float64, device=values[0].device
        )
        floating = [value.double() for value in values if value.is_floating_point()]
        whole = [
            value.to(torch.int64).view(torch.float64)
            for value in values
            if not value.is_floating_point()
        ]
        return torch.cat([weight, *floating, *whole])


@dataclass(kw_only=True, slots=True)
class _Sent:
    """The shards' buffers on their way."""

    rows: Tensor
    places: Sequence[int]
    """The row of each shard."""
    work: dist.Work | None = None
    carried: Callable[[], Tensor] | None = None

    def wait(self) -> tuple[list[float], Tensor]:
        """Weights and values, in the order of the shards."""
        if self.work is not None:
            self.work.wait()
            self.work = None
        if self.carried is not None:
            self.rows = self.carried().reshape(-1, self.rows.shape[1])
        rows = self.rows[list(self.places)]
        return rows[:, 0].tolist(), rows[:, 1:]
