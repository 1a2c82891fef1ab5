"""What the runner takes as a model: parameters that have a shape and stay alike, and gradients that are dense and summed.

Looked at before the first step, as far as a model shows it; else told in a line where the first gradient comes.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from elastic.errors import StartError

__all__ = ["check_forward", "check_model", "check_shapes", "check_wrapped", "sparse_error"]


def check_model(model: nn.Module, kind: str, *, in_shards: bool = False) -> None:
    """Refuse a model that cannot be trained here; `kind` is the job's class, `in_shards` with `train.logical_shards`.

    Raises:
        StartError: Names the first parameter or layer.
    """
    check_shapes(model, f"{kind}.model")
    check_forward(model, f"{kind}.model")
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise sparse_error(f"{name}.weight".lstrip("."))
        if in_shards and isinstance(module, nn.SyncBatchNorm):
            raise StartError(
                f"{kind}.model: found {name or 'itself'}, a SyncBatchNorm, with train.logical_shards, expected BatchNorm: its"
                " statistics are those of whatever the ranks run at one moment, which depends on their number, and a"
                " rank with fewer shards would leave the others waiting; a logical shard is the batch of a norm"
            )


def check_forward(model: nn.Module, label: str) -> None:
    """Refuse a model whose forward changes its weights by the samples that a rank has; `label` is where it comes from.

    Raises:
        StartError: Names the first layer.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise StartError(
                f"{label}: found {name or 'itself'} with max_norm={module.max_norm:g}, expected none: its forward changes the "
                "weights of the samples that a rank has, so that ranks would differ; leave it out, and renormalise in "
                "the loss or in a hook of the optimizer's step, on all ranks alike"
            )


def check_shapes(model: nn.Module, label: str) -> None:
    """Refuse a model with tensors that cannot be saved and loaded; `label` is where it comes from.

    Raises:
        StartError: Names the first parameter or buffer.
    """
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise StartError(
                f"{label}: found {name} without a shape (a lazy module), expected one for every parameter and buffer; "
                "give the layer its sizes, or run a forward before"
            )
        strides = tensor.stride() if tensor.layout is torch.strided else tensor.shape
        if any(step == 0 and size > 1 for step, size in zip(strides, tensor.shape, strict=True)):
            raise StartError(
                f"{label}: found {name} expanded, its elements share memory, expected each to have its own, so that it can be"
                " loaded; give it .clone()"
            )


def check_wrapped(
    modules: Mapping[str, nn.Module], objects: Mapping[str, Any], world_size: int
) -> None:
    """Refuse where an optimizer changes a parameter whose gradient nobody would sum over the ranks.

    Raises:
        StartError: Names the module, or the optimizer.
    """
    if not isinstance(modules["model"], DistributedDataParallel):
        raise StartError(
            f"run.attach: model: found {type(modules['model']).__name__} in a world of {world_size}, expected it wrapped with "
            "DistributedDataParallel"
        )
    # What is attached twice counts as wrapped where one of the two is.
    in_order = sorted(modules, key=lambda name: isinstance(modules[name], DistributedDataParallel))
    owners = {p: name for name in in_order for p in modules[name].parameters()}
    for label, given in objects.items():
        several = given.values() if isinstance(given, Mapping) else [given]
        for optimizer in (one for one in several if isinstance(one, Optimizer)):
            for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                owner = owners.get(parameter)
                if owner is None:
                    raise StartError(
                        f"run.attach: {label}: found a parameter of shape {tuple(parameter.shape)} that is in no attached "
                        "module, expected each in one: attach the DDP module that it belongs to, under a name of its own"
                    )
                if not isinstance(modules[owner], DistributedDataParallel):
                    raise StartError(
                        f"run.attach: {owner}: found {type(modules[owner]).__name__} in a world of {world_size}, whose "
                        "parameters an optimizer changes, expected it wrapped with DistributedDataParallel"
                    )


def sparse_error(name: str | None = None) -> StartError:
    """The error that says what to do about a sparse gradient, of a parameter where it is known."""
    of = "" if name is None else f" of {name}"
    return StartError(
        f"gradients: found a sparse one{of}, expected dense ones, which are summed, clipped and checked alike; make the "
        "embedding with sparse=False"
    )
