"""What the runner takes as a model: parameters that have a shape, and gradients that are dense.

Looked at before the first step, as far as a model shows it; else told in a line where the first gradient comes.
"""

from torch import nn
from torch.nn.parameter import is_lazy

from elastic.errors import StartError

__all__ = ["check_forward", "check_model", "check_shapes", "sparse_error"]


def check_model(model: nn.Module, kind: str) -> None:
    """Refuse a model that cannot be trained here; `kind` is the job's class.

    Raises:
        StartError: Names the first parameter or layer.
    """
    check_shapes(model, f"{kind}.model")
    check_forward(model, f"{kind}.model")
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise sparse_error(f"{name}.weight".lstrip("."))


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
    """Refuse a model whose lazy modules have seen no forward; `label` is where it comes from.

    Raises:
        StartError: Names the first parameter or buffer.
    """
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise StartError(
                f"{label}: found {name} without a shape (a lazy module), expected one for every parameter and buffer; "
                "give the layer its sizes, or run a forward before"
            )


def sparse_error(name: str | None = None) -> StartError:
    """The error that says what to do about a sparse gradient, of a parameter where it is known."""
    of = "" if name is None else f" of {name}"
    return StartError(
        f"gradients: found a sparse one{of}, expected dense ones, which are summed, clipped and checked alike; make the "
        "embedding with sparse=False"
    )
