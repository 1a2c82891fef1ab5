"""One generation of a run, on one rank: from the meeting to a restored state.

Promises: the order claim, list, restore, `started.json`; nothing is claimed for a start that the checks
refused. How it is saved is `elastic.saves`' business, what is trained in it `elastic.core`'s.
"""

import copy
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import nn

from checkpoints.errors import StoreError
from checkpoints.generations import check_fence
from checkpoints.layout import CheckpointName, Claim
from checkpoints.manager import CheckpointManager
from checkpoints.rollbacks import Position, positions
from elastic import finding, resume, summary
from elastic.errors import (
    AttentionError,
    ElasticError,
    OverruledError,
    PreemptedError,
    ReplicaError,
)
from elastic.fence import FenceWatch
from elastic.keeping import Keeper
from elastic.limit import launch_began, limit_of
from elastic.monitor import Fault
from elastic.notices import Notices
from elastic.opening import (
    Session,
    Setup,
    agents_of,
    faults_of,
    hello_of,
    open_run_store,
    open_world,
)
from elastic.progress import Progress
from elastic.records import Records
from elastic.saving import Saver
from elastic.state import TrainState
from elastic.stragglers import Paces

__all__ = ["Generation"]

logger = logging.getLogger(__name__)

_ORDERING: Final = frozenset({"train.seed", "train.order", "sampling"})
"""Parts of a run's identity that decide in which order an epoch takes its samples."""


