"""One exact optimizer step: micro-batches, the weighted mean over all ranks, clipping, the scaler.

Promises: the gradient is the mean over the samples (or items) of the whole global batch, however
they are cut into ranks and micro-batches; every rank takes or skips the update alike; what the model
draws depends on (seed, step, shard, micro-batch) and on nothing else. When to save, evaluate or stop
is the loop's business; how gradients are summed is the reducer's.
"""

import contextlib
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from elastic.agreement import REQUEST_SLOTS, Agreed, Request
from elastic.errors import AttentionError, StartError
from elastic.loader import MicroBatch, StepBatch
from elastic.options import TrainOptions
from elastic.reduce import CONTROL_SLOTS, Reducer
from elastic.seeding import mix, seed_all
from elastic.world import World
from jobs.job import Job, Mean, read_loss

__all__ = ["StepResult", "Stepper", "autocast"]

_LOSS, _COUNT_HIGH, _COUNT_LOW, _REQUEST = 0, 1, 2, 3
# Counts travel as float32: two halves keep them exact up to 2**36 items a step.
_COUNT_UNIT: Final = 4096
_PRECISION = {"bf16": torch.bfloat16, "fp16": torch.float16}
_PADDING: Final = [0.0] * (CONTROL_SLOTS - _REQUEST - REQUEST_SLOTS)


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


class Stepper:
    """Takes the steps of one job in one generation."""

    def __init__(
        self,
        job: Job,
        reducer: Reducer,
        optimizer: torch.optim.Optimizer,
        *,
        scaler: torch.amp.GradScaler | None,
        options: TrainOptions,
        world: World,
    ) -> None:
        """Bind the parts; `scaler` is given with fp16 alone."""
        if job.losses() is not None:
            raise StartError(
                f"{type(job).__name__}.losses: several phases are not yet served by this version; "
                "give one loss() and one optimizer"
            )
        self._job, self._reducer, self._optimizer = job, reducer, optimizer
        self._scaler, self._options, self._world = scaler, options, world
        self._autocast = autocast(options.precision, world.device)
        self._parameters = [p for g in optimizer.param_groups for p in g["params"]]
        self._own_loss: Tensor | float = 0.0
        self._statistics = _statistics(reducer.model) if options.on_nonfinite == "skip" else []
        self._kept: list[Tensor] = []

    def run(self, step: int, batch: StepBatch, request: Request) -> StepResult:
        """Take step number `step` (from 1) on this rank's micro-batches.

        Collective: every rank calls it with the same step.

        Raises:
            AttentionError: Something is not finite and `train.on_nonfinite` is stop.
        """
        self._optimizer.zero_grad(set_to_none=True)
        self._reducer.start_step()
        self._kept = [buffer.clone() for buffer in self._statistics]
        weighted = self._accumulate(step, batch, request)
        summed = self._reducer.summed()
        count = summed[_COUNT_HIGH] * _COUNT_UNIT + summed[_COUNT_LOW]
        loss = summed[_LOSS] / count if count else math.nan
        norm, skipped = self._update(
            step, batch, loss=loss, scale=_open_scale(batch, count, weighted)
        )
        return StepResult(
            loss=loss,
            count=count,
            grad_norm=norm,
            lr=float(self._optimizer.param_groups[0]["lr"]),
            skipped=skipped,
            agreed=Agreed.read(summed[_REQUEST : _REQUEST + REQUEST_SLOTS]),
        )

    def _accumulate(self, step: int, batch: StepBatch, request: Request) -> bool:
        """Forward and backward of each micro-batch; True where the job's loss is an open Mean."""
        device = self._world.device
        total: Tensor | float = 0.0
        count: Tensor | float = 0.0
        weighted = False
        for number, micro in enumerate(batch.micro_batches, start=1):
            last = number == len(batch.micro_batches)
            data = self._job.to_device(micro.data, device)
            seed_all(mix(self._options.seed, step, micro.shard, micro.number), device)
            with self._reducer.accumulate(last=last):
                with self._autocast:
                    value = read_loss(
                        self._reducer.forward(functools.partial(_loss, self._job, data))
                    )
                weighted = isinstance(value, Mean)
                term, added, items = _contribution(value, micro, batch.size)
                total, count = total + added, count + items
                if self._scaler is not None:
                    term = self._scaler.scale(term)
                control = self._control(total, count, request) if last else None
                self._reducer.backward(term, control)
        self._own_loss = total
        return weighted

    def _control(self, total: Tensor | float, count: Tensor | float, request: Request) -> Tensor:
        """Pack the control numbers on this rank's device without waiting for it."""
        flags = torch.tensor([0.0, 0.0, 0.0, *request.pack(), *_PADDING])
        if isinstance(count, Tensor):
            high = (count / _COUNT_UNIT).floor()
            low: Tensor | float = count - high * _COUNT_UNIT
        else:
            high = count // _COUNT_UNIT  # type: ignore[assignment]  # a number here, a tensor above
            low = count - high * _COUNT_UNIT
        control = flags.to(self._world.device, non_blocking=True)
        control[_LOSS], control[_COUNT_HIGH], control[_COUNT_LOW] = total, high, low
        return control

    def _update(
        self, step: int, batch: StepBatch, *, loss: float, scale: float | None
    ) -> tuple[float, bool]:
        """Unscale, check, clip and apply; returns the gradient's norm and whether it was skipped."""
        if self._scaler is not None:
            self._scaler.unscale_(self._optimizer)
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        if scale is not None:
            torch._foreach_mul_(gradients, scale)  # one call for all tensors
        norm_tensor = get_total_norm(gradients)
        norm = float(norm_tensor)
        finite_loss = math.isfinite(loss)
        if not finite_loss or (not math.isfinite(norm) and self._scaler is None):
            self._refuse(step, batch, loss=loss, norm=norm)
            return norm, True
        if self._options.grad_clip is not None and norm > self._options.grad_clip:
            clip_grads_with_norm_(self._parameters, self._options.grad_clip, norm_tensor)
        if self._scaler is None:
            self._optimizer.step()
            return norm, False
        before = self._scaler.get_scale()
        self._scaler.step(self._optimizer)
        self._scaler.update()
        return norm, self._scaler.get_scale() < before

    def _refuse(self, step: int, batch: StepBatch, *, loss: float, norm: float) -> None:
        """Leave the update out, or end the run; who it was is told by all ranks together."""
        own = [i for micro in batch.micro_batches for i in micro.indices]
        finite = math.isfinite(float(self._own_loss))
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


def _loss(job: Job, data: Any, model: nn.Module) -> Any:
    return job.loss(model, data)


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
