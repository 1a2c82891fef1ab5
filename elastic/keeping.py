"""This rank's part in the snapshots of its node: taken beside the training, kept, handed to the writer.

One rank of each node, its leader, holds the memory and the node's writer; the primary's writer makes
checkpoints of what it is offered. Promises: no snapshot is touched while somebody may read it; one that
is in memory is whole or is not there; where there is too little shared memory, or a store that only this
process can see, saving goes on the slower way and one line says so. Knows no collective.
"""

import contextlib
import json
import logging
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from checkpoints import memory, snapshots
from checkpoints.buffers import Buffers, Place
from checkpoints.copier import Copier
from checkpoints.errors import CheckpointError
from checkpoints.layout import AgentId, CheckpointName, Claim
from checkpoints.manager import CheckpointManager
from checkpoints.messages import LostError, Message
from checkpoints.options import CheckpointOptions
from checkpoints.remote import RemoteWriter
from checkpoints.segments import Segment, check_room, segments_of, sweep
from checkpoints.snapshots import Snapshot
from checkpoints.store import Store

if TYPE_CHECKING:
    from concurrent.futures import Future

__all__ = ["Keeper", "Taken"]

logger = logging.getLogger(__name__)

_RETRY_S: Final = 60.0
_PAUSE_S: Final = 15.0
_MOST_TRIES: Final = 2
_POLL_S: Final = 0.002


@dataclass(kw_only=True, slots=True)
class Taken:
    """A snapshot that is being taken."""

    copied: "Future[Snapshot]"
    blocked_s: float
    """How long the loop stood still for it so far."""
    began: float
    ended: list[float]
    """When the copy was done."""

    @property
    def cost_s(self) -> float:
        """What it has cost, once it is copied: the loop's wait, and the copy beside it."""
        return self.blocked_s + (self.ended[0] - self.began if self.ended else 0.0)


