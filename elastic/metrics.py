"""Where the time goes, and the line that a person watches.

The ledger adds up seconds by what they were spent on; the console turns a step into a progress line,
redrawn in place on a terminal and written now and then elsewhere. Trackers get their seam here.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final, TextIO

__all__ = ["Console", "Ledger", "Status"]

_REDRAW_S: Final = 0.2
_PLAIN_S: Final = 10.0


@dataclass(kw_only=True, slots=True)
class Ledger:
    """Seconds of this generation by use, from the primary's monotonic clock."""

    clock: Callable[[], float] = time.monotonic
    steps: float = 0.0
    checkpoint: float = 0.0
    eval: float = 0.0
    _mark: float = field(default=0.0)

    def start(self) -> None:
        """Begin counting: what comes next belongs to the first step."""
        self._mark = self.clock()

    def step_done(self) -> float:
        """Book the time since the last mark to steps; returns it, in seconds."""
        now = self.clock()
        spent = now - self._mark
        self.steps += spent
        self._mark = now
        return spent

    @contextlib.contextmanager
    def spend(self, use: str) -> Iterator[None]:
        """Book what happens inside to `use` (checkpoint or eval), and not to a step."""
        self.step_done()
        try:
            yield
        finally:
            now = self.clock()
            setattr(self, use, getattr(self, use) + now - self._mark)
            self._mark = now

    def totals(self) -> dict[str, float]:
        """Seconds so far, by use."""
        return {
            "steps": round(self.steps, 4),
            "checkpoint": round(self.checkpoint, 4),
            "eval": round(self.eval, 4),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Status:
    """What one progress line tells."""

    epoch: int
    epochs: int | None
    step: int
    loss: float | None
    samples: int
    world_size: int
    saved_step: int | None
    goodput: float | None = None
    """Time in steps of the lineage over the wall time since the run's first start."""


class Console:
    """Writes progress to a stream. Primary only."""

    def __init__(self, stream: TextIO, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Write to `stream`; a terminal is redrawn in place."""
        self._stream, self._clock = stream, clock
        self._terminal = stream.isatty()
        self._every = _REDRAW_S if self._terminal else _PLAIN_S
        self._last = clock()
        self._samples = 0
        self._open_line = False

    def update(self, samples: int, status: Callable[[], Status]) -> None:
        """Count a step of `samples` samples; writes a line where one is due."""
        self._samples += samples
        now = self._clock()
        if now - self._last < self._every:
            return
        rate = self._samples / (now - self._last)
        self._last, self._samples = now, 0
        self._write(_render(status(), rate), transient=True)

    def say(self, text: str) -> None:
        """Write a line that stays."""
        self._write(text, transient=False)

    def _write(self, text: str, *, transient: bool) -> None:
        line = f"\r\x1b[K{text}" + ("" if transient else "\n") if self._terminal else text + "\n"
        self._open_line = self._terminal and transient
        # A terminal that is gone or a full disk under a log must not end the training.
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(line)
            self._stream.flush()

    def close(self) -> None:
        """Leave the cursor on a line of its own."""
        if self._open_line:
            with contextlib.suppress(OSError, ValueError):
                self._stream.write("\n")
                self._stream.flush()


def _render(status: Status, rate: float) -> str:
    epochs = f"/{status.epochs}" if status.epochs is not None else ""
    loss = f"  loss {status.loss:.4f}" if status.loss is not None else ""
    saved = (
        f"  saved at {status.saved_step}" if status.saved_step is not None else "  not saved yet"
    )
    goodput = f"  goodput {status.goodput:.2f}" if status.goodput is not None else ""
    return (
        f"epoch {status.epoch + 1}{epochs}  step {status.step}{loss}  {rate:,.0f} samples/s"
        f"  W={status.world_size}{saved}{goodput}"
    )
