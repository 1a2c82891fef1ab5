"""A small job that notes its moments in a file, for the bench of recoveries; the plain script does the same.

A line holds the moment's name, CLOCK_MONOTONIC (one clock for all processes of a machine), rank and step.
"""

import os
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.data import Dataset, TensorDataset

from elastic import Job
from jobs.job import JobRun


def note(folder: str, what: str, step: int = 0) -> None:
    """Append a moment."""
    line = (
        f"{what} {time.clock_gettime(time.CLOCK_MONOTONIC)} {os.environ.get('RANK', '0')} {step}\n"
    )
    descriptor = os.open(f"{folder}/moments", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(descriptor, line.encode())
    os.close(descriptor)


def data(n: int) -> TensorDataset:
    """The samples: what a sum of features is."""
    features = torch.randn(n, 32, generator=torch.Generator().manual_seed(0))
    return TensorDataset(features, features.sum(1, keepdim=True))


def network() -> nn.Module:
    """The model."""
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))


class Recovering(Job):
    """Trains the small model; `folder` is where moments go, `delay` is slept in each step."""

    def __init__(self, folder: str, n: int = 512, delay: float = 0.0) -> None:
        self.folder, self.n, self.delay = folder, n, delay
        note(folder, "imported")

    def dataset(self) -> Dataset[Any]:
        note(self.folder, "met")
        return data(self.n)

    def model(self) -> nn.Module:
        return network()

    def optimizer(self, model: nn.Module) -> Optimizer:
        return SGD(model.parameters(), lr=0.01, momentum=0.9)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        time.sleep(self.delay)
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    def on_step(self, run: JobRun) -> None:
        note(self.folder, "stepped", run.step)

    def state_dict(self) -> dict[str, Any]:
        return {"n": self.n}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.n = int(state["n"])
        note(self.folder, "restored")
