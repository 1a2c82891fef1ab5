"""The reducer: sums gradients and a few control numbers of a step over all ranks, in one go.

Promises: gradients are *summed* over ranks, never divided by the number of them, so that a loss
already divided by what the whole step holds gives the exact mean however unevenly its samples are
spread. The control numbers of a step (its loss, its count, who was told to leave, what the primary
wants) travel as the gradient of one extra parameter inside DDP's own buckets: they cost no message.
What a step does with them is `elastic.step`'s business.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Final, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel

from elastic.world import World

__all__ = ["CONTROL_SLOTS", "Reducer", "forward_reads_buffers"]

CONTROL_SLOTS: Final = 16
"""How many float32 numbers of a step are summed over the ranks beside its gradients."""


class Reducer:
    """Wraps the model so that one backward leaves the summed gradient and control numbers.

    `model` is what a job's loss is given: the plain model, or its compiled form. The loss has to be run by
    `forward`, which is DDP's.
    """

    def __init__(
        self, plain: nn.Module, world: World, *, compiled: nn.Module | None, find_unused: bool
    ) -> None:
        """Wrap `plain` (on its device); `compiled` runs in its place where it was compiled.

        Collective: every rank calls this; DDP sends the primary's weights and buffers to all.
        """
        self._plain = plain
        self._control = nn.Parameter(torch.zeros(CONTROL_SLOTS, device=world.device))
        self._ddp: DistributedDataParallel | None = None
        self._seen: Tensor | None = None
        self._alone: list[float] | None = None
        self.model: nn.Module = plain if compiled is None else compiled
        if world.world_size == 1:
            return
        self._ddp = DistributedDataParallel(
            _LossWithControl(self.model, self._control),
            device_ids=[world.device] if world.device.type == "cuda" else None,
            process_group=None,
            find_unused_parameters=find_unused,
            forward_sync_buffers=forward_reads_buffers(plain),
            gradient_as_bucket_view=True,
        )
        self._ddp.register_comm_hook(None, _sum_bucket)

    def forward(self, call: Callable[[nn.Module], Any]) -> Any:
        """Return `call(model)`, run inside DDP's forward where there are other ranks."""
        if self._ddp is None:
            return call(self.model)
        value, self._seen = self._ddp(call)
        return value

    @contextlib.contextmanager
    def accumulate(self, *, last: bool) -> Iterator[None]:
        """Around the forward and backward of one micro-batch: only the last one of a step is sent."""
        if self._ddp is None or last:
            yield
        else:
            with self._ddp.no_sync():
                yield

    def backward(self, loss: Tensor, control: Tensor | None) -> None:
        """Add the gradient of `loss`; with the last micro-batch also this rank's control numbers.

        Collective where `control` is given. `control` has CONTROL_SLOTS float32 numbers.
        """
        if control is None:
            loss.backward()
        elif self._ddp is None:
            loss.backward()
            self._alone = cast("list[float]", control.tolist())
        else:
            # The gradient of this term with respect to the control parameter is `control` itself,
            # whatever the loss is: a loss that is not finite does not spoil the other numbers.
            seen, self._seen = self._seen, None
            if seen is None:
                raise ValueError(
                    "backward: found no forward before it, expected the loss from `forward`"
                )
            (loss + (seen * control).sum()).backward()

    def summed(self) -> list[float]:
        """The control numbers of the step, summed over the ranks; waits for the device."""
        if self._ddp is None:
            if self._alone is None:
                raise ValueError(
                    "no control numbers yet: found none, expected a backward with control"
                )
            return self._alone
        gradient = self._control.grad
        if gradient is None:
            raise ValueError("no control numbers yet: found none, expected a backward with control")
        return cast("list[float]", gradient.tolist())

    def start_step(self) -> None:
        """Forget the last step's control numbers; gradients are the optimizer's to clear."""
        self._control.grad = None
        self._alone = None


class _LossWithControl(nn.Module):
    """The model and the control parameter side by side; what runs inside DDP is the loss, not the model alone.

    So a loss may use the model as it likes: call it twice, a method or a part of it, or its parameters.
    """

    def __init__(self, body: nn.Module, control: nn.Parameter) -> None:
        super().__init__()
        self.body = body
        self.control = control

    def forward(self, call: Callable[[nn.Module], Any]) -> tuple[Any, Tensor]:
        # A view, since DDP looks for the parameters that a step uses in the graph behind what is returned.
        return call(self.body), self.control.view_as(self.control)


def _sum_bucket(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]  # noqa: ARG001  # DDP's signature, and torch's stubs lack the name
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
