"""The signals that come to a launcher: what ends it, once, and what is a notice to its node.

Guarantees: the workers are stopped once, with SIGTERM, whatever it was that came, so that they save; a second signal never
breaks that off, and the third one makes an end of it; what was ignored when the launcher began, as under nohup, stays so.
Does not import torch.
"""

import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

__all__ = ["Hearing", "ToldError", "say", "workers"]

_IMPATIENT: Final = 3
_STOPPING: Final = frozenset({"_shutdown", "_tell_signal"})
"""Where torch's agent stops its workers, and where we look what they ended with."""


class ToldError(Exception):
    """Raised when the launcher is told to end before torch, whose own exception it is afterwards, is there."""


class Hearing:
    """The handlers. Made by the main thread."""

    def __init__(self) -> None:
        self._count = 0
        self.exception: Callable[[], Exception] = ToldError
        """Makes what is raised, in the middle of whatever is being done."""
        self.notice: Callable[[str], bool] = lambda _: False
        """What is done at SIGUSR1 and SIGUSR2, with the signal's name; whether the launcher itself is to end."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._end)
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, self._notice)

    def _end(self, number: int, frame: "FrameType | None") -> None:
        self._count += 1
        if self._count >= _IMPATIENT:
            for pid in workers():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        elif self._count > 1 and number == signal.SIGINT:
            say("SIGINT: saving; once more to end at once")
        # While torch stops the workers another exception would break that off. Else torch has lost the one before.
        if not _is_stopping(frame):
            raise self.exception()

    def _notice(self, number: int, frame: "FrameType | None") -> None:
        if self.notice(signal.Signals(number).name) and not _is_stopping(frame):
            raise self.exception()


def _is_stopping(frame: "FrameType | None") -> bool:
    while frame is not None:
        if frame.f_code.co_name in _STOPPING:
            return True
        frame = frame.f_back
    return False


def workers() -> list[int]:
    """List the children of this process that torchrun started as workers."""
    found = []
    me = os.getpid()
    for text in Path(f"/proc/{me}/task/{me}/children").read_text(encoding="ascii").split():
        with contextlib.suppress(OSError):
            if b"\0RANK=" in b"\0" + Path(f"/proc/{text}/environ").read_bytes():
                found.append(int(text))
    return found


def say(line: str) -> None:
    """Say something as the launcher."""
    sys.stderr.write(f"launch: {line}\n")
    sys.stderr.flush()
