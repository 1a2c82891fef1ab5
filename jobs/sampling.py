"""How often a job wants each sample: by weight, or mixed from several datasets.

Declarations only; the runner checks them against the dataset and decides who reads what when. A job
returns one from `sampling(dataset)`; without one each epoch takes each sample exactly once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Mixture", "Sampling", "Weighted"]


@dataclass(frozen=True, slots=True, eq=False)
class Weighted:
    """Samples by weight: in an epoch of m draws sample i is drawn m·w_i/Σw times, rounded down or up.

    Which of the two is drawn anew for each epoch, so that over epochs the share is exact; with equal
    weights and no `samples` each sample is drawn exactly once. Which samples come together does not
    depend on where they lie in the dataset.
    """

    weights: Any
    """One for each sample of the dataset, 0 or more: a sequence, an array or a tensor."""

    samples: int | None = None
    """Draws of one epoch; None: as many as the dataset has samples."""


@dataclass(frozen=True, slots=True, eq=False)
class Mixture:
    """Several datasets mixed by weights: each epoch takes the same, exact number of samples of each part.

    The parts lie one after the other in the job's dataset, as in torch's ConcatDataset. At each epoch's
    end all samples of a part have been drawn equally often since the run began, give or take one: what a
    small part's share needs is repeated evenly, and of a large part nothing is left out for ever.
    """

    weights: Sequence[float]
    """The share of each part, in the order of the parts; only their ratios count."""

    lengths: Sequence[int] | None = None
    """Samples of each part; None: those of the dataset, which then is a ConcatDataset."""

    samples: int | None = None
    """Draws of one epoch; None: as many as the dataset has samples."""


Sampling: TypeAlias = Weighted | Mixture
