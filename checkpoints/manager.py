"""The checkpoints of one run: stage, commit, find, restore, retain.

    manager = CheckpointManager(open_store("s3://bucket/run-42"))
    found = manager.restore_newest()
    snapshot = manager.stage({"model": model.state_dict(), ...}, name=..., parent=..., run_id=..., info={})
    try:
        manager.commit(snapshot)
    finally:
        snapshot.release()

Promises: a checkpoint is there once its manifest is, and never before; newest is decided by generation
and step as numbers; what a restore gives back has been verified byte for byte. Retention deletes only
what no remaining manifest refers to, never the newest checkpoint that is known to be good, and never
fails a commit. `stage` runs on the training thread; `commit` may run in any other thread.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Final

from checkpoints import reader, writer
from checkpoints.buffers import Buffers, Snapshot
from checkpoints.catalog import Catalog, CheckpointInfo, split_address, told
from checkpoints.errors import CheckpointError, DamagedError, NoCheckpointError, OptionError
from checkpoints.generations import newest_generation
from checkpoints.policy import newest_first, retained
from checkpoints.retention import Retention

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from checkpoints.canonical import JSON
    from checkpoints.layout import CheckpointName, Manifest
    from checkpoints.store import Store

__all__ = ["CheckpointInfo", "CheckpointManager", "Snapshot", "split_address"]

logger = logging.getLogger(__name__)

PART_BYTES: Final = 64 << 20
SPLIT_BYTES: Final = 5_000_000_000


class CheckpointManager:
    """The checkpoints at one URL, for one writer and any number of readers."""

    def __init__(
        self,
        store: Store,
        *,
        keep: int = 3,
        keep_every: int | None = None,
        part_bytes: int = PART_BYTES,
        split_bytes: int = SPLIT_BYTES,
        fence: Callable[[], None] | None = None,
    ) -> None:
        """Open the checkpoints at a store; nothing is read or written yet.

        Args:
            store: The run's URL.
            keep: How many of the newest stay.
            keep_every: Of every so many steps one stays for ever.
            part_bytes: The most that one checksum covers.
            split_bytes: Files of tensors are split so that none is larger, where tensors allow it.
            fence: Called right before each commit; raises SupersededError or PartedError.
        """
        numbers = {"keep": keep, "keep_every": 1 if keep_every is None else keep_every}
        numbers |= {"part_bytes": part_bytes, "split_bytes": split_bytes}
        for key, value in numbers.items():
            if type(value) is not int or value < 1:
                raise OptionError(f"{key}: found {value!r}, expected a whole number of at least 1")
        self.store = store
        self.catalog = Catalog(store)
        self._keep = keep
        self._keep_every = keep_every
        self._part_bytes = part_bytes
        self._fence = fence
        self._buffers = Buffers(split_bytes=split_bytes)
        self._commits = threading.Lock()
        self._damaged: set[CheckpointName] = set()
        self._verified: set[CheckpointName] = set()
        self._base: Manifest | None = None
        self._retention = Retention(self.catalog)

    # ------------------------------------------------------------------------------------- writing
    def stage(
        self,
        tree: Mapping[str, object],
        *,
        name: CheckpointName,
        parent: CheckpointName | None,
        run_id: str,
        info: Mapping[str, JSON],
    ) -> Snapshot:
        """Copy a state to host memory, now; the live tensors may change once this returns.

        Args:
            tree: `model` is a flat dict of name and tensor; what else holds tensors goes to a file
                of its key, everything that is no tensor to state.json.
            name: The generation and step of the state.
            parent: The checkpoint that its generation began from.
            run_id: Whose state it is.
            info: What is told of it without reading it.

        Raises:
            UnsupportedStateError: Something is neither tensor nor JSON, or the info is larger than
                1 MiB; names the key.
            OptionError: `run_id` is empty or longer than 200 characters.
        """
        return self._buffers.stage(tree, name=name, parent=parent, run_id=run_id, info=info)

    def commit(
        self, snapshot: Snapshot, *, protect: Collection[CheckpointName] = ()
    ) -> CheckpointInfo:
        """Make a snapshot durable. Any thread, one at a time; no collectives.

        A snapshot whose commit failed stays held and can be committed again, or released.

        Args:
            snapshot: From `stage`; its memory is given back once it is committed.
            protect: Checkpoints that retention has to leave, such as the best.

        Raises:
            SupersededError, PartedError: From the fence; nothing was committed.
            CheckpointError: The store failed, or the name was swept.
        """
        with self._commits:
            manifest = writer.write(
                self.store,
                snapshot,
                part_bytes=self._part_bytes,
                fence=self._fence,
                base=self._base or self._parent_of(snapshot),
            )
            snapshot.release()
            self.catalog.add(manifest)
            self._base = manifest
            try:
                self._retain(manifest, protect)
            except (CheckpointError, OSError) as error:
                logger.warning(
                    "%s: old checkpoints stay for now, since deleting them failed: %s",
                    self.store.display_url,
                    error,
                )
        return told(manifest)

    def _parent_of(self, snapshot: Snapshot) -> Manifest | None:
        """The checkpoint that the generation began from: it was verified when it was restored."""
        if snapshot.parent is None or snapshot.parent in self._damaged:
            return None
        try:
            return self.catalog.manifest(snapshot.parent)
        except (NoCheckpointError, DamagedError):
            return None

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until no commit is under way; False if that took longer than `timeout_s`."""
        if not self._commits.acquire(timeout=-1 if timeout_s is None else timeout_s):
            return False
        self._commits.release()
        return True

    def adopt(self) -> tuple[()]:
        """Take over the snapshots that a writer before this one left; there are none yet."""
        return ()

    def close(self) -> None:
        """Finish what is under way and let the buffers go."""
        self.wait()
        self._buffers.close()

    # ------------------------------------------------------------------------------------- reading
    def names(self) -> list[CheckpointName]:
        """The committed checkpoints, newest first: listed anew each time, damaged ones included."""
        return self.catalog.names()

    def next_generation(self) -> int:
        """One more than any generation that has left a name here: for a loop of one's own, at each start.

        Damaged and swept checkpoints count too: their names are never free again.
        """
        used = [name.generation for name in self.catalog.inventory().files]
        return max([newest_generation(self.store), *used]) + 1

    def latest(self, exclude: Collection[CheckpointName] = ()) -> CheckpointName | None:
        """The newest committed checkpoint that is not excluded."""
        return self.catalog.latest(exclude)

    def info(self, name: CheckpointName) -> CheckpointInfo:
        """What is told of a checkpoint without reading its state.

        Raises:
            NoCheckpointError: There is no such checkpoint.
            DamagedError: The manifest does not verify.
        """
        return self.catalog.info(name)

    def resolve(self, which: str) -> CheckpointName:
        """The checkpoint meant by `latest`, `best`, a step (its newest generation) or a full name.

        Raises:
            NoCheckpointError: There is no such checkpoint.
        """
        return self.catalog.resolve(which)

    def restore(
        self, name: CheckpointName, *, keys: Collection[str] | None = None
    ) -> dict[str, object]:
        """The state in a checkpoint, every byte verified; its tensors are in host memory.

        Args:
            name: Which one.
            keys: The top-level keys that are wanted, e.g. ("model",); None: all, verifying all.

        Raises:
            NoCheckpointError: There is no such checkpoint.
            DamagedError: Something does not verify; names the file.
        """
        try:
            self.catalog.forget(name)  # a restore trusts nothing that it has not read itself
            tree = reader.restore(self.store, self.catalog.manifest(name), keys=keys)
        except DamagedError:
            self._damaged.add(name)
            self._base = None  # a file of it may be what is damaged
            raise
        if keys is None:
            self._verified.add(name)
            if self._base is None or self._base.name < name:
                self._base = self.catalog.manifest(name)
        return tree

    def restore_newest(
        self, *, exclude: Collection[CheckpointName] = (), keys: Collection[str] | None = None
    ) -> tuple[CheckpointInfo, dict[str, object]] | None:
        """The newest checkpoint that verifies; None where there is none. Failures are logged."""
        left_out = set(exclude)
        while (name := self.latest(left_out)) is not None:
            try:
                return self.info(name), self.restore(name, keys=keys)
            except (DamagedError, NoCheckpointError) as error:
                logger.error("%s; the checkpoint before it is tried", error)  # noqa: TRY400  # one line
                left_out.add(name)
        return None

    # ----------------------------------------------------------------------------------- retention
    def _retain(self, manifest: Manifest, protect: Collection[CheckpointName]) -> None:
        """Delete what need not stay, now that a checkpoint was committed; only what is older."""
        committed = manifest.name
        found = self.catalog.inventory()
        found.committed[committed] = manifest
        good = {
            name
            for name, read in found.committed.items()
            if read and name not in self._damaged and name <= committed
        } - found.left_behind | {committed}
        stay = retained(good, keep=self._keep, keep_every=self._keep_every, protected=protect)
        going = sorted(name for name in good - stay if name < committed)
        # What is damaged does not count, and goes once enough good ones are newer.
        if len(good) >= self._keep:
            floor = min(committed, newest_first(good)[self._keep - 1])
            ruins = found.committed.keys() - good - found.left_behind - set(protect)
            going += sorted(name for name in ruins if name < floor)
        # No reader looks at what a rollback left behind, now that its generation has committed.
        going += sorted(name for name in found.left_behind if name < committed)
        if self._fence is not None and (going or found.unfinished):
            self._fence()  # only the newest generation's writer deletes
        if going and not self._verified & stay:
            # The last one that was read back goes only when the new one was read back, too.
            self._read_back(manifest)
        self._retention.delete(going, found)
        self._retention.sweep([name for name in found.unfinished if name < committed], found)
        self._retention.take_names(found.bare)
        self._retention.clear(found, going)

    def _read_back(self, manifest: Manifest) -> None:
        try:
            reader.verify(self.store, reader.read_manifest(self.store, manifest.name))
        except DamagedError:
            self._damaged.add(manifest.name)
            self._base = None
            raise
        self._verified.add(manifest.name)
