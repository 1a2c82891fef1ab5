"""The second half of a start: claim the generation, choose the state to begin from, restore, say so.

The order is the design's: claim, then list, restore and verify, then `started.json`. Promises: what is
chosen is decided once, by the primary, and told to all; what fails to verify on any rank is left out
and the next older is taken, loudly; nothing is claimed for a start that the checks refused.
"""

import logging
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from checkpoints.errors import (
    CheckpointError,
    DamagedError,
    NoCheckpointError,
    ObjectMissingError,
    PartedError,
    StoreError,
    SupersededError,
)
from checkpoints.generations import (
    check_fence,
    claim,
    newest_generation,
    read_claim,
    read_rollbacks,
    write_started,
)
from checkpoints.layout import (
    JSON,
    RUN,
    AgentId,
    CheckpointName,
    Claim,
    Rollback,
    RunRecord,
    Started,
    new_token,
    started_name,
)
from checkpoints.manager import CheckpointManager
from checkpoints.redaction import redact_url
from checkpoints.rollbacks import Position
from checkpoints.store import Store
from elastic.errors import ElasticError, OverruledError, StartError
from elastic.foreign import match_names, read_weights
from elastic.identity import compare_identity
from elastic.monitor import Fault
from elastic.weights import load_model, model_tensors
from elastic.world import World

__all__ = [
    "Found",
    "Return",
    "agree_on_run",
    "cause_of",
    "claim_generation",
    "find_state",
    "say_started",
]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Return:
    """A rollback that a claim is to hold."""

    to: CheckpointName
    skip: tuple[Position, ...]
    cause: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """The state that this generation begins from; no name: a fresh start."""

    name: CheckpointName | None
    tree: Mapping[str, Any] | None
    damaged: tuple[str, ...] = ()
    """What was left out because it did not verify, with the reason."""


def agree_on_run(
    world: World, store: Store, identity: Mapping[str, Any], accept: Sequence[str]
) -> tuple[str, list[str]]:
    """Create run.json or compare with it; returns the run id and notes. Collective.

    Raises:
        StartError: The URL holds another run; on every rank.
    """
    verdict: dict[str, Any] = {}
    if world.is_primary:
        try:
            record = _run_record(store, identity)
            notes = compare_identity(record.identity, identity, accept)
            verdict = {"run_id": record.run_id, "notes": notes}
        except (StartError, CheckpointError) as error:
            verdict = {"error": str(error), "retry": isinstance(error, StoreError)}
    verdict = _told(world.broadcast(verdict))
    if "error" in verdict:
        raise (ElasticError if verdict["retry"] else StartError)(verdict["error"])
    return str(verdict["run_id"]), list(verdict["notes"])


def _run_record(store: Store, identity: Mapping[str, Any]) -> RunRecord:
    try:
        return RunRecord.from_json(store.get(RUN), RUN)
    except ObjectMissingError:
        record = RunRecord(run_id=new_token(), identity=dict(identity))
        if store.put_new(RUN, record.to_json()):
            return record
        # Another launch was faster: then this start has to be of its run.
        return RunRecord.from_json(store.get(RUN), RUN)


def cause_of(
    previous: Claim | None, agents: Sequence[AgentId], faults: Sequence[Fault], launch_is_new: bool
) -> str:
    """Why a generation begins, in half a line, from what the one before it left."""
    if previous is not None and previous.rollback is not None and not previous.agents:
        return previous.cause  # by hand
    if previous is None or launch_is_new:
        return "start"
    primary = [fault for fault in faults if not fault.is_secondary]
    if primary:
        return str(primary[0])
    came, gone = set(agents) - set(previous.agents), set(previous.agents) - set(agents)
    if gone:
        return "node lost" if not came else "node replaced"
    if came:
        return "node joined"
    return str(faults[0]) if faults else "restart"


def claim_generation(
    world: World,
    store: Store,
    *,
    agents: tuple[AgentId, ...],
    hosts: Sequence[str],
    run_id: str,
    config: Mapping[str, Any],
    faults: Sequence[Fault],
    back: Return | None = None,
) -> Claim:
    """Claim the next generation on the primary and tell it to all; `back` makes it a rollback. Collective.

    Raises:
        OverruledError: A newer launch owns the run.
        ElasticError: The store failed, or the run goes on elsewhere; a restart may cure it.
    """
    verdict: dict[str, Any] = {}
    if world.is_primary:
        previous = _newest_claim(store)

        def make(generation: int, launch: str) -> Claim:
            is_new = previous is None or launch != previous.launch
            rollbacks = read_rollbacks(store)
            if back is not None:
                own = Rollback(generation=generation, to=back.to, skip=back.skip)
                rollbacks = (*rollbacks, own)
            return Claim(
                generation=generation,
                run_id=run_id,
                launch=launch,
                agents=agents,
                world_size=world.world_size,
                nodes=world.nodes,
                hosts=tuple(hosts),
                versions={"torch": torch.__version__, "python": platform.python_version()},
                config=dict(config),
                cause=back.cause if back else cause_of(previous, agents, faults, is_new),
                faults=tuple(cast("dict[str, JSON]", fault.to_json()) for fault in faults),
                rollbacks=rollbacks,
            )

        verdict = _claim(store, agents, make)
    verdict = _told(world.broadcast(verdict))
    if "error" in verdict:
        raise (OverruledError if verdict["superseded"] else ElasticError)(verdict["error"])
    return Claim.from_json(str(verdict["claim"]).encode(), "claim")


