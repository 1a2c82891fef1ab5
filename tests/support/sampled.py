"""Tracer jobs that ask for draws of their own, and the draws of C08; killed at exact places as in `killed`.

Each is started as `tests/support/sampled.py:Weighted`.
"""

# ruff: noqa: ARG002 - the methods' arguments are the Job class's own.

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils.data import ConcatDataset, Dataset, IterableDataset

from jobs import sampling
from jobs.job import Loss
from tests.support import tracer
from tests.support.drawing import Drawing
from tests.support.killed import Killed


class Weighted(Killed, tracer.Tracer):
    """Sample i is wanted i times as often as sample 1; an epoch has `draws` draws."""

    def __init__(self, draws: int = 30, **args: Any) -> None:
        super().__init__(**args)
        self.draws = draws

    def sampling(self, dataset: Dataset[Any]) -> sampling.Sampling:
        return sampling.Weighted(range(self.n), self.draws)


class Mixture(Killed, tracer.Tracer):
    """Two parts: a third of the samples makes half of an epoch."""

    def __init__(self, draws: int = 30, share: float = 1.0, **args: Any) -> None:
        super().__init__(**args)
        self.draws = draws
        self.share = share

    def dataset(self) -> Dataset[Any]:
        small = self.n // 3
        values = [float(i) for i in range(self.n)]
        return ConcatDataset(
            [tracer.Numbers(small, values[:small]), tracer.Numbers(0, values[small:])]
        )

    def sampling(self, dataset: Dataset[Any]) -> sampling.Sampling:
        return sampling.Mixture([self.share, 1.0], samples=self.draws)


class Various(Weighted):
    """Ranks that want different draws."""

    def sampling(self, dataset: Dataset[Any]) -> sampling.Sampling:
        return sampling.Weighted(range(self.n), self.draws + tracer.rank_here())


class Stream(tracer.Tracer):
    """A dataset that only iterates."""

    def dataset(self) -> Dataset[Any]:
        return Endless()


class Endless(IterableDataset[float]):
    """Zeros without end."""

    def __iter__(self) -> Iterator[float]:
        while True:
            yield 0.0


class Draws(Killed, tracer.Tracer):
    """C08: writes down what each sample of each step drew, a line for each micro-batch, under `folder`."""

    def __init__(self, folder: str = "", **args: Any) -> None:
        super().__init__(**args)
        self.folder = Path(folder)

    def dataset(self) -> Dataset[Any]:
        return Drawing(self.n)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        columns = [column.tolist() for column in batch]
        loss = super().loss(model, (batch[0].float(), batch[0]))
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / f"{os.getpid()}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps([self.steps, list(zip(*columns, strict=True))]) + "\n")
        return loss
