"""How the commands show things to people: tables, sizes, ages, and a bar while something takes long.

A bar is drawn on a terminal only, on stderr, and is gone when the work is done; what a program reads is
never mixed with it.
"""

from __future__ import annotations

import io
import os
import sys
import threading
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final, Self

from checkpoints.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import TextIO

_UNITS: Final = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
_AGES: Final = (("d", 86400), ("h", 3600), ("min", 60))
_WIDTH: Final = 24
_DRAW_S: Final = 0.1
PIPE_CLOSED: Final = 141
"""As a shell tells of a program that SIGPIPE has ended."""


def open_output() -> None:
    """Let a program print whatever its terminal can show, and where nobody gave it an output at all."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by whoever started the program
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115  # for good
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def put_out(text: str) -> None:
    """Print what was asked for; where that fails, nothing more is written at exit.

    Raises:
        BrokenPipeError: Nobody reads it any more.
        CheckpointError: It cannot be written, to a file on a full disk for instance.
    """
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            raise
        raise CheckpointError(f"standard output: could not be written: {error.strerror}") from error


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """The rows of a table, as lines."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def size_text(size_bytes: object) -> str:
    """A size for people."""
    count = float(str(size_bytes))
    for unit, size in _UNITS:
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} B"


def age_text(age_s: object) -> str:
    """An age for people."""
    if age_s is None:
        return "-"
    seconds = float(str(age_s))
    for unit, size in _AGES:
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def age_s(created_at: str | None, now_s: float) -> float | None:
    """Seconds since a checkpoint was made; clocks differ, so that it is only for people."""
    if created_at is None:
        return None
    try:
        created = datetime.fromisoformat(created_at)
    except ValueError:
        return None
    if created.tzinfo is None:
        created = created.replace(tzinfo=UTC)
    return max(0.0, round(now_s - created.timestamp(), 3))


class Progress:
    """A bar for so many bytes. Any thread may tell of more."""

    def __init__(
        self,
        what: str,
        total_bytes: int,
        *,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._what, self._total = what, max(1, total_bytes)
        self._stream = sys.stderr if stream is None else stream
        self._is_shown = self._stream.isatty()
        self._clock = clock
        self._began = clock()
        self._drawn_at: float | None = None
        self._done = 0
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            if self._drawn_at is not None:
                self._stream.write("\r\x1b[K")
                self._stream.flush()
            self._is_shown = False

    def add(self, count: int) -> None:
        """Tell of so many more bytes."""
        with self._lock:
            self._done += count
            now = self._clock()
            if not self._is_shown:
                return
            if self._drawn_at is None or now - self._drawn_at >= _DRAW_S:
                self._drawn_at = now
                self._stream.write(f"\r\x1b[K{self._line(now - self._began)}")
                self._stream.flush()

    def _line(self, seconds: float) -> str:
        share = min(1.0, self._done / self._total)
        full = round(share * _WIDTH)
        rate = self._done / seconds if seconds > 0 else 0.0
        left = (self._total - self._done) / rate if rate else 0.0
        bar = "#" * full + "." * (_WIDTH - full)
        return (
            f"{self._what} [{bar}] {share:4.0%} of {size_text(self._total)},"
            f" {size_text(rate)}/s, {age_text(max(0.0, left))} left"
        )
