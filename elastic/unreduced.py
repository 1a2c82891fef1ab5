"""Gradients that DDP did not sum, or not whole: refused before an optimizer would take them for the sum, and named.

A backward in which a parameter had no gradient leaves its bucket, and all behind it, unsent; a parameter that the
loss uses on some ranks alone is the same to the others, who wait for it. A gradient that comes in several parts is
sent with its first one. Ranks that ask for other gradients than the rest would each add their part alone.
"""

import functools
import re
from collections.abc import Iterable, Sequence
from typing import Any, Final, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from elastic.errors import StartError

__all__ = [
    "ASKING_SLOTS",
    "FirstBackward",
    "asking",
    "check_asking",
    "check_reduced",
    "parts_error",
    "refuse_unreduced",
]

ASKING_SLOTS: Final = 4
"""What a rank tells of which parameters ask for a gradient."""
_MOST_RANKS: Final = 4096
"""Of so many the sums of those numbers are exact in float32."""
_SHOWN: Final = 4
_INDICES: Final = re.compile(r"did not receive grad for rank \d+:([\d ]+)")


class FirstBackward:
    """Watches the backwards of a first step for gradients that come in parts; later ones are not slowed by it."""

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Watch what asks for a gradient."""
        self._come: set[str] = set()
        self._in_parts: str | None = None
        self._handles = [
            parameter.register_post_accumulate_grad_hook(functools.partial(self._note, name))
            for name, parameter in named
            if parameter.requires_grad
        ]

    def _note(self, name: str, _: Tensor) -> None:
        if name in self._come and self._in_parts is None:
            self._in_parts = name
        self._come.add(name)

    def begin(self) -> None:
        """Before a forward; only the last one's backward is sent."""
        self._come.clear()
        self._in_parts = None

    def end(self) -> None:
        """After the last backward of the step; nothing is watched any more.

        Raises:
            StartError: A gradient came in parts; names the parameter.
        """
        for handle in self._handles:
            handle.remove()
        if self._in_parts is not None:
            raise parts_error(self._in_parts)


def parts_error(name: str | None = None) -> StartError:
    """The error that says what to do about a gradient in parts, of a parameter where it is known."""
    of = "one" if name is None else f"that of {name}"
    return StartError(
        f"gradients: found {of} in parts in one backward, expected it whole: of such DDP sums the first part alone; with "
        "checkpoint() use use_reentrant=False, and leave backward() to the runner"
    )


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


def asking(parameters: Sequence[nn.Parameter]) -> list[float]:
    """Two small numbers of which parameters ask for a gradient, each with its square.

    Over ranks that all say the same, and over no others, the number of ranks times the sum of squares is the square of the sum.
    """
    places = [place for place, p in enumerate(parameters, start=1) if p.requires_grad]
    first, second = sum(places) % 61, sum(place * place for place in places) % 59
    return [float(first), float(first**2), float(second), float(second**2)]


def check_asking(summed: Sequence[float], ranks: int, step: int) -> None:
    """Refuse ranks that do not train the same parameters: each would add its part alone.

    Raises:
        StartError: What `asking` gave, summed over the ranks, is not of ranks that all say the same.
    """
    if 1 < ranks <= _MOST_RANKS and any(
        ranks * squares != values**2
        for values, squares in zip(summed[::2], summed[1::2], strict=True)
    ):
        raise StartError(
            f"step {step}: found other parameters with requires_grad on some ranks than on others, expected the same on"
            " all; on_step, on_epoch and on_eval run on the primary alone: freeze and unfreeze in loss(), which every rank calls"
        )
