"""One exact optimizer step: micro-batches, the weighted mean over all ranks, clipping, the scaler.

Promises: the gradient is the mean over the samples (or items) of the whole global batch, however
they are cut into ranks and micro-batches; every rank takes or skips the update alike; what the model
draws depends on (seed, step, shard, micro-batch) and on nothing else. When to save, evaluate or stop
is the loop's business; how gradients are summed is the reducer's.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from elastic.agreement import Agreed, Request
from elastic.buffers import KeptBuffers
from elastic.errors import AttentionError, StartError
from elastic.loader import MicroBatch, StepBatch
from elastic.models import sparse_error
from elastic.options import TrainOptions
from elastic.phases import Phase
from elastic.reduce import Reducer, Turn, frozen
from elastic.seeding import mix, seed_all
from elastic.shards import ShardBuffers
from elastic.unreduced import ASKING_SLOTS, asking, check_asking
from elastic.world import World
from jobs.job import Job, Mean, read_loss

__all__ = ["STEP_SLOTS", "StepResult", "Stepper", "autocast"]

_KIND_SLOTS: Final = 2
"""What a rank tells of its losses: whether one was a Mean, whether one was a plain mean."""
STEP_SLOTS: Final = _KIND_SLOTS + ASKING_SLOTS
"""The flags that a step needs beside those of its request."""
_PRECISION = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What a step did; equal on every rank."""

    loss: float
    """Mean loss over the samples (or items) of the global batch, before the update; of several phases the sum."""
    count: float
    """Samples, or the summed counts of Means; of the last phase."""
    grad_norm: float
    """Norm of the mean gradient before clipping; of the last phase."""
    lr: float
    """Rate of the first parameter group that the update used; of the last phase."""
    skipped: bool
    """Whether no update was applied (a loss or gradient that is not finite)."""
    refused: str | None
    """What was not finite, and where; None where all was, or where the scaler only lowers its scale."""
    agreed: Agreed
    named: Mapping[str, float]
    """The figures of each phase by name (`loss.disc`), where there are several."""


