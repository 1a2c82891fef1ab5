"""Who keeps the others waiting: the seconds of its own that each rank's steps take, and which rank is slow.

A rank's own seconds are those of its batch, forward and backward, without its wait for the others' gradients. They
travel with the flags of the next step, so that they cost no message; now and then the primary looks at them. On CUDA
they are the host's: a slow loader shows, a slow GPU does not.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from elastic.monitor import Slot
from elastic.world import World

__all__ = ["Paces", "Straggler"]

_LOOK_S: Final = 5.0
_LOOK_STEPS: Final = 16
"""A verdict is on so many steps and so many seconds at least."""
_SLOW: Final = 1.3
_FAST: Final = 1.15
"""A rank is slow from so many times what the others take, and no more from below so many."""
_LEAST_S: Final = 0.002
_LEAST_SHARE: Final = 0.03
"""Less than this, and less than this share of a step, is nobody's concern."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Straggler:
    """A rank that has become slow, or no longer is."""

    rank: int
    host: str
    seconds: float
    """Its own in a step, the median."""
    others: float
    """What the others take."""
    shards: tuple[int, ...]
    """The slices of the batch that it has."""
    is_slow: bool

    def to_json(self) -> dict[str, Any]:
        """As fields of a journal line."""
        return {**asdict(self), "shards": list(self.shards)}

    def __str__(self) -> str:
        """Tell it in a line."""
        shards = ", ".join(map(str, self.shards))
        who = f"rank {self.rank} on {self.host}" + (f" (shards {shards})" if shards else "")
        if not self.is_slow:
            return (
                f"{who} is as fast as the others again: {self.seconds:.3f} s of its own in a step"
            )
        return (
            f"{who} is slow: {self.seconds:.3f} s of its own in a step, the others take {self.others:.3f} s and wait"
            " for it"
        )


class Paces:
    """Measures this rank's own seconds; on the primary it judges all ranks'."""

    def __init__(
        self, world: World, slot: Slot, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Measure in a world; in one of a single rank there is nobody to wait."""
        self._world, self._slot, self._clock = world, slot, clock
        self.slots = world.world_size if world.world_size > 1 else 0
        """How many numbers `told` gives."""
        self.shards: Callable[[int], Sequence[int]] = lambda _rank: ()
        """The slices of the batch that a rank has, where they are the job's."""
        self._began: float | None = None
        self._waited = 0.0
        self._own_s = 0.0
        self._rows: list[Sequence[float]] = []
        self._since = clock()
        self._slow: set[int] = set()

    def start(self) -> None:
        """The next step begins."""
        self._began, self._waited = self._clock(), self._slot.waited_s

    def stop(self) -> None:
        """It is done."""
        if self._began is not None:
            spent = self._clock() - self._began
            self._own_s = max(spent - (self._slot.waited_s - self._waited), 1e-9)
        else:
            self._own_s = 0.0  # the first batch of an epoch tells nothing
        self._began = None

    def told(self) -> tuple[float, ...]:
        """What this rank says of its last step, to be summed over the ranks."""
        if not self.slots:
            return ()
        own = [0.0] * self.slots
        own[self._world.rank] = self._own_s
        return tuple(own)

    def judge(self, paces: Sequence[float]) -> Iterator[Straggler]:
        """Take in a step's paces; yields what has changed. Primary only."""
        if min(paces) > 0:
            self._rows.append(paces)
        now = self._clock()
        if len(self._rows) < _LOOK_STEPS or now - self._since < _LOOK_S:
            return
        step_s = (now - self._since) / len(self._rows)
        least_s = max(_LEAST_S, _LEAST_SHARE * step_s)
        medians = [statistics.median(column) for column in zip(*self._rows, strict=True)]
        self._rows, self._since = [], now
        usual = statistics.median_low(medians)
        for rank, seconds in enumerate(medians):
            times = _FAST if rank in self._slow else _SLOW
            is_slow = seconds > times * usual and seconds - usual > least_s
            if is_slow == (rank in self._slow):
                continue
            (self._slow.add if is_slow else self._slow.discard)(rank)
            yield Straggler(
                rank=rank,
                host=self._world.hosts[rank],
                seconds=round(seconds, 6),
                others=round(usual, 6),
                shards=tuple(self.shards(rank)),
                is_slow=is_slow,
            )
