"""The saves of a generation: begun at a step's end, settled before the next update, made durable beside it.

Promises: a generation commits a step at most once; nothing is offered to the store before the replicas
were compared; no collective waits for the store. With a writer beside the training a save costs the loop
what cannot be copied later, and what is left of the copy when the next update comes; without one it makes
the loop wait, as one line has said.
"""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from checkpoints.errors import (
    CheckpointError,
    PartedError,
    StoreError,
    SupersededError,
    UnsupportedStateError,
)
from checkpoints.layout import CheckpointName
from checkpoints.snapshots import Snapshot
from elastic import finding
from elastic.digest import digest_of
from elastic.errors import ReplicaError
from elastic.generation import Generation
from elastic.keeping import Taken
from elastic.opening import Session, Setup

if TYPE_CHECKING:
    from concurrent.futures import Future

__all__ = ["Saves"]

logger = logging.getLogger(__name__)

_SLICE_BYTES: Final = 256 << 20
"""Of a larger state each save compares a slice, so that a few saves compare it all."""
_MOST_GOOD: Final = 8
"""More states than a node holds in memory."""
_FREE_S: Final = 3.0
"""How long a save that has to be made waits for memory, and for one before it that is quick to make."""
_QUICK_S: Final = 0.5
"""How long any other waits for that."""
_LOOK_S: Final = 0.3


@dataclass(kw_only=True, slots=True)
class Flight:
    """A save that was begun at a step's end and is settled before the next update."""

    taken: Taken | None
    digest: "Future[str] | None"
    step: int
    offer: Callable[[Snapshot], None] | None = None
    """What is done with the snapshot once the replicas are known to be the same."""


