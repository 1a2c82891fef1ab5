"""The Job base class: its defaults, Mean, and what counts as a loss."""

import logging
import math
import pickle
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset, default_collate

import jobs
from jobs import Job, JobError, Mean, read_loss
from jobs.job import Loss, Metric, count_samples

CPU = torch.device("cpu")
META = torch.device("meta")


class Plain(Job):
    def dataset(self) -> Dataset[Any]:
        return TensorDataset(torch.arange(6.0)[:, None])

    def model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        loss: Tensor = model(batch[0]).square().mean()
        return loss


class Weighted(Plain):
    def loss(self, model: nn.Module, batch: Any) -> Loss:
        return Mean(model(batch[0]).square().sum(), 2 * len(batch[0]))


class Phased(Plain):
    def losses(self) -> Mapping[str, Callable[[nn.Module, Any], Loss]]:
        return {"disc": self.loss, "gen": self.loss}


# ---- the base class


def test_four_methods_make_a_job() -> None:
    job = Plain()
    model = job.model()
    optimizer = job.optimizer(model)
    job.prepare()
    job.initialize(model)
    assert job.scheduler(optimizer, 10) is None
    assert job.losses() is None
    assert job.collate is None
    assert job.eval_dataset() is None
    assert job.fingerprint(job.dataset()) is None
    assert job.state_dict() == {}


def test_hooks_do_nothing_by_default() -> None:
    run: Any = object()
    job = Plain()
    job.on_step(run)
    job.on_epoch(run)
    job.on_eval(run, {"loss": 1.0})
    job.on_end(run)


def test_a_class_without_the_four_methods_cannot_be_built() -> None:
    class Half(Job):
        pass

    with pytest.raises(TypeError, match="dataset"):
        Half()  # type: ignore[abstract]  # that is the point


def test_a_job_without_a_loss_says_so() -> None:
    class Lossless(Plain):
        loss = Job.loss

    with pytest.raises(
        NotImplementedError, match=r"^Lossless has neither loss\(\) nor losses\(\)$"
    ):
        Lossless().loss(nn.Identity(), None)


def test_state_that_nobody_takes_back_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        Plain().load_state_dict({})
        assert not caplog.records
        Plain().load_state_dict({"seen": 3, "best": 1})
    assert caplog.messages == [
        "Plain has no load_state_dict: the checkpoint's job state (best, seen) is left aside"
    ]


def test_default_metrics_are_the_loss_over_samples_however_they_are_split() -> None:
    job = Plain()
    model = job.model()
    items = [job.dataset()[i] for i in range(6)]
    whole = job.metrics(model, default_collate(items))["loss"]
    parts = [job.metrics(model, default_collate(part))["loss"] for part in (items[:4], items[4:])]
    assert isinstance(whole, Mean)
    assert whole.count == 6
    assert not whole.sum.requires_grad
    sums = [float(part.sum) for part in parts if isinstance(part, Mean)]
    assert sum(sums) == pytest.approx(float(whole.sum), rel=1e-6)


def test_default_metrics_keep_the_weights_of_a_mean_and_the_names_of_phases() -> None:
    batch = default_collate([Plain().dataset()[i] for i in range(6)])
    weighted = Weighted().metrics(nn.Linear(1, 1), batch)["loss"]
    assert isinstance(weighted, Mean)
    assert (weighted.count, weighted.sum.requires_grad) == (12, False)
    assert list(Phased().metrics(nn.Linear(1, 1), batch)) == ["disc", "gen"]


def test_summary_divides_means_and_keeps_sums() -> None:
    totals: dict[str, Metric] = {
        "accuracy": Mean(torch.tensor(7), 10),
        "seen": torch.tensor(10.0),
        "more": 2,
    }
    assert Plain().summarize(totals) == {"accuracy": 0.7, "seen": 10.0, "more": 2.0}


# ---- Mean


def test_mean_takes_numbers_and_single_tensors() -> None:
    assert Mean(torch.tensor(3.0), torch.tensor(4)).value == 0.75
    assert Mean(3, 4).value == 0.75  # type: ignore[arg-type]  # a number is taken too
    assert Mean(torch.tensor([3.0]), 4).value == 0.75
    assert math.isnan(Mean(torch.tensor(0.0), 0).value)


@pytest.mark.parametrize(
    ("total", "count", "message"),
    [
        (torch.zeros(2), 1, r"Mean.sum: found a float32 tensor of shape \(2,\)"),
        (None, 1, "Mean.sum: found None, expected a single number"),
        (torch.tensor(1.0), torch.ones(3), r"Mean.count: found a float32 tensor of shape \(3,\)"),
        (torch.tensor(1.0), "4", "Mean.count: found a str"),
        (torch.tensor(1.0), -1, "Mean.count: found -1, expected a finite number, at least 0"),
        (torch.tensor(1.0), math.inf, "Mean.count: found inf"),
        (torch.tensor(1.0), math.nan, "Mean.count: found nan"),
        (
            torch.tensor(1.0),
            torch.tensor(1.0, requires_grad=True),
            "Mean.count: found a tensor with a gradient",
        ),
    ],
)
def test_a_mean_of_anything_else_is_refused(total: Any, count: Any, message: str) -> None:
    with pytest.raises(JobError, match=f"^{message}"):
        Mean(total, count)


