"""What the ranks tell each other in every step, and what they all know after it.

Pure: a Request is one rank's side, an Agreed is the sum over all ranks, so that everybody decides
alike at the same step. How the numbers travel is the reducer's or the control group's business.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

__all__ = ["REQUEST_SLOTS", "Agreed", "Request"]

REQUEST_SLOTS: Final = 8
"""How many numbers a Request packs into, without the paces."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What one rank says in one step; all after the first two flags but its pace is the primary's alone."""

    leave: bool = False
    """SIGTERM came: the agent ends or restarts this worker."""
    notice: bool = False
    """The node was told to leave (SIGUSR1 and the like): save, leave, end the agent."""
    save: bool = False
    """A checkpoint is due by the clock."""
    evaluate: bool = False
    """An evaluation is due by the clock."""
    stop: bool = False
    """The run is to end early and orderly."""
    superseded: bool = False
    """A newer generation of another launch has claimed the run."""
    parted: bool = False
    """A newer generation of this launch has claimed the run without this world's agents."""
    memory: bool = False
    """A snapshot for the nodes' memory is due by the clock."""
    paces: tuple[float, ...] = ()
    """Of each rank, 0 but for this one's: the seconds of its own that its last step took."""

    def pack(self) -> list[float]:
        """As numbers that can be summed over the ranks."""
        return [
            float(self.leave),
            float(self.notice),
            float(self.save),
            float(self.evaluate),
            float(self.stop),
            float(self.superseded),
            float(self.parted),
            float(self.memory),
            *self.paces,
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Agreed:
    """The flags of a step summed over all ranks: the same on every rank."""

    leave: int = 0
    """How many ranks had SIGTERM."""
    notice: int = 0
    """How many ranks had a notice."""
    save: bool = False
    evaluate: bool = False
    stop: bool = False
    superseded: bool = False
    parted: bool = False
    memory: bool = False
    paces: tuple[float, ...] = ()
    """The seconds of its own that each rank's last step took; 0 where a rank does not know."""

    @property
    def leaving(self) -> bool:
        """Whether somebody was told to leave: the state is saved and this generation ends."""
        return bool(self.leave or self.notice)

    @classmethod
    def read(cls, summed: Sequence[float]) -> "Agreed":
        """From the summed numbers of `Request.pack`."""
        leave, notice, save, evaluate, stop, superseded, parted, memory = (
            round(value) for value in summed[:REQUEST_SLOTS]
        )
        return cls(
            leave=leave,
            notice=notice,
            save=save > 0,
            evaluate=evaluate > 0,
            stop=stop > 0,
            superseded=superseded > 0,
            parted=parted > 0,
            memory=memory > 0,
            paces=tuple(summed[REQUEST_SLOTS:]),
        )
