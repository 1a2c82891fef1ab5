"""Evaluation: exact metrics over parts of any size, each sample counted once.

Promises: every rank evaluates its own contiguous part, and what is added up are sums and counts, so
that the result does not depend on the number of ranks; a signal is noticed within two batches and
agreed by all ranks; the mode of every module and the random streams are left as they were found.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset

from elastic.errors import StartError
from elastic.sampler import part
from elastic.seeding import kept_random_state, mix, seed_all
from elastic.world import Pending, World
from jobs.job import Job, Mean, Metric

__all__ = ["Evaluation"]

_EVAL_KEY: Final = 0xE7A1


class Evaluation:
    """Evaluates a job's model on its evaluation sets."""

    def __init__(
        self,
        job: Job,
        sets: Mapping[str, Dataset[Any]],
        world: World,
        *,
        batch_size: int,
        context: contextlib.AbstractContextManager[Any],
    ) -> None:
        """Cut each set into this rank's part; `context` is the autocast of the run.

        Raises:
            StartError: A set has no length or no items.
        """
        self._job, self._world, self._context = job, world, context
        self._loaders: dict[str, tuple[DataLoader[Any] | None, int]] = {}
        for name, dataset in sets.items():
            n = _length(name, dataset)
            start, stop = part(0, n, world.rank, world.world_size)
            # The largest part decides for all, since every round has one exchange of flags.
            most = part(0, n, 0, world.world_size)
            rounds = -(-(most[1] - most[0]) // batch_size)
            loader: DataLoader[Any] | None = None
            if stop > start:
                loader = DataLoader(
                    Subset(dataset, range(start, stop)),
                    batch_size=batch_size,
                    collate_fn=job.collate,
                    generator=torch.Generator(),
                )
            self._loaders[name] = (loader, rounds)

    def run(self, model: nn.Module, *, leaving: Callable[[], bool]) -> dict[str, float] | None:
        """Evaluate; None where the ranks agreed to leave in the middle. Collective.

        `leaving()` tells whether this rank was told to leave. Names of several sets become
        prefixes: `test/accuracy`.
        """
        # Of each module, since a frozen part is in eval mode while the rest trains.
        was_training = {module: module.training for module in model.modules()}
        model.eval()
        try:
            with kept_random_state(self._world.device):
                return self._evaluate_all(model, leaving)
        finally:
            for module, mode in was_training.items():
                module.training = mode

    def _evaluate_all(
        self, model: nn.Module, leaving: Callable[[], bool]
    ) -> dict[str, float] | None:
        results: dict[str, float] = {}
        for name, (loader, rounds) in self._loaders.items():
            totals = self._evaluate(model, loader, rounds, leaving)
            if totals is None:
                return None
            figures = self._job.summarize(self._add_up(totals))
            prefix = f"{name}/" if name else ""
            results.update({f"{prefix}{k}": float(v) for k, v in figures.items()})
        return results

    def _evaluate(
        self,
        model: nn.Module,
        loader: DataLoader[Any] | None,
        rounds: int,
        leaving: Callable[[], bool],
    ) -> dict[str, list[float]] | None:
        totals: dict[str, list[float]] = {}
        batches = iter(loader) if loader is not None else iter(())
        pending: Pending | None = None
        for number in range(rounds):
            if pending is not None and pending.wait():
                return None
            pending = self._world.flags_async(int(leaving()))
            seed_all(mix(_EVAL_KEY, self._world.rank, number), self._world.device)
            batch = next(batches, None)
            if batch is None:
                continue
            with torch.no_grad(), self._context:
                moved = self._job.to_device(batch, self._world.device)
                _add(totals, self._job.metrics(model, moved))
        if pending is not None and pending.wait():
            return None
        return totals

    def _add_up(self, own: Mapping[str, Sequence[float]]) -> dict[str, Metric]:
        """Add the ranks' sums in the order of the ranks, so that all hold the same bits."""
        summed: dict[str, list[float]] = {}
        for told in self._world.gather({name: list(values) for name, values in own.items()}):
            for name, values in told.items():
                have = summed.setdefault(name, [0.0] * len(values))
                summed[name] = [a + b for a, b in zip(have, values, strict=True)]
        return {
            name: Mean(torch.tensor(v[0], dtype=torch.float64), v[1]) if len(v) == 2 else v[0]
            for name, v in summed.items()
        }


def _add(totals: dict[str, list[float]], metrics: Mapping[str, Metric]) -> None:
    for name, metric in metrics.items():
        if isinstance(metric, Mean):
            values = [float(metric.sum), float(metric.count)]
        else:
            values = [float(metric.detach() if isinstance(metric, Tensor) else metric)]
        have = totals.setdefault(name, [0.0] * len(values))
        totals[name] = [a + b for a, b in zip(have, values, strict=True)]


def _length(name: str, dataset: Dataset[Any]) -> int:
    try:
        n = len(dataset)  # type: ignore[arg-type]  # checked right here
    except TypeError as error:
        raise StartError(
            f"eval_dataset {name}: found {type(dataset).__name__} without a length, expected a "
            "map-style dataset"
        ) from error
    if n < 1:
        raise StartError(f"eval_dataset {name}: found no items, expected at least 1, or None")
    return n
