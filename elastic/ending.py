"""The end of a worker that did not come to the run's end: told once, written down, and given its code.

Promises: an error that every rank has is told by one of them on each node; a user's exception shows its
traceback once in the life of an agent; a rank that only lost its peer names the peer and what ended it;
the same exception at the same step twice ends the run. Codes are those of the design's section 10.
"""

import contextlib
import logging
import multiprocessing
import re
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from checkpoints.errors import CheckpointError, StoreError, SupersededError, UnsupportedStateError
from elastic.agent import end_agent, has_agent
from elastic.errors import (
    ElasticError,
    ExitCode,
    OverruledError,
    PeersLeftError,
    PreemptedError,
    StartError,
)
from elastic.faults import is_collective, say_once, user_traceback
from elastic.monitor import Fault, present_faults
from elastic.opening import Session
from elastic.verdict import write_verdict
from jobs.errors import JobError

if TYPE_CHECKING:
    from elastic.core import Run

__all__ = ["end_worker"]

logger = logging.getLogger(__name__)

_SETTLE_S: Final = 0.5
_POLL_S: Final = 0.05
_NOISE: Final = re.compile(r"\[/[^\]]*\]\s*|\s*(This (may|is) |GLHF).*$")
"""Of gloo's messages: where in its own source it was, and its good wishes."""
_ENDS_AGENT: Final = (ExitCode.WRONG, ExitCode.ATTENTION, ExitCode.SUPERSEDED)


def end_worker(error: BaseException, session: Session, run: "Run | None") -> int:
    """Tell and record why this worker ends; returns its exit code, or ends the agent with it."""
    session.slot.enter("end")
    # The agent's signal, which another rank may have asked for, must not break off the line that this one owes.
    session.signals.arm()
    code = _tell(error, session, run)
    _kill_children()
    write_verdict(session.folder, session.place.local_rank, code)
    leaves = code is ExitCode.PREEMPTED and session.signals.notice
    if leaves and has_agent(session.place):
        why = session.signals.why
        say_once(session.folder, f"{why}: this node leaves with exit code {code:d}")
    if code in _ENDS_AGENT or leaves:
        end_agent(session.agent, code)
    return code


def _tell(error: BaseException, session: Session, run: "Run | None") -> ExitCode:
    is_unused = run is None or not run.has_stepped
    if is_unused and session.signals.pending and is_collective(error):
        # The others have ended at once, as this one would have; there is nothing to save.
        error = PreemptedError("told to leave before the first step")
        if run is not None:
            run.leave_unused()
    if isinstance(error, PreemptedError):
        session.slot.end(session.slot.fault(error, "preempted"))
        _say_primary(session, str(error))
        return ExitCode.PREEMPTED
    if isinstance(error, JobError | UnsupportedStateError):
        error = StartError(str(error)).with_traceback(error.__traceback__)
    if isinstance(error, SupersededError):
        error = OverruledError(str(error))
    if isinstance(error, ElasticError) and error.code in _ENDS_AGENT:
        return _tell_final(error, session, run)
    if isinstance(error, KeyboardInterrupt):
        session.slot.end(session.slot.fault(error, "ended"))
        return ExitCode.RETRY
    if is_collective(error):
        return _tell_lost_peer(error, session, run)
    if isinstance(error, ElasticError | StoreError | CheckpointError):
        left = run is not None and run.left
        session.slot.end(session.slot.fault(error, "preempted" if left else "exception"))
        word = "" if isinstance(error, PeersLeftError) else "error: "
        say_once(session.folder, f"{word}{error}", fresh=True)
        return ExitCode.RETRY
    return _tell_exception(error, session, run)


def _tell_final(error: ElasticError, session: Session, run: "Run | None") -> ExitCode:
    """An end that no restart may follow: one line, and the run's summary where it is this run's."""
    fault = session.slot.fault(error)
    session.slot.end(fault)
    word = "superseded" if isinstance(error, OverruledError) else "error"
    told = say_once(session.folder, f"{word}: {error}")
    if told and run is not None and not isinstance(error, OverruledError):
        run.write_fault(fault, failed=True)
    return error.code


def _tell_lost_peer(error: BaseException, session: Session, run: "Run | None") -> ExitCode:
    """Only an echo: name the one that it echoes, where it was on this node."""
    fault = session.slot.fault(error, "collective")
    fault = replace(fault, message=fault.message.strip().partition("\n")[0][:300])
    session.slot.end(fault)
    for cause in _causes(session.folder, session.slot.path):
        if cause.kind not in {"killed", "exited", "hung"}:
            return ExitCode.RETRY  # it could tell its end itself
        line = f"{cause} on {cause.host} at step {cause.step}: this generation ends"
        if say_once(session.folder, line, key=f"{cause.rank}-{cause.time}") and run is not None:
            run.write_fault(cause, failed=False)
        return ExitCode.RETRY
    said = _NOISE.sub("", fault.message) or type(error).__name__
    say_once(
        session.folder,
        f"rank {session.place.rank} lost a peer at step {fault.step}: {said}",
        fresh=True,
    )
    return ExitCode.RETRY


def _causes(folder: Path, own: Path) -> list[Fault]:
    """What ended the others of this node; a dying process needs a moment to be gone."""
    deadline = time.monotonic() + _SETTLE_S
    while True:
        found = [f for f in present_faults(folder, but=own) if not f.is_secondary]
        if found or time.monotonic() >= deadline:
            return found
        time.sleep(_POLL_S)


def _tell_exception(error: BaseException, session: Session, run: "Run | None") -> ExitCode:
    """The user's own code or ours failed: its traceback once; twice at one place is enough."""
    fault = session.slot.fault(error)
    again = [f for f in session.former if f.signature == fault.signature and f.step == fault.step]
    code = ExitCode.ATTENTION if again else ExitCode.RETRY
    session.slot.end(fault)
    say_once(session.folder, user_traceback(error), key=f"traceback-{fault.signature}")
    line = f"{fault} on {fault.host}"
    if again:
        line = (
            f"error: the same exception at the same step twice, without progress: {fault.type}: "
            f"{fault.message.strip().splitlines()[0] if fault.message.strip() else ''} at "
            f"{fault.where}, step {fault.step}, rank {fault.rank}; mend it and start again"
        )
    # Several ranks may raise the same: one of them says it.
    mark = f"{fault.signature}-{fault.step}-{code}"
    told = say_once(session.folder, line, key=mark, fresh=not again)
    if told and run is not None:
        run.write_fault(replace(fault), failed=bool(again))
    return code


def _say_primary(session: Session, text: str) -> None:
    if session.place.rank == 0:
        sys.stderr.write(text + "\n")
        sys.stderr.flush()


def _kill_children() -> None:
    """End loader workers: an exit that skips Python's own clean-up would leave them for seconds."""
    with contextlib.suppress(ValueError):  # not the main thread
        # torch's handler would raise here what this does on purpose.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for child in multiprocessing.active_children():
        child.kill()
