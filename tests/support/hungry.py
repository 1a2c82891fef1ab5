"""A job that takes all the memory there is, in one step on one rank: in the loss, or in a loader worker."""

from pathlib import Path
from typing import Any

from torch.utils.data import Dataset, get_worker_info

from tests.support import tracer
from tests.support.tracer import Numbers, rank_here

PIECE_BYTES = 64 << 20


def devour() -> None:
    """Take memory until somebody ends us."""
    kept = []
    while True:
        kept.append(b"x" * PIECE_BYTES)


class Hungry(tracer.Faulty):
    """C51c: `rank` is hungry in `step`."""

    def _happen(self) -> None:
        devour()


class HungryLoader(tracer.Counter):
    """The loader worker of `rank` is, once, at its item number `step`."""

    def __init__(self, marker: str, step: int = 3, rank: int = 1, n: int = 40) -> None:
        super().__init__(n)
        self.marker, self.step, self.rank = Path(marker), step, rank

    def dataset(self) -> Dataset[Any]:
        return Reading(self)

    def maybe(self, number: int) -> None:
        """Where the worker reads."""
        if (number, rank_here()) == (self.step, self.rank) and not self.marker.exists():
            self.marker.touch()
            devour()


class Reading(Numbers):
    """The items of the job."""

    def __init__(self, job: HungryLoader) -> None:
        super().__init__(job.n)
        self.job = job
        self.read = 0

    def __getitem__(self, index: int) -> tuple[float, int]:
        if get_worker_info() is not None:  # the trainer reads some, too
            self.read += 1
            self.job.maybe(self.read)
        return super().__getitem__(index)
