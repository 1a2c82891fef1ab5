"""Exact metrics over parts of any size, on one to four real ranks."""

# ruff: noqa: ARG002 - the methods' arguments are the Job class's own.

import contextlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset

from elastic.errors import StartError
from elastic.evaluate import Evaluation
from elastic.world import World
from jobs.job import Mean, Metric
from tests.support.ranked import run_ranks, world_of
from tests.support.tracer import Batch, Graded, Numbers


class Random(Dataset[float]):
    """Items that are drawn anew at each reading."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> float:
        return float(torch.rand(1, dtype=torch.float64)) + 0 * index


class Drawing(Graded):
    """Metrics that draw at random, and the sum of what was seen."""

    def metrics(self, model: nn.Module, batch: Any) -> Mapping[str, Metric]:
        values = batch if isinstance(batch, torch.Tensor) else batch[0]
        return {"noise": torch.rand(1), "values": Mean(values.sum(), len(values))}


class Summarized(Graded):
    """A figure that is none of the sums: the ratio of two of them."""

    def metrics(self, model: nn.Module, batch: Batch) -> Mapping[str, Metric]:
        hits = float((batch[1] < self.right).sum())
        return {"hits": hits, "misses": len(batch[1]) - hits}

    def summarize(self, totals: Mapping[str, Metric]) -> dict[str, float]:
        hits, misses = totals["hits"], totals["misses"]
        assert isinstance(hits, float)
        assert isinstance(misses, float)
        return {"odds": hits / misses}


class Partly(nn.Module):
    """A model with a frozen part."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(1, 1), nn.Dropout(0.5))
        self.frozen = nn.BatchNorm1d(1)
        self.train()
        self.frozen.eval()


def evaluate(
    world: World, job: Graded, sets: Mapping[str, Dataset[Any]], *, batch: int = 4, leaves: int = -1
) -> Any:
    """One evaluation; `leaves`: the rank that was told to leave."""
    evaluation = Evaluation(job, sets, world, batch_size=batch, context=contextlib.nullcontext())
    return evaluation.run(Partly(), leaving=lambda: world.rank == leaves)


def modes(world: World) -> tuple[list[bool], list[bool], float, float]:
    """Modes and the next random number, before an evaluation and after it."""
    model = Partly()
    before = [module.training for module in model.modules()]
    torch.manual_seed(3)
    expected = torch.rand(1).item()
    torch.manual_seed(3)
    job = Drawing()
    evaluation = Evaluation(
        job, {"": Random()}, world, batch_size=2, context=contextlib.nullcontext()
    )
    evaluation.run(model, leaving=lambda: False)
    return before, [module.training for module in model.modules()], expected, torch.rand(1).item()


class Counting(nn.Module):
    """Counts its forwards in a buffer, whatever its mode."""

    calls: torch.Tensor
    last: torch.Tensor
    cache: torch.Tensor
    grown: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))
        self.register_buffer("last", torch.zeros(1))
        self.register_buffer("cache", torch.zeros(1), persistent=False)
        self.register_buffer("grown", torch.zeros(1))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.cache = torch.ones(1)
        self.grown = torch.ones(3)
        self.last = values.sum().reshape(1).float()
        return values


class Asking(Graded):
    """Metrics by way of the model, and a count of how often they were asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[int] = []
        self.times = 0

    def metrics(self, model: nn.Module, batch: Any) -> Mapping[str, Metric]:
        self.asked.append(1)
        self.times += 1
        values = model(batch if isinstance(batch, torch.Tensor) else batch[1])
        return {"values": Mean(values.sum(), len(values))}


def buffers(world: World) -> Any:
    """The buffers after an evaluation that changes them, and after its names were asked for."""
    model, job = Counting(), Asking()
    evaluation = Evaluation(
        job, {"": Numbers(9)}, world, batch_size=2, context=contextlib.nullcontext()
    )
    names = evaluation.names(model)
    asked = len(job.asked), job.times
    evaluation.run(model, leaving=lambda: False)
    return (
        names,
        asked,
        float(model.calls),
        float(model.last),
        float(model.cache),
        model.grown.tolist(),
    )


class Streamed(IterableDataset[float]):
    """Only iterates."""

    def __iter__(self) -> Iterator[float]:
        yield 1.0


class Indexed(Streamed):
    """Iterates, and can be asked for items."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> float:
        return float(index)


def evaluate_all(world: World) -> dict[str, Any]:
    graded = Graded()
    ten = graded.eval_dataset()
    last = world.world_size - 1
    return {
        "c47": evaluate(world, graded, {"": ten}),
        "batches of one": evaluate(world, graded, {"": ten}, batch=1),
        "two sets": evaluate(world, graded, {"val": ten, "test": Numbers(3)}),
        "fewer items than ranks": evaluate(world, graded, {"": Numbers(1)}),
        "summarized": evaluate(world, Summarized(), {"": ten}),
        "left": evaluate(world, graded, {"": ten}, batch=1, leaves=last),
        "after leaving": evaluate(world, graded, {"": ten}),
        "drawn": evaluate(world, Drawing(), {"": Random()}),
        "drawn again": evaluate(world, Drawing(), {"": Random()}),
        "modes": modes(world),
        "buffers": buffers(world),
        "indexed": evaluate(world, Drawing(), {"": Indexed()})["values"],
    }


