"""Whether this node's workers die again and again without getting further: then it leaves, and a person must look.

What ended workers of a node stays in its agent's folder as long as the agent lives. Promises: only what repeats
without progress counts; a worker that somebody killed before its first step says nothing about the run; the node
leaves alone (76), and where others may go on without it they do. The same exception twice at one step is told by
`elastic.ending`, where its traceback is.
"""

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from checkpoints.errors import CheckpointError, StoreError
from checkpoints.generations import newest_generation
from checkpoints.options import CheckpointOptions
from elastic.errors import AttentionError
from elastic.fault import Fault
from elastic.opening import Session, open_run_store
from elastic.records import add_fault

__all__ = ["find_relapse", "give_up_relapse"]

logger = logging.getLogger(__name__)

_FILE: Final = "faults.jsonl"
_KEPT: Final = 20
_ALIKE: Final = 3
"""So many crashes or hangs at one step are no accident."""
_KILLED_ALIKE: Final = 5
"""So many if each was a SIGKILL that nobody explains: it may come from outside."""
_ANYHOW: Final = 10
"""So many faults of any kind in a row, none of which got further than the first of them."""


def give_up_relapse(session: Session, options: CheckpointOptions) -> None:
    """Take note of what ended this node's workers, and end this one where they only repeat it. Early.

    Raises:
        AttentionError: They do; on the first worker of the node, whose end ends the agent.
    """
    if not session.left:
        return
    history = remember(session.folder, session.left)
    why = find_relapse(history)
    if why is None:
        return
    if session.place.local_world_size == session.place.world_size:
        _write_down(session, options, history[-1])
    raise AttentionError(why)


def remember(folder: Path, faults: Sequence[Fault]) -> list[Fault]:
    """Add the first cause of a generation's end to what is known of this node; returns all of it."""
    path = folder / _FILE
    known: list[Fault] = []
    try:
        known = [Fault.from_json(json.loads(line)) for line in path.read_text("utf-8").splitlines()]
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        logger.warning("what is known of this node's faults cannot be read: %s", error)
    known = [*known, *[fault for fault in faults if not fault.is_secondary][:1]][-_KEPT:]
    lines = [json.dumps(fault.to_json()) + "\n" for fault in known]
    path.write_text("".join(lines), encoding="utf-8")
    return known


def find_relapse(history: Sequence[Fault]) -> str | None:
    """Say what repeats without progress, and the way out; None where nothing does. Oldest first."""
    counted = [fault for fault in history if _counts(fault)]
    if not counted or counted[-1] is not history[-1]:
        return None
    last = counted[-1]
    alike = 0
    for fault in reversed(counted):
        if (fault.kind, fault.signal, fault.step) != (last.kind, last.signal, last.step):
            break
        alike += 1
    enough = _ALIKE if _is_own(last) else _KILLED_ALIKE
    if last.kind != "exception" and alike >= enough:
        return (
            f"no progress: {alike} times in a row at step {last.step}, phase {last.phase!r}, on {last.host}: {last}; "
            "mend it and start again"
        )
    row = counted[-_ANYHOW:]
    if len(row) == _ANYHOW and all(fault.step <= row[0].step for fault in row):
        return (
            f"no progress: {_ANYHOW} faults in a row on {last.host}, none beyond step {row[0].step}, the last: {last}; "
            "mend it and start again"
        )
    return None


def _is_own(fault: Fault) -> bool:
    """Whether a fault comes from the run or its host, and not from whoever sends a SIGKILL."""
    return fault.kind != "killed" or fault.signal != "SIGKILL" or bool(fault.message)


def _counts(fault: Fault) -> bool:
    return _is_own(fault) or fault.step > 0


def _write_down(session: Session, options: CheckpointOptions, fault: Fault) -> None:
    """Say in the summary that the run has failed; it has no other node to go on on."""
    try:
        store = open_run_store(session, options)
        add_fault(store, newest_generation(store), fault, failed=True)
    except (CheckpointError, StoreError, AttentionError) as error:
        logger.warning("summary.json was not written: %s", error)
