"""A small GAN: a job of two phases, and the same training as a plain loop in one process.

Each loss uses both nets, so that a runner which lets one phase's gradient into the other's parameters,
or sends it, ends elsewhere.
"""

# ruff: noqa: ARG002 - the methods' arguments are the Job class's own.

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import LambdaLR, StepLR
from torch.utils.data import Dataset

from jobs.job import Job, Mean, Optimizers, Schedule
from tests.support.tracer import Batch, Numbers


class Pair(nn.Module):
    """A generator and a discriminator of numbers, with fixed first weights."""

    def __init__(self) -> None:
        super().__init__()
        self.gen = nn.Sequential(nn.Linear(1, 3), nn.Tanh(), nn.Linear(3, 1))
        self.disc = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1))
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters()):
                values = torch.arange(parameter.numel(), dtype=torch.float32)
                parameter.copy_(torch.sin(values + number + 1).view_as(parameter))


class Gan(Job):
    """Discriminator first, then generator; what is real is the dataset's numbers divided by n."""

    def __init__(self, n: int = 10, nan_item: int | None = None) -> None:
        self.n = n
        self.nan_item = nan_item

    def dataset(self) -> Dataset[Any]:
        return Numbers(self.n)

    def model(self) -> nn.Module:
        return Pair()

    def optimizer(self, model: nn.Module) -> Optimizers:
        assert isinstance(model, Pair)
        return {
            "gen": SGD(model.gen.parameters(), lr=0.1, momentum=0.9),
            "disc": Adam(model.disc.parameters(), lr=0.01),
        }

    def scheduler(self, optimizer: Optimizers, total_steps: int) -> Mapping[str, Schedule]:
        assert not isinstance(optimizer, Optimizer)
        return {
            "disc": StepLR(optimizer["disc"], step_size=2, gamma=0.5),
            "gen": (LambdaLR(optimizer["gen"], lambda epoch: 1 / (1 + epoch)), "epoch"),
        }

    def losses(self) -> Any:
        return {"disc": self.disc_loss, "gen": self.gen_loss}

    def disc_loss(self, model: Any, batch: Batch) -> Tensor:
        real, fake = self._real_and_fake(model, batch)
        loss: Tensor = softplus(-model.disc(real)).mean() + softplus(model.disc(fake)).mean()
        return loss

    def gen_loss(self, model: Any, batch: Batch) -> Mean:
        _, fake = self._real_and_fake(model, batch)
        weights = 1.0 + batch[1] % 3
        return Mean((softplus(-model.disc(fake))[:, 0] * weights).sum(), weights.sum())

    def _real_and_fake(self, model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        values, indices = batch
        real = (values / self.n).float()[:, None]
        if self.nan_item is not None:
            real = torch.where(indices[:, None] == self.nan_item, torch.nan, real)
        return real, model.gen(torch.cos(indices.float())[:, None])


def reference(n: int, batch: int, epochs: int, seed: int = 0) -> dict[str, Tensor]:
    """The weights after the same steps, by a plain loop over whole batches."""
    job = Gan(n)
    model = job.model()
    optimizers: Any = job.optimizer(model)
    schedules: Any = job.scheduler(optimizers, 0)
    for epoch in range(epochs):
        order = torch.randperm(n, generator=torch.Generator().manual_seed(seed + epoch))
        for start in range(0, n, batch):
            indices = order[start : start + batch]
            samples = (indices.double(), indices)
            for name, loss in job.losses().items():
                optimizers[name].zero_grad()
                value = loss(model, samples)
                (value.sum / value.count if isinstance(value, Mean) else value).backward()
                optimizers[name].step()
                optimizers["gen" if name == "disc" else "disc"].zero_grad()
            schedules["disc"].step()
        schedules["gen"][0].step()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}
