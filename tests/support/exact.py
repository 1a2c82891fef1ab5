"""A few steps of training in any world, from a state to a state: what the tests of exactness compare.

The job has what breaks bits: a batch norm, dropout, augmentation by draws, AdamW, clipping, and where
asked for items that differ in weight.
"""

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset

from elastic.agreement import REQUEST_SLOTS, Request
from elastic.bitwise import TreeReducer
from elastic.evaluate import Evaluation
from elastic.loader import Loader
from elastic.options import TrainOptions
from elastic.phases import phases_of
from elastic.reduce import PlainReducer, Reducer
from elastic.sampler import Plan
from elastic.shards import ShardBuffers
from elastic.state import TrainState
from elastic.step import STEP_SLOTS, Stepper, autocast
from elastic.tree import owned
from elastic.world import World
from jobs.job import Job, Loss, Mean, Metric

CHUNKS = (128, 4096, 1 << 20)


class Points(Dataset[tuple[Tensor, int]]):
    """Item i is a row of numbers of its own, moved a little by a draw."""

    def __init__(self, n: int) -> None:
        generator = torch.Generator().manual_seed(7)
        # Of very different sizes, so that the order of a sum shows in its bits.
        self.rows = torch.randn(n, 6, generator=generator) * torch.logspace(-3, 2, 6)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.rows[index] + 0.1 * torch.randn(6), index


class Net(nn.Module):
    """Two layers with a batch norm and dropout between; `spare` is used by some samples' shards only."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 18)
        self.norm = nn.BatchNorm1d(9)
        self.dropout = nn.Dropout(0.2)
        self.last = nn.Linear(18, 1)
        self.spare = nn.Linear(6, 1)
        self.never = nn.Linear(2, 2)

    def forward(self, rows: Tensor, spare: bool) -> Tensor:
        # Two values of each channel, so that a shard of one sample has a variance too.
        hidden = self.norm(self.first(rows).view(-1, 9, 2)).flatten(1)
        out: Tensor = self.last(self.dropout(torch.tanh(hidden)))
        return out + self.spare(rows) if spare else out


@dataclass
class Exact(Job):
    """Fits a sine of the index."""

    n: int = 37
    weighted: bool = False
    parts_from: int | None = None
    """From this forward of the process on, gradients come in parts: a weight is in two reentrant checkpoints."""
    forwards: int = 0

    def dataset(self) -> Dataset[Any]:
        return Points(self.n)

    def model(self) -> nn.Module:
        torch.manual_seed(3)
        return Net()

    def optimizer(self, model: nn.Module) -> Optimizer:
        return AdamW(model.parameters(), lr=0.01, weight_decay=0.1)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        rows, indices = batch
        out = model(rows, bool((indices % 5 == 0).any()))[:, 0]
        each: Tensor = (out - indices.float().sin()) ** 2
        if self.parts_from is not None and self.forwards >= self.parts_from:
            each = each + in_parts(model, rows)
        self.forwards += 1
        if not self.weighted:
            return each.mean()
        tokens = 1 + indices % 4
        return Mean((tokens * each).sum(), tokens.sum())

    def eval_dataset(self) -> Dataset[Any]:
        return Points(self.n)

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Metric]:
        rows, indices = batch
        each = (model(rows, True)[:, 0] - indices.float().sin()) ** 2
        return {"error": Mean(each.sum(), len(indices)), "seen": float(len(indices))}


def in_parts(model: Any, rows: Tensor) -> Tensor:
    def use(some: Tensor) -> Tensor:
        return torch.tanh(model.first(some))

    moved = rows.clone().requires_grad_()
    one, other = (checkpoint(use, moved * factor, use_reentrant=True) for factor in (1.0, 0.3))
    total: Tensor = (one * other).mean(dim=1)
    return total


@dataclass(frozen=True, kw_only=True)
class Case:
    """A training, whatever the world."""

    n: int = 37
    batch: int = 8
    shards: int = 4
    micro: int | None = None
    weighted: bool = False
    bitwise: bool = True
    clip: float = 0.5
    precision: str = "fp32"
    parts_from: int | None = None

    @property
    def plan(self) -> Plan:
        return Plan(
            n=self.n, global_batch_size=self.batch, seed=5, shards=self.shards, micro_batch_size=self.micro
        )  # fmt: skip


def run(
    world: World, case: Case, state: dict[str, Any] | None, first: int, steps: int
) -> dict[str, Any]:
    """Take `steps` steps from step `first` (from 0) of the run on; state None: its beginning.

    Returns the state after each step, what was logged, and this rank's samples.
    """
    job = Exact(case.n, case.weighted, case.parts_from)
    model, plan = job.model(), case.plan
    optimizer = job.optimizer(model)
    kept = TrainState()
    kept.attach(model=model, optimizer=optimizer)
    if state is not None:
        kept.restore(state)
    options = TrainOptions(
        grad_clip=case.clip, global_batch_size=case.batch, precision=case.precision  # type: ignore[arg-type]
    )  # fmt: skip
    phases = phases_of(job, optimizer)
    buffers = ShardBuffers(model, world, case.shards)
    reducer: Reducer
    if case.bitwise:
        reducer = TreeReducer(
            model, world, parameters=[phases[0].parameters], shards=case.shards,
            chunk_bytes=CHUNKS[world.world_size % len(CHUNKS)],
        )  # fmt: skip
    else:
        reducer = PlainReducer(
            model, world, compiled=None, find_unused=True, flags=REQUEST_SLOTS + STEP_SLOTS + buffers.slots,
            merges_buffers=True,
        )  # fmt: skip
    stepper = Stepper(
        job, reducer, phases, scaler=None, options=options, world=world, buffers=buffers
    )
    shards = owned(world.rank, world.world_size, case.shards)
    loader = Loader(job.dataset(), plan, rank=world.rank, shards=shards, pads=not case.bitwise)
    found: dict[str, Any] = {"states": [], "losses": [], "samples": []}
    step = first
    while step < first + steps:
        epoch, within = divmod(step, plan.steps)
        for batch in loader.epoch(epoch, min(within * case.batch, case.n)):
            result = stepper.run(step + 1, batch, Request())
            found["losses"].append((result.loss, result.count, result.grad_norm))
            found["samples"].append([i for m in batch.micro_batches for i in m.indices])
            found["states"].append(copied(kept.capture()))
            step += 1
            if step == first + steps:
                break
    context = autocast("fp32", world.device)
    evaluation = Evaluation(
        job, {"": job.eval_dataset()}, world, batch_size=7, context=context, fixed=True
    )
    found["metrics"] = evaluation.run(model, leaving=bool)
    return found


def copied(value: Any) -> Any:
    """A state that later steps do not change."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items()}
    if isinstance(value, list):
        return [copied(item) for item in value]
    return value


def bits(state: Any) -> str:
    """A hash over every bit of a state."""
    digest = hashlib.sha256()

    def feed(value: Any) -> None:
        if isinstance(value, Tensor):
            digest.update(value.contiguous().flatten().view(torch.uint8).numpy().tobytes())
        elif isinstance(value, dict):
            for key in sorted(value, key=str):
                digest.update(str(key).encode())
                feed(value[key])
        elif isinstance(value, list | tuple):
            for item in value:
                feed(item)
        else:
            digest.update(repr(value).encode())

    feed(state)
    return digest.hexdigest()[:16]
