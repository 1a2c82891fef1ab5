"""The signals that come to a launcher: what ends it, once, and what is a notice to its node.

Guarantees: the workers are stopped once, with SIGTERM, whatever it was that came, so that they save; a second signal never
breaks that off, and the third one makes an end of it; what was ignored when the launcher began, as under nohup, stays so.
No signal is lost: one that comes while libraries are imported ends the process there and then, and an exception that some
library swallows is raised again. Does not import torch.
"""

import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

from elastic.errors import ExitCode

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

__all__ = ["Hearing", "say", "workers"]

_IMPATIENT: Final = 3
_INSIST_S: Final = 0.5
_STOPPING: Final = frozenset({"_shutdown", "_tell_signal"})
"""Where torch's agent stops its workers, and where we look what they ended with."""


class Hearing:
    """The handlers. Made by the main thread."""

    def __init__(self) -> None:
        self._count = 0
        self._raised: Exception | None = None
        self.exception: Callable[[], Exception] | None = None
        """Makes what is raised, in the middle of whatever is being done; None: nothing has begun, and the process ends."""
        self.notice: Callable[[str], bool] = lambda _: False
        """What is done at SIGUSR1 and SIGUSR2, with the signal's name; whether the launcher itself is to end."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._end)
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, self._notice)
        signal.signal(signal.SIGALRM, self._insist)

    def settle(self) -> None:
        """What was raised has arrived where it belongs, or there is nobody left to hear it."""
        signal.setitimer(signal.ITIMER_REAL, 0.0)

    def _end(self, number: int, frame: "FrameType | None") -> None:
        self._count += 1
        if self._count >= _IMPATIENT:
            for pid in workers():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        elif self._count > 1 and number == signal.SIGINT:
            say("SIGINT: saving; once more to end at once")
        self._break_off(frame)

    def _notice(self, number: int, frame: "FrameType | None") -> None:
        if self.notice(signal.Signals(number).name):
            self._break_off(frame)

    def _break_off(self, frame: "FrameType | None") -> None:
        # While torch stops the workers another exception would break that off. Else torch has lost the one before.
        if _is_stopping(frame):
            return
        if self.exception is None:
            _end_at_once()
        signal.setitimer(signal.ITIMER_REAL, _INSIST_S, _INSIST_S)
        self._raised = self.exception()
        raise self._raised

    def _insist(self, _number: int, frame: "FrameType | None") -> None:
        """Raise again what a destructor or an `except Exception` on its way has swallowed."""
        if _is_stopping(frame) or self.exception is None:
            self.settle()
        elif not _is_handled(self._raised):
            self._raised = self.exception()
            raise self._raised


def _end_at_once() -> "NoReturn":
    """Nothing has begun, and no library may be asked to clean up: one of them is half imported."""
    os.write(2, b"launch: told to end before anything began\n")
    os._exit(ExitCode.PREEMPTED)


def _is_handled(error: BaseException | None) -> bool:
    """Whether an exception is on its way through a `finally` or an `except` just now."""
    seen = sys.exc_info()[1]
    while seen is not None and seen is not error:
        seen = seen.__context__
    return seen is not None


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
