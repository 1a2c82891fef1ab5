"""One snapshot made durable by the writer, for the generation that asked: its store, its fence, its words.

Promises: a checkpoint is committed under the name that it was taken under, and only while its generation
is the newest or the newest one's state descends from it; until the newest generation has said from what
it began, its files are written and the commit waits. Only the newest generation's writer deletes.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any, Final

from checkpoints.errors import (
    CheckpointError,
    DamagedError,
    PartedError,
    StoreError,
    SupersededError,
    TransientStoreError,
)
from checkpoints.generations import check_fence, descends_from, newest_generation
from checkpoints.layout import CheckpointName, Claim
from checkpoints.manager import CheckpointManager
from checkpoints.store import open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from checkpoints.layout import Manifest
    from checkpoints.snapshots import Snapshot

logger = logging.getLogger(__name__)

_LOOK_S: Final = 0.3


class Publisher:
    """Publishes snapshots for one generation."""

    def __init__(
        self,
        settings: dict[str, Any],
        committed: Callable[[CheckpointName], None],
        may_wait: Callable[[float], bool],
    ) -> None:
        """Open the store of a trainer.

        Args:
            settings: What the trainer said: url, storage_options, keep, keep_every, part_bytes, claim,
                retry_s, pause_s, damaged.
            committed: Called once a checkpoint is in the store, before any is deleted.
            may_wait: Whether a wait of so many seconds may go on.
        """
        retry_s = float(settings["retry_s"])
        self.pause_s = float(settings["pause_s"])
        self._store = open_store(settings["url"], settings["storage_options"], retry_s=retry_s)
        claim = settings["claim"]
        self._claim = None if claim is None else Claim.from_json(claim.encode(), "claim")
        self._committed, self._may_wait = committed, may_wait
        self._name: CheckpointName | None = None
        self._manager = _Manager(self, self._store, settings)

    def publish(self, snapshot: Snapshot, protect: Collection[CheckpointName]) -> dict[str, Any]:
        """Try once; returns the message that says what came of it."""
        self._name = snapshot.name
        before = time.process_time()
        told: dict[str, Any] = {"name": str(snapshot.name)}
        try:
            info = self._manager.commit(snapshot, protect=protect)
        except (SupersededError, PartedError) as error:
            superseded = isinstance(error, SupersededError)
            mine = self._claim is not None and snapshot.name.generation == self._claim.generation
            logger.warning("checkpoint %s is given up: %s", snapshot.name, error)
            return told | {
                "op": "fenced" if mine else "dropped",
                "error": str(error),
                "superseded": superseded,
            }
        except CheckpointError as error:
            logger.warning("checkpoint %s: %s", snapshot.name, error)
            final = not isinstance(error, StoreError | DamagedError)
            return told | {"op": "failed", "error": str(error), "final": final}
        except Exception as error:
            logger.exception("checkpoint %s", snapshot.name)
            told["error"] = f"{type(error).__name__}: {error}"
            return told | {"op": "failed", "final": True}
        cpu_s = round(time.process_time() - before, 4)
        return told | {"op": "committed", "size_bytes": info.size_bytes, "cpu_s": cpu_s}

    def fence(self) -> None:
        """Return if the checkpoint under way may be committed.

        Raises:
            SupersededError, PartedError: The run has gone on from another state.
            TransientStoreError: The newest generation has not begun, and nobody is left to wait for it.
        """
        name = self._name
        if self._claim is None or name is None:
            return
        began = time.monotonic()
        while (newest := newest_generation(self._store)) > name.generation:
            descends = descends_from(self._store, newest, name)
            if descends:
                return
            if descends is not None:
                self._refuse(name, newest)
            if not self._may_wait(time.monotonic() - began):
                raise TransientStoreError(
                    f"generation {newest} has not said from what it began; not committed"
                )
            time.sleep(_LOOK_S)

    def _refuse(self, name: CheckpointName, newest: int) -> None:
        if self._claim is not None and self._claim.generation < newest:
            check_fence(self._store, self._claim)
        raise PartedError(
            f"checkpoint {name}: generation {newest} began from another state",
            generation=name.generation,
            newest=newest,
        )

    def is_newest(self) -> bool:
        """Whether the generation that this is for is the newest one."""
        return self._claim is None or newest_generation(self._store) <= self._claim.generation

    def note(self, name: CheckpointName) -> None:
        """A checkpoint is in the store."""
        self._committed(name)


class _Manager(CheckpointManager):
    """A manager that says what it has committed before it deletes, and deletes only for the newest."""

    def __init__(self, publisher: Publisher, store: Any, settings: dict[str, Any]) -> None:
        super().__init__(
            store,
            keep=settings["keep"],
            keep_every=settings["keep_every"],
            part_bytes=settings["part_bytes"],
            fence=publisher.fence,
        )
        self._publisher = publisher
        self._damaged |= {CheckpointName.parse(name) for name in settings.get("damaged", ())}

    def _retain(self, manifest: Manifest, protect: Collection[CheckpointName]) -> None:
        self._publisher.note(manifest.name)
        if self._publisher.is_newest():
            super()._retain(manifest, protect)
