"""The bitwise reducer: gradients summed over logical shards in one order, whatever the world is.

Promises: the sum of a step's gradients, loss and counts has the same bits for every number of ranks,
since each addition has the same operands (`elastic.tree`); nothing but addition happens on the way.
A rank's backwards add into flat buffers, one for each subtree under way; then slices go to their
owners, who finish the tree, and back to all. Sizes of buffers, slices and chunks change no bit.

A parameter that a shard does not use counts as zero there; one that no shard uses has no gradient at
all, so that its optimizer leaves it alone, as in plain torch.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from elastic.errors import StartError
from elastic.flats import Buffer, Flat
from elastic.reduce import Totals, Turn
from elastic.tree import Node, merges, nodes_of, owned, siblings
from elastic.world import World

__all__ = ["TreeReducer"]

_T = TypeVar("_T")

_CHUNK_BYTES: Final = 8 << 20
"""Slices of one chunk travel while the one before it is added up."""


class TreeReducer:
    """Sums by the canonical tree over `shards` logical shards; see `elastic.reduce.Reducer`."""

    def __init__(
        self,
        model: nn.Module,
        world: World,
        *,
        parameters: Sequence[Sequence[nn.Parameter]],
        shards: int,
        chunk_bytes: int = _CHUNK_BYTES,
    ) -> None:
        """Reduce each phase's `parameters`; `model` is what a job's loss calls, compiled or not."""
        self.model = model
        self._world, self._shards = world, shards
        self._phases = [Flat(list(of), world.world_size) for of in parameters]
        self._flat = self._phases[0]
        self._chunk_bytes = chunk_bytes
        self._own = owned(world.rank, world.world_size, shards)
        self._turn: Turn | None = None
        self._adds = False
        self._tree: list[tuple[Node, Buffer]] = []
        self._losses: dict[int, Tensor | float] = {}
        self._counts: dict[int, Tensor | float] = {}
        self._flags: Sequence[float] = ()
        self._row: Tensor | None = None
        self._present: int | None = None
        """The shards of the step, where they are known before the numbers have come."""

    def begin(self, phase: int, flags: Sequence[float], *, samples: int | None = None) -> None:
        """Forget the last phase's numbers."""
        # Each shard has a sample as long as there are some; so it is known without asking which shards a step has.
        self._present = None if samples is None else min(samples, self._shards)
        self._flat = self._phases[phase]
        self._flat.forget()
        self._tree.clear()
        self._losses.clear()
        self._counts.clear()
        self._flags = flags
        self._row = None

    @contextlib.contextmanager
    def turn(self, turn: Turn) -> Iterator[None]:
        """Around one micro-batch: its gradients go into the buffer of its shard's subtree."""
        self._turn = turn
        self._flat.begin_turn()
        if turn.opens:
            self._open(turn)
        yield
        if turn.closes:
            self._close(turn.shard)

    def _open(self, turn: Turn) -> None:
        """Point the parameters' gradients at the buffer that the shard's are added into."""
        pair = self._tree and siblings(self._tree[-1][0], Node(turn.shard, 1))
        # Into its left neighbour's at once: one micro-batch makes one addition, the tree's own, unless its
        # gradients come in parts.
        self._adds = bool(pair) and turn.closes and not self._flat.in_parts
        if not self._adds:
            buffer = self._flat.take()
            buffer.clear()
            self._tree.append((Node(turn.shard, 1), buffer))
        self._flat.point_at(self._tree[-1][1])

    def _close(self, shard: int) -> None:
        """Count the shard as added, and add up the subtrees that it completes."""
        node, buffer = self._tree.pop()
        if node.first != shard:
            node = Node(node.first, 2)
        while self._tree and siblings(self._tree[-1][0], node):
            older, into = self._tree.pop()
            into.add(buffer)
            self._flat.give_back(buffer)
            node, buffer = Node(older.first, 2 * older.size), into
        self._tree.append((node, buffer))

    def forward(self, call: Callable[[nn.Module], _T]) -> _T:
        """Run a loss on the model."""
        return call(self.model)

    def backward(self, term: Tensor, *, loss: Tensor | float, count: Tensor | float) -> None:
        """Add the gradient of `term`, and the shard's numbers in float64.

        Raises:
            StartError: A gradient came in parts, which was known too late; names the parameter.
        """
        if self._turn is None:
            raise ValueError("backward: found no turn, expected one around it")
        term.backward()
        if self._adds and self._flat.in_parts:
            raise StartError(
                f"train.reproducible: the gradient of parameter {self._name(self._flat.in_parts[0])} came in parts in a "
                "later shard and not in the first, expected it whole, or in parts in each; with checkpoint() use "
                "use_reentrant=False"
            )
        shard = self._turn.shard
        self._losses[shard] = self._losses.get(shard, 0.0) + _double(loss)
        self._counts[shard] = self._counts.get(shard, 0.0) + _double(count)

    def _name(self, number: int) -> str:
        wanted = self._flat.parameters[number]
        named = self.model.named_parameters()
        return next((name for name, parameter in named if parameter is wanted), f"number {number}")

    def carry(self, row: Tensor) -> Callable[[], Tensor]:
        """Let a row travel with the numbers: one message less, which counts where steps are short."""
        self._row = row
        return self._rows

    def _rows(self) -> Tensor:
        assert self._row is not None
        return self._row.view(self._world.world_size, -1)

    def finish(self) -> Totals:
        """Finish the tree together with the other ranks. Collective."""
        numbers = _Numbers(self._world, self._shards, self._flags, self._flat.used, self._row)
        numbers.send(self._own, self._losses, self._counts)
        buffers = [buffer for _, buffer in self._tree]
        everywhere = [
            owned(rank, self._world.world_size, self._shards)
            for rank in range(self._world.world_size)
        ]
        self._world.wait_for_gradients()
        result = buffers[0] if buffers else self._flat.take()
        rounds: list[_Round] = []
        if self._present is not None and self._world.world_size > 1:
            # On its way while the numbers are: short steps feel each wait for a message.
            rounds = self._send_first(buffers, result, self._nodes(everywhere, self._present))
        totals, present, used = numbers.read(everywhere)
        self._row = numbers.carried
        nodes = self._nodes(everywhere, present)
        if self._world.world_size == 1:
            for into, other in merges(nodes[0]):
                buffers[into].add(buffers[other])
        else:
            if self._present not in {None, present}:
                raise ValueError(f"shards: found {present} in the step, expected {self._present}")
            rounds = rounds or self._send_first(buffers, result, nodes)
            _exchange(rounds, merges([node for of in nodes for node in of]))
        self._world.has_gradients()
        self._flat.show(result, used)
        for buffer in buffers or [result]:
            self._flat.give_back(buffer)
        self._tree.clear()
        return totals

    def _nodes(self, everywhere: Sequence[range], present: int) -> list[list[Node]]:
        """The subtrees that each rank has of a step with so many shards."""
        nodes = [nodes_of(of, present) for of in everywhere]
        if [node for node, _ in self._tree] != nodes[self._world.rank]:
            raise ValueError(
                f"shards: found subtrees {[node for node, _ in self._tree]}, expected "
                f"{nodes[self._world.rank]} of the {present} shards of the step"
            )
        return nodes

    def _send_first(
        self, buffers: Sequence[Buffer], result: Buffer, nodes: Sequence[Sequence[Node]]
    ) -> list["_Round"]:
        """The chunks that are to be exchanged, the first on its way; none of a phase without parameters."""
        counts = [len(of) for of in nodes]
        rounds = [
            _Round(
                sources=[buffer.flats[kind] for buffer in buffers],
                result=result.flats[kind],
                received=self._flat.received(kind, sum(counts)),
                counts=counts,
                start=start,
                stop=stop,
            )
            for kind in range(len(result.flats))
            for start, stop in self._flat.chunks(kind, self._chunk_bytes)
        ]
        for first in rounds[:1]:
            first.scatter()
        return rounds


