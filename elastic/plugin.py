"""torchrun's entry point for `--rdzv_backend=fsspec`: loads the rendezvous only in a torchrun that asks for it.

Runs in every torchrun of the environment, so it imports nothing before that.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.elastic.rendezvous.api import RendezvousHandler, RendezvousParameters

__all__ = ["handlers"]


def handlers() -> "Callable[[RendezvousParameters], RendezvousHandler]":
    """Return the creator that torchrun wants of an entry point."""
    return _create


def _create(params: "RendezvousParameters") -> "RendezvousHandler":
    from elastic.rendezvous import create

    return create(params)
