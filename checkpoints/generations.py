"""Who trains: generations are claimed one after the other, and an older one is fenced off.

A claim is created exclusively; its number is the only order there is. It names its agents and a launch,
inherited from the newest claim that names one of them. A world finds itself *superseded* where the
newest claim is of another launch and an older one names its own agents, and *parted* where the newest is
of its own launch, made without its agents. The decision is a pure function of the claims.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from checkpoints.canonical import LIMIT_BYTES
from checkpoints.errors import (
    DamagedError,
    ObjectMissingError,
    PartedError,
    RecordError,
    SupersededError,
)
from checkpoints.layout import (
    CHECKPOINTS,
    GENERATIONS,
    AgentId,
    CheckpointName,
    Claim,
    Rollback,
    Source,
    Started,
    audit_prefix,
    claim_name,
    generation_of,
    journal_prefix,
    new_token,
    started_name,
)
from checkpoints.store import Store

logger = logging.getLogger(__name__)

_QUIET_S: Final = 30.0
_STARTED: Final = ".started.json"


# ---------------------------------------------------------------------------------------- deciding
class Standing(Enum):
    """How a world stands towards the newest claim."""

    FREE = auto()
    """No claim names its agents: it may claim, as a new launch."""
    CURRENT = auto()
    """The newest claim names one of its agents: it may claim, in that launch."""
    SUPERSEDED = auto()
    """Another launch has claimed after its own."""
    PARTED = auto()
    """Its launch has gone on without its agents."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """What the claims say about a world."""

    standing: Standing
    launch: str | None = None
    """The launch that it belongs to; None: a new one."""
    mine: int = 0
    """The newest generation whose claim names one of its agents; 0 where none does."""
    newest: int = 0
    """The newest claimed generation; 0 where there is none."""

    @property
    def superseded(self) -> bool:
        """Whether another launch has taken over."""
        return self.standing is Standing.SUPERSEDED

    @property
    def parted(self) -> bool:
        """Whether the launch has gone on without these agents."""
        return self.standing is Standing.PARTED


def decide_claim(claims: Iterable[Claim], agents: Iterable[AgentId]) -> Decision:
    """Whether a world of these agents may claim, and in which launch."""
    ordered = sorted(claims, key=lambda claim: claim.generation, reverse=True)
    own = frozenset(agents)
    if not ordered:
        return Decision(standing=Standing.FREE)
    newest = ordered[0]
    mine = next((claim for claim in ordered if own.intersection(claim.agents)), None)
    if mine is None:
        return Decision(standing=Standing.FREE, newest=newest.generation)
    if mine.generation == newest.generation:
        standing = Standing.CURRENT
    else:
        standing = Standing.PARTED if mine.launch == newest.launch else Standing.SUPERSEDED
    return Decision(
        standing=standing,
        launch=mine.launch,
        mine=mine.generation,
        newest=newest.generation,
    )


# ------------------------------------------------------------------------------------------ claims
def newest_generation(store: Store) -> int:
    """The number of the newest claim, readable or not; 0 where there is none."""
    return max(_claimed(store), default=0)


def _claimed(store: Store) -> list[int]:
    found = (generation_of(f"{GENERATIONS}/{child}") for child in store.children(GENERATIONS))
    return [generation for generation in found if generation is not None]


def read_record(store: Store, name: str) -> bytes:
    """The bytes of a record.

    Raises:
        ObjectMissingError: There is none.
        RecordError: It is too large for one, or no file at all.
    """
    try:
        return store.get(name, limit_bytes=LIMIT_BYTES)
    except DamagedError as error:
        raise RecordError(str(error)) from error


def read_claim(store: Store, generation: int) -> Claim:
    """The claim of one generation.

    Raises:
        ObjectMissingError: It was not claimed.
        RecordError: Its record cannot be read.
    """
    name = claim_name(generation)
    data = read_record(store, name)
    try:
        return Claim.from_json(data, name)
    except RecordError as error:
        raise RecordError(f"{store.display_url}/{error}") from None


def read_claims(store: Store) -> list[Claim]:
    """All claims that can be read, in order; the others are told in the log."""
    return list(_newest_claims(store, _claimed(store)))[::-1]


def read_rollbacks(store: Store) -> tuple[Rollback, ...]:
    """All rollbacks of the run: each claim carries on those of the ones before it."""
    newest = next(_newest_claims(store, _claimed(store)), None)
    return () if newest is None else newest.rollbacks


def _newest_claims(store: Store, claimed: Iterable[int]) -> Iterator[Claim]:
    """The claims that can be read, newest first, each read when it is asked for."""
    for generation in sorted(claimed, reverse=True):
        try:
            yield read_claim(store, generation)
        except (RecordError, ObjectMissingError) as error:
            logger.warning("generation %d is left out: %s", generation, error)


def _deciding_claims(
    store: Store, claimed: Iterable[int], agents: frozenset[AgentId]
) -> list[Claim]:
    """The claims down to the newest that names one of the agents: older ones change nothing.

    After a restart that is one read, however many generations there were.
    """
    claims = []
    for claim in _newest_claims(store, claimed):
        claims.append(claim)
        if agents.intersection(claim.agents):
            break
    return claims


def claim(
    store: Store,
    *,
    agents: Sequence[AgentId],
    make: Callable[[int, str], Claim],
    quiet_s: float = _QUIET_S,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Claim:
    """Claim the next generation. Primary only.

    Args:
        store: The run's URL.
        agents: The agents of this world.
        make: The claim for a generation and a launch.
        quiet_s: A parted world may claim once the newest generation has written nothing for so long.
        clock: A monotonic clock of this process: no other host's time is believed.
        sleep: Waits between two looks.

    Raises:
        SupersededError: Another launch has claimed after this one.
        PartedError: This launch has gone on without these agents, and is at work.
    """
    own = frozenset(agents)
    fresh = new_token()
    while True:
        # What is decided and the number that is tried come from one listing: whoever claims in
        # between takes that number, and the decision is made again.
        claimed = _claimed(store)
        decision = decide_claim(_deciding_claims(store, claimed, own), own)
        if decision.superseded:
            raise _superseded(store, decision.mine, decision.newest)
        if decision.parted:
            _wait_until_quiet(store, decision, quiet_s, clock, sleep)
        generation = _next_generation(store, claimed)
        made = make(generation, decision.launch or fresh)
        if store.put_new(claim_name(generation), made.to_json()):
            return made
        logger.info("%s: generation %d was claimed by another", store.display_url, generation)


def _next_generation(store: Store, claimed: Sequence[int]) -> int:
    """One more than any number that was ever used: checkpoints may outlive their claims."""
    names = (CheckpointName.find(child) for child in store.children(CHECKPOINTS))
    used = [name.generation for name in names if name is not None]
    return max([*used, *claimed, 0]) + 1


def _wait_until_quiet(
    store: Store,
    decision: Decision,
    quiet_s: float,
    clock: Callable[[], float],
    sleep: Callable[[float], None],
) -> None:
    """Return when the newest generation has written nothing for `quiet_s`, else raise."""
    seen = _traces(store, decision.newest)
    began = clock()
    while (left := began + quiet_s - clock()) > 0:
        sleep(min(left, max(quiet_s / 20, 0.05)))
        if _traces(store, decision.newest) != seen or newest_generation(store) != decision.newest:
            raise _parted(store, decision.mine, decision.newest)
    logger.warning(
        "%s: generation %d has written nothing for %g s; going on without it",
        store.display_url,
        decision.newest,
        quiet_s,
    )


def _traces(store: Store, generation: int) -> list[tuple[str, int]]:
    """The names and sizes of all that a generation writes as it goes."""
    names = [
        *store.list(journal_prefix(generation)),
        *store.list(audit_prefix(generation)),
        *store.list(f"{CHECKPOINTS}/{generation:06d}-"),
        *store.list(f"{GENERATIONS}/{generation:06d}"),
    ]
    traces = []
    for name in names:
        try:
            traces.append((name, store.size(name)))
        except ObjectMissingError:
            # Retention may delete between the listing and the look: that, too, is a trace.
            traces.append((name, -1))
    return traces


def check_fence(store: Store, mine: Claim) -> None:
    """Return if no newer generation was claimed; called right before a commit.

    Raises:
        SupersededError: The newest claim is of another launch.
        PartedError: The newest claim is a later one of this launch.
    """
    newest = newest_generation(store)
    if newest <= mine.generation:
        return
    try:
        launch = read_claim(store, newest).launch
    except RecordError:
        # It was claimed, whatever it says; who cannot be known to be a friend goes first.
        launch = ""
    if launch == mine.launch:
        raise _parted(store, mine.generation, newest)
    raise _superseded(store, mine.generation, newest)


def _superseded(store: Store, mine: int, newest: int) -> SupersededError:
    return SupersededError(
        f"{store.display_url}: generation {mine} is superseded: another launch has claimed generation "
        f"{newest}, and this one ends; give each launch a URL of its own",
        generation=mine,
        newest=newest,
    )


def _parted(store: Store, mine: int, newest: int) -> PartedError:
    return PartedError(
        f"{store.display_url}: generation {mine} is behind: this launch has gone on with generation "
        f"{newest}; back to the rendezvous",
        generation=mine,
        newest=newest,
    )


# ----------------------------------------------------------------------------------------- lineage
def write_started(store: Store, started: Started) -> None:
    """Say from which state a generation began, once, when its restore has verified.

    Raises:
        RecordError: Somebody else has said so for this generation.
    """
    name = started_name(started.generation)
    if not store.put_new(name, started.to_json()):
        raise RecordError(f"{store.display_url}/{name}: was already written by another process")


def read_started(store: Store) -> list[Started]:
    """The started records that can be read, in order; the others are told in the log."""
    found = []
    for child in store.children(GENERATIONS):
        if not child.endswith(_STARTED):
            continue
        name = f"{GENERATIONS}/{child}"
        try:
            found.append(Started.from_json(read_record(store, name), name))
        except (RecordError, ObjectMissingError) as error:
            logger.warning("%s: left out: %s", store.display_url, error)
    return sorted(found, key=lambda record: record.generation)


def descends_from(store: Store, generation: int, name: CheckpointName) -> bool | None:
    """Whether a generation began from the state `name`, or from one that was trained on from it.

    None: it has not said yet from what it began.

    Raises:
        RecordError: A started record cannot be read.
    """
    at = generation
    while at > name.generation:
        record = _started(store, at)
        if record is None:
            return None if at == generation else False
        parent = record.parent_name
        if parent is None:
            return False
        if parent.generation == name.generation:
            return name.step <= parent.step
        at = parent.generation if parent.generation < at else 0
    return False


def _started(store: Store, generation: int) -> Started | None:
    name = started_name(generation)
    try:
        return Started.from_json(read_record(store, name), name)
    except ObjectMissingError:
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Stretch:
    """The steps of the final state that one generation did: (start_step, end_step]."""

    generation: int
    start_step: int
    end_step: int
    parent: str | None
    source: Source


def lineage(started: Iterable[Started], end: CheckpointName) -> list[Stretch]:
    """The generations whose steps are in the state `end`, in order, from the first on.

    Raises:
        RecordError: A generation of the chain has no started record, or does not follow its parent.
    """
    records = {record.generation: record for record in started}
    chain: list[Stretch] = []
    at: CheckpointName | None = end
    while at is not None:
        record = records.get(at.generation)
        if record is None:
            raise RecordError(f"lineage of {end}: generation {at.generation} has no started record")
        parent = record.parent_name
        if at.step < record.start_step or (parent and parent.generation >= at.generation):
            raise RecordError(
                f"lineage of {end}: found {at} after a start at step {record.start_step} from "
                f"{record.parent}, expected a later step and an older parent"
            )
        chain.append(
            Stretch(
                generation=at.generation,
                start_step=record.start_step,
                end_step=at.step,
                parent=record.parent,
                source=record.source,
            )
        )
        at = parent
    return chain[::-1]
