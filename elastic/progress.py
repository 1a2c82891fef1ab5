"""Where a run stands: steps, position, counters, the best evaluation. Saved with every checkpoint.

Pure. The position follows the design's words: `(e, n)` means that all steps of epoch e are done and
its end (evaluation, schedule, best) is not; `(e + 1, 0)` means that the end is done too.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Final, Literal

from checkpoints.errors import RecordError

__all__ = ["Best", "Progress"]

_ADDED: Final = frozenset({"arithmetic", "bits_until", "skipped_in_row"})
"""Counters that checkpoints of the first version do not have."""


@dataclass(kw_only=True, slots=True)
class Best:
    """One evaluation worth keeping."""

    metric: str
    value: float
    step: int
    checkpoint: str | None = None
    """Name of the checkpoint that holds its weights; None where none was made."""


@dataclass(kw_only=True, slots=True)
class Progress:
    """The counters of a run; the same on every rank."""

    step: int = 0
    """Steps done, applied or skipped."""
    epoch: int = 0
    position: int = 0
    """Samples of the epoch's order that are used up."""
    samples: int = 0
    """Samples used over the whole run, each step of the lineage once."""
    skipped_steps: int = 0
    skipped_in_row: int = 0
    """Steps skipped since the last one that was applied."""
    evaluation_due: bool = False
    """An evaluation belongs to the last step and has not been done."""
    bests: list[Best] = field(default_factory=list)
    """Best evaluations, the best first."""
    bad_evaluations: int = 0
    """Evaluations since the best one."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Of the last evaluation."""
    stopped: str | None = None
    """Why the run ended early on purpose."""
    arithmetic: dict[str, str] | None = None
    """In bitwise mode: the releases and the kind of processor that the run began with."""
    bits_until: int | None = None
    """In bitwise mode: the last step whose bits are promised; None: all are."""

    @property
    def best(self) -> Best | None:
        """The best evaluation so far."""
        return self.bests[0] if self.bests else None

    def count_step(self, samples: int, *, skipped: bool) -> None:
        """Note one more step of `samples` samples."""
        self.step += 1
        self.position += samples
        self.samples += samples
        self.skipped_steps += skipped
        self.skipped_in_row = self.skipped_in_row + 1 if skipped else 0

    def end_epoch(self) -> None:
        """The end of the epoch is done too."""
        self.epoch += 1
        self.position = 0

    def judge(
        self,
        metrics: Mapping[str, float],
        *,
        monitor: str | None,
        mode: Literal["min", "max"],
        keep_best: int,
    ) -> bool:
        """Take in an evaluation; True where it is the best so far. A nan is never better."""
        self.metrics = dict(metrics)
        self.evaluation_due = False
        if monitor is None:
            return False
        value = metrics[monitor]
        sign = 1.0 if mode == "min" else -1.0
        better = not math.isnan(value) and (
            self.best is None or sign * value < sign * self.best.value
        )
        self.bad_evaluations = 0 if better else self.bad_evaluations + 1
        if not math.isnan(value):
            self.bests.append(Best(metric=monitor, value=value, step=self.step))
            self.bests.sort(key=lambda best: (sign * best.value, best.step))
            # What a checkpoint holds stays until enough better ones are held by one, too.
            stay = [*self.bests[: max(1, keep_best)], *self._held()[:keep_best]]
            self.bests = [best for best in self.bests if best in stay]
        return better

    def _held(self) -> list[Best]:
        return [best for best in self.bests if best.checkpoint is not None]

    @property
    def best_unsaved(self) -> bool:
        """Whether one of the best evaluations is of this very step and in no checkpoint."""
        return any(best.step == self.step and best.checkpoint is None for best in self.bests)

    def name_checkpoint(self, name: str | None) -> None:
        """The checkpoint made at this step, if one was, holds the weights of this step's evaluation."""
        for best in self.bests:
            if best.step == self.step:
                best.checkpoint = name

    def forget_checkpoint(self, name: str) -> None:
        """The checkpoint that was begun under this name was not made: it holds nothing."""
        for best in self.bests:
            if best.checkpoint == name:
                best.checkpoint = None

    def protected(self, keep_best: int) -> list[str]:
        """Names of the checkpoints that hold the best evaluations."""
        return [str(best.checkpoint) for best in self._held()[:keep_best]]

    def to_tree(self) -> dict[str, Any]:
        """As a tree of JSON values."""
        return asdict(self)

    @classmethod
    def from_tree(cls, tree: Mapping[str, Any]) -> "Progress":
        """From `to_tree`.

        Raises:
            RecordError: A counter is missing or unknown.
        """
        known = {f.name for f in fields(cls)}
        wrong = ", ".join(sorted((set(tree) ^ known) - _ADDED | (set(tree) - known)))
        if wrong:
            raise RecordError(f"progress: found other keys than this version's ({wrong})")
        bests: Sequence[Mapping[str, Any]] = tree["bests"]
        return cls(**{**tree, "bests": [Best(**best) for best in bests]})
