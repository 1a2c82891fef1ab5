"""Reducers: what sums the gradients and a few numbers of a step over all ranks, in one go.

Promises: gradients are *summed* over ranks, never divided by the number of them, so that a loss
already divided by what the whole step holds gives the exact mean however unevenly its samples are
spread. The plain reducer is DDP: the numbers of a step (its loss, its count, who was told to leave,
what the primary wants) travel as the gradient of one extra parameter inside DDP's own buckets, so
that they cost no message. What a step does with them is `elastic.step`'s business.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel

from elastic.models import sparse_error
from elastic.unreduced import FirstBackward, parts_error, refuse_unreduced
from elastic.world import World

__all__ = ["PlainReducer", "Reducer", "Totals", "Turn", "forward_reads_buffers", "frozen"]

_T = TypeVar("_T")

_LOSS, _COUNT_HIGH, _COUNT_LOW, _FLAGS = 0, 1, 2, 3
# Counts travel as float32: two halves keep them exact up to 2**36 items a step.
_COUNT_UNIT: Final = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """Where in a rank's step a micro-batch stands."""

    shard: int
    opens: bool = True
    """Whether it is the first of its shard."""
    closes: bool = True
    """Whether it is the last of its shard."""
    last: bool = True
    """Whether it is the last of this rank's step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Totals:
    """The numbers of a phase of a step, summed over all ranks; the same on every rank."""

    loss: float
    count: float
    flags: tuple[float, ...]


class Reducer(Protocol):
    """Sums what the micro-batches of a step's phase give; collective from `begin` to `finish`.

    A phase has an optimizer of its own; most jobs have one. In order: `begin`, for each micro-batch of
    this rank a `forward` and a `backward` inside its `turn`, `finish`. Then the summed gradients are in
    the phase's parameters, on every rank. Parameters of other phases are `frozen` meanwhile.
    """

    @property
    def model(self) -> nn.Module:
        """What a job's loss is given: the plain model, or the compiled one."""
        ...

    def begin(self, phase: int, flags: Sequence[float], *, samples: int | None = None) -> None:
        """Forget the last phase's numbers; `flags` are this rank's, to be summed as well.

        The list is kept, and read with the last backward or at `finish`. `samples` are those of the whole step, if known.
        """
        ...

    def turn(self, turn: Turn) -> AbstractContextManager[None]:
        """Around the forward and backward of one micro-batch."""
        ...

    def forward(self, call: Callable[[nn.Module], _T]) -> _T:
        """Run a loss on the model; it may call the model, or parts of it, as often as it likes."""
        ...

    def backward(self, term: Tensor, *, loss: Tensor | float, count: Tensor | float) -> None:
        """Add the gradient of `term`, and what the micro-batch adds to the loss and the count."""
        ...

    def carry(self, row: Tensor) -> Callable[[], Tensor] | None:
        """Let a float64 row, as long on every rank, travel with the numbers; None where there is no room.

        What is returned gives the rows of all ranks, by rank, once `finish` is done.
        """
        ...

    def finish(self) -> Totals:
        """Wait until all is summed."""
        ...