def _newest_claim(store: Store) -> Claim | None:
    """The newest claim that can be read; where it cannot, the cause is told as a start."""
    newest = newest_generation(store)
    try:
        return read_claim(store, newest) if newest else None
    except CheckpointError as error:
        logger.warning("the claim of generation %d is left out: %s", newest, error)
        return None


def _claim(
    store: Store, agents: tuple[AgentId, ...], make: Callable[[int, str], Claim]
) -> dict[str, Any]:
    try:
        claimed = claim(store, agents=agents, make=make)
    except (SupersededError, PartedError, StoreError) as error:
        return {"error": str(error), "superseded": isinstance(error, SupersededError)}
    return {"claim": claimed.to_json().decode()}


def find_state(
    world: World,
    manager: CheckpointManager,
    *,
    unfit: Callable[[Mapping[str, Any]], str | None] = lambda _: None,
) -> Found:
    """Restore the newest checkpoint that verifies on every rank, and is not `unfit`. Collective.

    Raises:
        ElasticError: The store failed while reading; a restart may cure it.
    """
    damaged: list[str] = []
    left_out: list[CheckpointName] = []
    while True:
        chosen = _choose(world, manager, left_out)
        if chosen is None:
            return Found(name=None, tree=None, damaged=tuple(damaged))
        tree, problem, passing = None, "", False
        try:
            tree = manager.restore(chosen)
            problem = unfit(tree) or ""
        except DamagedError as error:
            problem = str(error)
        except (StoreError, ObjectMissingError, NoCheckpointError) as error:
            problem, passing = str(error), isinstance(error, StoreError)
        said = [_told(one) for one in world.gather({"problem": problem, "passing": passing})]
        wrong = [(rank, one) for rank, one in enumerate(said) if one["problem"]]
        if not wrong:
            return Found(name=chosen, tree=tree, damaged=tuple(damaged))
        rank, first = wrong[0]
        if first["passing"]:
            raise ElasticError(
                f"checkpoint {chosen} could not be read by rank {rank}: {first['problem']}"
            )
        damaged.append(f"{chosen}: {first['problem']}")
        left_out.append(chosen)
        if world.is_primary:
            logger.error(
                "checkpoint %s is damaged (%s); the one before it is taken",
                chosen,
                first["problem"],
            )


def _choose(
    world: World, manager: CheckpointManager, left_out: Sequence[CheckpointName]
) -> CheckpointName | None:
    verdict: dict[str, Any] = {}
    if world.is_primary:
        try:
            chosen = manager.latest(exclude=left_out)
            verdict = {"chosen": None if chosen is None else str(chosen)}
        except StoreError as error:
            verdict = {"error": str(error)}
    verdict = _told(world.broadcast(verdict))
    if "error" in verdict:
        raise ElasticError(f"the checkpoints could not be listed: {verdict['error']}")
    return None if verdict["chosen"] is None else CheckpointName.parse(verdict["chosen"])


def load_initial(model: nn.Module, url: str, options: Mapping[str, object]) -> list[str]:
    """Load the weights at `checkpoint.init_from` as far as they fit; returns what a person should know.

    Raises:
        StartError: There are none, or none of them fits.
    """
    try:
        found = read_weights(url, options)
    except CheckpointError as error:
        raise StartError(f"checkpoint.init_from: {error}") from error
    names = match_names(found, model_tensors(model))
    report = load_model(model, {names[name]: found[name] for name in found}, strict=False)
    if not report.loaded:
        raise StartError(
            f"checkpoint.init_from: none of the {len(found)} tensors in {redact_url(url)} fits the "
            f"model ({'; '.join(report.lines())})"
        )
    lines = [f"checkpoint.init_from: {len(report.loaded)} tensors loaded from {redact_url(url)}"]
    return lines + [f"checkpoint.init_from: {line}" for line in report.lines()]


def is_pending(store: Store, claimed: Claim) -> bool:
    """Whether a rollback that an older claim holds has not been started by any generation yet."""
    if not claimed.rollbacks:
        return False
    since = range(claimed.rollbacks[-1].generation, claimed.generation)
    return not any(store.exists(started_name(generation)) for generation in since)


def say_started(
    store: Store, claimed: Claim, *, found: Found, source: str, step: int, position: tuple[int, int]
) -> None:
    """Write started.json. Primary only, once, when everything has verified.

    Raises:
        OverruledError: A newer launch has claimed the run meanwhile.
    """
    try:
        check_fence(store, claimed)
    except SupersededError as error:
        raise OverruledError(str(error)) from error
    write_started(
        store,
        Started(
            generation=claimed.generation,
            parent=None if found.name is None else str(found.name),
            source=source,  # type: ignore[arg-type]  # one of the literals, by the caller
            start_step=step,
            position=position,
        ),
    )


def _told(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ElasticError(f"a message of another rank: found {value!r}, expected an object")
    return value


def compare_replicas(world: World, digest: str) -> None:
    """Check that every rank holds the same state. Collective.

    Raises:
        ElasticError: A rank differs; names it.
    """
    digests = world.gather(digest)
    wrong = [rank for rank, other in enumerate(digests) if other != digests[0]]
    if wrong:
        raise ElasticError(
            f"after the restore rank {wrong[0]} holds another state than rank 0 (digest "
            f"{digests[wrong[0]]} against {digests[0]}); its memory or its disk may be faulty"
        )
