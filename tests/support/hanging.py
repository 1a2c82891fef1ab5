"""A job whose ranks hang at given places, each once; one that crashes at a step; one whose rank is slow."""

import ctypes
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset, get_worker_info

from jobs.job import JobRun, Mean, Metric
from tests.support.tracer import Batch, Counter, Numbers, rank_here, steps_done


def hang(how: str) -> None:
    """Give no sign of life any more: in Python, in C with Python's lock held, stopped, or in a dead collective."""
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if how == "gil":
        ctypes.PyDLL(None).sleep(3600)
    if how == "alone":
        dist.barrier()
    while how == "loop":
        pass
    time.sleep(3600)


class Hanging(Counter):
    """Hangs as a text such as "loss:gil:3@1 load:sleep:4@0" says: where, how, in which step, on which rank.

    One after the other: what has happened is noted in the folder `marks`, and the next may. Without it the first
    happens at each try.
    """

    def __init__(self, hangs: str = "", n: int = 40, marks: str = "", delay: float = 0.0) -> None:
        super().__init__(n, delay)
        self.hangs, self.marks = hangs.split(), marks
        self._evaluated = 0

    def maybe(self, where: str, step: int) -> None:
        """Hang, if this is one of the places."""
        for place in self.hangs:
            mark = Path(self.marks) / place.replace(":", "-")
            if self.marks and mark.exists():
                continue
            at, how, when = place.split(":")
            if (at, when) == (where, f"{step}@{rank_here()}"):
                if self.marks:
                    mark.parent.mkdir(exist_ok=True)
                    mark.touch()
                hang(how)
            return

    def dataset(self) -> Dataset[Any]:
        return Reading(self)

    def model(self) -> nn.Module:
        self.maybe("model", 0)
        return super().model()

    def loss(self, model: nn.Module, batch: Batch) -> Any:
        self.maybe("loss", steps_done(model) + 1)
        return super().loss(model, batch)

    def eval_dataset(self) -> Dataset[Any]:
        return Numbers(8)

    def metrics(self, model: nn.Module, batch: Batch) -> Mapping[str, Metric]:
        self._evaluated += 1
        if self._evaluated % 2 == 0:  # the first batch has a longer bound
            self.maybe("evaluate", steps_done(model))
        return {"score": Mean(torch.tensor(float(len(batch[0]))), len(batch[0]))}

    def on_step(self, run: JobRun) -> None:
        self.maybe("hook", run.step)


class Reading(Numbers):
    """Hangs where a loader worker reads its item of the given number."""

    def __init__(self, job: Hanging) -> None:
        super().__init__(job.n)
        self.job = job
        self.read = 0

    def __getitem__(self, index: int) -> tuple[float, int]:
        if get_worker_info() is not None:
            self.read += 1
            self.job.maybe("load", self.read)
        return super().__getitem__(index)


class Crashing(Counter):
    """Rank 1 ends in step 3 at each try by a signal that comes from its own code; `host` may be at fault."""

    def __init__(self, n: int = 40, step: int = 3, only: str = "", delay: float = 0.0) -> None:
        super().__init__(n, delay)
        self.step, self.only = step, only

    def model(self) -> nn.Module:
        if self.only and os.environ.get("FAULTY") == self.only:
            ctypes.string_at(0)
        return super().model()

    def loss(self, model: nn.Module, batch: Batch) -> Any:
        if not self.only and steps_done(model) + 1 == self.step and rank_here() == 1:
            ctypes.string_at(0)
        return super().loss(model, batch)


class Slow(Counter):
    """One rank takes `late` seconds longer for each step."""

    def __init__(self, n: int = 4000, rank: int = 1, late: float = 0.05) -> None:
        super().__init__(n, 0.02)
        self.rank, self.late = rank, late

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        if rank_here() == self.rank:
            time.sleep(self.late)
        loss = super().loss(model, batch)
        assert isinstance(loss, Tensor)
        return loss
