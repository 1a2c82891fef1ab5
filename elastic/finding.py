"""Which state a generation begins from: of all nodes' memory and the store the furthest that verifies.

Promises: what is chosen is decided once, by the primary, and told to all; what fails to verify on any rank
is left out and the next is taken, loudly; no rank holds more than one copy of the state beside its own, and
the ranks of a node share that one. Replicas are compared as hashes, and one that differs is named.
"""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch

from checkpoints import memory
from checkpoints.errors import (
    DamagedError,
    NewerFormatError,
    NoCheckpointError,
    ObjectMissingError,
    RecordError,
    StoreError,
)
from checkpoints.generations import read_rollbacks
from checkpoints.layout import CheckpointName
from checkpoints.manager import CheckpointManager
from checkpoints.rollbacks import is_left_behind
from checkpoints.serialization import join, split
from elastic.errors import AttentionError, ElasticError, ReplicaError
from elastic.keeping import Keeper
from elastic.world import World

__all__ = ["Found", "compare_replicas", "find_state", "told"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """The state that this generation begins from; no name: a fresh start."""

    name: CheckpointName | None
    tree: Mapping[str, Any] | None
    source: Literal["fresh", "memory", "store"] = "fresh"
    path: str | None = None
    """Where this node holds it in memory."""
    damaged: tuple[str, ...] = ()
    """What was left out because it did not verify, with the reason."""
    ruins: tuple[CheckpointName, ...] = ()
    """The checkpoints in the store among them."""


def find_state(
    world: World,
    manager: CheckpointManager,
    keeper: Keeper | None,
    left_out: Collection[tuple[str, CheckpointName]] = (),
    *,
    unfit: Callable[[Mapping[str, Any]], str | None] = lambda _: None,
) -> Found:
    """Load the furthest state that verifies on every rank: from the nodes' memory or the store. Collective.

    Args:
        world: The ranks.
        manager: The checkpoints at the run's URL.
        keeper: This rank's part in its node's memory; None: only the store is asked.
        left_out: (source, name) of what is known to be wrong.
        unfit: Why a state that verifies is not to be taken all the same; alike on every rank.

    Raises:
        ElasticError: The store failed while reading; a restart may cure it.
        AttentionError: A newer version has written a checkpoint.
    """
    damaged: list[str] = []
    wrong = set(left_out)
    while True:
        chosen = _choose(world, manager, keeper, wrong, damaged)
        if chosen is None:
            return Found(name=None, tree=None, damaged=tuple(damaged), ruins=_ruins(wrong))
        load = _load_memory if chosen.source == "memory" else _load_store
        tree, problem = load(world, manager, keeper, chosen)
        if tree is not None:
            problem = unfit(tree)
        if problem is None:
            return Found(
                name=chosen.name,
                tree=tree,
                source=chosen.source,
                path=None if keeper is None else chosen.paths.get(keeper.node),
                damaged=tuple(damaged),
                ruins=_ruins(wrong),
            )
        damaged.append(f"{chosen.name}: {problem}")
        # Nor is a copy of it believed that a node has fetched into its memory.
        wrong |= {(chosen.source, chosen.name), ("memory", chosen.name)}
        if world.is_primary:
            what = "checkpoint" if chosen.source == "store" else "the snapshot in memory"
            logger.error(
                "%s %s is damaged (%s); the one before it is taken", what, chosen.name, problem
            )


def _ruins(wrong: Collection[tuple[str, CheckpointName]]) -> tuple[CheckpointName, ...]:
    return tuple(sorted(name for source, name in wrong if source == "store"))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Chosen:
    source: Literal["memory", "store"]
    name: CheckpointName
    paths: Mapping[str, str]
    """Of each node that holds it in memory: where."""


def _choose(
    world: World,
    manager: CheckpointManager,
    keeper: Keeper | None,
    wrong: set[tuple[str, CheckpointName]],
    damaged: list[str],
) -> _Chosen | None:
    """The furthest state; decided by the primary, from what all nodes tell. Collective."""
    mine = [
        {
            "name": str(one.name),
            "position": _position(one.info),
            "path": one.path,
            "known": None if one.known is None else str(one.known),
        }
        for one in (keeper.held() if keeper is not None else ())
    ]
    node = "" if keeper is None else keeper.node
    all_held = [told(one) for one in world.gather({"node": node, "held": mine})]
    verdict: dict[str, Any] = {}
    if world.is_primary:
        try:
            verdict = _furthest(manager, all_held, wrong, damaged)
        except NewerFormatError as error:
            verdict = {"newer": str(error)}
        except StoreError as error:
            verdict = {"error": str(error)}
    verdict = told(world.broadcast(verdict))
    if "newer" in verdict:
        raise AttentionError(str(verdict["newer"]))
    if "error" in verdict:
        raise ElasticError(f"the checkpoints could not be listed: {verdict['error']}")
    if verdict["source"] is None:
        return None
    return _Chosen(
        source=verdict["source"],
        name=CheckpointName.parse(verdict["name"]),
        paths=verdict["paths"],
    )


def _furthest(
    manager: CheckpointManager,
    nodes: Sequence[Mapping[str, Any]],
    wrong: set[tuple[str, CheckpointName]],
    damaged: list[str],
) -> dict[str, Any]:
    names = manager.names()
    best: tuple[list[int], int, str] | None = None
    for name in names:
        if ("store", name) in wrong:
            continue
        try:
            best = (_position(manager.info(name).info), 0, str(name))
        except (DamagedError, NoCheckpointError) as error:
            damaged.append(f"{name}: {error}")
            wrong.add(("store", name))
            logger.error("checkpoint %s: %s; the one before it is taken", name, error)  # noqa: TRY400  # one line
            continue
        break
    there = {str(name) for name in names}
    rollbacks = read_rollbacks(manager.store)
    for held in (one for rank in nodes for one in rank["held"]):
        # It was taken for another history of the store than the one that is there.
        if held["known"] is not None and held["known"] not in there:
            continue
        name = CheckpointName.parse(held["name"])
        if ("memory", name) in wrong or is_left_behind(name, rollbacks):
            continue
        candidate = (held["position"], 1, held["name"])
        if best is None or candidate > best:
            best = candidate
    if best is None:
        return {"source": None}
    position, in_memory, text = best
    paths = {
        rank["node"]: one["path"]
        for rank in nodes
        for one in rank["held"]
        if one["name"] == text and one["position"] == position
    }
    return {
        "source": "memory" if in_memory else "store",
        "name": text,
        "paths": paths if in_memory else {},
    }


def _position(info: Mapping[str, Any]) -> list[int]:
    """(epoch, samples of it), as far as it is told."""
    return [int(info.get("epoch", 0)), int(info.get("position", 0))]


Loaded = tuple[Mapping[str, Any] | None, str | None]


def _load_memory(
    world: World, _manager: CheckpointManager, keeper: Keeper | None, chosen: _Chosen
) -> Loaded:
    """Map the node's snapshot; a node without it is sent the state by one that has it. Collective."""
    path = None if keeper is None else chosen.paths.get(keeper.node)
    tree: Mapping[str, Any] | None = None
    problem = ""
    if path is not None and keeper is not None:
        keeper.count_try(path, began=False)
        try:
            tree = memory.load(path, chosen.name)
        except (DamagedError, RecordError) as error:
            problem = str(error)
    said = [told(one) for one in world.gather({"problem": problem, "has": tree is not None})]
    problem = next((one["problem"] for one in said if one["problem"]), "")
    if problem:
        return None, problem
    if not all(one["has"] for one in said):
        source = next(rank for rank, one in enumerate(said) if one["has"])
        tree = send_tree(world, tree, source)
    return tree, None


def send_tree(world: World, tree: Mapping[str, Any] | None, source: int) -> Mapping[str, Any]:
    """Give every rank that has no state the one of rank `source`. Collective."""
    tensors, skeleton = split(dict(tree)) if tree is not None else ({}, None)
    shapes = {
        name: [str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in tensors.items()
    }
    sent = told(world.broadcast({"skeleton": skeleton, "tensors": shapes}, src=source))
    if tree is None:
        tensors = {
            name: torch.empty(shape, dtype=getattr(torch, dtype))
            for name, (dtype, shape) in sent["tensors"].items()
        }
    # Whoever has the state sends or takes copies: its own may lie in memory that others read.
    world.broadcast_tensors(
        [
            tensors[name] if tree is None or world.rank == source else tensors[name].clone()
            for name in sent["tensors"]
        ],
        src=source,
    )
    if tree is not None:
        return tree
    return cast("Mapping[str, Any]", join(sent["skeleton"], tensors))


def _load_store(
    world: World, manager: CheckpointManager, keeper: Keeper | None, chosen: _Chosen
) -> Loaded:
    """Read a checkpoint once for each node, into memory that its ranks share. Collective.

    Raises:
        ElasticError: The store failed; a restart may cure it.
    """
    tree: Mapping[str, Any] | None = None
    problem, passing, path = "", False, None
    node = "" if keeper is None else keeper.node
    try:
        path = keeper.fetch(manager, chosen.name) if keeper is not None and keeper.leads else None
    except (DamagedError, StoreError, ObjectMissingError, NoCheckpointError) as error:
        problem, passing = str(error), isinstance(error, StoreError)
    said = _agreed(
        world, chosen, {"problem": problem, "passing": passing, "path": path, "node": node}
    )
    if isinstance(said, str):
        return None, said
    path = next((one["path"] for one in said if one["node"] == node and one["path"]), None)
    try:
        # Without shared memory each rank reads for itself.
        tree = memory.load(path, chosen.name) if path else manager.restore(chosen.name)
    except (DamagedError, StoreError, ObjectMissingError, NoCheckpointError) as error:
        problem, passing = str(error), isinstance(error, StoreError)
    said = _agreed(world, chosen, {"problem": problem, "passing": passing})
    return (None, said) if isinstance(said, str) else (tree, None)


def _agreed(world: World, chosen: _Chosen, mine: dict[str, Any]) -> list[dict[str, Any]] | str:
    """What all ranks say, or the first problem. Collective."""
    said = [told(one) for one in world.gather(mine)]
    for rank, one in enumerate(said):
        if one["problem"] and one["passing"]:
            raise ElasticError(
                f"checkpoint {chosen.name} could not be read by rank {rank}: {one['problem']}"
            )
    return next((str(one["problem"]) for one in said if one["problem"]), said)


def compare_replicas(world: World, digest: str, *, when: str) -> None:
    """Check that every rank holds the same state. Collective.

    Raises:
        ReplicaError: A rank differs; names it.
    """
    digests = [str(one) for one in world.gather(digest)]
    usual = max(digests, key=digests.count)
    odd = [rank for rank, other in enumerate(digests) if other != usual]
    if not odd:
        return
    if 2 * len(odd) == len(digests):
        who = f"ranks 0 and {next(r for r, d in enumerate(digests) if d != digests[0])} differ"
    else:
        names = ", ".join(str(rank) for rank in odd)
        who = f"rank{'s' if len(odd) > 1 else ''} {names} of {len(digests)} differ{'' if len(odd) > 1 else 's'} from the others"
    hosts = ", ".join(dict.fromkeys(world.hosts[rank] for rank in odd))
    raise ReplicaError(
        f"{when}: {who} (digests {', '.join(dict.fromkeys(digests))}); nothing of this state is saved; "
        f"the memory of {hosts} may be faulty, a parameter is not synchronised, or a hook (on_step, on_epoch) changed something on the primary alone"
    )


def told(value: object) -> dict[str, Any]:
    """A message of another rank, which has to be an object."""
    if not isinstance(value, dict):
        raise ElasticError(f"a message of another rank: found {value!r}, expected an object")
    return value
