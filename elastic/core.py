"""The run: position, state, saving, signals and restart, for the project's loop and for anyone's own.

Promises: what is told to one door is tested by the other, since both stand on this object. A step is
counted when its update is done; a save, a signal or an early end is agreed by all ranks at a step's
boundary; a generation commits a step at most once. How a step is computed is not known here.
"""

from __future__ import annotations

import copy
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import nn

from checkpoints.errors import PartedError, StoreError, SupersededError
from checkpoints.generations import check_fence
from checkpoints.layout import Claim
from checkpoints.manager import CheckpointManager
from checkpoints.store import Store
from elastic import resume, summary
from elastic.agreement import Agreed, Request
from elastic.errors import ElasticError, OverruledError, PreemptedError
from elastic.monitor import Fault
from elastic.opening import Session, Setup, agents_of, faults_of, hello_of, open_run_store, open_world
from elastic.progress import Progress
from elastic.records import Records, status_of
from elastic.saving import Saver, is_due, is_due_at_epoch_end
from elastic.state import TrainState
from elastic.weights import model_tensors, weights_sha256

__all__ = ["Run"]

logger = logging.getLogger(__name__)

_FENCE_S: Final = 5.0
_PEER_S: Final = 3.0
_POLL_S: Final = 0.05


class Run:
    """One generation of a run, on one rank.

    In order: made, `identify`, `claim`, `restore`, then `epochs` around steps that are `count`ed and
    `settle`d; `finish` is the end of `epochs`, `close` the end of all.
    """

    def __init__(
        self, session: Session, setup: Setup, *, code: str, prepare: Callable[[], None]
    ) -> None:
        """Reach the store, meet the other ranks, start the process group. Collective.

        Raises:
            StartError: The start is wrong, on every rank.
            MeetingError: The ranks did not find each other in time.
        """
        self._session, self._setup = session, setup
        self.store: Store = open_run_store(session, setup.checkpoint)
        hello = hello_of(session, setup, code)
        self.world, self._meeting, self._hellos = open_world(session, setup, self.store, hello, prepare)
        self.former_faults: list[Fault] = faults_of(self._hellos)
        self.progress = Progress()
        self.state = TrainState()
        options = setup.checkpoint
        self.manager = CheckpointManager(
            self.store,
            keep=options.keep,
            keep_every=options.keep_every,
            part_bytes=options.part_bytes,
            fence=self._fence,
        )
        self.epochs_planned: int | None = None
        self.max_steps: int | None = None
        self.epoch_samples: int | None = None
        """Samples that an epoch uses; the loader knows."""
        self.keep_best = 0
        self._run_id = ""
        self._model: nn.Module | None = None
        self._claim: Claim | None = None
        self._records: Records | None = None
        self._saver: Saver | None = None
        self._watch: _FenceWatch | None = None
        self._restored: Progress | None = None
        self._loss = float("nan")
        self._save_deferred = False
        self._stop_asked: str | None = None
        self._finished = False

    # ---------------------------------------------------------------------------- what hooks see
    @property
    def step(self) -> int:
        """Steps of the run that are done."""
        return self.progress.step

    @property
    def epoch(self) -> int:
        """The epoch, counted from 0."""
        return self.progress.epoch

    @property
    def generation(self) -> int:
        """The number of this start; 0 before it is claimed."""
        return 0 if self._claim is None else self._claim.generation

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return self.world.device

    @property
    def is_primary(self) -> bool:
        """Whether this is rank 0."""
        return self.world.is_primary

    def log(self, **values: float) -> None:
        """Add named numbers to the journal line of the next step that is counted."""
        self.records.log(values)

    def stop(self, reason: str = "run.stop() was called") -> None:
        """Ask for an early, orderly end; the primary's word counts, all ranks end together."""
        self._stop_asked = reason

    @property
    def records(self) -> Records:
        """The generation's records; they exist once it is claimed."""
        if self._records is None:
            raise ElasticError("records: found no claimed generation, expected claim() before")
        return self._records

    # ---------------------------------------------------------------------------- the start
    def identify(self, identity: Mapping[str, Any]) -> None:
        """Check that the URL holds this run, or create it. Collective.

        Raises:
            StartError: It holds another run: names the first difference.
        """
        self._session.slot.beat(0, "check")
        found = resume.agree_on_run(self.world, self.store, identity, self._setup.accept)
        self._run_id, notes = found
        self.tell(notes)

    def claim(self) -> None:
        """Claim the next generation. Collective.

        Raises:
            OverruledError: A newer launch owns the run.
        """
        self._claim = resume.claim_generation(
            self.world,
            self.store,
            agents=agents_of(self._hellos),
            hosts=[hello["host"] for hello in self._hellos],
            run_id=self._run_id,
            config=self._setup.config,
            faults=self.former_faults,
        )
        self._session.slot.begin(self.world.rank, self.generation)
        self._records = Records(
            self.store,
            self._claim,
            rank=self.world.rank,
            run_id=self._run_id,
            audit=self._setup.audit,
        )
        self._records.faults(self.former_faults)

    def attach(self, *, model: nn.Module, **objects: Any) -> None:
        """Take the objects that make up the state, as code and config just made them."""
        self._model = model
        self.state.attach(model=model, **objects)

    def restore(self, initialize: Callable[[], None]) -> None:
        """Bring the attached state to where the run stands, and begin. Collective.

        `initialize` sets first weights; the primary calls it where nothing is there to restore.

        Raises:
            StartError: The checkpoint does not fit the model.
        """
        self._session.slot.beat(0, "restore")
        found = resume.find_state(self.world, self.manager)
        for damaged in found.damaged:
            self.records.event("damaged", what=damaged)
        if found.tree is None:
            source = self._begin(initialize)
        else:
            source = "store"
            tree = dict(found.tree)
            self.progress = Progress.from_tree(tree.pop("progress"))
            at = self.progress
            self._restored = copy.deepcopy(at)
            self.tell(self.state.restore(tree, steps=at.step, epochs=at.epoch))
        resume.compare_replicas(self.world, self.state.digest(replicated=True))
        if self.is_primary:
            self._begin_records(found, source)
        self.world.barrier()
        self._session.signals.arm()
        self.records.ledger.start()

    def _begin(self, initialize: Callable[[], None]) -> str:
        """Set first weights: the job's own or a file's; the primary's reach everybody."""
        init_from = self._setup.checkpoint.init_from
        if init_from is not None:
            options = self._setup.checkpoint.storage_options
            self.tell(resume.load_initial(self._attached, init_from, options))
        elif self.is_primary:
            initialize()
        self.state.broadcast_model(self.world)
        return "fresh" if init_from is None else "init"

    def _begin_records(self, found: resume.Found, source: str) -> None:
        claimed = self._claimed
        at = self.progress
        resume.say_started(
            self.store,
            claimed,
            found=found,
            source=source,
            step=at.step,
            position=(at.epoch, at.position),
        )
        self._saver = Saver(
            self.manager,
            self._setup.checkpoint,
            run_id=self._run_id,
            generation=self.generation,
            parent=found.name,
        )
        self._watch = _FenceWatch(self.store, claimed)
        began = min(float(hello["began"]) for hello in self._hellos)
        self.records.started(at, parent=found.name, source=source, began=began)

    # ---------------------------------------------------------------------------- the loop
    def epochs(self, epochs: int) -> Iterator[int]:
        """Yield the epochs that are still to do, from the resumed one; then finish the run.

        The body trains the rest of the epoch's steps and does what belongs to its end.
        """
        self.epochs_planned = epochs
        while not self.over:
            yield self.progress.epoch
            if self.at_epoch_end:
                self.end_epoch()
        self.finish()

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
        self._session.slot.beat(self.progress.step + 1, "step")
        signals = self._session.signals
        if self._saver is None or self._watch is None:
            return Request(leave=signals.leave, notice=signals.notice)
        return Request(
            leave=signals.leave,
            notice=signals.notice,
            save=self._saver.wants,
            evaluate=evaluate,
            stop=self._stop_asked is not None,
            superseded=isinstance(self._watch.found, SupersededError),
            parted=isinstance(self._watch.found, PartedError),
        )

    def count(self, samples: int, *, loss: float, skipped: bool = False, **values: float) -> None:
        """Count the step whose update is done or skipped. Every rank."""
        if skipped:
            self.records.audit(self.progress, [], skipped=True)
        self.progress.count_step(samples, skipped=skipped)
        self._loss = loss
        self.records.step(self.progress, samples, loss=loss, skipped=skipped, values=values)
        if self.is_primary:
            self.records.console.update(samples, self._status)
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
        if self._save_deferred and not self.at_epoch_end:
            self.save()

    def save_soon(self) -> None:
        """Make a checkpoint at the next boundary (a best evaluation). Every rank alike."""
        self._save_deferred = True

    def end_epoch(self) -> None:
        """The epoch's end is done: move on, and save where it is due. Every rank."""
        due = is_due_at_epoch_end(self._setup.checkpoint.every, self.progress.epoch)
        self.progress.end_epoch()
        if due or self._save_deferred:
            self.save()

    def save(self) -> bool:
        """Make a checkpoint of the present state. Every rank; the answer is the primary's alone.

        Raises:
            OverruledError: The run belongs to a newer launch.
            AttentionError: Nothing could be saved for too long.
        """
        self._save_deferred = False
        if self.records.audits_in_parts:
            self.records.flush_audit()
            self.world.barrier()
        saver = self._saver
        if saver is None:
            return True
        name = saver.name(self.progress.step)
        if saver.last == name:
            return True
        self._session.slot.beat(self.progress.step, "save")
        if saver.last is None and self.progress == self._restored:
            return True  # nothing has happened since the checkpoint that this generation began from
        self.progress.name_checkpoint(str(name))
        tree = {**self.state.capture(), "progress": self.progress.to_tree()}
        protect = self.progress.protected(self.keep_best)
        began = time.monotonic()
        try:
            with self.records.spend("checkpoint"):
                saved = saver.save(tree, step=self.progress.step, info=self._info(), protect=protect)
        except (SupersededError, PartedError) as error:
            raise self._overruled(superseded=isinstance(error, SupersededError)) from error
        took = round(time.monotonic() - began, 4)
        spent = self.records.ledger.totals()
        if saved:
            self.records.event(
                "checkpoint", step=self.progress.step, checkpoint=str(name), seconds=took, spent=spent
            )
        else:
            self.records.event("save failed", step=self.progress.step, error=saver.last_error)
        self.records.flush()
        return saved

    # ---------------------------------------------------------------------------- the ends
    def leave(self) -> None:
        """Save, wait for it together, and end this generation. Collective.

        Raises:
            PreemptedError: This rank was told to leave and the state is saved.
            ElasticError: Others were told to leave, or the state could not be saved.
        """
        saved = bool(self.world.broadcast(self.save()))
        signals = self._session.signals
        if self.is_primary:
            spent = self.records.ledger.totals()
            self.records.event("leave", step=self.progress.step, saved=saved, spent=spent)
            self.records.flush()
            self.records.summarize("preempted" if saved else "running", self.progress)
        self.world.barrier()
        if not saved:
            raise ElasticError("told to leave, but the state could not be saved; the last checkpoint stays")
        deadline = time.monotonic() + _PEER_S
        # A change of membership signals every node, but not at one moment.
        while not signals.pending and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        if signals.pending:
            raise PreemptedError(
                f"told to leave: the state of step {self.progress.step} is saved; start again to go on"
            )
        raise ElasticError("another node was told to leave: the state is saved, this one restarts")

    def finish(self) -> None:
        """The run is over: save the last state, write the summary, wait for each other. Collective.

        Raises:
            ElasticError: Told to leave before the last state could be saved.
        """
        if self._finished:
            return
        self._session.slot.beat(self.progress.step, "finish")
        while not self.world.broadcast(self.save()):
            if self.world.flags_async(int(self._session.signals.pending)).wait():
                raise ElasticError("told to leave before the last state could be saved")
            time.sleep(_FENCE_S)
        if self.is_primary:
            self._write_end()
        self.world.barrier()
        self._session.signals.ignore()
        self._finished = True

    def _write_end(self) -> None:
        at = self.progress
        status: summary.Status = "complete" if at.stopped is None else "stopped"
        spent = self.records.ledger.totals()
        self.records.event("end", status=status, step=at.step, spent=spent)
        self.records.flush()
        sha = weights_sha256(model_tensors(self._attached))
        self.records.summarize(status, at, weights_sha256=sha)
        figures = "".join(f", {name} {value:.4g}" for name, value in at.metrics.items())
        why = f" ({at.stopped})" if at.stopped else ""
        saved = "" if self._saver is None else f"; the model is checkpoint {self._saver.newest}"
        self.records.console.say(
            f"{status}{why}: {at.epoch} epochs, {at.step} steps{figures}{saved} at {self.store.display_url}"
        )

    def close(self) -> None:
        """Give everything back, in order."""
        if self._watch is not None:
            self._watch.stop()
        if self._records is not None:
            self._records.close()
        self.manager.close()
        self.world.close()
        self._meeting.close()

    # ---------------------------------------------------------------------------- the rest
    def told_to_leave(self) -> bool:
        """Whether this rank was told to leave."""
        return self._session.signals.pending

    def evaluated(self, metrics: Mapping[str, float]) -> None:
        """Write down an evaluation of the present step. Every rank."""
        at = self.progress
        figures = {k: v for k, v in metrics.items() if abs(v) < float("inf")}
        self.records.event(
            "eval", step=at.step, epoch=at.epoch, metrics=figures, spent=self.records.ledger.totals()
        )
        if self.is_primary:
            shown = "  ".join(f"{name} {value:.4g}" for name, value in metrics.items())
            self.records.console.say(f"epoch {at.epoch + 1}  step {at.step}  evaluation: {shown}")

    def write_fault(self, fault: Fault, *, failed: bool) -> None:
        """Write a fault of this generation down, once it is claimed. Any rank."""
        if self._records is not None:
            self._records.own_fault(fault, failed=failed)

    def already_over(self) -> dict[str, Any] | None:
        """The summary of a run that is complete or was stopped on purpose, else None. Collective."""
        found: dict[str, Any] | None = None
        if self.is_primary:
            try:
                found = summary.read(self.store)
            except StoreError as error:
                logger.warning("summary.json could not be read: %s", error)
        if found is not None and found.get("status") not in {"complete", "stopped"}:
            found = None
        told = self.world.broadcast(found)
        return told if isinstance(told, dict) else None

    def tell(self, notes: Sequence[str]) -> None:
        """Say something once, on the primary."""
        if self.is_primary:
            for note in notes:
                logger.info("%s", note)

    @property
    def _attached(self) -> nn.Module:
        if self._model is None:
            raise ElasticError("model: found none, expected attach() before")
        return self._model

    @property
    def _claimed(self) -> Claim:
        if self._claim is None:
            raise ElasticError("generation: found none, expected claim() before")
        return self._claim

    def _info(self) -> dict[str, Any]:
        at = self.progress
        return {
            "step": at.step,
            "epoch": at.epoch,
            "position": at.position,
            "samples": at.samples,
            "metrics": {k: v for k, v in at.metrics.items() if abs(v) < float("inf")},
            "best": None if at.best is None else at.best.checkpoint,
            "stopped": at.stopped,
            "world_size": self.world.world_size,
        }

    def _status(self) -> Any:
        return status_of(
            self.progress,
            epochs=self.epochs_planned,
            loss=self._loss,
            world_size=self.world.world_size,
            saved=None if self._saver is None else self._saver.last,
        )

    def _fence(self) -> None:
        check_fence(self.store, self._claimed)

    def _overruled(self, *, superseded: bool) -> ElasticError:
        if superseded:
            return OverruledError(
                f"generation {self.generation} was superseded: a newer launch owns "
                f"{self.store.display_url}; this one ends, nothing that it saved is lost"
            )
        return ElasticError(f"generation {self.generation} was overtaken: the run went on without us")


class _FenceWatch:
    """Looks now and then whether a newer generation was claimed. Primary only, in its own thread."""

    def __init__(self, store: Store, claimed: Claim) -> None:
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
