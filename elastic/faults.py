"""Signals as flags, and what an exception means: whose fault it is and whether a restart may cure it.

Promises: a signal handler only sets a flag, so that nothing is cut in the middle; a peer's death is
never told as the fault of the rank that noticed it; a user sees the traceback of their own code once.
Which flags lead to which end is agreed by all ranks at a step boundary, in `elastic.core`.
"""

import atexit
import contextlib
import hashlib
import logging
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Final, NoReturn

from elastic.errors import CollectiveError, ExitCode, StartError

__all__ = ["Signals", "is_collective", "leave", "say_once", "user_traceback"]

logger = logging.getLogger(__name__)

_FRESH_S: Final = 5.0
"""For so long a fresh line is not said again."""
_IMPATIENT: Final = 3
"""At this many signals the process ends at once; what is committed stays."""
_ONE_S: Final = 1.0
"""Signals within so long are one: a scheduler tells every process, the agent its workers, and a stub its own."""

_OWN_FOLDERS: Final = tuple(
    f"{Path(__file__).resolve().parent.parent / name}{os.sep}"
    for name in ("elastic", "checkpoints")
)
_TORCH: Final = re.compile(r"/(site|dist)-packages/torch/")
_COLLECTIVE: Final = re.compile(
    r"gloo|NCCL|ProcessGroup|Connection (closed|reset) by peer|Broken pipe|Connection refused"
    r"|Socket Timeout|wait timeout|monitoredBarrier|DistStore|recvValue failed",
    re.IGNORECASE,
)


class Signals:
    """Turns the signals of `signals:` into two flags that the ranks agree on.

    SIGTERM comes at every change of membership too: it means "end soon", not "preempted". The others
    are notices: this node is to leave.
    """

    def __init__(
        self,
        names: Sequence[str],
        *,
        end_now: Callable[[], None] | None = None,
        mark: Path | None = None,
    ) -> None:
        """Remember what to catch.

        Args:
            names: The signals.
            end_now: Called at the third signal, or before `arm`.
            mark: A file that is a notice once it is there; it holds the reason.
        """
        self._names = tuple(names)
        self._end_now = end_now
        self._mark = None if mark is None else str(mark)
        self._armed = False
        self.leave = False
        self.why = ""
        """What the notice was."""
        self._count = 0
        self._counted_at = float("-inf")

    def install(self) -> None:
        """Set the handlers. Main thread only.

        Raises:
            StartError: A name is no signal that can be caught.
        """
        for name in self._names:
            try:
                signal.signal(signal.Signals[name], self._handle)
            except (KeyError, OSError) as error:
                raise StartError(
                    f"signals: found {name!r}, expected names like SIGTERM or SIGUSR1"
                ) from error

    def arm(self) -> None:
        """From the first step on a signal is a flag; before, there is nothing to save and it ends at once."""
        self._armed = True

    def ignore(self) -> None:
        """The work is done and saved: a signal changes nothing any more. Main thread only."""
        for name in self._names:
            signal.signal(getattr(signal, name), signal.SIG_IGN)

    @property
    def notice(self) -> bool:
        """Whether this node is to leave. A microsecond or two: looked at in every step."""
        if not self.why and self._mark is not None and os.path.exists(self._mark):  # noqa: PTH110 - for its speed
            self.note(Path(self._mark).read_text(encoding="utf-8"))
        return bool(self.why)

    def note(self, why: str) -> None:
        """This node is to leave; the first reason stays."""
        self.why = self.why or why or "a notice"

    @property
    def pending(self) -> bool:
        """Whether any signal came."""
        return self.leave or self.notice

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if time.monotonic() - self._counted_at >= _ONE_S:
            self._counted_at = time.monotonic()
            self._count += 1
        if number == signal.SIGTERM:
            self.leave = True
        else:
            self.note(signal.Signals(number).name)
        if self._end_now is not None and (not self._armed or self._count >= _IMPATIENT):
            self._end_now()
            os._exit(ExitCode.PREEMPTED)


def is_collective(error: BaseException) -> bool:
    """Whether an exception only says that a peer is gone or a collective timed out."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, CollectiveError):
            return True
        module = type(seen).__module__
        if type(seen).__name__.startswith("Dist") and module.startswith("torch"):
            return True
        if isinstance(seen, RuntimeError | ValueError) and _COLLECTIVE.search(str(seen)):
            return True
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)
    return False


def user_traceback(error: BaseException) -> str:
    """The traceback without the frames of the runner, and of torch that it calls, above the user's code."""
    kept = error.__traceback__
    while kept is not None and _is_between(kept.tb_frame.f_code.co_filename):
        kept = kept.tb_next
    shown: TracebackType | None = kept or error.__traceback__
    return "".join(traceback.format_exception(type(error), error, shown)).rstrip()


def _is_between(filename: str) -> bool:
    return bool(_TORCH.search(filename)) or str(Path(filename).resolve()).startswith(_OWN_FOLDERS)


def say_once(folder: Path, text: str, *, key: str | None = None, fresh: bool = False) -> bool:
    """Write a line to stderr unless a worker of this agent has said it before; True where it did.

    `fresh`: said at most once within a few seconds, so that a later restart may say it again.
    """
    # One that has left its mark has to speak: a signal may end it in between.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        return _say(folder, text, key or text, fresh=fresh)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _say(folder: Path, text: str, key: str, *, fresh: bool) -> bool:
    turn = int(time.time() / _FRESH_S) if fresh else None
    name = _mark(folder, key, turn)
    try:
        if turn is not None and _is_younger(_mark(folder, key, turn - 1), _FRESH_S):
            return False
        os.close(os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        return False
    except OSError as error:
        logger.debug("no mark could be left (%s)", error)
    sys.stderr.write(text.rstrip() + "\n")
    sys.stderr.flush()
    return True


def leave(code: int, *, tidy: bool = False) -> NoReturn:
    """End the process with `code`, whatever native threads do at exit. Runs what atexit holds where all went well, or if `tidy`."""
    with _flushed():
        if tidy or code == ExitCode.DONE:
            # A failed worker may hold native waits that its clean-up would join for ever.
            atexit._run_exitfuncs()  # noqa: SLF001  # the only way to run them before os._exit
    os._exit(code)


def _mark(folder: Path, what: str, turn: int | None) -> Path:
    text = what if turn is None else f"{what}{turn}"
    return folder / f"said-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _is_younger(path: Path, seconds: float) -> bool:
    try:
        return time.time() - path.stat().st_mtime < seconds
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def _flushed() -> Iterator[None]:
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
