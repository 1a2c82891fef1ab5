"""The run: position, state, saving, signals and restart, for the project's loop and for anyone's own.

Promises: what is told to one door is tested by the other, since both stand on this object. A step is
counted when its update is done; a save, a signal or an early end is agreed by all ranks at a step's
boundary; a generation commits a step at most once. How a step is computed is not known here.
"""

import contextlib
import logging
import time
from collections.abc import Iterator, Mapping
from typing import Final, Literal

from checkpoints.errors import PartedError, SupersededError
from elastic import finding, resume
from elastic.agreement import Agreed, Request
from elastic.errors import AttentionError, ElasticError, PeersLeftError, PreemptedError
from elastic.metrics import Status
from elastic.nonfinite import check_rollbacks, unfit
from elastic.saves import Saves
from elastic.saving import is_due, is_due_at_epoch_end
from elastic.summary import now_s
from elastic.weights import model_tensors, parameter_names, weights_sha256

__all__ = ["Run"]

logger = logging.getLogger(__name__)

_FENCE_S: Final = 5.0
_LEAVE_S: Final = 20.0
"""How long a leaving generation waits for its last checkpoint; launchers kill after 30 seconds."""
_DRAIN_S: Final = 60.0
"""How long a rollback waits for the checkpoints that are on their way."""
_PEER_S: Final = 3.0
_POLL_S: Final = 0.05


