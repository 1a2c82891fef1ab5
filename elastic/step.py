"""One exact optimizer step: micro-batches, the weighted mean over all ranks, clipping, the scaler.

Promises: the gradient is the mean over the samples (or items) of the whole global batch, however
they are cut into ranks and micro-batches; every rank takes or skips the update alike; what the model
draws depends on (seed, step, shard, micro-batch) and on nothing else. When to save, evaluate or stop
is the loop's business; how gradients are summed is the reducer's.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from elastic.agreement import REQUEST_SLOTS, Agreed, Request
from elastic.errors import AttentionError, StartError
from elastic.loader import MicroBatch, StepBatch
from elastic.options import TrainOptions
from elastic.reduce import Reducer, Turn
from elastic.seeding import mix, seed_all
from elastic.shards import ShardBuffers
from elastic.world import World
from jobs.job import Job, Loss, Mean, read_loss

__all__ = ["Phase", "StepResult", "Stepper", "autocast", "phases_of"]

_PRECISION = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What a step did; equal on every rank."""

    loss: float
    """Mean loss over the samples (or items) of the global batch, before the update."""
    count: float
    """Samples, or the summed counts of Means."""
    grad_norm: float
    """Norm of the mean gradient before clipping."""
    lr: float
    """Rate of the first parameter group that the update used."""
    skipped: bool
    """Whether the update was left out (a loss or gradient that is not finite)."""
    agreed: Agreed


def autocast(precision: str, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Return the context in which losses and metrics run for a `train.precision`."""
    if precision == "fp32":
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=_PRECISION[precision])


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """A loss of a step and the optimizer that follows it."""

    name: str
    loss: Callable[[nn.Module, Any], Loss]
    optimizer: torch.optim.Optimizer

    @property
    def parameters(self) -> list[nn.Parameter]:
        """What its optimizer changes."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]


def phases_of(
    job: Job, optimizers: torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer]
) -> list[Phase]:
    """The phases of a job's step, in order.

    Raises:
        StartError: Losses and optimizers do not belong together.
    """
    if job.losses() is not None or not isinstance(optimizers, torch.optim.Optimizer):
        raise StartError(
            f"{type(job).__name__}.losses: several phases are not yet served by this version; "
            "give one loss() and one optimizer"
        )
    return [Phase(name="loss", loss=job.loss, optimizer=optimizers)]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Outcome:
    """What one phase of a step did."""

    loss: float
    count: float
    grad_norm: float
    skipped: bool
    flags: tuple[float, ...]


