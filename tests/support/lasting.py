"""A tracer in which something takes a minute, and says so in a file: an evaluation, a restore, the first item, a step.

`args.at` names it; without, nothing takes long.
"""

# ruff: noqa: ARG002 - the methods' arguments are the Job class's own.

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from checkpoints.layout import started_name
from jobs.job import Loss, Mean, Metric
from tests.support import tracer
from tests.support.tracer import Batch, Numbers, rank_here

LONG_S = 60.0
BATCH_S = 1.0


class Lasting(tracer.Tracer):
    """Tells each beginning of what lasts: a line with the rank in `told`."""

    def __init__(self, told: str, at: str = "", **args: Any) -> None:
        super().__init__(**args)
        self.steps = 0
        self.told = Path(told)
        self.at = at

    def last(self, at: str, seconds: float) -> None:
        """Take long where this is the place."""
        if at == self.at:
            with self.told.open("a", encoding="utf-8") as file:
                file.write(f"{rank_here()}\n")
            time.sleep(seconds)

    def dataset(self) -> Dataset[Any]:
        return Read(self)

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        self.last("step", 3.0)
        self.steps += 1
        if self.steps == 3:
            self.last("third step", LONG_S)
        return super().loss(model, batch)

    def eval_dataset(self) -> Dataset[Any]:
        return Numbers(int(LONG_S / BATCH_S) * 2)

    def metrics(self, model: nn.Module, batch: Batch) -> Mapping[str, Metric]:
        self.last("evaluation", BATCH_S)
        return {"seen": Mean(torch.tensor(float(len(batch[0]))), len(batch[0]))}

    def state_dict(self) -> dict[str, Any]:
        return {"kept": 1}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        assert state == {"kept": 1}
        self.last("restore", LONG_S)


class Read(Numbers):
    """The items of the job."""

    def __init__(self, job: Lasting) -> None:
        super().__init__(job.n)
        self.job = job

    def __getitem__(self, index: int) -> tuple[float, int]:
        self.job.last("item", LONG_S)
        # Of the first batch, not of the look at what an item is, which comes before.
        if rank_here() == 1 and (self.job.told.parent / "run" / started_name(2)).exists():
            self.job.last("item of rank 1", LONG_S)
        return super().__getitem__(index)
