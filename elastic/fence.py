"""The fence, looked at now and then: whether a newer generation was claimed while this one trains.

A commit checks the fence anyway; this only makes an older world end soon where it commits seldom.
"""

import logging
import threading
from typing import Final

from checkpoints.errors import PartedError, StoreError, SupersededError
from checkpoints.generations import check_fence
from checkpoints.layout import Claim
from checkpoints.store import Store

__all__ = ["FenceWatch"]

logger = logging.getLogger(__name__)

_FENCE_S: Final = 5.0


class FenceWatch:
    """Looks every few seconds, in its own thread, until it has found something. Primary only."""

    def __init__(self, store: Store, claimed: Claim) -> None:
        """Start looking."""
        self.found: SupersededError | PartedError | None = None
        self._store, self._claim = store, claimed
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fence", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._over.wait(_FENCE_S):
            try:
                check_fence(self._store, self._claim)
            except (SupersededError, PartedError) as error:
                self.found = error
                return
            except StoreError as error:
                logger.debug("the fence could not be looked at: %s", error)

    def stop(self) -> None:
        """End the thread."""
        self._over.set()
        self._thread.join(timeout=1.0)