def autocast(precision: str, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Return the context in which losses and metrics run for a `train.precision`."""
    if precision == "fp32":
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=_PRECISION[precision])


@dataclass(frozen=True, kw_only=True, slots=True)
class _Outcome:
    """What one phase of a step did."""

    loss: float
    count: float
    grad_norm: float
    skipped: bool
    refused: str | None
    flags: tuple[float, ...]


class Stepper:
    """Takes the steps of one job in one generation."""

    def __init__(
        self,
        job: Job,
        reducer: Reducer,
        phases: Sequence[Phase],
        *,
        scaler: torch.amp.GradScaler | Mapping[str, torch.amp.GradScaler] | None,
        options: TrainOptions,
        world: World,
        buffers: ShardBuffers | None = None,
        told: Callable[[], tuple[bool, bool]] | None = None,
    ) -> None:
        """Bind the parts.

        Args:
            job: Whose losses.
            reducer: What sums the gradients.
            phases: In order.
            scaler: With fp16 alone; several by phase.
            options: The train section.
            world: The ranks.
            buffers: With logical shards.
            told: `Request.leave` and `Request.notice` as they are by now: a signal that comes while a step's
                losses are computed still ends the run after this step, which may be a long one.
        """
        self._told = told
        self._job, self._reducer, self._phases = job, reducer, list(phases)
        self._scalers = [
            scaler[phase.name] if isinstance(scaler, Mapping) else scaler for phase in phases
        ]
        self._options, self._world = options, world
        self._autocast = autocast(options.precision, world.device)
        self._parameters = [phase.parameters for phase in self._phases]
        self._every = list(reducer.model.parameters())
        self._foreign = [_others(reducer.model, phase, len(phases)) for phase in phases]
        # What the reducer sums: it was made from the same parameters.
        self._known = [{p for p in of if p.requires_grad} for of in self._parameters]
        self._own_losses: list[Tensor | float] = []
        self._buffers = buffers
        self._kept = KeptBuffers(reducer.model) if options.on_nonfinite != "stop" else None

    def run(self, step: int, batch: StepBatch, request: Request) -> StepResult:
        """Take step number `step` (from 1) on this rank's micro-batches.

        Collective: every rank calls it with the same step.

        Raises:
            AttentionError: Something is not finite and `train.on_nonfinite` is stop.
            StartError: Some of a loss's values are Means and others are not, or a gradient is sparse or not summed.
        """
        flags = request.pack()
        outcomes = [
            self._run_phase(index, step, batch, flags) for index in range(len(self._phases))
        ]
        last = outcomes[-1]
        return StepResult(
            loss=sum(outcome.loss for outcome in outcomes),
            count=last.count,
            grad_norm=last.grad_norm,
            lr=self._rate(-1),
            skipped=all(outcome.skipped for outcome in outcomes),
            refused=next((o.refused for o in outcomes if o.refused is not None), None),
            agreed=Agreed.read(last.flags[: len(flags)]),
            named=self._named(outcomes),
        )

    def leave_out(self) -> StepResult:
        """What a step gives that a rollback leaves out. Every rank alike; no collective."""
        return StepResult(
            loss=math.nan,
            count=0.0,
            grad_norm=math.nan,
            lr=self._rate(-1),
            skipped=True,
            refused=None,
            agreed=Agreed(),
            named={},
        )

    def _rate(self, index: int) -> float:
        return float(self._phases[index].optimizer.param_groups[0]["lr"])

    def _named(self, outcomes: Sequence[_Outcome]) -> dict[str, float]:
        if len(outcomes) == 1:
            return {}
        named: dict[str, float] = {}
        for index, (phase, outcome) in enumerate(zip(self._phases, outcomes, strict=True)):
            named[f"loss.{phase.name}"] = outcome.loss
            named[f"grad_norm.{phase.name}"] = outcome.grad_norm
            named[f"lr.{phase.name}"] = self._rate(index)
            if outcome.skipped:
                named[f"skipped.{phase.name}"] = 1.0
        return named

    def _run_phase(
        self, index: int, step: int, batch: StepBatch, flags: Sequence[float]
    ) -> _Outcome:
        """One loss over the whole step, its exact mean gradient, and its optimizer's update."""
        self._phases[index].optimizer.zero_grad(set_to_none=True)
        # Who has no samples cannot know what kind of loss the job gives.
        told = [*flags, *[0.0] * _KIND_SLOTS, *asking(self._every)]
        if self._kept is not None:
            self._kept.begin()
        if self._buffers is not None:
            self._buffers.begin()
            told += self._buffers.flags
        self._reducer.begin(index, told, samples=batch.size)
        with frozen(self._foreign[index]):
            self._accumulate(index, step, batch, told, kinds=len(flags))
        if self._buffers is not None:
            self._buffers.send(self._reducer.carry)
        totals = self._reducer.finish()
        weighted, plain = (count > 0 for count in totals.flags[len(flags) :][:_KIND_SLOTS])
        if weighted and plain:
            raise StartError(
                f"loss{self._of_phase(index)}: found Mean(sum, count) for some micro-batches of step {step} and a plain "
                "mean for others, expected one of the two for all; return Mean for each"
            )
        told_asking = totals.flags[len(flags) + _KIND_SLOTS :][:ASKING_SLOTS]
        check_asking(told_asking, self._world.world_size, step)
        if self._buffers is not None:
            self._buffers.merge(totals.flags[len(flags) + STEP_SLOTS :])
        loss = totals.loss / totals.count if totals.count else math.nan
        scale = _open_scale(batch, totals.count, weighted)
        norm, skipped, refused = self._update(
            index, step, batch, loss=loss, scale=scale, is_empty=not totals.count
        )
        return _Outcome(
            loss=loss,
            count=totals.count,
            grad_norm=norm,
            skipped=skipped,
            refused=refused,
            flags=totals.flags,
        )

    def _accumulate(
        self, index: int, step: int, batch: StepBatch, told: list[float], *, kinds: int
    ) -> None:
        """Forward and backward of each micro-batch; fills in what is told to all beside the flags."""
        buffers = self._buffers
        device, scaler = self._world.device, self._scalers[index]
        self._own_losses = []
        for turn, micro in _turns(batch.micro_batches):
            address = (step, micro.shard, micro.number) + ((index,) if index else ())
            seed_all(mix(self._options.seed, *address), device)
            data = self._job.to_device(micro.data, device)  # which may draw: noise, mixup, masks
            if buffers is not None:
                buffers.enter(turn)
            with self._reducer.turn(turn):
                value = self._reducer.forward(functools.partial(self._loss, index, data))
                if buffers is not None:
                    buffers.leave(turn, micro.samples)
                    told[len(told) - buffers.slots :] = buffers.flags
                if micro.samples:
                    told[kinds + int(not isinstance(value, Mean))] = 1.0
                term, added, items = _contribution(value, micro, batch.size)
                self._own_losses.append(added)
                if turn.last and self._told is not None:
                    told[:2] = map(float, self._told())
                if scaler is not None:
                    term = scaler.scale(term)
                self._reducer.backward(term, loss=added, count=items)

    def _loss(self, index: int, data: Any, model: nn.Module) -> Tensor | Mean:
        with self._autocast:
            return read_loss(self._phases[index].loss(model, data))

    def _update(
        self,
        index: int,
        step: int,
        batch: StepBatch,
        *,
        loss: float,
        scale: float | None,
        is_empty: bool,
    ) -> tuple[float, bool, str | None]:
        """Unscale, check, clip and apply; returns the gradient's norm, whether it was skipped, and why."""
        optimizer, parameters = self._phases[index].optimizer, self._parameters[index]
        scaler = self._scalers[index]
        if scaler is not None:
            scaler.unscale_(optimizer)
        gradients = [p.grad for p in parameters if p.grad is not None]
        if self._world.world_size > 1:
            self._check_known(index)
        if any(gradient.is_sparse for gradient in gradients):
            raise sparse_error()
        if scale is not None:
            torch._foreach_mul_(gradients, scale)  # one call for all tensors
        norm_tensor = get_total_norm(gradients)
        norm = float(norm_tensor)
        finite_loss = math.isfinite(loss)
        if not finite_loss or (not math.isfinite(norm) and scaler is None):
            found = (
                f"found a total count of 0{self._of_phase(index)}, expected an item that counts"
                if is_empty
                else f"found loss {loss} and gradient norm {norm}{self._of_phase(index)}, expected finite numbers"
            )
            return norm, True, self._refuse(index, step, batch, found, is_empty=is_empty)
        if self._options.grad_clip is not None and norm > self._options.grad_clip:
            clip_grads_with_norm_(parameters, self._options.grad_clip, norm_tensor)
        # An optimizer may draw (noise), on every rank the same: no shard has this number.
        seed_all(mix(self._options.seed, step, -1, index), self._world.device)
        if scaler is None:
            optimizer.step()
            return norm, False, None
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        return norm, scaler.get_scale() < before, None

    def _check_known(self, index: int) -> None:
        known = self._known[index]
        for place, parameter in enumerate(self._parameters[index]):
            if parameter.grad is not None and parameter not in known:
                raise StartError(
                    f"gradients: found one of parameter {place} of the optimizer{self._of_phase(index)}, shape "
                    f"{tuple(parameter.shape)}, which asked for none when the model was made, expected those alone that did: "
                    "it is not summed over the ranks; let model() give it requires_grad=True, freeze it later, and set "
                    "train.find_unused_parameters=true"
                )

    def _of_phase(self, index: int) -> str:
        return f" of phase {self._phases[index].name}" if len(self._phases) > 1 else ""

    def _refuse(
        self, index: int, step: int, batch: StepBatch, found: str, *, is_empty: bool
    ) -> str:
        """Leave the update out, or end the run; who it was is told by all ranks together."""
        own = [i for micro in batch.micro_batches for i in micro.indices]
        finite = all(math.isfinite(float(loss)) for loss in self._own_losses)
        told = cast("list[dict[str, Any]]", self._world.gather({"indices": own, "finite": finite}))
        indices = [i for rank in told for i in rank["indices"]]
        ranks = [rank for rank, said in enumerate(told) if not said["finite"]]
        scaler = self._scalers[index]
        if scaler is not None:
            scaler.update(scaler.get_scale())
        if self._kept is not None:
            self._kept.restore()
        shown = ", ".join(map(str, indices[:16])) + (", ..." if len(indices) > 16 else "")
        seen = "" if is_empty and not ranks else f"; first seen on {_name_ranks(ranks)}"
        what = f"step {step}: {found}{seen}, samples [{shown}]"
        if self._options.on_nonfinite == "stop":
            raise AttentionError(f"{what}; mend the data or set train.on_nonfinite=skip")
        return what


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


def _others(model: nn.Module, phase: Phase, phases: int) -> list[nn.Parameter]:
    """What has no gradient in a phase: all that its optimizer does not change, where there are several."""
    own = set(phase.parameters)
    return [p for p in model.parameters() if p not in own] if phases > 1 else []


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
