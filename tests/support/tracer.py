"""Jobs whose weights tell what was trained: the tracer of the public cases, and its relatives.

Each is started as `tests/support/tracer.py:Tracer`. What a job does wrong on purpose depends on its
weights (which count steps, and come back with a checkpoint) and on RANK, never on process history.
"""

# ruff: noqa: ARG002 - the methods' arguments are the Job class's own.

import json
import os
import random
import signal
import time
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, MultiStepLR, StepLR
from torch.utils.data import Dataset

from jobs.job import Job, JobRun, Loss, Mean, Metric, Schedule

Batch = tuple[Tensor, Tensor]


class Numbers(Dataset[tuple[float, int]]):
    """Item i gives the float `values[i]` (by default i) and the index i."""

    def __init__(self, n: int, values: list[float] | None = None) -> None:
        self.values = [float(i) for i in range(n)] if values is None else values

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> tuple[float, int]:
        return self.values[index], index


class Scalar(nn.Module):
    """One scalar parameter w; forward gives w minus each value."""

    def __init__(self, start: float = 0.0) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(start))

    def forward(self, values: Tensor) -> Tensor:
        # The default collate makes float64 of Python's floats; the cases' values are those of fp32.
        return self.w - values.to(self.w.dtype)


class Tracer(Job):
    """w moves a tenth of the way to the mean of each step's samples.

    Args of its own: `delay` seconds slept in each loss, `weighted` (C45: sample i counts 1 + i mod 3
    times), `ballast_mb` of job state, `nan_item` whose loss is not a number (C24).
    """

    def __init__(
        self,
        n: int = 12,
        lr: float = 0.1,
        delay: float = 0.0,
        weighted: bool = False,
        ballast_mb: int = 0,
        nan_item: int | None = None,
    ) -> None:
        self.n = n
        self.lr = lr
        self.delay = delay
        self.weighted = weighted
        self.ballast = torch.arange(ballast_mb << 17, dtype=torch.int64)
        self.nan_item = nan_item

    def dataset(self) -> Dataset[Any]:
        return Numbers(self.n)

    def model(self) -> nn.Module:
        return Scalar()

    def optimizer(self, model: nn.Module) -> Optimizer:
        return SGD(model.parameters(), lr=self.lr)

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        values, indices = batch
        if self.delay:
            time.sleep(self.delay)
        each: Tensor = 0.5 * model(values) ** 2
        if self.nan_item is not None:
            each = torch.where(indices == self.nan_item, torch.nan, each)
        if not self.weighted:
            return each.mean()
        tokens = 1 + indices % 3
        return Mean((tokens * each).sum(), tokens.sum())

    def state_dict(self) -> dict[str, Any]:
        return {"ballast": self.ballast} if len(self.ballast) else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.ballast = state.get("ballast", self.ballast)


class AdamScalar(Tracer):
    """C38: loss 0.5 w^2 from w = 1 under Adam, whose moments show in every step."""

    def model(self) -> nn.Module:
        return Scalar(start=1.0)

    def optimizer(self, model: nn.Module) -> Optimizer:
        return Adam(model.parameters(), lr=self.lr)

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        if self.delay:
            time.sleep(self.delay)
        loss: Tensor = 0.5 * (model(torch.zeros_like(batch[0])) ** 2).mean()
        return loss