class Generation:
    """The start of a generation; in order: made, `identify`, `claim`, `attach`, `restore`."""

    def __init__(
        self, session: Session, setup: Setup, *, code: str, prepare: Callable[[], None]
    ) -> None:
        """Reach the store, meet the other ranks, start the process group. Collective.

        Raises:
            StartError: The start is wrong, on every rank.
            MeetingError: The ranks did not find each other in time.
        """
        self._session, self._setup = session, setup
        self._limit = limit_of(
            setup.stop_before,
            by_slurm="slurm" in setup.notices,
            began=launch_began(session.agent),
            environ=os.environ,
        )
        if self._limit is not None and self._limit.left_s <= 0:
            session.signals.note(f"{self.limited_by}: the time is up")
        if session.signals.notice:
            raise PreemptedError("told to leave before this start; what is saved stays")
        self._notices = Notices(setup.notices, session.folder, os.environ)
        if session.place.local_rank == 0:
            self._notices.start()
        self.store = open_run_store(session, setup.checkpoint)
        hello = hello_of(session, setup, code)
        self.world, self._meeting, self._hellos = open_world(
            session, setup, self.store, hello, prepare
        )
        self.former_faults: list[Fault] = faults_of(self._hellos)
        self.progress = Progress()
        self.state = TrainState()
        options = setup.checkpoint
        self.manager = CheckpointManager(
            self.store,
            keep=options.keep,
            keep_every=options.keep_every,
            part_bytes=options.part_bytes,
            split_bytes=options.split_bytes,
            fence=self._fence,
        )
        self.keeper = Keeper(
            agent=session.agent,
            folder=session.folder,
            options=options,
            store=self.store,
            leads=session.place.local_rank == 0,
        )
        self.check_position: Callable[[int], object] | None = None
        """Raises where no step of the plan begins at a position: before this generation counts as started."""
        self.epochs_planned: int | None = None
        self.max_steps: int | None = None
        self.epoch_samples: int | None = None
        """Samples that an epoch uses; the loader knows."""
        self.keep_best = 0
        self.accepted: list[str] = []
        """Differences to the run's identity that `run.accept` lets through, a line for each."""
        self._run_id = ""
        self._model: nn.Module | None = None
        self._claim: Claim | None = None
        self._records: Records | None = None
        self._saver: Saver | None = None
        self._watch: FenceWatch | None = None
        self._restored: Progress | None = None
        self._loss = float("nan")
        self._restored_from = ""
        self._parent: CheckpointName | None = None
        self._skips: frozenset[Position] = frozenset()
        self._stop_asked: str | None = None
        self._finished = False
        self.at_first_step: Callable[[], None] | None = None
        """Called once, when this generation has done its first step."""
        self.paces = Paces(self.world, self._session.slot)
        self._stepped = False
        self.left = False
        """Whether somebody was told to leave, so that this generation ended by agreement."""

    @property
    def is_primary(self) -> bool:
        """Whether this is rank 0."""
        return self.world.is_primary

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return self.world.device

    @property
    def generation(self) -> int:
        """The number of this start; 0 before it is claimed."""
        return 0 if self._claim is None else self._claim.generation

    @property
    def records(self) -> Records:
        """The generation's records; they exist once it is claimed."""
        if self._records is None:
            raise ElasticError("records: found no claimed generation, expected claim() before")
        return self._records

    def identify(self, identity: Mapping[str, Any]) -> None:
        """Check that the URL holds this run, or create it. Collective.

        Raises:
            StartError: It holds another run: names the first difference.
        """
        self._session.slot.beat(0, "check")
        found = resume.agree_on_run(self.world, self.store, identity, self._setup.accept)
        self._run_id, self.accepted = found
        self.tell(self.accepted)

    def claim(self) -> None:
        """Claim the next generation. Collective.

        Raises:
            OverruledError: A newer launch owns the run.
        """
        self._claim_next(self.former_faults)

    def _claim_next(self, faults: list[Fault], back: resume.Return | None = None) -> None:
        self._claim = resume.claim_generation(
            self.world,
            self.store,
            agents=agents_of(self._hellos),
            hosts=[hello["host"] for hello in self._hellos],
            run_id=self._run_id,
            config=self._setup.config,
            faults=faults,
            back=back,
        )
        self._skips = positions(self._claim.rollbacks)
        self._session.slot.begin(self.world.rank, self.generation)
        self._records = Records(
            self.store,
            self._claim,
            rank=self.world.rank,
            run_id=self._run_id,
            audit=self._setup.audit,
        )
        self._records.faults(faults)

    @property
    def limited_by(self) -> str:
        """The setting that a limit of time comes from."""
        return "notices" if self._setup.stop_before is None else "train.stop_before"

    def attach(self, *, model: nn.Module, **objects: Any) -> None:
        """Take the objects that make up the state, as code and config just made them."""
        self._model = model
        self.state.attach(model=model, **objects)

    def restore(self, initialize: Callable[[], None]) -> None:
        """Bring the attached state to where the run stands, and begin. Collective.

        `initialize` sets first weights; the primary calls it where nothing is there to restore.

        Raises:
            StartError: The checkpoint does not fit the model, or its position not the plan.
        """
        self._session.slot.beat(0, "restore")
        self.keeper.open(self._run_id)
        wrong: list[tuple[str, CheckpointName]] = []
        while True:
            found = finding.find_state(self.world, self.manager, self.keeper, wrong)
            self._refuse_ruins(found)
            source = self._begin_from(found, initialize)
            try:
                finding.compare_replicas(
                    self.world, self.state.digest(replicated=True), when="after the restore"
                )
            except ReplicaError as error:
                if found.source != "memory" or found.name is None:
                    raise
                # Two nodes hold two states under one name: neither is believed.
                self.tell([f"{error}; what is in memory is left out"])
                wrong.append(("memory", found.name))
            else:
                break
        if self.check_position is not None:
            self.check_position(self.progress.position)
        self._warn_of_order()
        if self.is_primary:
            if found.tree is not None and resume.is_pending(self.store, self._claimed):
                source = "rollback"
            self._begin_records(found, source, min(float(hello["began"]) for hello in self._hellos))
        if found.path is not None:
            self.keeper.count_try(found.path, began=True)
        if found.source == "memory":
            # Further than the store: it must not end with its node.
            self._session.signals.arm()
        self._session.slot.beat(self.progress.step, "first step")
        self.records.ledger.start()

    def _warn_of_order(self) -> None:
        """Say what it means that another order was accepted while an epoch is under way."""
        at = self.progress
        keys = [line.partition(":")[0] for line in self.accepted]
        changed = [key for key in keys if key in _ORDERING]
        if changed and at.position:
            self.warn(
                f"{', '.join(changed)}: accepted within epoch {at.epoch + 1}, of which {at.position} samples are done: in another "
                "order some samples of this epoch come twice and others not at all; from the next epoch on each comes once"
            )

    def _refuse_ruins(self, found: finding.Found) -> None:
        """A run that has checkpoints, of which none verifies or is there, is not begun anew in silence. Collective."""
        if found.tree is not None:
            return
        mine: dict[str, Any] = {"ruins": [str(name) for name in found.ruins]}
        if self.is_primary and not found.ruins:
            lost = resume.lost_checkpoint(self.manager.catalog, self.generation)
            mine["lost"] = None if lost is None else str(lost)
        said = finding.told(self.world.broadcast(mine))
        if said.get("lost"):
            raise AttentionError(
                f"{self.store.display_url}/checkpoints: found none, expected at least {said['lost']}, of which the run's records "
                "tell; mount or bring back what held them, or take a new checkpoint.url to begin anew"
            )
        if ruins := said["ruins"]:
            raise AttentionError(
                f"checkpoints: {', '.join(ruins)}: none of them verifies, expected one to go on from; look at them "
                f"with python -m checkpoints verify {self.store.display_url}, or take a new checkpoint.url"
            )

    def _return_to(self, found: finding.Found, began: float) -> None:
        """Go on from an earlier state as a new generation of the same processes. Collective."""
        self._begin_from(found, lambda: None)
        digest = self.state.digest(replicated=True)
        finding.compare_replicas(self.world, digest, when="after the rollback")
        if self.is_primary:
            self._begin_records(found, "rollback", began)
        self.world.barrier()
        self.records.ledger.start()

    def _begin_from(self, found: finding.Found, initialize: Callable[[], None]) -> str:
        """Put the found state into the attached objects, or first weights; returns the source."""
        for damaged in found.damaged:
            self.records.event("damaged", what=damaged)
        if found.tree is None:
            return self._begin(initialize)
        tree = dict(found.tree)
        self.progress = Progress.from_tree(tree.pop("progress"))
        at = self.progress
        self._restored, self._restored_from = copy.deepcopy(at), found.source
        self._parent = found.name
        self.tell(self.state.restore(tree, steps=at.step, epochs=at.epoch))
        return found.source

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

    def _begin_records(self, found: finding.Found, source: str, began: float) -> None:
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
        self.keeper.begin(claimed, damaged=found.ruins)
        self._saver = Saver(
            self.manager,
            self._setup.checkpoint,
            self.keeper,
            run_id=self._run_id,
            generation=self.generation,
            parent=found.name,
        )
        if found.source == "memory" and found.path is not None:
            self._saver.make_parent_durable(found.path)
        self._watch = FenceWatch(self.store, claimed)
        self.records.started(at, parent=found.name, source=source, began=began)
        failures, observed_s = self.records.history()
        self._saver.pace.seen(failures, observed_s)
        self._saver.memory_pace.seen(failures, observed_s)

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

    def warn(self, note: str) -> None:
        """Say something loudly, once, on the primary."""
        if self.is_primary:
            logger.warning("%s", note)

    def write_fault(self, fault: Fault, *, failed: bool) -> None:
        """Write a fault of this generation down, once it is claimed. Any rank."""
        if self._records is not None:
            self._records.own_fault(fault, self.progress, failed=failed)

    def look_at_paces(self, paces: Sequence[float]) -> None:
        """Say once who keeps the others waiting, and when that is over. Primary; elsewhere it does nothing."""
        if not self.is_primary or not paces:
            return
        for found in self.paces.judge(paces):
            self.records.event("straggler", step=self.progress.step, **found.to_json())
            (self.warn if found.is_slow else logger.info)(str(found))

    def _end_records(self) -> None:
        """This generation writes nothing more."""
        if self._watch is not None:
            self._watch.stop()
        if self._saver is not None:
            self._saver.release()
        if self._records is not None:
            self._records.close()

    def close(self) -> None:
        """Give everything back, in order."""
        self._notices.close()
        self._end_records()
        self.keeper.close(finished=self._finished)
        self.manager.close()
        self.world.close()
        self._meeting.close()

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

    def _fence(self) -> None:
        check_fence(self.store, self._claimed)

    def _overruled(self, *, superseded: bool) -> ElasticError:
        if superseded:
            return OverruledError(
                f"generation {self.generation} was superseded: a newer launch owns "
                f"{self.store.display_url}; this one ends, nothing that it saved is lost"
            )
        return ElasticError(
            f"generation {self.generation} was overtaken: the run went on without us"
        )