class Stepper:
    """Takes the steps of one job in one generation."""

    def __init__(
        self,
        job: Job,
        reducer: Reducer,
        phases: Sequence[Phase],
        *,
        scaler: torch.amp.GradScaler | None,
        options: TrainOptions,
        world: World,
        buffers: ShardBuffers | None = None,
    ) -> None:
        """Bind the parts; `scaler` is given with fp16 alone, `buffers` with logical shards."""
        self._job, self._reducer, self._phases = job, reducer, list(phases)
        self._scaler, self._options, self._world = scaler, options, world
        self._autocast = autocast(options.precision, world.device)
        self._parameters = [phase.parameters for phase in self._phases]
        self._own_losses: list[Tensor | float] = []
        self._buffers = buffers
        self._statistics = _statistics(reducer.model) if options.on_nonfinite == "skip" else []
        self._kept: list[Tensor] = []

    def run(self, step: int, batch: StepBatch, request: Request) -> StepResult:
        """Take step number `step` (from 1) on this rank's micro-batches.

        Collective: every rank calls it with the same step.

        Raises:
            AttentionError: Something is not finite and `train.on_nonfinite` is stop.
        """
        flags = request.pack()
        outcomes = [
            self._run_phase(index, step, batch, flags) for index in range(len(self._phases))
        ]
        last = outcomes[-1]
        return StepResult(
            loss=last.loss,
            count=last.count,
            grad_norm=last.grad_norm,
            lr=float(self._phases[-1].optimizer.param_groups[0]["lr"]),
            skipped=last.skipped,
            agreed=Agreed.read(last.flags[:REQUEST_SLOTS]),
        )

    def _run_phase(
        self, index: int, step: int, batch: StepBatch, flags: Sequence[float]
    ) -> _Outcome:
        """One loss over the whole step, its exact mean gradient, and its optimizer's update."""
        self._phases[index].optimizer.zero_grad(set_to_none=True)
        # Who has no samples cannot know what kind of loss the job gives.
        told = [*flags, 0.0]
        self._kept = [buffer.clone() for buffer in self._statistics]
        if self._buffers is not None:
            self._buffers.begin()
            told += self._buffers.flags
        self._reducer.begin(index, told)
        self._accumulate(index, step, batch, told)
        totals = self._reducer.finish()
        weighted = totals.flags[len(flags)] > 0
        if self._buffers is not None:
            self._buffers.merge(totals.flags[len(flags) + 1 :])
        loss = totals.loss / totals.count if totals.count else math.nan
        scale = _open_scale(batch, totals.count, weighted)
        norm, skipped = self._update(index, step, batch, loss=loss, scale=scale)
        return _Outcome(
            loss=loss, count=totals.count, grad_norm=norm, skipped=skipped, flags=totals.flags
        )

    def _accumulate(self, index: int, step: int, batch: StepBatch, told: list[float]) -> None:
        """Forward and backward of each micro-batch; fills in what is told to all beside the flags."""
        buffers = self._buffers
        device, phase = self._world.device, self._phases[index]
        weighted = len(told) - 1 - (buffers.slots if buffers is not None else 0)
        self._own_losses = []
        for turn, micro in _turns(batch.micro_batches):
            data = self._job.to_device(micro.data, device)
            address = (step, micro.shard, micro.number) + ((index,) if index else ())
            seed_all(mix(self._options.seed, *address), device)
            if buffers is not None:
                buffers.enter(turn)
            with self._reducer.turn(turn):
                with self._autocast:
                    value = read_loss(phase.loss(self._reducer.model, data))
                if buffers is not None:
                    buffers.leave(turn, micro.samples)
                    told[len(told) - buffers.slots :] = buffers.flags
                told[weighted] = float(isinstance(value, Mean))
                term, added, items = _contribution(value, micro, batch.size)
                self._own_losses.append(added)
                if self._scaler is not None:
                    term = self._scaler.scale(term)
                self._reducer.backward(term, loss=added, count=items)

    def _update(
        self, index: int, step: int, batch: StepBatch, *, loss: float, scale: float | None
    ) -> tuple[float, bool]:
        """Unscale, check, clip and apply; returns the gradient's norm and whether it was skipped."""
        optimizer, parameters = self._phases[index].optimizer, self._parameters[index]
        if self._scaler is not None:
            self._scaler.unscale_(optimizer)
        gradients = [p.grad for p in parameters if p.grad is not None]
        if scale is not None:
            torch._foreach_mul_(gradients, scale)  # one call for all tensors
        norm_tensor = get_total_norm(gradients)
        norm = float(norm_tensor)
        finite_loss = math.isfinite(loss)
        if not finite_loss or (not math.isfinite(norm) and self._scaler is None):
            self._refuse(step, batch, loss=loss, norm=norm)
            return norm, True
        if self._options.grad_clip is not None and norm > self._options.grad_clip:
            clip_grads_with_norm_(parameters, self._options.grad_clip, norm_tensor)
        if self._scaler is None:
            optimizer.step()
            return norm, False
        before = self._scaler.get_scale()
        self._scaler.step(optimizer)
        self._scaler.update()
        return norm, self._scaler.get_scale() < before

    def _refuse(self, step: int, batch: StepBatch, *, loss: float, norm: float) -> None:
        """Leave the update out, or end the run; who it was is told by all ranks together."""
        own = [i for micro in batch.micro_batches for i in micro.indices]
        finite = all(math.isfinite(float(loss)) for loss in self._own_losses)
        told = cast("list[dict[str, Any]]", self._world.gather({"indices": own, "finite": finite}))
        indices = [i for rank in told for i in rank["indices"]]
        ranks = [rank for rank, said in enumerate(told) if not said["finite"]]
        if self._scaler is not None:
            self._scaler.update(self._scaler.get_scale())
        for buffer, kept in zip(self._statistics, self._kept, strict=True):
            buffer.copy_(kept)
        if self._options.on_nonfinite == "stop":
            shown = ", ".join(map(str, indices[:16])) + (", ..." if len(indices) > 16 else "")
            raise AttentionError(
                f"step {step}: found loss {loss} and gradient norm {norm}, expected finite numbers; "
                f"first seen on {_name_ranks(ranks)}, samples [{shown}]; mend the data or set train.on_nonfinite=skip"
            )


def _turns(micro_batches: Sequence[MicroBatch]) -> Iterator[tuple[Turn, MicroBatch]]:
    """Each micro-batch with its place in its shard and in the step."""
    shards = [None, *(micro.shard for micro in micro_batches), None]
    for place, micro in enumerate(micro_batches, start=1):
        yield (
            Turn(
                shard=micro.shard,
                opens=shards[place - 1] != micro.shard,
                closes=shards[place + 1] != micro.shard,
                last=place == len(micro_batches),
            ),
            micro,
        )


def _contribution(
    value: Tensor | Mean, micro: MicroBatch, size: int
) -> tuple[Tensor, Tensor | float, Tensor | float]:
    """Of one micro-batch: the term to differentiate, its share of the logged sum, its count."""
    weight = 1.0 if micro.samples else 0.0
    if isinstance(value, Mean):
        term = value.sum * (weight / _open_divisor(size))
        # As float32 a count above 2**24 would be rounded.
        items = value.count.detach().double() if isinstance(value.count, Tensor) else value.count
        return term, _wide(value.sum.detach()) * weight, items * weight
    term = value * (micro.samples / size)
    return term, _wide(value.detach()) * float(micro.samples), float(micro.samples)


def _wide(value: Tensor) -> Tensor:
    """As float32 at least: a sum over a batch soon leaves fp16's range."""
    return value.to(torch.promote_types(value.dtype, torch.float32))


def _statistics(model: nn.Module) -> list[Tensor]:
    """Running statistics of norms: a forward over what is not finite would spoil them for good."""
    norms = [module for module in model.modules() if isinstance(module, _NormBase)]
    return [buffer for norm in norms for buffer in norm.buffers(recurse=False)]


def _open_divisor(size: int) -> float:
    """A power of two near the step's size: exact to divide by, and keeps fp16 in its range."""
    return float(2 ** max(0, size - 1).bit_length())


def _open_scale(batch: StepBatch, count: float, weighted: bool) -> float | None:
    """What turns gradients of an open Mean, summed, into the mean over all items."""
    if not weighted:
        return None
    return _open_divisor(batch.size) / count if count else 0.0


def _name_ranks(ranks: Sequence[int]) -> str:
    if not ranks:
        return "all ranks (each loss is finite, the gradient is not)"
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
