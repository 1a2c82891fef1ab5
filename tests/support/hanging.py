"""A job that hangs at one place, in one way, on one rank, once; and one whose rank is slow.

The place and the way are arguments: `where` is load, loss, evaluate, model or hook, `how` is sleep (in Python),
loop (in Python), gil (in C, with Python's lock held) or stop (SIGSTOP).
"""

import ctypes
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from jobs.job import JobRun, Mean, Metric
from tests.support.tracer import Batch, Counter, Numbers, rank_here, steps_done


def hang(how: str) -> None:
    """Give no sign of life any more."""
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    while how == "loop":
        pass
    if how == "gil":
        ctypes.PyDLL(None).sleep(3600)
    time.sleep(3600)


class Hanging(Counter):
    """Hangs in step `step` on `rank`; with `marker` once, without at each try."""

    def __init__(
        self,
        where: str = "loss",
        how: str = "sleep",
        step: int = 3,
        rank: int = 1,
        n: int = 24,
        marker: str = "",
    ) -> None:
        super().__init__(n)
        self.where, self.how, self.step, self.rank, self.marker = where, how, step, rank, marker
        self._trained = 0

    def _maybe(self, where: str, step: int) -> None:
        if (where, step, rank_here()) != (self.where, self.step, self.rank):
            return
        if self.marker:
            if Path(self.marker).exists():
                return
            Path(self.marker).touch()
        hang(self.how)

    def dataset(self) -> Dataset[Any]:
        return Reading(self) if self.where == "load" else super().dataset()

    def model(self) -> nn.Module:
        self._maybe("model", self.step)
        return super().model()

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        self._trained = steps_done(model)
        self._maybe("loss", self._trained + 1)
        loss = super().loss(model, batch)
        assert isinstance(loss, Tensor)
        return loss

    def eval_dataset(self) -> Dataset[Any]:
        return Numbers(6)

    def metrics(self, model: nn.Module, batch: Batch) -> Mapping[str, Metric]:
        self._maybe("evaluate", steps_done(model))
        return {"score": Mean(torch.tensor(1.0), 1)}

    def on_step(self, run: JobRun) -> None:
        self._maybe("hook", run.step)


class Reading(Numbers):
    """Hangs where the item of the job's step is read, in a loader worker where there is one."""

    def __init__(self, job: Hanging) -> None:
        super().__init__(job.n)
        self.job = job
        self.read = 0

    def __getitem__(self, index: int) -> tuple[float, int]:
        self.read += 1
        self.job._maybe("load", self.read)
        return super().__getitem__(index)


class Slow(Counter):
    """One rank takes `late` seconds longer for each step."""

    def __init__(
        self, n: int = 4000, rank: int = 1, late: float = 0.1, delay: float = 0.05
    ) -> None:
        super().__init__(n, delay)
        self.rank, self.late = rank, late

    def loss(self, model: nn.Module, batch: Batch) -> Any:
        if rank_here() == self.rank:
            time.sleep(self.late)
        return super().loss(model, batch)
