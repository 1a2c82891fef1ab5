"""The buffers of a model: where each is, and what it was when the step began.

A change is seen by a buffer's version or by its being another tensor, or, of those that torch changes without showing it
(norms) or that are written through `.data`, by comparing bits.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

__all__ = ["KeptBuffers", "Place", "differ", "places_of"]

_BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By the bytes of an element: what its bits are compared as."""


@dataclass(slots=True, eq=False)
class Place:
    """One buffer of a model, wherever it is assigned to, and what it was."""

    module: nn.Module
    name: str
    tracks: bool
    """Whether it counts a norm's batches, of which a step is one."""
    always: bool
    """Whether torch changes it without its version showing it."""
    is_persistent: bool
    """Whether the model's state has it."""
    base: Tensor
    """Its content when the step began."""
    seen: Tensor
    version: int

    @property
    def now(self) -> Tensor:
        """What the module has there; of complex numbers both parts."""
        buffer = self._own
        return torch.view_as_real(buffer) if buffer.is_complex() else buffer

    @property
    def _own(self) -> Tensor:
        buffer = self.module._buffers[self.name]  # noqa: SLF001  # the name is a buffer's
        assert buffer is not None
        return buffer

    @property
    def is_written(self) -> bool:
        """Whether it shows that something was written; what was written through `.data` does not."""
        return self._own is not self.seen or self.seen._version != self.version  # noqa: SLF001

    def note(self) -> None:
        """What is there now is known."""
        self.seen = self._own
        self.version = self.seen._version  # noqa: SLF001

    def restore(self) -> None:
        """Put back what it began with."""
        self.now.copy_(self.base)
        self.note()


class KeptBuffers:
    """What a forward over numbers that are not finite would spoil for good: running statistics of any kind."""

    def __init__(self, model: nn.Module) -> None:
        """Look at the buffers of a model; keeps a copy of each."""
        self._places = places_of(model)

    @torch.no_grad()
    def begin(self) -> None:
        """Note what the step begins with. Copies only what was written since."""
        for place in self._written():
            place.base.copy_(place.now)
            place.note()

    @torch.no_grad()
    def restore(self) -> None:
        """Put back what the step began with."""
        for place in self._written():
            place.restore()

    def _written(self) -> list[Place]:
        return [place for place in self._places if place.always or place.is_written]


def differ(places: Sequence[Place]) -> list[bool]:
    """Whether each is another than its base: as it shows, else by its bits."""
    found = [place.is_written for place in places]
    unsure = [number for number, is_written in enumerate(found) if not is_written]
    if not unsure:
        return found
    pairs = [(_bits(places[number].now), _bits(places[number].base)) for number in unsure]
    if pairs[0][0].device.type == "cpu":
        differ = [not now.equal(base) for now, base in pairs]
    else:
        # One wait for the device.
        differ = torch.stack([(now != base).any() for now, base in pairs]).tolist()
    for number, is_changed in zip(unsure, differ, strict=True):
        found[number] = is_changed
    return found


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(_BITS[tensor.element_size()])


def places_of(model: nn.Module) -> list[Place]:
    """Find the buffers of a plain model, each once; those without elements are left out."""
    found: dict[int, Place] = {}
    for module in model.modules():
        norm = isinstance(module, _NormBase)
        for name, buffer in module.named_buffers(recurse=False):
            if id(buffer) in found or not buffer.numel():
                continue
            plain = torch.view_as_real(buffer) if buffer.is_complex() else buffer
            tracks = (
                isinstance(module, _NormBase)
                and name == "num_batches_tracked"
                and module.momentum is not None
            )
            found[id(buffer)] = Place(
                module=module,
                name=name,
                tracks=tracks,
                always=norm,
                is_persistent=name not in module._non_persistent_buffers_set,  # noqa: SLF001  # torch tells it nowhere else
                base=plain.detach().clone(),
                seen=buffer,
                version=buffer._version,  # noqa: SLF001
            )
    return list(found.values())