class Keeper:
    """The snapshots of this rank."""

    def __init__(
        self, *, agent: AgentId, folder: Path, options: CheckpointOptions, store: Store, leads: bool
    ) -> None:
        """Hold nothing yet.

        Args:
            agent: The node's agent: memory and writer are told by it.
            folder: The private folder that the agent's workers share.
            options: The checkpoint section.
            store: The run's URL.
            leads: Whether this rank is its node's leader.
        """
        self._agent, self._folder, self._options, self._store = agent, folder, options, store
        self.leads = leads
        self.copier = Copier()
        self._run_id = ""
        self._buffers: Buffers | None = None
        self._writer: RemoteWriter | None = None
        self._known: CheckpointName | None = None

    # --------------------------------------------------------------------------------------- opening
    def open(self, run_id: str) -> None:
        """Find what the leader before this one left, and its writer. Leaders only; others do nothing."""
        self._run_id = run_id
        if not self.leads:
            return
        keeps = not self._options.tier.memory.is_off
        with contextlib.ExitStack() as stack:
            inherited = memory.open_leftovers(run_id) if keeps else []
            for segment in inherited:
                stack.callback(segment.close)
            for path in sweep():
                logger.info("%s: its launch is over; removed", path)
            self._find(run_id, keeps=keeps)
            if self._buffers is not None:
                self._inherit(inherited, self._buffers)

    def _find(self, run_id: str, *, keeps: bool) -> None:
        """Find the memory and the writer of this agent."""
        if _is_private(self._store) or not _is_json(self._options.storage_options):
            logger.warning(
                "%s: only this process can write there: the loop waits for each save",
                self._store.display_url,
            )
            return
        place = Place(self._agent, run_id) if keeps else Place()
        buffers = Buffers(
            split_bytes=self._options.split_bytes, max_slots=3 if keeps else 2, place=place
        )
        try:
            self._writer = RemoteWriter(self._folder, self._agent, buffers)
        except (LostError, OSError) as error:
            logger.warning("%s; the loop waits for each save", error)
            return
        self._buffers = buffers
        taken = {str(segment.path) for segment in buffers.segments}
        for path in segments_of(self._agent):
            if str(path) not in taken:
                self._take_over(path, buffers)

    def _take_over(self, path: Path, buffers: Buffers) -> None:
        """Memory that no writer told of: use it again, or clear it where it is another run's."""
        try:
            segment = Segment.open(path)
            snapshot = snapshots.read(segment.view())
        except (CheckpointError, OSError):
            snapshot = None
        if snapshot is None or snapshot.run_id != self._run_id or not buffers.has_free:
            path.unlink(missing_ok=True)
            return
        buffers.take_over(segment, int(path.name.rsplit("-", 1)[1]))

    def _inherit(self, segments: Sequence[Segment], buffers: Buffers) -> None:
        """Take a copy of the newest snapshot that an agent before this one has left on the node.

        Its writer may still be making it durable, more slowly than this launch has come; what that reads
        is not touched.
        """
        numbered = memory.held(segments, list(map(str, range(len(segments)))), self._run_id)
        own = memory.held(buffers.segments, [""] * len(buffers.segments), self._run_id)
        if numbered and (not own or numbered[0].name > own[0].name):
            source = segments[int(numbered[0].path)]
            try:
                check_room(source.size_bytes, named=True)
                slot = buffers.reserve(source.size_bytes)
            except (CheckpointError, OSError) as error:
                logger.info(
                    "snapshot %s of the launch before is left out: %s", numbered[0].name, error
                )
            else:
                if isinstance(slot.memory, Segment):
                    snapshots.copy(source.view(), slot.memory.view())
                slot.free()

    def begin(self, claim: Claim, *, damaged: Sequence[CheckpointName] = ()) -> None:
        """The generation has begun: tell the primary's writer where to write and for whom.

        Args:
            claim: The generation's.
            damaged: What did not verify: it counts for nothing when old checkpoints are deleted.
        """
        if self._writer is None:
            return
        options = self._options
        self._writer.open(
            {
                "url": _absolute_url(self._store),
                "storage_options": dict(options.storage_options),
                "keep": options.keep,
                "keep_every": options.keep_every,
                "part_bytes": options.part_bytes,
                "claim": claim.to_json().decode(),
                "damaged": [str(name) for name in damaged],
                "retry_s": _RETRY_S,
                "pause_s": _PAUSE_S,
            }
        )

    @property
    def writes_beside(self) -> bool:
        """Whether a writer makes the checkpoints, so that the loop need not wait."""
        return self._writer is not None and self._buffers is not None and self._buffers.is_shared

    # ---------------------------------------------------------------------------------------- taking
    def take(
        self,
        tree: Mapping[str, object],
        *,
        name: CheckpointName,
        parent: CheckpointName | None,
        info: Mapping[str, Any],
        still: frozenset[int],
        done: Callable[[Snapshot], None] | None = None,
    ) -> Taken | None:
        """Begin a snapshot; None where there is no memory for one at the moment. Leaders only.

        Args:
            tree: The state.
            name: Its generation and step.
            parent: The state that the generation began from.
            info: What is told of it.
            still: The tensors that do not change until `Taken.copied` is done.
            done: Called with it in the copying thread, once it is whole.
        """
        buffers = self._buffers
        if buffers is None or not buffers.is_shared or not buffers.has_free:
            return None
        began = time.monotonic()
        filling = buffers.begin(
            tree, name=name, parent=parent, run_id=self._run_id, info=info, still=still
        )
        ended: list[float] = []

        def copy() -> Snapshot:
            snapshot = filling.copy(known=self._known)
            if not buffers.is_shared:
                # There was less memory than it seemed: from now on saves go the slower way.
                snapshot.release()
                raise CheckpointError("there is too little shared memory for a snapshot")
            ended.append(time.monotonic())
            if done is not None:
                done(snapshot)
            return snapshot

        now = time.monotonic()
        return Taken(copied=self.copier.start(copy), blocked_s=now - began, began=now, ended=ended)

    def offer(self, snapshot: Snapshot, *, protect: Sequence[str], keep: bool) -> None:
        """Have the writer make it a checkpoint.

        Raises:
            LostError: There is no writer any more.
        """
        if self._writer is None:
            raise LostError("writer: found none, expected one")
        self._writer.offer(snapshot, protect=protect, keep=keep)

    def offer_held(self, path: str) -> bool:
        """Have the writer make a checkpoint of what a generation began from; False where it has it already.

        Raises:
            LostError: There is no writer any more.
        """
        if self._buffers is None or self._writer is None:
            return False
        for segment in self._buffers.segments:
            if _path_of(segment) == path and (snapshot := self._buffers.hold(segment)) is not None:
                self._writer.offer(snapshot, protect=(), keep=True)
                return True
        return False

    def look(self) -> list[Message]:
        """What the writer has said since the last look.

        Raises:
            LostError: It is gone and cannot be replaced.
        """
        return [] if self._writer is None else self._writer.look()

    def give_up_writer(self) -> Snapshot | None:
        """Go on without a writer: the loop waits for each save from now on. What it had newest, if anything."""
        if self._writer is None:
            return None
        newest = self._writer.newest_held()
        self._writer.leave()
        self._writer = None
        return newest

    def wait(self, timeout_s: float) -> bool:
        """Wait until all that was offered is settled; False where that takes longer."""
        return self._writer is None or self._writer.wait(timeout_s)

    def await_memory(self, timeout_s: float) -> bool:
        """Wait until there is memory for another snapshot; False where that takes longer."""
        deadline = time.monotonic() + timeout_s
        while self._buffers is not None and not self._buffers.has_free:
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        return True

    def await_turn(self, timeout_s: float) -> bool:
        """Wait until the writer has taken up what waits for it; False where that takes longer."""
        return self._writer is None or self._writer.await_turn(timeout_s)

    def note_known(self, name: CheckpointName) -> None:
        """A checkpoint is in the store: snapshots from now on know of it."""
        self._known = name

    def distrust(self, good: Collection[CheckpointName]) -> None:
        """What this node holds in memory may be wrong: forget it, but for what is known to be good."""
        if self._buffers is not None:
            self._buffers.forget(good)

    # ------------------------------------------------------------------------------------- restoring
    @property
    def node(self) -> str:
        """What tells this node's ranks from those of others."""
        return f"{self._agent.boot_id}-{self._agent.pid}-{self._agent.start}"

    def held(self) -> list[memory.Held]:
        """The snapshots of this run that the node holds, newest first; leaders know."""
        if self._buffers is None or (self._options.tier.memory.is_off and not self._adopted):
            return []
        segments = self._buffers.segments
        found = memory.held(segments, [_path_of(segment) for segment in segments], self._run_id)
        return [one for one in found if one.tries < _MOST_TRIES]

    @property
    def _adopted(self) -> bool:
        return self._writer is not None and self._writer.was_adopted

    def count_try(self, path: str, *, began: bool) -> None:
        """Note that a generation tries to begin from a snapshot, or that it has begun. Leaders note."""
        if self._buffers is None:
            return
        for segment in self._buffers.segments:
            if _path_of(segment) == path:
                tries = 0 if began else snapshots.tries(segment.view()) + 1
                snapshots.count_try(segment.view(), tries)

    def fetch(self, manager: CheckpointManager, name: CheckpointName) -> str | None:
        """Read a checkpoint into the node's memory; where it is, or None where there is no room.

        Raises:
            CheckpointError: It does not verify, or the store failed.
        """
        if self._buffers is None or not self._buffers.is_shared or not self._buffers.has_free:
            return None
        manager.catalog.forget(name)  # a restore trusts nothing that it has not read itself
        manifest = manager.catalog.manifest(name)
        slot = self._buffers.reserve(memory.size_of(manifest))
        try:
            if not isinstance(slot.memory, Segment):
                return None
            memory.fetch(self._store, manifest, slot.memory.view())
            self._known = name
            return _path_of(slot.memory)
        finally:
            slot.free()

    # ---------------------------------------------------------------------------------------- ending
    def close(self, *, finished: bool) -> None:
        """Let everything go; where the run is finished nothing is left in memory."""
        self.copier.close()
        if self._writer is not None:
            if finished:
                self._writer.finish()
            else:
                self._writer.leave()
        if self._buffers is not None:
            self._buffers.close(unlink=finished)


def _path_of(segment: Segment) -> str:
    """A path under which this node's other processes can open it, while this one lives."""
    if segment.path is not None:
        return str(segment.path)
    return f"/proc/{os.getpid()}/fd/{segment.fd}"


def _is_private(store: Store) -> bool:
    """Whether each process has that store for itself."""
    return store.url.startswith("memory:")


def _absolute_url(store: Store) -> str:
    """The URL for a process with another working directory."""
    if not store.is_local:
        return store.url
    path = store.url.partition("://")[2] if "://" in store.url else store.url
    return str(Path(path).expanduser().absolute())


def _is_json(options: Mapping[str, object]) -> bool:
    try:
        json.dumps(dict(options))
    except (TypeError, ValueError):
        return False
    return True
