"""Which tensors seem never to change, so that they get files of their own.

Only a hint: what is in the files decides what is written again, so that a wrong guess costs an upload and
never a byte. Two sources: a parameter that wants no gradient says so itself, from the first checkpoint on;
of all others a sample of the bytes is compared between the first two snapshots of a process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import xxhash

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

SMALLEST_BYTES: Final = 1 << 20
"""What is frozen gets a file of its own from this size on..."""
SMALLEST_SHARE: Final = 0.05
"""... and from this share of its key on: one file is the easier one to use."""
_SAMPLE: Final = 1024
_LOOKS: Final = 2


def freezes(tensor: Tensor) -> bool:
    """Whether a tensor says itself that training does not change it."""
    import torch

    return isinstance(tensor, torch.nn.Parameter) and not tensor.requires_grad


def part(
    tensors: Mapping[str, Tensor], seen: frozenset[str]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Part the tensors of one key into those that change and those that seem frozen.

    Args:
        tensors: All of them, by name.
        seen: The names of those that were seen not to change.
    """
    said = {name for name, tensor in tensors.items() if freezes(tensor)}
    names = said or seen  # who says it knows it, also when it thaws
    frozen = {name: tensor for name, tensor in tensors.items() if name in names}
    changing = {name: tensor for name, tensor in tensors.items() if name not in names}
    size = _size(frozen)
    if size < SMALLEST_BYTES or size < SMALLEST_SHARE * (size + _size(changing)):
        return dict(tensors), {}
    return (changing, frozen) if changing else (frozen, {})


def _size(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


class Watch:
    """Compares a sample of each tensor between the first two snapshots of a process."""

    def __init__(self) -> None:
        self._samples: dict[tuple[str, str], bytes] = {}
        self._looks = 0
        self.seen: dict[str, frozenset[str]] = {}
        """By key, the tensors that did not change."""

    @property
    def is_done(self) -> bool:
        """Whether another look would tell nothing."""
        return self._looks >= _LOOKS

    def look(self, places: Mapping[tuple[str, str], memoryview]) -> None:
        """See the bytes of the tensors in a snapshot, by key and name."""
        if self.is_done:
            return
        self._looks += 1
        samples = {name: _sample(view) for name, view in places.items() if view.nbytes}
        if samples == self._samples:
            self._looks = 1  # the same state twice tells nothing
        elif self.is_done:
            same = [name for name, sample in samples.items() if self._samples.get(name) == sample]
            keys = {key for key, _ in same}
            self.seen = {k: frozenset(name for key, name in same if key == k) for k in keys}
            samples = {}
        self._samples = samples


def _sample(view: memoryview) -> bytes:
    # An odd stride meets the low and the high bytes of every kind of number.
    stride = max(1, view.nbytes // _SAMPLE) | 1
    return xxhash.xxh3_128_digest(bytes(view[::stride]))