@contextlib.contextmanager
def frozen(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Let these parameters have no gradient meanwhile: what is not asked for is not computed."""
    changed = [parameter for parameter in parameters if parameter.requires_grad]
    for parameter in changed:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in changed:
            parameter.requires_grad_(True)


@dataclass(slots=True)
class _Sent:
    """What the hook of every DDP knows; not the reducer itself, which DDP would keep alive for ever."""

    world: World
    whole: bool = False
    """Whether every bucket of the present phase was sent: they go in order, so the last one tells."""


class PlainReducer:
    """Runs losses under DDP, so that one backward leaves the summed gradient and numbers.

    Each phase has a DDP of its own, which knows the phase's parameters alone and sends no others. What
    DDP wraps is the computation of the loss, not the model: so a loss may call the model twice, or a
    part of it, and sees the plain model in every world.
    """

    def __init__(
        self,
        plain: nn.Module,
        world: World,
        *,
        compiled: nn.Module | None,
        find_unused: bool,
        phases: Sequence[Sequence[nn.Parameter]] = (),
        flags: int = 20,
        merges_buffers: bool = False,
    ) -> None:
        """Wrap `plain` (on its device); `compiled` runs in its place where it was compiled.

        Collective: every rank calls this; DDP sends the primary's weights and buffers to all.

        Args:
            plain: The model as the job made it.
            world: The ranks.
            compiled: The same, compiled.
            find_unused: Let DDP look for parameters that a forward did not use.
            phases: The parameters of each phase where there are several; one has all of them.
            flags: How many flags a step has at most.
            merges_buffers: Whether somebody else keeps the ranks' buffers alike.
        """
        self.model: nn.Module = plain if compiled is None else compiled
        self._slots = _FLAGS + flags
        self._world, self._device = world, world.device
        self._turn = Turn(shard=0)
        self._loss: Tensor | float = 0.0
        self._count: Tensor | float = 0.0
        self._flags: Sequence[float] = ()
        self._summed: list[float] | None = None
        self._phase = 0
        self._out: Tensor | None = None
        self._sent = _Sent(world)
        every = list(plain.parameters())
        self._ddps: list[DistributedDataParallel | None] = []
        self._controls: list[nn.Parameter] = []
        self._first: dict[int, FirstBackward] = {}
        named = list(plain.named_parameters())
        for parameters in phases if len(phases) > 1 else [every]:
            control = nn.Parameter(torch.zeros(self._slots, device=world.device))
            self._controls.append(control)
            if world.world_size == 1:
                self._ddps.append(None)
                continue
            own = set(parameters)
            # DDP takes what asks for a gradient when it is made.
            with frozen(parameter for parameter in every if parameter not in own):
                ddp = DistributedDataParallel(
                    _LossWithControl(self.model, control),
                    device_ids=[world.device] if world.device.type == "cuda" else None,
                    process_group=None,
                    find_unused_parameters=find_unused,
                    forward_sync_buffers=not merges_buffers and forward_reads_buffers(plain),
                    gradient_as_bucket_view=True,
                )
            ddp.register_comm_hook(self._sent, _sum_bucket)
            self._first[len(self._ddps)] = FirstBackward((n, p) for n, p in named if p in own)
            self._ddps.append(ddp)

    def begin(self, phase: int, flags: Sequence[float], *, samples: int | None = None) -> None:  # noqa: ARG002
        """Forget the last phase's numbers; gradients are the optimizer's to clear."""
        self._phase = phase
        self._loss, self._count, self._flags = 0.0, 0.0, flags
        self._controls[phase].grad = None
        self._out, self._summed = None, None
        self._sent.whole = False

    @contextlib.contextmanager
    def turn(self, turn: Turn) -> Iterator[None]:
        """Around the forward and backward of one micro-batch: only the last one of a step is sent."""
        self._turn = turn
        first = self._first.get(self._phase)
        if first is not None:
            first.begin()
        ddp = self._ddps[self._phase]
        if ddp is None or turn.last:
            yield
        else:
            with ddp.no_sync():
                yield

    def forward(self, call: Callable[[nn.Module], _T]) -> _T:
        """Run a loss on the model, once in each turn."""
        ddp = self._ddps[self._phase]
        if ddp is None:
            return call(self.model)
        value, self._out = ddp(call)
        return cast("_T", value)

    def backward(self, term: Tensor, *, loss: Tensor | float, count: Tensor | float) -> None:
        """Add the gradient of `term`; with the last micro-batch also this rank's numbers.

        Raises:
            StartError: A gradient is sparse, or comes in parts.
        """
        self._loss, self._count = self._loss + loss, self._count + count
        out, self._out = self._out, None
        if not self._turn.last:
            term.backward()
        elif self._ddps[self._phase] is None:
            term.backward()
            self._summed = cast("list[float]", self._numbers().tolist())
        elif out is None:
            raise ValueError("backward: found no forward in this turn, expected one")
        else:
            # The gradient of this addend with respect to the control parameter is the numbers
            # themselves, whatever the loss is: one that is not finite does not spoil the others.
            try:
                (term + (out * self._numbers()).sum()).backward()
            except RuntimeError as error:
                if "SparseTensorImpl" in str(error):  # DDP has no place for it in its buckets
                    raise sparse_error() from error
                if "mark a variable ready only once" in str(error):
                    raise parts_error() from error
                raise

    def _numbers(self) -> Tensor:
        """Pack this rank's numbers on its device without waiting for it."""
        padding = [0.0] * (self._slots - _FLAGS - len(self._flags))
        packed = torch.tensor([0.0, 0.0, 0.0, *self._flags, *padding])
        numbers = packed.to(self._device, non_blocking=True)
        count = self._count
        if isinstance(count, Tensor):
            high: Tensor | float = (count / _COUNT_UNIT).floor()
        else:
            high = count // _COUNT_UNIT
        numbers[_LOSS], numbers[_COUNT_HIGH] = self._loss, high
        numbers[_COUNT_LOW] = count - high * _COUNT_UNIT
        return numbers

    def carry(self, row: Tensor) -> None:
        """None: these numbers are summed, and have been sent."""

    def finish(self) -> Totals:
        """The numbers of the step, summed over the ranks; waits for the device.

        Raises:
            StartError: A parameter is not in the loss, or its gradient came in parts, so that DDP has not summed
                it; names it.
        """
        summed, control = self._summed, self._controls[self._phase]
        ddp = self._ddps[self._phase]
        if ddp is not None and control.grad is not None and not self._sent.whole:
            refuse_unreduced(ddp, "use it, or set train.find_unused_parameters=true")
        first = self._first.pop(self._phase, None)
        if first is not None:
            first.end()
        if control.grad is not None:
            summed = cast("list[float]", control.grad.tolist())
        self._world.has_gradients()
        if summed is None:
            raise ValueError("no numbers yet: found none, expected a backward of the last turn")
        return Totals(
            loss=summed[_LOSS],
            count=summed[_COUNT_HIGH] * _COUNT_UNIT + summed[_COUNT_LOW],
            flags=tuple(summed[_FLAGS : _FLAGS + len(self._flags)]),
        )


class _LossWithControl(nn.Module):
    """The computation of a loss as a module, with the control parameter beside it, for DDP to see both."""

    def __init__(self, body: nn.Module, control: nn.Parameter) -> None:
        super().__init__()
        self.body = body
        self.control = control

    def forward(self, call: Callable[[nn.Module], Any]) -> tuple[Any, Tensor]:
        # A view, since DDP looks for the parameters that a step uses in the graph behind what is returned.
        return call(self.body), self.control.view_as(self.control)


def _sum_bucket(sent: _Sent, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]  # torch's stubs lack the name
    if bucket.is_last():
        sent.whole = True
        sent.world.wait_for_gradients()
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return cast("torch.futures.Future[Tensor]", work.get_future().then(_first))


def _first(future: torch.futures.Future[list[Tensor]]) -> Tensor:
    return future.value()[0]


def forward_reads_buffers(model: nn.Module) -> bool:
    """Whether a training forward may read a buffer that ranks could disagree on.

    Running statistics of batch norms are only written in training: rank 0's are what is saved and
    evaluated, so DDP need not send them before each forward. Any other buffer (spectral norm's
    vectors, codebooks) is sent as DDP always did, unless the model has none.
    """
    for module in model.modules():
        if isinstance(module, _NormBase) and (module.training or not module.track_running_stats):
            continue
        if any(True for _ in module.buffers(recurse=False)):
            return True
    return False
