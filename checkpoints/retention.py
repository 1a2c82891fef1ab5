"""Takes away what need not stay: old checkpoints, and what killed writers left.

Promises: a file goes only when no manifest that remains refers to it. Of a checkpoint the manifest goes
first, so that no reader ever takes half of one for whole; where a file of it stays, its name is void from
then on, so that nobody writes over that file. Of what was never committed the name is taken
first, for ever: a writer that was only slow has then either committed, and its checkpoint stays, or it
never will. Cut short at any point, the next one finishes the work.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from checkpoints.errors import DamagedError
from checkpoints.layout import MANIFEST, void_manifest

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from checkpoints.catalog import Catalog, Inventory
    from checkpoints.layout import CheckpointName

logger = logging.getLogger(__name__)


class Retention:
    """Deletes at one URL. What stays is decided elsewhere."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._store = catalog.store
        self._swept: set[CheckpointName] = set()

    def delete(
        self,
        going: Collection[CheckpointName],
        found: Inventory,
        *,
        look_again: bool = False,
    ) -> list[str]:
        """Delete checkpoints and the files that only they needed; returns those files.

        Args:
            going: What to delete.
            found: What lies there.
            look_again: List once more between manifests and files: others may have committed.
        """
        for name in sorted(going):
            self._store.delete(name.manifest)
            self._catalog.forget(name)
        remaining = self._catalog.inventory() if look_again else found
        needed = remaining.needed(without=going)
        deleted: list[str] = []
        staying = []
        for name in sorted(going):
            files = [file for file in found.files[name] if file != MANIFEST]
            unneeded = [file for file in files if name.file(file) not in needed]
            if len(unneeded) == len(files):
                self._store.delete_tree(name.folder)
            else:
                self._delete_files(name, unneeded)
                staying.append(name)
            deleted += [name.file(file) for file in unneeded]
            logger.debug("checkpoint %s: deleted", name)
        self.take_names(staying)  # last: where the disk is full, there is room by now
        return deleted

    def take_names(self, names: Iterable[CheckpointName]) -> None:
        """Let nobody use the names of deleted checkpoints whose folders others still need."""
        for name in names:
            if self._take(name):
                self._catalog.add_void(name)

    def sweep(self, names: Iterable[CheckpointName], found: Inventory) -> list[CheckpointName]:
        """Take away what was begun and never committed; returns the names that are void now."""
        swept = []
        for name in names:
            if not self._take(name):
                continue  # its writer was only slow: now it is committed, and stays
            self._catalog.add_void(name)
            self._delete_files(name, found.unneeded(name))
            self._store.delete_temps(name.folder)
            self._swept.add(name)
            swept.append(name)
            logger.info("checkpoint %s: was never committed; its remains are swept", name)
        return swept

    def clear(self, found: Inventory, going: Collection[CheckpointName] = ()) -> list[str]:
        """Take away what is left of void checkpoints; returns the files.

        A sweep may have been cut short, or a file was needed by another checkpoint until now.

        Args:
            found: What lies there.
            going: Checkpoints of it that are deleted by now.
        """
        deleted = []
        for name in found.void:
            files = found.unneeded(name, without=going)
            if files or name not in self._swept:
                self._delete_files(name, files)
                self._store.delete_temps(name.folder)
                self._swept.add(name)
                deleted += [name.file(file) for file in files]
        return deleted

    def _take(self, name: CheckpointName) -> bool:
        """Make a name void; False where it has a manifest, whatever that is."""
        try:
            return self._store.put_new(name.manifest, void_manifest())
        except DamagedError as error:  # put there by hand
            logger.warning("checkpoint %s: left as it is: %s", name, error)
            return False

    def _delete_files(self, name: CheckpointName, files: Iterable[str]) -> None:
        for file in files:
            self._store.delete(name.file(file))
