"""When a checkpoint is made, by whom, and what a store that fails means for the run.

Promises: a step is committed at most once by a generation; a save that fails never harms the run: it
is told at once, tried again, and only `checkpoint.max_unsaved` ends the run. Decisions that need a
clock are the primary's and reach the others through the step's agreement.
"""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from checkpoints.errors import CheckpointError, StoreError
from checkpoints.layout import CheckpointName
from checkpoints.manager import CheckpointManager
from checkpoints.options import CheckpointOptions, Interval
from elastic.errors import AttentionError

if TYPE_CHECKING:
    from checkpoints.buffers import Snapshot

__all__ = ["Clocked", "Saver", "is_due"]

logger = logging.getLogger(__name__)

_RETRY_S: Final = 15.0


def is_due(interval: Interval, step: int) -> bool:
    """Whether an interval in steps asks for something after step `step`."""
    return interval.kind == "steps" and step % round(interval.count) == 0


def is_due_at_epoch_end(interval: Interval, epoch: int) -> bool:
    """Whether an interval in epochs asks for something at the end of epoch `epoch` (from 0)."""
    return interval.kind == "epochs" and (epoch + 1) % round(interval.count) == 0


@dataclass(kw_only=True, slots=True)
class Clocked:
    """An interval in seconds, by the primary's monotonic clock, since the last one began."""

    interval: Interval
    clock: Callable[[], float] = time.monotonic
    began: float = field(default=0.0)

    def restart(self) -> None:
        """Count from now on."""
        self.began = self.clock()

    @property
    def due(self) -> bool:
        """Whether the time is up."""
        return self.interval.kind == "seconds" and self.clock() - self.began >= self.interval.count


class Saver:
    """Makes checkpoints for one generation. Primary only, but for `asked`."""

    def __init__(
        self,
        manager: CheckpointManager,
        options: CheckpointOptions,
        *,
        run_id: str,
        generation: int,
        parent: CheckpointName | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Save into `manager` as `generation`, which began from `parent`."""
        self._manager, self._options, self._clock = manager, options, clock
        self._run_id, self._generation, self._parent = run_id, generation, parent
        self.clocked = Clocked(interval=options.every, clock=clock)
        self.clocked.restart()
        self._held: Snapshot | None = None
        self._unsaved_since: float | None = None
        self._retry_at = 0.0
        self.last: CheckpointName | None = None
        self.last_error: str | None = None

    @property
    def newest(self) -> CheckpointName | None:
        """The newest checkpoint of this lineage."""
        return self.last or self._parent

    @property
    def wants(self) -> bool:
        """Whether the clock asks for a checkpoint: the interval's, or a failed one's."""
        if self._unsaved_since is not None:
            return self._clock() >= self._retry_at
        return self.clocked.due

    def name(self, step: int) -> CheckpointName:
        """What a checkpoint of `step` is called."""
        return CheckpointName(generation=self._generation, step=step)

    def save(
        self, tree: Mapping[str, object], *, step: int, info: Mapping[str, Any], protect: list[str]
    ) -> bool:
        """Make a checkpoint of `tree` now; False where the store did not take it.

        Raises:
            SupersededError: The run belongs to a newer launch.
            PartedError: The run went on without this world's agents.
            AttentionError: Nothing could be saved for `checkpoint.max_unsaved`.
            UnsupportedStateError: The state holds what is neither tensor nor JSON.
        """
        name = self.name(step)
        if self.last == name:
            return True
        self.clocked.restart()
        held, self._held = self._held, None
        if held is not None and held.name != name:
            held.release()
            held = None
        try:
            # One whose manifest may have arrived is committed again: its name cannot be used anew.
            held = held or self._manager.stage(
                tree, name=name, parent=self._parent, run_id=self._run_id, info=info
            )
            keep = [CheckpointName.parse(text) for text in protect]
            self._manager.commit(held, protect=keep)
        except StoreError as error:
            self._held = held
            self.put_off(step, error)
            return False
        self.last, self._unsaved_since, self.last_error = name, None, None
        return True

    def release(self) -> None:
        """Let go of what could not be saved: its generation has ended."""
        if self._held is not None:
            self._held.release()
            self._held = None

    def put_off(self, step: int, error: CheckpointError) -> None:
        """Tell that the checkpoint of `step` was not made; it is wanted again soon.

        Raises:
            AttentionError: Nothing could be saved for `checkpoint.max_unsaved`.
        """
        now = self._clock()
        if self._unsaved_since is None:
            self._unsaved_since = now
        self._retry_at = now + _RETRY_S
        self.last_error = str(error)
        saved = f"the last one is {self.newest}" if self.newest else "there is none yet"
        logger.error(
            "the checkpoint of step %d was not saved (%s); training goes on, %s, next try in %.0f s",
            step,
            error,
            saved,
            _RETRY_S,
        )
        unsaved = now - self._unsaved_since
        if unsaved >= self._options.max_unsaved:
            raise AttentionError(
                f"checkpoint.max_unsaved: nothing could be saved for {unsaved:.0f} s (limit "
                f"{self._options.max_unsaved:.0f} s): {error}; {saved}"
            ) from error