class Saves(Generation):
    """A generation that is saved. Every rank calls the same in the same order."""

    def __init__(
        self, session: Session, setup: Setup, *, code: str, prepare: Callable[[], None]
    ) -> None:
        """Meet and start the world; see Generation."""
        super().__init__(session, setup, code=code, prepare=prepare)
        self._beside = False
        self._begun_step = -1
        self._flight: Flight | None = None
        self._compared = 0
        self._compares_all = False
        self._good: list[CheckpointName] = []
        self._save_deferred = False
        self._keep_next = False

    def restore(self, initialize: Callable[[], None]) -> None:
        """As Generation.restore; from then on every update waits for the snapshot under way. Collective."""
        super().restore(initialize)
        self.state.before_updates(self.settle_snapshot)
        self._beside = bool(self.world.broadcast(self.keeper.writes_beside))

    def save(self, *, keep: bool = False) -> bool:
        """Make a checkpoint of the present state, or begin to. Collective; the answer is the primary's.

        With a writer beside the training this returns as soon as the copy is under way: it is waited for
        right before the next update, and the replicas are compared then.

        Args:
            keep: The snapshot is not given up for a newer one.

        Raises:
            OverruledError: The run belongs to a newer launch.
            AttentionError: Nothing could be saved for too long.
            ReplicaError: A rank holds another state than the others; nothing was saved.
        """
        keep = keep or self._keep_next
        self._save_deferred = self._keep_next = False
        self.settle_snapshot()
        if not self._send_audit():
            return False
        self._session.slot.beat(self.progress.step, "save")
        self._begun_step = self.progress.step
        digest = self._begin_digest() if not self._nothing_new else None
        if not self._beside:
            self._compare(digest)
            return self._save_here()
        saver = self._saver
        is_new = saver is not None and not saver.is_begun(self.progress.step)
        if self.keeper.leads and (is_new or saver is None) and not self._nothing_new:
            return self._save_beside(digest, keep=keep)
        self._flight = Flight(taken=None, digest=digest, step=self.progress.step)
        return True

    @property
    def _nothing_new(self) -> bool:
        """Whether the state is the very checkpoint that this generation began from."""
        return self._restored_from == "store" and self.progress == self._restored

    def _send_audit(self) -> bool:
        """No checkpoint before the audit of its steps is in the store. Collective where it is in parts."""
        if not self.records.audits_in_parts:
            return True
        sent = self.world.gather(self.records.flush_audit())
        if all(sent):
            return True
        if self._saver is not None:
            told = f"the audit of rank {sent.index(False)} could not be written"
            self._saver.put_off(self.progress.step, StoreError(told))
        return False

    def _save_beside(self, digest: "Future[str] | None", *, keep: bool) -> bool:
        """Begin a snapshot that the primary's writer will make a checkpoint. Leaders."""
        saver, step = self._saver, self.progress.step
        if saver is not None:
            with self.records.spend("checkpoint"):
                saver.await_turn(self.state.size_bytes)
        protect = self.progress.protected(self.keep_best)
        offer: Callable[[Snapshot], None] | None = None
        if saver is not None:
            if not self.keeper.writes_beside:
                self._flight = Flight(taken=None, digest=digest, step=step)
                return self._save_here()
            name = str(saver.name(step))
            self.progress.name_checkpoint(name)
            protect = [one for one in protect if one != name]

            def offer(snapshot: Snapshot) -> None:
                saver.offer(snapshot, protect=protect, keep=keep)

        # With peers the offer waits until their replicas were compared.
        at_once = offer if digest is None else None
        if saver is not None:
            saver.await_quick(_FREE_S if keep else _QUICK_S)
        if keep:
            self.keeper.await_memory(_FREE_S)
        taken = self._take(done=at_once)
        if taken is None:
            self._flight = Flight(taken=None, digest=digest, step=step)
            if saver is not None:
                self.progress.name_checkpoint(None)
                saver.defer()  # one waits already: nothing is lost but some steps of age
            return False
        if saver is not None:
            saver.begin(step)
        self._flight = Flight(
            taken=taken, digest=digest, step=step, offer=None if at_once else offer
        )
        return True

    def _take(self, done: Callable[[Snapshot], None] | None = None) -> Taken | None:
        with self.records.spend("checkpoint"):
            tree = {**self.state.capture(), "progress": self.progress.to_tree()}
            return self.keeper.take(
                tree,
                name=CheckpointName(generation=self.generation, step=self.progress.step),
                parent=self._parent,
                info=self._info(),
                still=self.state.still(),
                done=done,
            )

    def remember(self) -> None:
        """Begin a snapshot for the nodes' memory alone. Every rank; leaders take it."""
        self.settle_snapshot()
        if self._saver is not None:
            self._saver.memory_pace.restart()
        if self.keeper.leads and self.keeper.writes_beside:
            taken = self._take()
            if taken is not None:
                self._flight = Flight(taken=taken, digest=None, step=self.progress.step)

    def settle_snapshot(self) -> None:
        """Wait for the snapshot under way; what it was copied from may change after this. Collective.

        Raises:
            ReplicaError: A rank holds another state than the others; nothing was saved.
        """
        flight, self._flight = self._flight, None
        if flight is None:
            return
        snapshot: Snapshot | None = None
        if flight.taken is not None:
            began = time.monotonic()
            try:
                with self.records.spend("checkpoint"):
                    snapshot = flight.taken.copied.result()
            except UnsupportedStateError:
                raise
            except CheckpointError as error:
                if self._saver is not None:
                    self._saver.put_off(flight.step, error)
            flight.taken.blocked_s += time.monotonic() - began
        self._compare(flight.digest)
        if self._saver is not None and flight.taken is not None and snapshot is not None:
            if flight.offer is not None:
                flight.offer(snapshot)
            if self._saver.is_begun(flight.step):
                self._saver.note_cost(self._saver.name(flight.step), flight.taken.cost_s)
            self._saver.note_memory_cost(flight.taken.cost_s)

    def _begin_digest(self) -> "Future[str] | None":
        """Hash this rank's replica beside the training; None where there are no others."""
        if self.world.world_size == 1:
            return None
        tree = self.state.replicated()
        parts = max(1, -(-self.state.size_bytes // _SLICE_BYTES))
        part, self._compared = self._compared, self._compared + 1
        self._compares_all = parts == 1
        return self.keeper.copier.start(lambda: digest_of(tree, part=part, parts=parts))

    def _compare(self, digest: "Future[str] | None") -> None:
        """Compare the replicas of the step whose save was begun. Collective where there is a digest."""
        if digest is None:
            return
        step = self._begun_step
        try:
            when = f"before the checkpoint of step {step}"
            finding.compare_replicas(self.world, digest.result(), when=when)
        except ReplicaError:
            self.keeper.distrust(self._good)
            raise
        if self._compares_all:
            self._good = [*self._good[-_MOST_GOOD:], CheckpointName(self.generation, step)]

    def _save_here(self) -> bool:
        """Make the checkpoint in this process, while all wait. Primary; elsewhere it does nothing."""
        saver = self._saver
        if saver is None:
            return True
        name = saver.name(self.progress.step)
        if saver.last == name or self._nothing_new:
            return True
        self.progress.name_checkpoint(str(name))
        tree = {**self.state.capture(), "progress": self.progress.to_tree()}
        protect = self.progress.protected(self.keep_best)
        began = time.monotonic()
        try:
            with self.records.spend("checkpoint"):
                saved = saver.save(
                    tree, step=self.progress.step, info=self._info(), protect=protect
                )
        except (SupersededError, PartedError) as error:
            raise self._overruled(superseded=isinstance(error, SupersededError)) from error
        took = round(time.monotonic() - began, 4)
        self.note_saved(
            {"op": "committed", "name": str(name), "seconds": took}
            if saved
            else {"op": "failed", "name": str(name), "error": saver.last_error, "final": True}
        )
        return saved

    def look_after_saves(self) -> None:
        """Take in what the writer has said. Primary; elsewhere it does nothing. Often.

        Raises:
            AttentionError: Nothing could be saved for too long.
        """
        if self._saver is not None:
            self._saver.look(self.note_saved)

    def note_saved(self, message: Mapping[str, Any]) -> None:
        """Write down what has become of a checkpoint. Primary only."""
        if "name" not in message:
            return
        name, kind = str(message["name"]), message["op"]
        step = CheckpointName.parse(name).step
        if kind == "committed":
            self.records.event(
                "checkpoint",
                step=step,
                checkpoint=name,
                seconds=message["seconds"],
                spent=self.records.ledger.totals(),
            )
        else:
            if kind != "failed" or message["final"]:
                self.progress.forget_checkpoint(name)
            what = "save failed" if kind == "failed" else f"save {kind}"
            self.records.event(what, step=step, error=message.get("error"))
        self.records.flush()

    def make_durable(self, limit_s: float) -> bool:
        """Save the present state and wait until it is a checkpoint; False after `limit_s`. Collective.

        No collective in it waits for the store, so that none can time out.

        Raises:
            OverruledError: The run belongs to a newer launch.
        """
        self.save(keep=True)
        self.settle_snapshot()
        deadline = time.monotonic() + limit_s
        while True:
            outcome = "waiting"
            if self._saver is not None:
                saver = self._saver
                outcome = (
                    "saved"
                    if self._nothing_new
                    else saver.outcome(self.progress.step, _LOOK_S, self.note_saved)
                )
                if outcome == "waiting" and time.monotonic() > deadline:
                    outcome = "failed"
                if saver.fenced is not None:
                    outcome = "fenced"
            self._session.slot.beat(self.progress.step, "save")
            told = self.world.broadcast(outcome)
            if told == "fenced":
                superseded = self._saver is None or isinstance(self._saver.fenced, SupersededError)
                raise self._overruled(superseded=superseded)
            if told != "waiting":
                return bool(told == "saved")

    def drain(self, limit_s: float) -> None:
        """Wait until what was offered to the writer is settled, for so long at most. Collective.

        No collective in it waits for the store, so that none can time out.
        """
        self.settle_snapshot()
        deadline = time.monotonic() + limit_s
        while True:
            settled = True
            if self._saver is not None:
                settled = self.keeper.wait(_LOOK_S) or time.monotonic() > deadline
                self.look_after_saves()
            self._session.slot.beat(self.progress.step, "save")
            if self.world.broadcast(settled):
                return

    def _info(self) -> dict[str, Any]:
        at = self.progress
        return {
            "step": at.step,
            "epoch": at.epoch,
            "position": at.position,
            "samples": at.samples,
            "metrics": {k: v for k, v in at.metrics.items() if abs(v) < float("inf")},
            "best": next(iter(at.protected(1)), None),
            "stopped": at.stopped,
            "world_size": self.world.world_size,
        }
