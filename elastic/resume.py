"""The second half of a start: whose run it is, the claim of the generation, and the word that it began.

The order is the design's: claim, then list, restore and verify, then `started.json`. Promises: what is
decided is decided once, by the primary, and told to all; nothing is claimed for a start that the checks
refused. Which state it begins from is the business of `elastic.finding`.
"""

import logging
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from checkpoints.catalog import Catalog
from checkpoints.errors import (
    CheckpointError,
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
    read_started,
    write_started,
)
from checkpoints.journal import read_events
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
from checkpoints.redaction import redact_url
from checkpoints.rollbacks import Position
from checkpoints.store import Store
from elastic.errors import ElasticError, OverruledError, StartError
from elastic.finding import Found, told
from elastic.foreign import match_names, read_weights
from elastic.identity import compare_identity
from elastic.monitor import Fault
from elastic.weights import load_model, model_tensors
from elastic.world import World

__all__ = [
    "Return",
    "agree_on_run",
    "cause_of",
    "claim_generation",
    "is_pending",
    "load_initial",
    "lost_checkpoint",
    "say_started",
]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Return:
    """A rollback that a claim is to hold."""

    to: CheckpointName
    skip: tuple[Position, ...]
    cause: str


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
    verdict = told(world.broadcast(verdict))
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
        changes = changed_settings(previous.config, config) if previous and previous.config else []
        if changes and "claim" in verdict:
            logger.info(
                "changed since generation %d: %s",
                previous.generation if previous else 0,
                "; ".join(changes),
            )
    verdict = told(world.broadcast(verdict))
    if "error" in verdict:
        raise (OverruledError if verdict["superseded"] else ElasticError)(verdict["error"])
    return Claim.from_json(str(verdict["claim"]).encode(), "claim")


def changed_settings(old: object, new: object, path: str = "") -> list[str]:
    """What differs between two configs, each as `key: old -> new`."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        found: list[str] = []
        for key in sorted({*old, *new}):
            found += changed_settings(old.get(key), new.get(key), f"{path}.{key}".lstrip("."))
        return found
    return [] if old == new else [f"{path}: {old} -> {new}"]


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


def load_initial(model: nn.Module, url: str, options: Mapping[str, object]) -> list[str]:
    """Load the weights at `checkpoint.init_from` as far as they fit; returns what a person should know.

    Raises:
        StartError: There are none, or none of them fits.
    """
    try:
        found = read_weights(url, options)
    except (CheckpointError, StartError) as error:
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


def lost_checkpoint(catalog: Catalog, generation: int) -> CheckpointName | None:
    """The newest checkpoint that generations before this one tell of, where there is none at all; primary only.

    Raises:
        ElasticError: The store failed; a restart may cure it.
    """
    if generation == 1:
        return None
    try:
        if catalog.inventory().committed:
            return None
        events = read_events(catalog.store)
        saved = [
            str(event.get("checkpoint")) for event in events if event.get("event") == "checkpoint"
        ]
        known = [CheckpointName.find(name) for name in saved]
        known += [record.parent_name for record in read_started(catalog.store)]
    except StoreError as error:
        raise ElasticError(f"the run's records could not be read: {error}") from error
    return max((name for name in known if name is not None), default=None)
