"""Jobs on what a checkpoint must keep beside weights and moments: an average, a loss scale, two optimizers.

Each can be killed at exact places, as those of `tests.support.killed`.
"""

# ruff: noqa: ARG002 - the methods' arguments are the Job class's own.

import os
import signal
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.data import Dataset

from jobs.job import Job, Loss, Mean, Metric
from tests.support import phased, tracer
from tests.support.killed import Killed
from tests.support.tracer import Batch, Numbers


class Averaged(Killed, tracer.Tracer):
    """C40: an evaluation tells the weight that it sees; `ask` is a step in whose evaluation SIGTERM comes, once."""

    def __init__(self, ask: int = 0, **args: Any) -> None:
        super().__init__(**args)
        self.ask = ask

    def eval_dataset(self) -> Dataset[Any]:
        return Numbers(6)

    def metrics(self, model: nn.Module, batch: Batch) -> Mapping[str, Metric]:
        if self.steps == self.ask and self._is_first((self.ask, 100 + tracer.rank_here())):
            os.kill(os.getpid(), signal.SIGTERM)
        count = len(batch[0])
        return {"w": Mean(next(model.parameters()).detach() * count, count)}


class Line(nn.Module):
    """A weight in front of small numbers, so that fp16 holds the sum of what fp16 held of each."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(self.layer.weight)

    def forward(self, values: Tensor) -> Tensor:
        found: Tensor = self.layer(torch.full((len(values), 1), 2.0**-8))
        return found


class Overflowing(Killed, tracer.Tracer):
    """C39: of each sample's output the gradient is 20 / B: in fp16 too much at a scale of 16384 and above."""

    def model(self) -> nn.Module:
        return Line()

    def optimizer(self, model: nn.Module) -> Optimizer:
        return SGD(model.parameters(), lr=0.1)

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        super().loss(_Nothing(), batch)  # counts, and is killed
        loss: Tensor = (model(batch[0]).float() * 20.0).mean()
        return loss


class Ruined(tracer.Tracer):
    """From the second step on each loss is infinite: the weights are to blame, not the data."""

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        loss = super().loss(model, batch)
        assert isinstance(loss, Tensor)
        return loss + (torch.inf if float(next(model.parameters()).detach()) > 0 else 0.0)


class _Nothing(nn.Module):
    def forward(self, values: Tensor) -> Tensor:
        return values


class Gan(phased.Gan):
    """The GAN, killed in its discriminator's loss."""

    def __init__(self, kill: str = "", marks: str = "", n: int = 10) -> None:
        super().__init__(n=n)
        self._killed = _Counter(kill, marks)

    def disc_loss(self, model: Any, batch: Batch) -> Tensor:
        self._killed.loss(model, batch)
        return super().disc_loss(model, batch)

    def state_dict(self) -> dict[str, Any]:
        return self._killed.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._killed.load_state_dict(state)


class _Silent(Job):
    """A job of which only the count of losses is wanted."""

    def dataset(self) -> Dataset[Any]:
        return Numbers(1)

    def model(self) -> nn.Module:
        return nn.Identity()

    def optimizer(self, model: nn.Module) -> Optimizer:
        return SGD([nn.Parameter(torch.zeros(1))], lr=0.1)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        return torch.zeros(())


class _Counter(Killed, _Silent):
    """Counts and kills for a job whose losses have other names."""