class Run(Saves):
    """One generation of a run, on one rank.

    In order: made, `identify`, `claim`, `restore`, then `epochs` around steps that are `count`ed and
    `settle`d; `finish` is the end of `epochs`, `close` the end of all.
    """

    @property
    def step(self) -> int:
        """Steps of the run that are done."""
        return self.progress.step

    @property
    def epoch(self) -> int:
        """The epoch, counted from 0."""
        return self.progress.epoch

    def log(self, **values: float) -> None:
        """Add named numbers to the journal line of the next step that is counted."""
        self.records.log(values)

    def stop(self, reason: str = "run.stop() was called") -> None:
        """Ask for an early, orderly end; the primary's word counts, all ranks end together."""
        self._stop_asked = reason

    def epochs(self, epochs: int) -> Iterator[int]:
        """Yield the epochs that are still to do, from the resumed one; then finish the run.

        The body trains the rest of the epoch's steps and does what belongs to its end.
        """
        self.epochs_planned = epochs
        while not self.over:
            self._session.slot.beat(self.progress.step, "first batch")
            yield self.progress.epoch
            if self.at_epoch_end:
                self.end_epoch()
            elif not self.over:
                self.left_early()
        self.finish()

    def left_early(self) -> None:
        """The body of `epochs` has ended before its epoch did."""

    @property
    def has_stepped(self) -> bool:
        """Whether this generation has done a step."""
        return self._stepped

    @property
    def over(self) -> bool:
        """Whether the run has come to its end: as planned, or stopped on purpose."""
        at = self.progress
        done = self.epochs_planned is not None and at.epoch >= self.epochs_planned
        limit = self.max_steps is not None and at.step >= self.max_steps
        return done or limit or at.stopped is not None

    @property
    def at_epoch_end(self) -> bool:
        """Whether all steps of the epoch are done and its end is not."""
        return self.epoch_samples is not None and self.progress.position >= self.epoch_samples

    def request(self, *, evaluate: bool = False) -> Request:
        """What this rank says in the next step's agreement."""
        self._session.signals.arm()
        phase = "step" if self._stepped else "first step"
        self._session.slot.beat(self.progress.step + 1, phase)
        signals = self._session.signals
        self._look_at_limit()
        self.look_after_saves()
        if self._saver is None or self._watch is None:
            return Request(leave=signals.leave, notice=signals.notice, paces=self.paces.told())
        return Request(
            leave=signals.leave,
            notice=signals.notice,
            save=self._saver.wants,
            memory=self._saver.wants_memory,
            evaluate=evaluate,
            paces=self.paces.told(),
            stop=self._stop_asked is not None,
            superseded=isinstance(self._saver.fenced or self._watch.found, SupersededError),
            parted=isinstance(self._saver.fenced or self._watch.found, PartedError),
        )

    def signals(self) -> tuple[bool, bool]:
        """Whether SIGTERM has come to this rank, and whether its node is to leave."""
        signals = self._session.signals
        return signals.leave, signals.notice

    def count(
        self,
        samples: int,
        *,
        loss: float,
        values: Mapping[str, float],
        skipped: bool = False,
    ) -> None:
        """Count the step whose update is done or skipped. Every rank."""
        self.paces.stop()
        self._stepped = True
        if skipped:
            self.records.audit(self.progress, [], skipped=True)
        self.progress.count_step(samples, skipped=skipped)
        self._loss = loss
        self.records.step(self.progress, samples, loss=loss, skipped=skipped, values=values)
        if self.is_primary:
            self.records.console.update(samples, self._status)
        if self._limit is not None:
            self._limit.count_step()
        if self.at_first_step is not None:
            self.at_first_step()
            self.at_first_step = None
        if self._setup.step_delay_s:
            time.sleep(self._setup.step_delay_s)

    def settle(self, agreed: Agreed) -> None:
        """After a step and its evaluation: end, leave or save, as all ranks agreed. Every rank.

        Raises:
            OverruledError: The run belongs to a newer launch.
            PreemptedError: Told to leave; the state is saved.
        """
        if agreed.superseded or agreed.parted:
            raise self._overruled(superseded=agreed.superseded)
        if agreed.leaving:
            self.leave()
        if agreed.stop:
            self.progress.stopped = self._stop_asked or "the primary asked for it"
        if agreed.save or is_due(self._setup.checkpoint.every, self.progress.step):
            self._save_deferred = True
        # At an epoch's last step the save waits for the epoch's end, which belongs to the state.
        memory = self._setup.checkpoint.tier.memory
        if self._save_deferred and not self.at_epoch_end:
            self.save()
        elif agreed.memory or is_due(memory, self.progress.step) or self._save_deferred:
            self.remember()
        self.look_at_paces(agreed.paces)
        self.begin_step()

    def begin_step(self) -> None:
        """What comes next belongs to the next step: its batch, its forward and backward. Every rank."""
        self._session.slot.beat(self.progress.step, "load")
        self.paces.start()

    @contextlib.contextmanager
    def in_phase(self, phase: str) -> Iterator[None]:
        """Around what has a bound of its own before it counts as hung."""
        slot = self._session.slot
        before = slot.phase
        slot.enter(phase)
        try:
            yield
        finally:
            slot.enter(before)

    def alive(self) -> None:
        """Say that what takes long here goes on well: `hang_after` counts anew from now. Any rank, often if you like."""
        self._session.slot.enter(self._session.slot.phase)

    def is_left_out(self, samples: int) -> bool:
        """Whether the step of `samples` samples to come is one that a rollback leaves out."""
        at = self.progress
        return any(
            epoch == at.epoch and at.position <= start < at.position + samples
            for epoch, start in self._skips
        )

    def roll_back(self, why: str) -> None:
        """Return to the newest fit checkpoint, as a new generation of the same processes. Collective.

        The step to come is the one that was refused: it is left out when it comes again.

        Raises:
            AttentionError: There is none, or returning has not helped so far.
            OverruledError: A newer launch owns the run.
        """
        at, began = self.progress, now_s()
        self._session.slot.beat(at.step, "rollback")
        self.drain(_DRAIN_S)
        parameters = set(parameter_names(self._attached).values())
        found = finding.find_state(
            self.world, self.manager, None, unfit=lambda tree: unfit(tree, parameters)
        )
        if found.name is None:
            raise AttentionError(f"{why}; there is no checkpoint to return to")
        check_rollbacks(self._claimed.rollbacks, found.name, why)
        back = resume.Return(
            to=found.name,
            skip=((at.epoch, at.position),),
            cause=f"rollback to {found.name}: step {at.step + 1} is not finite",
        )
        if self.is_primary:
            logger.warning("%s; the run returns to checkpoint %s", why, found.name)
        spent = self.records.ledger.totals()
        self.records.event("rollback", step=at.step, to=str(found.name), why=why, spent=spent)
        self._end_records()
        self._save_deferred = False
        self._claim_next([], back)
        self._return_to(found, began)
        self.records.ledger.start()

    def save_soon(self) -> None:
        """Make a checkpoint at the next boundary (a best evaluation). Every rank alike."""
        self._save_deferred = self._keep_next = True

    def end_epoch(self) -> None:
        """The epoch's end is done: move on, and save where it is due. Every rank."""
        options = self._setup.checkpoint
        due = is_due_at_epoch_end(options.every, self.progress.epoch)
        remember = is_due_at_epoch_end(options.tier.memory, self.progress.epoch)
        self.progress.end_epoch()
        if due or self._save_deferred:
            self.save()
        elif remember:
            self.remember()

    def leave(self) -> None:
        """Save, wait for it together, and end this generation. Collective.

        Raises:
            PreemptedError: This rank was told to leave and the state is saved.
            PeersLeftError: Others were told to leave, and the state is saved.
            ElasticError: It could not be saved.
        """
        self.left = True
        self._look_at_limit(together=True)
        within_s = _LEAVE_S if self._limit is None else max(_LEAVE_S, self._limit.left_s)
        saved = self.make_durable(within_s)
        signals = self._session.signals
        if self.is_primary:
            self._write_left(saved=saved)
        self.world.barrier()
        if not saved:
            beside = (
                "; the writer goes on with it, and a start on this node meanwhile begins from it"
                if self._beside
                else ""
            )
            raise ElasticError(
                f"told to leave, but the state of step {self.progress.step} could not be saved in time{beside}; the last "
                "checkpoint stays"
            )
        deadline = time.monotonic() + _PEER_S
        # A change of membership signals every node, but not at one moment.
        while not signals.pending and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        if signals.pending:
            raise PreemptedError(
                f"told to leave: the state of step {self.progress.step} is saved; it goes on from there at the next start"
            )
        raise PeersLeftError(
            f"other workers were told to leave: the state of step {self.progress.step} is saved, this node's start again"
        )

    def leave_unused(self) -> None:
        """Say that the run is preempted, where this generation is told to leave before it has done a step.

        What it began from in memory alone is further than the store: such a run says so only once it is saved.
        """
        if self.is_primary and self._records is not None and self._restored_from in {"", "store"}:
            self._write_left(saved=True)

    def _write_left(self, *, saved: bool) -> None:
        spent = self.records.ledger.totals()
        self.records.event("leave", step=self.progress.step, saved=saved, spent=spent)
        self.records.flush()
        self.records.summarize("preempted" if saved else "running", self.progress)

    def finish(self) -> None:
        """The run is over: save the last state, write the summary, wait for each other. Collective.

        Raises:
            ElasticError: Told to leave before the last state could be saved.
        """
        if self._finished:
            return
        self._session.slot.beat(self.progress.step, "finish")
        while not self.make_durable(_FENCE_S):
            if self.world.flags_async(int(self._session.signals.pending)).wait():
                raise ElasticError("told to leave before the last state could be saved")
            time.sleep(_POLL_S)
        if self.is_primary:
            self._write_end()
        self.world.barrier()
        self._session.signals.ignore()
        self._finished = True

    def _write_end(self) -> None:
        at = self.progress
        status: Literal["complete", "stopped"] = "complete" if at.stopped is None else "stopped"
        spent = self.records.ledger.totals()
        self.records.event("end", status=status, step=at.step, spent=spent)
        self.records.flush()
        sha = weights_sha256(model_tensors(self._attached))
        self.records.summarize(status, at, weights_sha256=sha)
        figures = "".join(f", {name} {value:.4g}" for name, value in at.metrics.items())
        skipped = f" ({at.skipped_steps} of them skipped)" if at.skipped_steps else ""
        why = f" ({at.stopped})" if at.stopped else ""
        saved = "" if self._saver is None else f"; the model is checkpoint {self._saver.newest}"
        self.records.console.say(
            f"{status}{why}: {at.epoch} epochs, {at.step} steps{skipped}{figures}{saved} at {self.store.display_url}"
        )

    def told_to_leave(self) -> bool:
        """Whether this rank was told to leave."""
        self._look_at_limit()
        return self._session.signals.pending

    def _look_at_limit(self, *, together: bool = False) -> None:
        """Where the time is nearly up it is a notice to this node."""
        save_s = None if self._saver is None else self._saver.took_s
        if self._limit is not None and self._limit.is_near(save_s, together=together):
            self._session.signals.note(f"{self.limited_by}: the time is nearly up")

    def evaluated(self, metrics: Mapping[str, float]) -> None:
        """Write down an evaluation of the present step. Every rank."""
        at = self.progress
        figures = {k: v for k, v in metrics.items() if abs(v) < float("inf")}
        self.records.event(
            "eval",
            step=at.step,
            epoch=at.epoch,
            metrics=figures,
            spent=self.records.ledger.totals(),
        )
        if self.is_primary:
            shown = "  ".join(f"{name} {value:.4g}" for name, value in metrics.items())
            self.records.console.say(f"epoch {at.epoch + 1}  step {at.step}  evaluation: {shown}")

    def _status(self) -> Status:
        at = self.progress
        saved = None if self._saver is None else self._saver.newest
        return Status(
            epoch=at.epoch,
            epochs=self.epochs_planned,
            step=at.step,
            loss=self._loss,
            samples=at.samples,
            world_size=self.world.world_size,
            saved_step=None if saved is None else saved.step,
            goodput=self.records.goodput(at),
        )