class Scheduled(Tracer):
    """A tracer that keeps the rate of each step in its state, as `rates: [[step, rate], ...]`.

    Its gradient is zero, so that any rate will do.
    """

    base_lr = 0.1

    def __init__(self, n: int = 12, delay: float = 0.0) -> None:
        super().__init__(n=n, lr=self.base_lr, delay=delay)
        self.rates: dict[int, float] = {}
        self._optimizer: Optimizer | None = None
        self._rate = float("nan")

    def optimizer(self, model: nn.Module) -> Optimizer:
        self._optimizer = super().optimizer(model)
        return self._optimizer

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        assert self._optimizer is not None
        self._rate = float(self._optimizer.param_groups[0]["lr"])
        loss = super().loss(model, batch)
        assert isinstance(loss, Tensor)
        return loss * 0.0

    def on_step(self, run: JobRun) -> None:
        self.rates[run.step] = self._rate

    def state_dict(self) -> dict[str, Any]:
        return {"rates": sorted([step, rate] for step, rate in self.rates.items())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.rates = {int(step): rate for step, rate in state["rates"]}


class Cosine(Scheduled):
    """C37: CosineAnnealingLR over 100 steps, from 0.001."""

    base_lr = 0.001

    def scheduler(self, optimizer: Any, total_steps: int) -> Schedule:
        return CosineAnnealingLR(optimizer, T_max=100)


class MultiStep(Scheduled):
    """C37: MultiStepLR stepped per epoch, from 100, a tenth from epoch 4 on."""

    base_lr = 100.0

    def scheduler(self, optimizer: Any, total_steps: int) -> Schedule:
        return MultiStepLR(optimizer, milestones=[4], gamma=0.1), "epoch"


class Stairs(Scheduled):
    """C46: StepLR, a tenth every 20 steps, from 0.1."""

    def scheduler(self, optimizer: Any, total_steps: int) -> Schedule:
        return StepLR(optimizer, step_size=20, gamma=0.1)


class Counter(Job):
    """w counts the steps that were done: the loss is -w, the rate 1."""

    def __init__(self, n: int = 12, delay: float = 0.0) -> None:
        self.n = n
        self.delay = delay

    def dataset(self) -> Dataset[Any]:
        return Numbers(self.n)

    def model(self) -> nn.Module:
        return Scalar()

    def optimizer(self, model: nn.Module) -> Optimizer:
        return SGD(model.parameters(), lr=1.0)

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        if self.delay:
            time.sleep(self.delay)
        loss: Tensor = -model(torch.zeros_like(batch[0])).mean()
        return loss


def steps_done(model: nn.Module) -> int:
    """The steps that a Counter's model has behind it."""
    return round(float(next(model.parameters()).detach()))


class Scored(Counter):
    """C43: the evaluation of epoch e gives scores[e], read off the weights."""

    def __init__(
        self, scores: list[float] | None = None, n: int = 4, steps_per_epoch: int = 1
    ) -> None:
        super().__init__(n)
        self.scores = [5.0, 3.0, 4.0, 4.0, 4.0, 4.0] if scores is None else scores
        self.steps_per_epoch = steps_per_epoch

    def eval_dataset(self) -> Dataset[Any]:
        return Numbers(3)

    def metrics(self, model: nn.Module, batch: Batch) -> Mapping[str, Metric]:
        epoch = max(0, steps_done(model) // self.steps_per_epoch - 1)
        score = self.scores[min(epoch, len(self.scores) - 1)]
        samples = len(batch[0])
        return {"score": Mean(torch.tensor(score * samples), samples)}


class Graded(Tracer):
    """C47: an evaluation set of `items`, of which the first `right` are answered rightly."""

    def __init__(self, n: int = 12, items: int = 10, right: int = 7) -> None:
        super().__init__(n=n)
        self.items = items
        self.right = right

    def eval_dataset(self) -> Dataset[Any]:
        return Numbers(self.items)

    def metrics(self, model: nn.Module, batch: Batch) -> Mapping[str, Metric]:
        indices = batch[1]
        hits = (indices < self.right).sum()
        return {"accuracy": Mean(hits, len(indices)), "seen": torch.tensor(float(len(indices)))}


class Shuffled(Tracer):
    """C07: the dataset shuffles its items with an unseeded generator in its constructor."""

    def __init__(self, n: int = 40) -> None:
        super().__init__(n=n)

    def dataset(self) -> Dataset[Any]:
        values = [float(i) for i in range(self.n)]
        random.Random().shuffle(values)
        return Numbers(self.n, values)


class Uneven(Tracer):
    """C07: each rank's dataset is one item longer than that of the rank before."""

    def __init__(self, n: int = 40) -> None:
        super().__init__(n=n)

    def dataset(self) -> Dataset[Any]:
        return Numbers(self.n + rank_here())


class Empty(Tracer):
    """A dataset without items."""

    def dataset(self) -> Dataset[Any]:
        return Numbers(0)


class Faulty(Counter):
    """C51: something happens to `rank` inside `step`: raise, kill, exit or hang.

    With `marker` (a path) it happens once; without, at each try.
    """

    def __init__(
        self,
        n: int = 40,
        step: int = 3,
        rank: int = 1,
        kind: str = "raise",
        marker: str = "",
        delay: float = 0.0,
    ) -> None:
        super().__init__(n, delay)
        if kind not in {"raise", "kill", "exit", "hang"}:
            raise ValueError(f"args.kind: found {kind!r}, expected raise, kill, exit or hang")
        self.step = step
        self.rank = rank
        self.kind = kind
        self.marker = marker

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        if steps_done(model) + 1 == self.step and rank_here() == self.rank and self._is_due():
            self._happen()
        return super().loss(model, batch)

    def _is_due(self) -> bool:
        due = not (self.marker and Path(self.marker).exists())
        if due and self.marker:
            Path(self.marker).touch()
        return due

    def _happen(self) -> None:
        if self.kind == "raise":
            raise ValueError(f"the fault of step {self.step} on rank {self.rank}")
        if self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        while self.kind == "hang":
            time.sleep(3600)
        os._exit(3)


class BrokenModel(Tracer):
    """C48: the user's own model() raises."""

    def model(self) -> nn.Module:
        raise ValueError("the model of this job is broken")


class Shaped(Tracer):
    """C44: a model whose layers can be widened, renamed or removed between two starts."""

    def __init__(
        self, n: int = 12, width: int = 4, name: str = "layer", extra: bool = True
    ) -> None:
        super().__init__(n=n)
        self.width = width
        self.name = name
        self.extra = extra

    def model(self) -> nn.Module:
        layers = {self.name: nn.Linear(1, self.width)}
        if self.extra:
            layers["extra"] = nn.Linear(self.width, self.width)
        return nn.Sequential(OrderedDict(layers))

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        loss: Tensor = 0.001 * (model(batch[0].float()[:, None]) ** 2).mean()
        return loss


class Masks(Tracer):
    """C12: records its dropout masks, a line for each forward, under `folder`.

    A line holds rank, indices of the samples and the mask as text: two masks of one sample are equal
    if and only if the random state of its micro-batch was.
    """

    def __init__(self, n: int = 64, features: int = 16, folder: str = "") -> None:
        super().__init__(n=n, lr=0.001)
        self.features = features
        self.folder = folder

    def model(self) -> nn.Module:
        return MaskedSum(self.features)

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        values, indices = batch
        masks: list[Tensor] = []
        dropout = next(module for module in model.modules() if isinstance(module, nn.Dropout))
        hook = dropout.register_forward_hook(lambda *call: masks.append(call[2].detach() != 0))
        try:
            loss: Tensor = 0.5 * ((model(values) - 1) ** 2).mean()
        finally:
            hook.remove()
        if self.folder and model.training:
            self._record(indices.tolist(), masks[0])
        return loss

    def _record(self, indices: list[int], mask: Tensor) -> None:
        text = "".join("1" if kept else "0" for kept in mask.flatten().tolist())
        line = json.dumps({"rank": rank_here(), "indices": indices, "mask": text})
        Path(self.folder).mkdir(parents=True, exist_ok=True)
        with (Path(self.folder) / f"masks-{os.getpid()}.jsonl").open("a", encoding="utf-8") as file:
            file.write(line + "\n")


class MaskedSum(nn.Module):
    """A weighted sum of features, each dropped half of the time."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((features,), 0.01))
        self.dropout = nn.Dropout(0.5)

    def forward(self, values: Tensor) -> Tensor:
        kept: Tensor = self.dropout(torch.ones(len(values), len(self.w), device=self.w.device))
        return (values.to(self.w.dtype)[:, None] * self.w * kept).sum(1)


def rank_here() -> int:
    """This process's rank, as the launcher tells it; a job of a user's own may look at it too."""
    return int(os.environ.get("RANK", "0"))
