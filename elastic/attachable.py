"""What a training's state asks of the objects that are attached to it."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

__all__ = ["Averaged", "Broadcaster", "Stateful", "is_stateful"]


class Stateful(Protocol):
    """What can be attached: its state is of tensors and JSON values."""

    def state_dict(self) -> Any:
        """The state."""
        ...

    def load_state_dict(self, state: Any, /) -> Any:
        """Take it back."""
        ...


class Averaged(Protocol):
    """An average of the model's weights, as far as it is needed here."""

    def begin(self) -> None:
        """Begin anew at the weights."""
        ...

    def raw(self) -> Mapping[str, Tensor]:
        """The weights, whatever the model shows."""
        ...

    def tensors(self) -> Mapping[str, Tensor]:
        """The averages, live."""
        ...

    def load(self, saved: Mapping[str, Tensor], /) -> None:
        """Take averages back."""
        ...


class Broadcaster(Protocol):
    """The world, as far as it is needed here."""

    def broadcast_tensors(self, tensors: Sequence[Tensor], src: int = 0) -> None:
        """Overwrite the tensors with those of rank `src`. Collective."""
        ...


def is_stateful(thing: object) -> bool:
    """Whether something has `state_dict` and `load_state_dict` to call."""
    return all(callable(getattr(thing, name, None)) for name in ("state_dict", "load_state_dict"))
