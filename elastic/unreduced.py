"""Gradients that DDP did not sum: a backward in which a parameter had none left its bucket, and all behind it, unsent.

Each rank then holds gradients of its own, which an optimizer would take for the sum. Refused before that, and
named; a parameter that the loss uses on some ranks alone is the same to the others, who wait for it.
"""

import re
from typing import Any, Final, NoReturn

import torch
from torch.nn.parallel import DistributedDataParallel

from elastic.errors import StartError

__all__ = ["check_reduced", "refuse_unreduced"]

_SHOWN: Final = 4
_INDICES: Final = re.compile(r"did not receive grad for rank \d+:([\d ]+)")


def check_reduced(ddp: DistributedDataParallel, way_out: str) -> None:
    """Refuse where DDP's last backward was not finished, as DDP itself would at its next forward.

    Every rank calls it after a backward: like that forward it may be what orders DDP's buckets anew. Collective.

    Raises:
        StartError: A parameter had no gradient; names it.
    """
    reducer: Any = ddp.reducer
    if not torch.is_grad_enabled():
        return
    try:
        reducer._rebuild_buckets()  # noqa: SLF001  # DDP's forward begins so
    except RuntimeError as error:
        if "finished reduction" not in str(error):
            raise
        _refuse(ddp, str(error), way_out)


def refuse_unreduced(ddp: DistributedDataParallel, way_out: str) -> NoReturn:
    """Tell which parameters had no gradient in a backward that is known to be unfinished.

    Raises:
        StartError: Always.
    """
    try:
        ddp.reducer._rebuild_buckets()  # noqa: SLF001  # DDP's forward begins so
    except RuntimeError as error:
        _refuse(ddp, str(error), way_out)
    _refuse(ddp, "", way_out)


def _refuse(ddp: DistributedDataParallel, said: str, way_out: str) -> NoReturn:
    known = _names(ddp)
    found = _INDICES.search(said)
    indices = [int(index) for index in found[1].split()] if found else []
    names = [known[index] if index < len(known) else f"number {index}" for index in indices]
    shown = ", ".join(names[:_SHOWN]) or "some"
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    raise StartError(
        f"gradients: found none of parameter {shown}{more} in a backward, expected each in the loss of"
        f" every rank: nothing would be summed over the ranks; {way_out}"
    )


def _names(ddp: DistributedDataParallel) -> list[str]:
    """The parameters in DDP's own order, by their plain names."""
    ignored = ddp.parameters_to_ignore
    return [
        name.removeprefix("body.").removeprefix("_orig_mod.")
        for name, parameter in ddp.module.named_parameters()
        if parameter.requires_grad and name not in ignored
    ]
