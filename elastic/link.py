"""What the torchrun agent's main thread and its rendezvous thread share: few words, each behind one lock.

The main thread asks to join, and looks; the rendezvous thread tells. Does not import torch.
"""

import contextlib
import threading
import time
from dataclasses import dataclass
from typing import Final

from elastic.broken import note_broken
from elastic.errors import MeetingError
from elastic.roster import WorldId

__all__ = ["ClosedError", "Link", "Start"]

_TICK_S: Final = 0.1
"""How long the main thread waits at once: it handles signals in between."""


class ClosedError(MeetingError):
    """Raised when the launch has ended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """A world that this agent is part of."""

    world: WorldId
    rank: int
    size: int
    address: str
    """Where the leader was reached; its store for this world is there."""
    port: int


class Link:
    """The shared words."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._start: Start | None = None
        self._closed = ""
        self._failed = ""
        self.trouble = "no leader found yet"
        """Why this agent is in no world."""
        self.world: WorldId | None = None
        """The world of this agent's workers."""
        self.is_ready = False
        self.is_finishing = False
        self.is_leaving = False
        self.is_closing = False
        self.has_left = False
        self.folder = ""
        """Where this agent leaves word for its workers' watcher."""
        self.waiting = 0
        """What torchrun looks at: above 0, it stops the workers and joins again."""

    # --------------------------------------------------------------------------------- main thread
    def ask(self) -> None:
        """Note that this agent, whose workers are stopped, wants to be in the next world."""
        with self._changed:
            self.is_ready, self.is_finishing, self.world, self._start, self.waiting = (
                True,
                False,
                None,
                None,
                0,
            )

    def wait_for_start(self, limit_s: float) -> Start:
        """Wait for the next world, in Python code, so that signals are handled.

        Raises:
            ClosedError: Raised when the launch has ended.
            MeetingError: Raised when this agent can take no part.
            TimeoutError: Raised when no world has formed with it.
        """
        deadline = time.monotonic() + limit_s
        with self._changed:
            while self._start is None:
                if self._closed:
                    raise ClosedError(self._closed)
                if self._failed:
                    raise MeetingError(self._failed)
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"no world formed with this node within {limit_s:.0f} s: {self.trouble}"
                    )
                self._changed.wait(_TICK_S)
            start, self._start = self._start, None
            return start

    def is_doomed(self, world: WorldId) -> bool:
        """Tell whether a world is over, or about to be."""
        return self.waiting > 0 or bool(self._closed) or self.world != world

    def wait_until_left(self, limit_s: float) -> bool:
        """Wait until the others know that this agent goes, or the launch is closed."""
        with self._changed:
            return self._changed.wait_for(lambda: self.has_left or bool(self._closed), limit_s)

    # --------------------------------------------------------------------------------- rendezvous thread
    @property
    def is_over(self) -> bool:
        """Whether the launch has ended for this agent."""
        return bool(self._closed or self._failed)

    def start(self, start: Start) -> None:
        """Hand a world to the main thread."""
        with self._changed:
            self._start, self.world, self.is_ready, self.waiting, self.trouble = (
                start,
                start.world,
                False,
                0,
                "",
            )
            self._changed.notify_all()

    def recall(self, *, is_broken: bool = False) -> None:
        """Have torchrun stop the workers and join again; who waits for a node that is gone is not waited for."""
        with self._changed:
            self.waiting = 1
        if is_broken and self.folder:
            with contextlib.suppress(
                OSError
            ):  # then they wait for as long as a collective may last
                note_broken(self.folder)

    def leave(self) -> None:
        """Note that the others know that this agent goes."""
        with self._changed:
            self.has_left = True
            self._changed.notify_all()

    def close(self, reason: str) -> None:
        """The launch has ended."""
        with self._changed:
            self._closed = self._closed or reason
            self._changed.notify_all()

    def fail(self, reason: str) -> None:
        """This agent can take no part."""
        with self._changed:
            self._failed = self._failed or reason
            self._changed.notify_all()