@pytest.fixture(scope="module", params=[1, 2, 3, 4])
def worlds(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    if request.param == 1:
        with world_of(0, 1, tmp_path_factory.mktemp("alone")) as world:
            return [evaluate_all(world)]
    return run_ranks(request.param, evaluate_all)


Results = list[dict[str, Any]]


def test_every_rank_has_the_same_figures(worlds: Results) -> None:
    assert all(found == worlds[0] for found in worlds)


def test_c47_accuracy_is_exact_and_each_item_is_counted_once(worlds: Results) -> None:
    assert worlds[0]["c47"] == {"accuracy": 0.7, "seen": 10.0}
    assert worlds[0]["batches of one"] == {"accuracy": 0.7, "seen": 10.0}


def test_an_evaluation_leaves_no_trace_in_a_buffer_nor_its_names_in_the_job(
    worlds: Results,
) -> None:
    assert worlds[0]["buffers"] == (["values"], (0, 0), 0.0, 0.0, 1.0, [1.0] * 3)


def test_an_iterable_dataset_that_can_be_indexed_is_read_by_index(worlds: Results) -> None:
    assert worlds[0]["indexed"] == 1.0


def test_a_set_that_only_iterates_is_refused(tmp_path: Path) -> None:
    with (
        world_of(0, 1, tmp_path) as world,
        pytest.raises(StartError, match="eval_dataset val: found Streamed, which only iterates"),
    ):
        evaluate(world, Drawing(), {"val": Streamed()})


def test_figures_that_summarize_makes_have_no_names_beforehand(tmp_path: Path) -> None:
    with world_of(0, 1, tmp_path) as world:
        evaluation = Evaluation(
            Summarized(), {"": Numbers(3)}, world, batch_size=2, context=contextlib.nullcontext()
        )
        assert evaluation.names(Partly()) is None


def test_names_of_several_sets_become_prefixes(worlds: Results) -> None:
    assert worlds[0]["two sets"] == {
        "val/accuracy": 0.7, "val/seen": 10.0, "test/accuracy": 1.0, "test/seen": 3.0,
    }  # fmt: skip


def test_rank_without_items_adds_nothing(worlds: Results) -> None:
    assert worlds[0]["fewer items than ranks"] == {"accuracy": 1.0, "seen": 1.0}


def test_figures_are_made_of_the_sums_over_all_ranks(worlds: Results) -> None:
    assert worlds[0]["summarized"] == {"odds": 7 / 3}


def test_evaluation_ends_by_agreement_where_one_rank_is_told_to_leave(worlds: Results) -> None:
    assert worlds[0]["left"] is None
    assert worlds[0]["after leaving"] == worlds[0]["c47"]


def test_what_items_and_metrics_draw_is_the_same_each_time(worlds: Results) -> None:
    assert worlds[0]["drawn"] == worlds[0]["drawn again"]


def test_modes_and_random_streams_are_left_as_they_were(worlds: Results) -> None:
    before, after, expected, drawn = worlds[0]["modes"]
    assert after == before == [True, True, True, True, False]
    assert drawn == expected


def test_failing_metric_leaves_the_modes_as_they_were(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    class Failing(Graded):
        def metrics(self, model: nn.Module, batch: Batch) -> Mapping[str, Metric]:
            assert not any(module.training for module in model.modules())
            assert not torch.is_grad_enabled()
            raise ValueError("no")

    model = Partly()
    with world_of(0, 1, tmp_path_factory.mktemp("alone")) as world:
        evaluation = Evaluation(
            Failing(), {"": Numbers(3)}, world, batch_size=2, context=contextlib.nullcontext()
        )
        with pytest.raises(ValueError, match="no"):
            evaluation.run(model, leaving=lambda: False)
    assert [module.training for module in model.modules()] == [True, True, True, True, False]


class Endless(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (
            Endless(),
            "eval_dataset test: found Endless without a length, expected a map-style dataset",
        ),
        (Numbers(0), "eval_dataset test: found no items, expected at least 1, or None"),
    ],
)
def test_set_that_cannot_be_cut_is_refused(
    dataset: Dataset[Any], message: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with (
        world_of(0, 1, tmp_path_factory.mktemp("alone")) as world,
        pytest.raises(StartError, match=f"^{re.escape(message)}$"),
    ):
        Evaluation(
            Graded(), {"test": dataset}, world, batch_size=2, context=contextlib.nullcontext()
        )
