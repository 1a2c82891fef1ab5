"""What a generation writes down: its journal, the audit, summary.json, and the lines a person sees.

Promises: a record that cannot be written is told and never harms the training; the journal has one
line for each step, so that what a killed generation did is known to the next one. Everything but the
audit is the primary's.
"""

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from checkpoints.errors import StoreError
from checkpoints.journal import Journal
from checkpoints.layout import CheckpointName, Claim
from checkpoints.store import Store
from elastic import summary
from elastic.metrics import Console, Ledger
from elastic.monitor import Fault
from elastic.progress import Progress

__all__ = ["Records"]

logger = logging.getLogger(__name__)

_KEPT_FAULTS = 20


class Records:
    """The records of one generation, on one rank."""

    def __init__(
        self, store: Store, claimed: Claim, *, rank: int, run_id: str, audit: bool
    ) -> None:
        """Open the journal (primary) and the audit (every rank, where asked for)."""
        self._store, self._claim, self._rank, self._run_id = store, claimed, rank, run_id
        self.ledger = Ledger()
        self.console = Console(sys.stdout)
        self._journal = Journal(store, claimed.generation) if rank == 0 else None
        self._audit = Journal(store, claimed.generation, rank=rank) if audit else None
        self._rows: list[summary.Row] = []
        self._faults: list[Fault] = []
        self._logged: dict[str, float] = {}
        self._unwritten: set[str] = set()

    # ---------------------------------------------------------------------------- the start
    def faults(self, faults: Sequence[Fault]) -> None:
        """Note why the generation before this one ended."""
        self._faults = list(faults)
        for fault in faults:
            self.event("fault", fault=fault.to_json(), told=str(fault))

    def started(
        self, progress: Progress, *, parent: CheckpointName | None, source: str, began: float
    ) -> None:
        """Write the first lines of the journal and the summary. Primary only."""
        now = summary.now_s()
        past = summary.past_rows(self._store, self._claim.generation)
        summary.write_history(self._store, self._claim.generation, past)
        claim = self._claim
        row = summary.Row(
            generation=claim.generation,
            world_size=claim.world_size,
            nodes=claim.nodes,
            parent=None if parent is None else str(parent),
            source=source,
            start_step=progress.step,
            end_step=progress.step,
            cause=claim.cause,
            began=began,
            ready=now,
            ended=now,
        )
        self._rows = [*past, row]
        self.event(
            "start",
            began=began,
            ready=now,
            world_size=claim.world_size,
            cause=claim.cause,
            parent=row.parent,
            source=source,
            step=progress.step,
            epoch=progress.epoch,
            position=progress.position,
            spent=self.ledger.totals(),
        )
        self.flush()
        self.summarize("running", progress)
        origin = f"from checkpoint {parent}"
        if parent is None:
            origin = (
                "from the weights of checkpoint.init_from" if source == "init" else "from the start"
            )
        elif source == "memory":
            origin = f"from the snapshot {parent} in memory"
        self.console.say(
            f"generation {claim.generation} ({claim.cause}): W={claim.world_size}, {origin}, epoch "
            f"{progress.epoch + 1}, position {progress.position}, step {progress.step} at "
            f"{self._store.display_url}"
        )

    def history(self) -> tuple[int, float]:
        """How many generations before this one ended by a fault, and the seconds that they ran."""
        past = self._rows[:-1]
        failures = sum(row.cause not in {"start", "node joined"} for row in self._rows[1:])
        return failures, sum(max(0.0, row.ended - row.began) for row in past)

    # ---------------------------------------------------------------------------- the loop
    def log(self, values: Mapping[str, float]) -> None:
        """Add named numbers to the next step's line."""
        self._logged.update({name: float(value) for name, value in values.items()})

    def step(
        self,
        progress: Progress,
        samples: int,
        *,
        loss: float,
        skipped: bool,
        values: Mapping[str, float],
    ) -> None:
        """Write the line of a step that is done. Primary only; elsewhere it does nothing."""
        if self._journal is None:
            self._logged.clear()
            return
        fields: dict[str, Any] = {
            "step": progress.step,
            "epoch": progress.epoch,
            "position": progress.position,
            "samples": samples,
            "loss": loss,
            **values,
            **self._logged,
            "seconds": round(self.ledger.step_done(), 6),
            "spent": self.ledger.totals(),
        }
        if skipped:
            fields["skipped"] = True
        self._logged.clear()
        self.event("step", **fields)

    def audit(self, progress: Progress, indices: Sequence[int], *, skipped: bool = False) -> None:
        """Write which samples this rank uses in the step under way, before they count."""
        if self._audit is None:
            return
        line: dict[str, Any] = {
            "generation": self._claim.generation,
            "epoch": progress.epoch,
            "step": progress.step + 1,
            "rank": self._rank,
            "indices": list(indices),
        }
        if skipped:
            line["skipped"] = True
        self._audit.audit(line)

    @property
    def audits_in_parts(self) -> bool:
        """Whether the audit has to be sent to the store before a checkpoint commits."""
        return self._audit is not None and not self._store.can_append

    def flush_audit(self) -> bool:
        """Send this rank's audit lines to the store; False where it did not take them."""
        audit = self._audit
        return audit is None or self._written("the audit", lambda: audit.flush(durable=True))

    def _written(self, what: str, write: Callable[[], None]) -> bool:
        """Whether a record could be written; where it could not, that is told once, until it can be again."""
        try:
            write()
        except StoreError as error:
            if what not in self._unwritten:
                self._unwritten.add(what)
                logger.warning("%s was not written: %s", what, error)
            return False
        self._unwritten.discard(what)
        return True

    def spend(self, use: str) -> AbstractContextManager[None]:
        """Book the time inside to `use`: checkpoint or eval."""
        return self.ledger.spend(use)

    # ---------------------------------------------------------------------------- writing
    def event(self, kind: str, **fields: Any) -> None:
        """Write a line of the journal. Primary; elsewhere it does nothing."""
        if self._journal is not None:
            self._journal.event(kind, **fields)

    def flush(self) -> None:
        """Send what is buffered to the store."""
        if self._journal is not None:
            self._written("the journal", self._journal.flush)

    def summarize(
        self, status: summary.Status, progress: Progress, *, weights_sha256: str | None = None
    ) -> None:
        """Write summary.json. Primary only."""
        if not self._rows:
            return
        now = summary.now_s()
        content = summary.build(
            [*self._rows[:-1], self._row(progress, now)],
            progress,
            status=status,
            run_id=self._run_id,
            now=now,
            weights_sha256=weights_sha256,
            faults=[fault.to_json() for fault in self._faults],
            bits_until=progress.bits_until,
        )
        self._written("summary.json", lambda: summary.write(self._store, content))

    def goodput(self, progress: Progress) -> float | None:
        """Of the whole run so far; None before it has begun. Primary only."""
        if not self._rows:
            return None
        now = summary.now_s()
        return summary.goodput([*self._rows[:-1], self._row(progress, now)], progress.step, now)

    def _row(self, progress: Progress, now: float) -> summary.Row:
        """This generation's row as it stands."""
        spent = self.ledger.totals()
        return summary.finish_row(self._rows[-1], step=progress.step, now=now, spent=spent)

    def own_fault(self, fault: Fault, progress: Progress, *, failed: bool) -> None:
        """Write a fault of this generation itself: to this rank's journal and the summary. Any rank."""
        journal = self._journal or Journal(self._store, self._claim.generation, rank=self._rank)
        try:
            journal.event("fault", fault=fault.to_json(), told=str(fault))
            journal.flush()
            add_fault(self._store, self._claim.generation, fault, failed=failed)
            if failed:
                self._sum_up_failed(progress)
        except StoreError as error:
            logger.warning("the fault was not written down: %s", error)

    def _sum_up_failed(self, progress: Progress) -> None:
        """No generation comes after this one to say how far it came: it says so itself, whichever rank it is."""
        number = self._claim.generation
        present = summary.read(self._store)
        rows = summary.past_rows(self._store, number + 1)
        if present is None or present["generation"] != number or rows[-1:] == []:
            return
        now = summary.now_s()
        rows[-1] = replace(rows[-1], end_step=progress.step, ended=now)
        content = summary.build(
            rows, progress, status="failed", run_id=self._run_id, now=now, faults=present["faults"],
            bits_until=progress.bits_until,
        )  # fmt: skip
        summary.write(self._store, content)

    def close(self) -> None:
        """Close the files; what is buffered is written if the store takes it."""
        for journal in (self._journal, self._audit):
            if journal is not None:
                try:
                    journal.close()
                except StoreError as error:
                    logger.warning("the journal was not closed in order: %s", error)
        self.console.close()


def add_fault(store: Store, generation: int, fault: Fault, *, failed: bool) -> None:
    """Add a fault to summary.json while it is this generation's; `failed` ends the run there."""
    present = summary.read(store)
    if present is None or present.get("generation") != generation:
        return
    faults = [*present.get("faults", []), fault.to_json()][-_KEPT_FAULTS:]
    status = "failed" if failed else present["status"]
    summary.write(store, {**present, "status": status, "faults": faults})