def test_mean_is_frozen_and_can_be_sent() -> None:
    mean = Mean(torch.tensor(3.0), 4)
    with pytest.raises(AttributeError):
        mean.count = 5  # type: ignore[misc]  # that is the point
    assert pickle.loads(pickle.dumps(mean)).value == 0.75  # noqa: S301 - our own bytes


# ---- read_loss


def test_a_scalar_loss_is_taken_with_its_gradient() -> None:
    loss = torch.tensor([2.0], requires_grad=True)
    for value in (loss.sum(), loss):
        read = read_loss(value)
        assert isinstance(read, Tensor)
        assert read.shape == ()
        assert read.requires_grad


def test_a_plain_pair_of_sum_and_count_is_a_mean() -> None:
    total = torch.tensor(6.0, requires_grad=True) * 1
    for count in (3, 3.0, torch.tensor(3)):
        for value in ((total, count), [total, count], Mean(total, count)):
            read = read_loss(value)
            assert isinstance(read, Mean)
            assert read.sum is total
            assert read.value == 2.0


GRADIENT = torch.tensor(1.0, requires_grad=True) * 1


@pytest.mark.parametrize(
    "value",
    [
        (GRADIENT, torch.zeros(4, 10)),
        (GRADIENT, GRADIENT),
        (GRADIENT, None),
        (GRADIENT, 3, 4),
        (3.0, 4),
        (GRADIENT, True),
        (GRADIENT,),
        {"loss": GRADIENT},
        None,
        1.5,
        (),
        {},
    ],
)
def test_loss_and_logits_and_the_like_are_an_error_that_names_mean(value: object) -> None:
    with pytest.raises(
        JobError, match=r"^loss returned .*Mean\(sum, count\); return the loss alone$"
    ):
        read_loss(value)


def test_the_error_says_what_was_found() -> None:
    with pytest.raises(
        JobError,
        match=r"a tuple \(a float32 tensor of shape \(\), a float32 tensor of shape \(4, 10\)\)",
    ):
        read_loss((GRADIENT, torch.zeros(4, 10)))
    with pytest.raises(JobError, match="loss returned a dict with keys loss"):
        read_loss({"loss": GRADIENT})
    with pytest.raises(JobError, match=r"float32 tensor of shape \(4,\), expected a single number"):
        read_loss(torch.zeros(4))
    for value in (torch.tensor(3), (torch.tensor(3), 4), Mean(torch.tensor(3), 4)):
        with pytest.raises(JobError, match=r"a int64 tensor.*expected a floating type"):
            read_loss(value)


# ---- batches


class Pair(NamedTuple):
    first: Tensor
    second: list[Tensor]


@dataclass
class Record:
    values: Tensor
    name: str


class Movable:
    def __init__(self, device: torch.device) -> None:
        self.device = device

    def to(self, device: torch.device) -> "Movable":
        return Movable(device)


def test_to_device_moves_every_tensor_and_keeps_the_containers() -> None:
    one = torch.ones(2)
    batch = [
        one,
        {"a": one, "b": "text"},
        Pair(one, [one]),
        Record(one, "name"),
        Movable(CPU),
        OrderedDict(z=one),
        (one, 3),
        None,
    ]
    moved = Plain().to_device(batch, META)
    assert moved[0].device == moved[1]["a"].device == META
    assert moved[1]["b"] == "text"
    assert isinstance(moved[2], Pair)
    assert moved[2].first.device == moved[2].second[0].device == META
    assert (moved[3].values.device, moved[3].name) == (META, "name")
    assert moved[4].device == META
    assert isinstance(moved[5], OrderedDict)
    assert moved[5]["z"].device == META
    assert isinstance(moved[6], tuple)
    assert moved[6][1] == 3
    assert moved[7] is None
    assert one.device == CPU


@pytest.mark.parametrize(
    "batch",
    [
        torch.zeros(3, 2),
        [torch.zeros(3, 2), torch.zeros(3)],
        {"x": torch.zeros(3, 2)},
        (["a", "b", "c"], torch.zeros(3)),
        ["a", "b", "c"],
        {"name": "x", "values": [torch.zeros(3)]},
        Record(torch.zeros(3), "x"),
        ({"x": torch.zeros(3)}, 1),
    ],
)
def test_samples_of_a_batch_are_counted(batch: Any) -> None:
    assert count_samples(batch) == 3


@pytest.mark.parametrize("batch", [None, 3, torch.tensor(1.0), {}, [], object()])
def test_a_batch_without_a_length_is_one_clear_line(batch: Any) -> None:
    with pytest.raises(JobError, match=r"^metrics: found .* write the job's own metrics\(\)$"):
        count_samples(batch)


# ---- the package


def test_package_exports_its_names_lazily() -> None:
    code = (
        "import sys, jobs; assert 'torch' not in sys.modules; "
        "from jobs import JobError, load_job; assert 'torch' not in sys.modules; "
        "assert set(jobs.__all__) <= set(dir(jobs)); "
        "from jobs import Job, Mean; assert 'torch' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(jobs.__file__).parents[1])
    with pytest.raises(AttributeError, match=r"^module 'jobs' has no attribute 'nothing'$"):
        _ = jobs.nothing
