"""When a checkpoint is made, by whom, and what a store that fails means for the run.

Promises: a step is committed at most once by a generation; a save that fails never harms the run: it
is told at once, tried again, and only `checkpoint.max_unsaved` ends the run. Decisions that need a
clock are the primary's and reach the others through the step's agreement.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from checkpoints.errors import (
    CheckpointError,
    PartedError,
    StoreError,
    SupersededError,
)
from checkpoints.layout import CheckpointName
from checkpoints.manager import CheckpointManager
from checkpoints.messages import LostError, Message
from checkpoints.options import CheckpointOptions, Interval
from checkpoints.snapshots import Snapshot
from elastic.errors import AttentionError
from elastic.keeping import Keeper
from elastic.pacing import Pace

__all__ = ["Clocked", "Outcome", "Saver", "is_due"]

logger = logging.getLogger(__name__)

_QUICK_S: Final = 0.5
"""A checkpoint that takes less is waited for before the next one is begun."""
_RETRY_S: Final = 15.0
_SMALL_BYTES: Final = 8 << 20
_FAST_S: Final = 1.0

Outcome = Literal["saved", "waiting", "failed"]


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
    """Makes checkpoints for one generation. Primary only."""

    def __init__(
        self,
        manager: CheckpointManager,
        options: CheckpointOptions,
        keeper: Keeper,
        *,
        run_id: str,
        generation: int,
        parent: CheckpointName | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Save into `manager`, or by the keeper's writer, as `generation`, which began from `parent`."""
        self._manager, self._options, self._keeper = manager, options, keeper
        self._run_id, self._generation, self._parent = run_id, generation, parent
        self._clock = clock
        # Where both tiers pace themselves they share the budget.
        tiers = options.every.is_auto + options.tier.memory.is_auto
        budget = options.budget / max(1, tiers)
        self.pace = Pace("checkpoint.every", options.every, budget=budget, clock=clock)
        self.memory_pace = Pace(
            "checkpoint.tier.memory", options.tier.memory, budget=budget, clock=clock
        )
        self._held: Snapshot | None = None
        self._pending: set[CheckpointName] = set()
        self._took_s = 0.0
        self._unsaved_since: float | None = None
        self._retry_at: float | None = None
        self._costs: dict[CheckpointName, float] = {}
        self.last: CheckpointName | None = None
        """The newest checkpoint that this generation has committed."""
        self.last_error: str | None = None
        self.fenced: SupersededError | PartedError | None = None
        """What the writer found at the fence."""

    @property
    def newest(self) -> CheckpointName | None:
        """The newest checkpoint of this lineage."""
        return self.last or self._parent

    @property
    def took_s(self) -> float | None:
        """How long the newest checkpoint took, from its snapshot to its commit; None before the first."""
        return self._took_s or None

    @property
    def wants(self) -> bool:
        """Whether the clock asks for a checkpoint: the interval's, or a failed one's."""
        if self._retry_at is not None:
            return self._clock() >= self._retry_at
        return self.pace.is_due

    @property
    def wants_memory(self) -> bool:
        """Whether the clock asks for a snapshot in memory."""
        return self._keeper.writes_beside and self.memory_pace.is_due

    def name(self, step: int) -> CheckpointName:
        """What a checkpoint of `step` is called."""
        return CheckpointName(generation=self._generation, step=step)

    def is_begun(self, step: int) -> bool:
        """Whether the checkpoint of `step` is made, or on its way."""
        name = self.name(step)
        return name == self.last or name in self._pending

    # ----------------------------------------------------------------------------- by the writer
    def await_quick(self, limit_s: float) -> None:
        """Where checkpoints are quick to make, let the one before be made and not be replaced by this one.

        So a small state has a checkpoint at each step that asks for one, and a large or slow one never waits.
        """
        if self._pending and self._took_s < _QUICK_S:
            self._keeper.wait(limit_s)

    def begin(self, step: int) -> None:
        """The checkpoint of `step` is being taken: it counts as begun."""
        self.pace.restart()
        self._retry_at = None
        self._pending.add(self.name(step))

    def await_turn(self, size_bytes: int) -> None:
        """Let a small state's earlier save go first, where the store is fast: then none is left out.

        A large state, or a slow store, never makes the loop wait: there the newer one replaces it.
        """
        if size_bytes <= _SMALL_BYTES and self._took_s <= _FAST_S and self._unsaved_since is None:
            self._keeper.await_turn(2 * _FAST_S)

    def defer(self) -> None:
        """There was no memory for a snapshot: the save is wanted at the next step."""
        self._retry_at = self._clock()

    def offer(self, snapshot: Snapshot, *, protect: Sequence[str], keep: bool) -> None:
        """Give a whole snapshot to the writer, or write it here where there is none any more. Any thread."""
        protected = list(protect)
        if self.last is None and self._parent is not None:
            protected.append(
                str(self._parent)
            )  # until there is an own one, it is what a restart needs
        try:
            self._keeper.offer(snapshot, protect=protected, keep=keep)
        except LostError as error:
            self._lose_writer(error)

    def make_parent_durable(self, path: str) -> None:
        """The state that this generation began from lies in memory alone: save that, under its own name."""
        if self._parent is None:
            return
        try:
            if self._parent not in self._manager.names() and self._keeper.offer_held(path):
                self._pending.add(self._parent)
        except LostError as error:
            self._lose_writer(error)
        except StoreError as error:
            logger.warning("checkpoint %s is not made: %s", self._parent, error)

    def _lose_writer(self, error: LostError) -> None:
        logger.error("%s; from now on the loop waits for each save", error)
        # The writer may live and commit it yet: the very snapshot is committed here, never another of that step.
        self._held = self._keeper.give_up_writer() or self._held
        self._pending.clear()
        self._retry_at = self._clock()

    def look(self, note: Callable[[Message], None]) -> None:
        """Take in what the writer has said; `note` is called with each result. Often.

        Raises:
            AttentionError: Nothing could be saved for `checkpoint.max_unsaved`.
        """
        try:
            messages = self._keeper.look()
        except LostError as error:
            self._lose_writer(error)
            return
        for message in messages:
            self._take_in(message)
            note(message)
        if self._unsaved_since is not None:
            self._check_unsaved(self.last_error or "no reason given")

    def _take_in(self, message: Message) -> None:
        if "name" not in message:
            return
        name = CheckpointName.parse(message["name"])
        own = name.generation == self._generation
        match message["op"]:
            case "committed":
                self._pending.discard(name)
                self._keeper.note_known(name)
                self._took_s = float(message["seconds"])
                self._saved(name if own else None)
                cost = self._costs.pop(name, 0.0) + float(message.get("cpu_s", 0.0))
                self._tell(self.pace.cost(cost, took_s=float(message["seconds"])))
            case "failed":
                final = bool(message["final"])
                if final:
                    self._pending.discard(name)
                self._fail(name.step, str(message["error"]), retry=final)
            case "replaced" | "dropped":
                self._pending.discard(name)
            case "fenced":
                self._pending.discard(name)
                kind = SupersededError if message["superseded"] else PartedError
                self.fenced = kind(str(message["error"]))

    def note_cost(self, name: CheckpointName, cost_s: float) -> None:
        """What taking the snapshot of a checkpoint has cost the loop."""
        self._costs[name] = cost_s

    def note_memory_cost(self, cost_s: float) -> None:
        """What a snapshot in memory has cost the loop."""
        self._tell(self.memory_pace.cost(cost_s))

    @staticmethod
    def _tell(note: str | None) -> None:
        if note is not None:
            logger.info("%s", note)

    def outcome(self, step: int, wait_s: float, note: Callable[[Message], None]) -> Outcome:
        """What has become of the checkpoint of `step`, after waiting a little.

        Raises:
            AttentionError: Nothing could be saved for `checkpoint.max_unsaved`.
        """
        name = self.name(step)
        if name in self._pending:
            self._keeper.wait(wait_s)
        failed = self._unsaved_since
        self.look(note)
        if self.last == name:
            return "saved"
        if name in self._pending and (self._unsaved_since is None or failed is not None):
            return "waiting"
        return "failed"

    # ------------------------------------------------------------------------------ by this process
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
        self.pace.restart()
        held, self._held = self._held, None
        if held is not None and held.name != name:
            held.release()
            held = None
        began = self._clock()
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
        self._saved(name)
        took_s = self._took_s = self._clock() - began
        self._tell(self.pace.cost(took_s, took_s=took_s))
        return True

    def _saved(self, name: CheckpointName | None) -> None:
        self.last = name or self.last
        self._unsaved_since = self._retry_at = self.last_error = None

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
        self._fail(step, str(error), retry=True)

    def _fail(self, step: int, error: str, *, retry: bool) -> None:
        now = self._clock()
        if self._unsaved_since is None:
            self._unsaved_since = now
        if retry:
            self._retry_at = now + _RETRY_S
        self.last_error = error
        saved = f"the last one is {self.newest}" if self.newest else "there is none yet"
        logger.error(
            "the checkpoint of step %d was not saved (%s); training goes on, %s, next try in %.0f s",
            step,
            error,
            saved,
            _RETRY_S,
        )
        self._check_unsaved(error)

    def _check_unsaved(self, error: str) -> None:
        unsaved = 0.0 if self._unsaved_since is None else self._clock() - self._unsaved_since
        if unsaved >= self._options.max_unsaved:
            saved = f"the last one is {self.newest}" if self.newest else "there is none yet"
            raise AttentionError(
                f"checkpoint.max_unsaved: nothing could be saved for {unsaved:.0f} s (limit "
                f"{self._options.max_unsaved:.0f} s): {error}; {saved}"
            )
