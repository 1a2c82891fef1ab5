"""`python -m elastic rollback URL --to NAME`: the run goes on from an older checkpoint; imports no torch.

It claims a generation that nobody trains: what newer checkpoints hold is left out by every reader from
then on, a run that is still at work is superseded, and the next start begins from the named one. Nothing
is deleted here; the next commit clears away what was left behind.
"""

import json
import logging
from collections.abc import Mapping
from typing import Any

from checkpoints import reader
from checkpoints.catalog import Catalog, CheckpointInfo
from checkpoints.errors import CheckpointError, ObjectMissingError
from checkpoints.generations import claim, newest_generation, read_claim, read_rollbacks
from checkpoints.layout import RUN, SUMMARY, CheckpointName, Claim, Rollback, RunRecord
from checkpoints.store import Store, open_store
from checkpoints.terminal import put_out
from elastic.agent import is_known_dead
from elastic.errors import ExitCode, StartError

__all__ = ["rollback"]

logger = logging.getLogger(__name__)

_ENDED = frozenset({"complete", "stopped", "preempted", "failed"})


def rollback(url: str, options: Mapping[str, object], *, to: str, force: bool) -> ExitCode:
    """Let the run at `url` go on from checkpoint `to`: a full name, a step, `best` or `latest`.

    Raises:
        StartError: The checkpoint was left behind already, or the run may be at work.
        CheckpointError: The URL cannot be read, or the checkpoint does not verify.
    """
    store = open_store(url, options)
    catalog = Catalog(store)
    run_id = _run_id(store)
    name = catalog.resolve(to)
    inventory = catalog.inventory()
    if name in inventory.left_behind:
        raise StartError(
            f"--to: found {name}, which an earlier rollback left behind, expected one of "
            f"{', '.join(map(str, inventory.living[:8]))}"
        )
    manifest = catalog.manifest(name)
    reader.verify(store, manifest)
    if not force:
        _refuse_beside_a_living_run(store)
    gone = [other for other in inventory.living if other > name]
    claimed = _claim(store, run_id, name)
    _rewind_summary(store, catalog.info(name))
    put_out(
        f"{store.display_url}: generation {claimed.generation} returns to checkpoint {name}; "
        f"{len(gone)} newer left behind; start the run again to go on from there\n"
    )
    return ExitCode.DONE


def _run_id(store: Store) -> str:
    try:
        return RunRecord.from_json(store.get(RUN), RUN).run_id
    except ObjectMissingError:
        raise StartError(f"{store.display_url}: found no {RUN}, expected a run") from None


def _refuse_beside_a_living_run(store: Store) -> None:
    newest = newest_generation(store)
    try:
        agents = read_claim(store, newest).agents if newest else ()
    except CheckpointError as error:
        logger.warning("%s; whether its agents live is not known", error)
        agents = ()
    ended = (_summary(store) or {}).get("status") in _ENDED
    known = [(agent, is_known_dead(agent)) for agent in agents]
    # What runs on this host is seen; of other hosts the summary has to say that the run has ended.
    living = [agent for agent, dead in known if dead is False or (dead is None and not ended)]
    if living:
        raise StartError(
            f"{store.display_url}: generation {newest} may be at work (agent {living[0]}), expected none; "
            "end it first, or let --force supersede it"
        )


def _claim(store: Store, run_id: str, name: CheckpointName) -> Claim:
    def make(generation: int, launch: str) -> Claim:
        own = Rollback(generation=generation, to=name)
        return Claim(
            generation=generation,
            run_id=run_id,
            launch=launch,
            agents=(),
            world_size=1,
            nodes=1,
            hosts=(),
            cause=f"rollback to {name} by hand",
            rollbacks=(*read_rollbacks(store), own),
        )

    return claim(store, agents=(), make=make)


def _summary(store: Store) -> dict[str, Any] | None:
    try:
        found = json.loads(store.get(SUMMARY))
    except (ObjectMissingError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _rewind_summary(store: Store, target: CheckpointInfo) -> None:
    """The run has not come to its end any more: the next start is not told that it is complete."""
    present = _summary(store)
    if present is None:
        return
    at, best = target.info, present.get("best")
    if isinstance(best, dict) and best.get("step", 0) > target.name.step:
        best = None
    content = {
        **present,
        "status": "preempted",
        "stopped": None,
        "steps": at.get("step", target.name.step),
        "samples": at.get("samples", 0),
        "epochs": at.get("epoch", 0),
        "metrics": at.get("metrics", {}),
        "best": best,
        "weights_sha256": None,
    }
    store.put(SUMMARY, json.dumps(content, indent=1, allow_nan=False).encode())
