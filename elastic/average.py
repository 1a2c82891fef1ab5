"""An average of the weights over the steps, kept beside them: `train.ema`.

Promises: after each applied step `average = decay * average + (1 - decay) * weights`, without warm-up,
from the first weights on; every rank holds the same. The two sets are never mixed: while the model
shows the average (an evaluation), what is asked for the weights still gets the weights. Floating and complex buffers
are averaged as parameters are, other buffers are the model's own. Half precision is averaged as float32.
"""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from elastic.weights import model_tensors, plain_names

__all__ = ["Average"]


@dataclass(slots=True, eq=False)
class _Place:
    """One parameter or buffer of the model, with its average."""

    owner: nn.Module
    key: str
    names: list[str]
    """Its plain names; a tied one has several."""
    mean: Tensor
    shown: Tensor | None = field(default=None)
    """The weights, while the model shows the average."""

    @property
    def live(self) -> Tensor:
        """The tensor that the model uses now; a buffer may have been replaced."""
        found = _tensor(self.owner, self.key)
        assert found is not None
        return found

    @property
    def raw(self) -> Tensor:
        """The weights, whatever the model shows."""
        return self.live.detach() if self.shown is None else self.shown


class Average:
    """The average of one model's weights."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        """Begin at the weights as they are."""
        self.decay = decay
        self._model = model
        self._places = _places(model)

    @torch.no_grad()
    def begin(self) -> None:
        """Begin anew at the weights as they are."""
        for place in self._places:
            place.mean.copy_(place.raw)

    @torch.no_grad()
    def update(self) -> None:
        """Take in the weights after an update. Every rank alike."""
        weight = 1.0 - self.decay
        means, lives = [], []
        for place in self._places:
            live = place.raw
            means.append(place.mean)
            lives.append(live if live.dtype == place.mean.dtype else live.to(place.mean.dtype))
        torch._foreach_lerp_(means, lives, weight)  # one call for all tensors

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Let the model have the averages; by exchanging what its tensors point at, not by copying."""
        try:
            for place in self._places:
                live, place.shown = place.live, place.live.data
                live.data = place.mean.to(live.dtype)
            yield
        finally:
            for place in self._places:
                if place.shown is not None:
                    place.live.data, place.shown = place.shown, None

    def raw(self) -> dict[str, Tensor]:
        """The weights by plain name, also while the model shows the averages."""
        return {name: place.raw for place in self._places for name in place.names}

    def tensors(self) -> dict[str, Tensor]:
        """The averages under the names of the model's own state, live; complete enough to load."""
        means = {name: place.mean for place in self._places for name in place.names}
        return {name: means.get(name, own) for name, own in model_tensors(self._model).items()}

    @torch.no_grad()
    def load(self, saved: Mapping[str, Tensor]) -> None:
        """Take averages back that `tensors` gave."""
        for place in self._places:
            for name in place.names:
                if name in saved:
                    place.mean.copy_(saved[name])


def _tensor(owner: nn.Module, key: str) -> Tensor | None:
    """A module's own parameter or buffer of this name."""
    found: Tensor | None = owner._parameters.get(key)  # noqa: SLF001  # as nn.Module looks for it
    return owner._buffers.get(key) if found is None else found  # noqa: SLF001


def _places(model: nn.Module) -> list[_Place]:
    """What of the model's state can be averaged; a tied tensor once."""
    found: dict[int, _Place] = {}
    for plain, actual in plain_names(model).items():
        path, _, key = actual.rpartition(".")
        try:
            owner = model.get_submodule(path)
        except AttributeError:
            continue  # an entry that a module makes up for its state
        tensor = _tensor(owner, key)
        if tensor is None or not (tensor.is_floating_point() or tensor.is_complex()):
            continue
        if id(tensor) in found:
            found[id(tensor)].names.append(plain)
            continue
        wide = torch.promote_types(tensor.dtype, torch.float32)
        mean = tensor.detach().clone().to(wide)
        found[id(tensor)] = _Place(owner=owner, key=key, names=[plain], mean=mean)
    return list(found.values())
