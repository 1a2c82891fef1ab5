"""Flat buffers of gradients: a phase's parameters in one row, into which backwards add.

A backward is expected to add each parameter's gradient at once. Where it comes in several parts (a weight that is
used in two reentrant checkpoints, a loss that calls `backward` itself) that is noted: each part is an addition of its own.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn

__all__ = ["Buffer", "Flat"]

_ALIGN: Final = 16
"""Each parameter begins at a multiple of this many elements, as kernels like it."""


@dataclass(slots=True)
class Buffer:
    """The gradients of a phase in one row, a tensor for each type of parameter, and views of it."""

    flats: list[Tensor]
    views: list[Tensor]

    def clear(self) -> None:
        """Make it zero."""
        for flat in self.flats:
            flat.zero_()

    def add(self, other: "Buffer") -> None:
        """Add another one."""
        for flat, more in zip(self.flats, other.flats, strict=True):
            flat.add_(more)


class Flat:
    """The flat buffers of one phase's parameters."""

    def __init__(self, parameters: list[nn.Parameter], world_size: int) -> None:
        self.parameters = [p for p in dict.fromkeys(parameters) if p.requires_grad]
        self.used = [False] * len(self.parameters)
        self.in_parts: list[int] = []
        """Parameters whose gradient came in several parts in one turn, by number."""
        self._come = [False] * len(self.parameters)
        self._world_size = world_size
        self._free: list[Buffer] = []
        self._received: dict[int, Tensor] = {}
        kinds = dict.fromkeys((p.dtype, p.device) for p in self.parameters)
        self._kinds = {kind: place for place, kind in enumerate(kinds)}
        self._sizes = [0] * len(kinds)
        self._strides = [torch.empty_like(p, device="meta").stride() for p in self.parameters]
        self._places: list[tuple[int, int]] = []
        for number, parameter in enumerate(self.parameters):
            kind = self._kinds[parameter.dtype, parameter.device]
            self._places.append((kind, self._sizes[kind]))
            self._sizes[kind] += -(-parameter.numel() // _ALIGN) * _ALIGN
            parameter.register_post_accumulate_grad_hook(functools.partial(self._note, number))
        # Every rank owns a slice of each chunk, all of one length.
        self._sizes = [-(-size // world_size) * world_size for size in self._sizes]

    def _note(self, number: int, _: Tensor) -> None:
        self.used[number] = True
        if self._come[number] and number not in self.in_parts:
            self.in_parts.append(number)
        self._come[number] = True

    def begin_turn(self) -> None:
        """Before a forward: no gradient has come."""
        self._come[:] = [False] * len(self._come)

    def forget(self) -> None:
        """Before the first shard: nothing is used yet."""
        self.used[:] = [False] * len(self.used)

    def take(self) -> Buffer:
        """A free buffer, made where there is none."""
        if self._free:
            return self._free.pop()
        flats = [
            torch.zeros(size, dtype=dtype, device=device)
            for size, (dtype, device) in zip(self._sizes, self._kinds, strict=True)
        ]
        views = [
            # In the parameter's own order of dimensions: fused optimizers read both as they lie in memory.
            flats[kind][start : start + parameter.numel()].as_strided(parameter.shape, strides)
            for parameter, strides, (kind, start) in zip(
                self.parameters, self._strides, self._places, strict=True
            )
        ]
        return Buffer(flats, views)

    def give_back(self, buffer: Buffer) -> None:
        """Its content stays readable until the next step takes it."""
        self._free.append(buffer)

    def point_at(self, buffer: Buffer) -> None:
        """Let backwards add into a buffer."""
        for parameter, view in zip(self.parameters, buffer.views, strict=True):
            parameter.grad = view

    def show(self, buffer: Buffer, used: Sequence[bool]) -> None:
        """Let the optimizer see the sums; None where no shard used a parameter."""
        for parameter, view, is_used in zip(self.parameters, buffer.views, used, strict=True):
            parameter.grad = view if is_used else None

    def received(self, kind: int, nodes: int) -> Tensor:
        """Room for all nodes' parts of this rank's slices."""
        needed = nodes * (self._sizes[kind] // self._world_size)
        room = self._received.get(kind)
        if room is None or len(room) < needed:
            dtype, device = list(self._kinds)[kind]
            room = self._received[kind] = torch.empty(needed, dtype=dtype, device=device)
        return room

    def chunks(self, kind: int, chunk_bytes: int) -> list[tuple[int, int]]:
        """Where a flat tensor is cut; each chunk is a multiple of the ranks."""
        dtype, _ = list(self._kinds)[kind]
        size, unit = self._sizes[kind], self._world_size
        length = max(1, chunk_bytes // dtype.itemsize // unit) * unit
        return [(start, min(start + length, size)) for start in range(0, size, length)]