def _exchange(rounds: Sequence["_Round"], order: Sequence[tuple[int, int]]) -> None:
    """Slices to their owners, of which the first are on their way, the rest of the tree there, and the sums back to all."""
    # The same order on all ranks, so that one process group is enough.
    for number, this in enumerate(rounds):
        if number + 1 < len(rounds):
            rounds[number + 1].scatter()
        this.gather(order)
    for this in rounds:
        this.wait()


def _double(value: Tensor | float) -> Tensor | float:
    return value.detach().double() if isinstance(value, Tensor) else float(value)


# ------------------------------------------------------------------------------------------- numbers
class _Numbers:
    """A rank's numbers of a phase, gathered from all ranks and added in the order of the shards."""

    def __init__(
        self,
        world: World,
        shards: int,
        flags: Sequence[float],
        used: Sequence[bool],
        row: Tensor | None,
    ) -> None:
        self._world, self._flags, self._used = world, flags, used
        self.carried = row
        """What travels beside them: this rank's before `read`, all ranks' after it."""
        workers = min(world.world_size, shards)
        self._slots = -(-shards // workers)
        self._size = len(flags) + 3 * self._slots + len(used)
        self._own = torch.empty(0)
        self._all = torch.empty(0)
        self._work: dist.Work | None = None

    def send(
        self, own: range, losses: dict[int, Tensor | float], counts: dict[int, Tensor | float]
    ) -> None:
        device = self._world.device
        there = [float(shard in losses) for shard in own]
        rows = [losses.get(shard, 0.0) for shard in own], [counts.get(shard, 0.0) for shard in own]
        padding = [0.0] * (self._slots - len(own))
        head = [*self._flags, *map(float, self._used), *there, *padding]
        if device.type == "cpu":
            values = [float(value) for row in rows for value in (*row, *padding)]
            self._own = torch.tensor(head + values, dtype=torch.float64)
        else:
            # Nothing here waits for the device.
            values_there = [
                torch.as_tensor(value, dtype=torch.float64).to(device, non_blocking=True).reshape(1)
                for row in rows
                for value in (*row, *padding)
            ]
            first = torch.tensor(head, dtype=torch.float64).to(device, non_blocking=True)
            self._own = torch.cat([first, *values_there])
        if self.carried is not None:
            self._own = torch.cat([self._own, self.carried])
        if self._world.world_size > 1:
            self._all = self._own.new_empty(self._world.world_size * len(self._own))
            self._work = dist.all_gather_single(self._all, self._own, async_op=True)

    def read(self, everywhere: Sequence[range]) -> tuple[Totals, int, list[bool]]:
        """The totals, how many shards the step has, and which parameters any of them used."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        every = self._all if self._world.world_size > 1 else self._own
        table = every.view(-1, len(self._own))
        if self.carried is not None:
            self.carried = table[:, self._size :]
        rows = table[:, : self._size].tolist()
        flags, slots = len(self._flags), self._slots
        summed = [sum(column) for column in zip(*(row[:flags] for row in rows), strict=True)]
        used = [
            any(column)
            for column in zip(*(r[flags : flags + len(self._used)] for r in rows), strict=True)
        ]
        present, loss, count = 0, 0.0, 0.0
        for row, shards in zip(rows, everywhere, strict=True):
            there, losses, counts = (
                row[flags + len(used) + part * slots :][:slots] for part in range(3)
            )
            for slot in range(len(shards)):
                present += bool(there[slot])
                loss += losses[slot]
                count += counts[slot]
        return Totals(loss=loss, count=count, flags=tuple(summed)), present, used


# -------------------------------------------------------------------------------------------- rounds
@dataclass(kw_only=True, slots=True)
class _Round:
    """One chunk on its way: from every rank's subtrees to the sum on every rank."""

    sources: Sequence[Tensor]
    result: Tensor
    received: Tensor
    counts: Sequence[int]
    """Subtrees of each rank."""
    start: int
    stop: int
    _work: dist.Work | None = None
    _parts: Tensor = field(default_factory=lambda: torch.empty(0))
    _packed: Tensor = field(default_factory=lambda: torch.empty(0))

    @property
    def _slice(self) -> int:
        return (self.stop - self.start) // len(self.counts)

    def scatter(self) -> None:
        """Send each rank its slice of this rank's subtrees."""
        ranks, nodes, length = len(self.counts), sum(self.counts), self._slice
        begin = nodes * (self.start // ranks)
        self._parts = self.received[begin : begin + nodes * length]
        if len(self.sources) == 1:
            self._packed = self.sources[0][self.start : self.stop]
        else:
            packed = self.result.new_empty(ranks, len(self.sources), length)
            for number, source in enumerate(self.sources):
                packed[:, number].copy_(source[self.start : self.stop].view(ranks, length))
            self._packed = packed.view(-1)
        self._work = dist.all_to_all_single(
            self._parts,
            self._packed,
            [count * length for count in self.counts],
            [len(self.sources) * length] * ranks,
            async_op=True,
        )

    def gather(self, order: Sequence[tuple[int, int]]) -> None:
        """Finish the tree for this rank's slice, and give it to all."""
        self.wait()
        parts = self._parts.view(sum(self.counts), self._slice)
        for into, other in order:
            parts[into].add_(parts[other])
        self._work = dist.all_gather_single(
            self.result[self.start : self.stop], parts[0], async_op=True
        )

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            # Handles that outlive the process group have ended processes at exit.
            self._work = None
