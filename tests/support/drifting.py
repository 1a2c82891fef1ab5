"""A tracer one of whose ranks holds another state from some step on, once, as after a flipped bit.

Started as `tests/support/drifting.py:Drifting` with `args.at` (a step), `args.rank` and `args.marks`, and
`Filled`, whose one large parameter is filled with one number at every step (C27), and `Large` (C36).
"""

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.utils.data import Dataset

from jobs.job import Job, Loss
from tests.support import tracer


class Drifting(tracer.Tracer):
    """The tracer; in step `at` the weight of one rank is changed behind the reducer's back."""

    def __init__(self, at: int = 3, rank: int = 1, marks: str = "", **args: Any) -> None:
        super().__init__(**args)
        self.at, self.odd_rank, self.marks = at, rank, Path(marks)
        self.calls = 0

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        self.calls += 1
        if self.calls == self.at and tracer.rank_here() == self.odd_rank and self._is_first():
            with torch.no_grad():
                next(p for name, p in model.named_parameters() if name.endswith("w")).add_(1.0)
        return super().loss(model, batch)

    def _is_first(self) -> bool:
        try:
            self.marks.touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


class _One(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((size,), 1.0))

    def forward(self, values: Tensor) -> Tensor:
        return (self.w.mean() - values.to(self.w.dtype)) ** 2


class Filled(Job):
    """One parameter of `megabytes`, all of whose elements are the same at every step; AdamW."""

    def __init__(self, n: int = 80, megabytes: int = 8) -> None:
        self.n, self.size = n, megabytes << 18

    def dataset(self) -> Dataset[Any]:
        return tracer.Numbers(self.n)

    def model(self) -> nn.Module:
        return _One(self.size)

    def optimizer(self, model: nn.Module) -> Optimizer:
        return AdamW(model.parameters(), lr=0.01)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        return torch.as_tensor(model(batch[0])).mean()


class Large(Filled):
    """`Filled` that writes down the most private memory of its process, by rank, to `marks`."""

    def __init__(self, marks: str = "", **args: Any) -> None:
        super().__init__(**args)
        self.marks = Path(marks)
        self.peak = 0

    def model(self) -> nn.Module:
        made = super().model()
        self.before = private_bytes()
        threading.Thread(target=self._watch, name="peak", daemon=True).start()
        return made

    def _watch(self) -> None:
        while True:
            self.peak = max(self.peak, private_bytes())
            time.sleep(0.001)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        # Taken before the first backward: what comes later is the same in every generation.
        if not (self.marks / f"{os.getpid()}").exists():
            self.marks.mkdir(parents=True, exist_ok=True)
            figures = {"peak": self.peak, "before": self.before, "now": private_bytes()}
            (self.marks / f"{os.getpid()}").write_text(json.dumps(figures))
        return super().loss(model, batch)


def private_bytes() -> int:
    """The memory that this process shares with no other."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0
