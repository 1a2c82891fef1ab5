"""Whether somebody may be training at a URL right now, as far as that can be told from outside.

Promises: no clock of another host is believed, and a guess is never taken for knowledge. A run is known to
rest where it has said so itself, or where every process that its newest claim names is dead on this very
machine; where there is no claim, only while nothing is begun; in every other case it may be at work, and who deletes beside it has to insist.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from checkpoints.canonical import parse
from checkpoints.errors import CheckpointError, ObjectMissingError, RecordError
from checkpoints.generations import newest_generation, read_claim, read_record
from checkpoints.journal import read_events
from checkpoints.layout import SUMMARY
from checkpoints.processes import boot_id, is_alive

if TYPE_CHECKING:
    from collections.abc import Collection

    from checkpoints.layout import CheckpointName
    from checkpoints.store import Store

logger = logging.getLogger(__name__)

_RESTS: Final = frozenset({"complete", "preempted", "stopped", "failed"})


def may_be_at_work(store: Store, begun: Collection[CheckpointName] = ()) -> str | None:
    """Why somebody may be at work here; None where nobody can be.

    Args:
        store: The run's URL.
        begun: What was begun there after the newest commit and is not committed. Who saves from a
            loop of his own claims no generation: this is all that tells of him.
    """
    newest = newest_generation(store)
    if not newest:
        if not begun:
            return None
        return (
            f"checkpoint {max(begun)} was begun, and no generation tells whether its writer lives"
        )
    if _status(store) in {(newest, status) for status in _RESTS}:
        return None
    if any(event.get("event") == "end" for event in read_events(store, newest)):
        return None
    if _all_dead_here(store, newest):
        return None
    return f"generation {newest} has not said that it ended, so it may be at work"


def rests(
    store: Store, command: str, *, force: bool, begun: Collection[CheckpointName] = ()
) -> bool:
    """Whether nobody can be at work; where somebody may be, it is refused to delete, unless forced.

    Raises:
        CheckpointError: It may be, and nobody does.
    """
    reason = may_be_at_work(store, begun)
    if reason is None:
        return True
    if not force:
        raise CheckpointError(
            f"{store.display_url}: {reason}; {command} when it has ended, or use --force if you know"
            " that it has, or that it can do without"
        )
    logger.warning("%s: %s; going on, since --force was given", store.display_url, reason)
    return False


def _status(store: Store) -> tuple[int | None, str | None]:
    try:
        summary = parse(read_record(store, SUMMARY), SUMMARY)
    except (ObjectMissingError, RecordError):
        return None, None
    match summary:
        case {"generation": int(generation), "status": str(status)}:
            return generation, status
    return None, None


def _all_dead_here(store: Store, generation: int) -> bool:
    """Whether all agents of a claim were processes of this machine since it booted, and are gone."""
    try:
        claim = read_claim(store, generation)
        boot = boot_id()
    except CheckpointError:
        return False
    agents = claim.agents
    return bool(agents) and all(
        agent.boot_id == boot and not is_alive(agent.pid, agent.start) for agent in agents
    )
