"""One exact optimizer step, on one, two and three real ranks."""

import math
import re
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from elastic.agreement import Agreed, Request
from elastic.errors import AttentionError, StartError
from elastic.loader import Loader
from elastic.models import check_model
from elastic.options import TrainOptions
from elastic.phases import phases_of
from elastic.reduce import PlainReducer
from elastic.sampler import Plan
from elastic.step import Stepper
from elastic.world import World
from jobs.job import Loss, Mean
from tests.support.ranked import run_ranks, world_of
from tests.support.tracer import Batch, Masks, Numbers, Tracer


class Heavy(Tracer):
    """Each micro-batch stands for a great many items."""

    items = 2**30 - 1

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        total = model(batch[0]).sum() * 0.0
        if 0 in batch[1]:
            total = total * math.nan
        return Mean(total, torch.tensor(self.items))


class Wide(Tracer):
    """A net with a batch norm, a bias and many numbers."""

    def model(self) -> nn.Module:
        torch.manual_seed(5)
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        indices = batch[1]
        x = torch.stack([indices, indices % 3, indices % 5], 1).float()
        each: Tensor = (model(x)[:, 0] - indices.float().sin()) ** 2
        if not self.weighted:
            return each.mean()
        weights = (1 + indices % 4).float() / 3
        return Mean((weights * each).sum(), weights.sum())


class Tracked(nn.Module):
    """Running means of its own: one is written into, one is made anew; one counts."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("written", "made"):
            self.register_buffer(name, torch.zeros(1))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.written: Tensor
        self.made: Tensor
        self.count: Tensor

    def forward(self, x: Tensor) -> Tensor:
        mean = x.detach().mean()
        self.written.lerp_(mean, 0.5)
        self.made = self.made * 0.5 + mean * 0.5
        self.count += 1
        return x


class Normed(Tracer):
    """A batch norm in front, and means of its own, whose statistics a bad sample would spoil."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 1), Tracked())

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        values, indices = batch
        item = -1 if self.nan_item is None else self.nan_item
        x = torch.where(indices == item, torch.nan, values.float())
        loss: Tensor = model(x[:, None]).mean()
        return loss


class Half(Tracer):
    """The loss is of a half-precision type and large."""

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        loss: Tensor = (model(batch[0]) * 0.0 + 30000.0).mean().half()
        return loss if not self.weighted else Mean(loss, len(batch[0]))


class Undecided(Tracer):
    """A Mean where the micro-batch has item 3, else a plain mean."""

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        loss = super().loss(model, batch)
        return Mean(loss * len(batch[1]), len(batch[1])) if 3 in batch[1] else loss  # type: ignore[operator,arg-type]


class Weightless(Tracer):
    """No item counts."""

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        return Mean(model(batch[0]).sum() * 0.0, 0)


class Sparse(Tracer):
    """A gradient that has the rows of the batch alone."""

    def model(self) -> nn.Module:
        return nn.Embedding(12, 1)

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        loss: Tensor = nn.functional.embedding(batch[1], model.weight, sparse=True).mean()  # type: ignore[arg-type]
        return loss


class Thawing(Tracer):
    """A bias that asks for a gradient from its first loss on, and not before."""

    def model(self) -> nn.Module:
        model = nn.Linear(1, 1)
        model.bias.requires_grad_(False)
        return model

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        model.requires_grad_(True)
        loss: Tensor = model(batch[0].float()[:, None]).mean()
        return loss


class Jittered(Tracer):
    """Batches are moved by noise on their way to the device."""

    def to_device(self, batch: Any, device: torch.device) -> Any:
        values, indices = super().to_device(batch, device)
        return values + torch.randn(len(values)), indices


class Langevin(SGD):
    """Adds noise to each update."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(torch.randn_like(parameter))
        return loss


class Noisy(Tracer):
    """Its optimizer draws."""

    def optimizer(self, model: nn.Module) -> Optimizer:
        return Langevin(model.parameters(), lr=self.lr)


JOBS: dict[str, type[Tracer]] = {
    job.__name__: job
    for job in (
        Tracer,
        Heavy,
        Wide,
        Normed,
        Half,
        Masks,
        Jittered,
        Noisy,
        Sparse,
        Thawing,
        Undecided,
        Weightless,
    )
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A few steps of training."""

    job: str = "Tracer"
    n: int = 12
    batch: int = 4
    micro: int | None = None
    weighted: bool = False
    nan_item: int | None = None
    on_nonfinite: str = "stop"
    grad_clip: float | None = None
    scale: float | None = None
    """The scaler's first scale, with fp16."""
    leave: tuple[int, int] | None = None
    """(step, rank) of a SIGTERM."""
    late: tuple[int, int] | None = None
    """The same, but after the step has begun."""
    steps: int = 99
    freezes_alone: bool = False
    """Whether rank 0 freezes a parameter after the first step."""


def make_job(case: Case) -> Tracer:
    if case.job == "Masks":
        return Masks(n=case.n)
    return JOBS[case.job](n=case.n, weighted=case.weighted, nan_item=case.nan_item)


def train(world: World, case: Case) -> dict[str, Any]:
    """Train an epoch; what each step gave, and the weights after it."""
    job = make_job(case)
    model = job.model()
    optimizer = job.optimizer(model)
    plan = Plan(
        n=case.n, global_batch_size=case.batch, seed=0, shards=world.world_size, micro_batch_size=case.micro
    )  # fmt: skip
    scaler = None if case.scale is None else torch.amp.GradScaler("cpu", init_scale=case.scale)
    options = TrainOptions(
        on_nonfinite=case.on_nonfinite,  # type: ignore[arg-type]
        grad_clip=case.grad_clip,
        precision="fp32" if scaler is None else "fp16",
    )
    reducer = PlainReducer(model, world, compiled=None, find_unused=case.freezes_alone)
    phases = phases_of(job, optimizer)
    at = 0
    stepper = Stepper(
        job, reducer, phases, scaler=scaler, options=options, world=world,
        told=lambda: (case.late == (at, world.rank) or case.leave == (at, world.rank), False),
    )  # fmt: skip
    loader = Loader(job.dataset(), plan, rank=world.rank)
    results, weights = [], []
    for step, batch in enumerate(loader.epoch(0), 1):
        if step > case.steps:
            break
        request = Request(
            leave=case.leave == (step, world.rank), save=step == 2 and world.is_primary
        )
        at = step
        try:
            results.append(stepper.run(step, batch, request))
        except (AttentionError, StartError) as error:
            return {"error": str(error)}
        if case.freezes_alone and world.is_primary:
            next(model.parameters()).requires_grad_(False)
        weights.append(
            [number for p in model.parameters() for number in p.detach().flatten().tolist()]
        )
    return {
        "weights": weights,
        "loss": [result.loss for result in results],
        "count": [result.count for result in results],
        "norm": [result.grad_norm for result in results],
        "lr": [result.lr for result in results],
        "skipped": [result.skipped for result in results],
        "agreed": [result.agreed for result in results],
        "buffers": [buffer.tolist() for buffer in model.buffers()],
    }  # fmt: skip


MICRO = (4, 2, 1)
CASES: dict[str, Case] = {
    **{f"c45 {micro}": Case(n=10, weighted=True, micro=micro) for micro in MICRO},
    **{f"plain {micro}": Case(n=10, micro=micro) for micro in MICRO},
    # Steps of 5, 5 and 1 samples: uneven parts, then empty ones.
    **{f"wide {micro}": Case(job="Wide", n=11, batch=5, micro=micro) for micro in (None, 1)},
    "wide weighted": Case(job="Wide", n=11, batch=5, micro=2, weighted=True),
    "skip": Case(nan_item=10, on_nonfinite="skip"),
    "stop": Case(nan_item=10),
    "clip": Case(grad_clip=0.5),
    "no clip": Case(grad_clip=100.0),
    "scaled": Case(scale=1024.0),
    "overflow": Case(n=24, scale=2.0**127),
    "scaled nan": Case(nan_item=10, on_nonfinite="skip", scale=1024.0),
    "heavy": Case(job="Heavy", n=4, on_nonfinite="skip", leave=(1, 0)),
    "leave": Case(leave=(2, 1)),
    "late": Case(late=(2, 0)),
    "normed": Case(job="Normed", nan_item=10, on_nonfinite="skip", batch=6),
    "noisy": Case(job="Noisy"),
    "undecided": Case(job="Undecided", n=8, batch=8, micro=2),
    "sparse": Case(job="Sparse"),
    "thawing": Case(job="Thawing"),
    "freezing": Case(job="Wide", freezes_alone=True),
    "weightless": Case(job="Weightless"),
    "half": Case(job="Half", steps=1),
    "half weighted": Case(job="Half", steps=1, weighted=True),
}


def train_all(world: World) -> dict[str, Any]:
    return {name: train(world, case) for name, case in CASES.items()}


@pytest.fixture(scope="module", params=[1, 2, 3])
def world_results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    if request.param == 1:
        with world_of(0, 1, tmp_path_factory.mktemp("alone")) as world:
            return [train_all(world)]
    return run_ranks(request.param, train_all)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    with world_of(0, 1, tmp_path_factory.mktemp("alone")) as world:
        return train_all(world)


Results = list[dict[str, Any]]


@pytest.mark.parametrize("name", [name for name in CASES if name not in {"normed", "thawing"}])
def test_every_rank_has_the_same_outcome(world_results: Results, name: str) -> None:
    assert all(str(found[name]) == str(world_results[0][name]) for found in world_results)


@pytest.mark.parametrize("micro", MICRO)
def test_c45_open_means_are_weighed_by_their_counts(world_results: Results, micro: int) -> None:
    found = world_results[0][f"c45 {micro}"]
    weights = [w for (w,) in found["weights"]]
    assert weights == pytest.approx([0.4333333, 0.99, 1.191], rel=1e-6)
    assert found["count"] == [9, 6, 4]


@pytest.mark.parametrize("micro", MICRO)
def test_plain_means_are_weighed_by_their_samples(world_results: Results, micro: int) -> None:
    found = world_results[0][f"plain {micro}"]
    assert found["count"] == [4, 4, 2]
    order = torch.randperm(10, generator=torch.Generator().manual_seed(0)).float()
    w, weights, losses = 0.0, [], []
    for part in order.split(4):
        losses.append(float((0.5 * (w - part) ** 2).mean()))
        w += 0.1 * (float(part.mean()) - w)
        weights.append([w])
    assert torch.tensor(found["weights"]).allclose(torch.tensor(weights), rtol=1e-6)
    assert found["loss"] == pytest.approx(losses, rel=1e-6)


@pytest.mark.parametrize("name", ["wide None", "wide 1", "wide weighted"])
def test_gradient_is_the_exact_mean_however_it_is_cut(
    world_results: Results, alone: dict[str, Any], name: str
) -> None:
    found, expected = world_results[0][name], alone["wide weighted" if "w " in name else name]
    expected = alone["wide weighted"] if name == "wide weighted" else alone["wide None"]
    assert len(found["weights"]) == 3
    assert torch.tensor(found["weights"]).allclose(torch.tensor(expected["weights"]), rtol=1e-5)
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert found["norm"] == pytest.approx(expected["norm"], rel=1e-5)


def test_wide_reference_is_what_plain_torch_does(alone: dict[str, Any]) -> None:
    job = Wide(n=11)
    model = job.model()
    optimizer = job.optimizer(model)
    order = torch.randperm(11, generator=torch.Generator().manual_seed(0))
    for part in order.split(5):
        optimizer.zero_grad()
        loss = job.loss(model, (part.float(), part))
        assert isinstance(loss, Tensor)
        loss.backward()
        optimizer.step()
    last = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert torch.tensor(alone["wide None"]["weights"][-1]).allclose(last, rtol=1e-6)


def test_c24_step_with_a_nan_is_skipped_by_all_ranks(world_results: Results) -> None:
    found = world_results[0]["skip"]
    assert [w for (w,) in found["weights"]] == pytest.approx([0.55, 0.55, 1.02], rel=1e-6)
    assert found["skipped"] == [False, True, False]
    assert math.isnan(found["loss"][1])
    assert found["count"] == [4, 4, 4]


def test_c24_stop_names_step_rank_and_samples(world_results: Results) -> None:
    size = len(world_results)
    rank = {1: 0, 2: 1, 3: 2}[size]
    message = (
        r"step 2: found loss nan and gradient norm 2\.8\d+, expected finite numbers; first seen on "
        rf"rank {rank}, samples \[7, 4, 2, 10\]; mend the data or set train\.on_nonfinite=skip"
    )
    assert re.fullmatch(message, world_results[0]["stop"]["error"])


def test_loss_that_is_a_mean_for_some_micro_batches_alone_is_refused(
    world_results: Results,
) -> None:
    assert world_results[0]["undecided"]["error"] == (
        "loss: found Mean(sum, count) for some micro-batches of step 1 and a plain mean for others, expected one of the "
        "two for all; return Mean for each"
    )


def test_sparse_gradient_is_refused_in_a_line(world_results: Results) -> None:
    line = "gradients: found a sparse one, expected dense ones, which are summed, clipped and checked alike; make the "
    assert world_results[0]["sparse"]["error"] == line + "embedding with sparse=False"
    with pytest.raises(StartError, match=r"found a sparse one of 0\.weight, expected"):
        check_model(nn.Sequential(nn.Embedding(2, 2, sparse=True)), "Sparse")


def test_an_embedding_whose_forward_changes_its_weights_is_refused() -> None:
    expanded = nn.Linear(2, 2)
    expanded.register_buffer("row", torch.ones(1, 2).expand(4, 2))
    with pytest.raises(StartError, match=r"Wide.model: found row expanded, its elements share"):
        check_model(expanded, "Wide")
    normed = nn.Sequential(nn.SyncBatchNorm(2))
    check_model(normed, "Synced")
    with pytest.raises(StartError, match=r"Synced.model: found 0, a SyncBatchNorm, with train.log"):
        check_model(normed, "Synced", in_shards=True)
    with pytest.raises(StartError, match=r"Bound.model: found 0 with max_norm=2, expected none"):
        check_model(nn.Sequential(nn.EmbeddingBag(2, 2, max_norm=2.0)), "Bound")


def test_gradient_that_no_reducer_knows_is_refused(world_results: Results) -> None:
    for found in world_results:
        if len(world_results) == 1:
            assert len(found["thawing"]["weights"]) == 3
        else:
            assert (
                "one of parameter 1 of the optimizer, shape (1,), which asked for none"
                in found["thawing"]["error"]
            )


def test_what_one_rank_alone_freezes_is_refused_by_all(world_results: Results) -> None:
    for found in world_results:
        if len(world_results) == 1:
            assert len(found["freezing"]["weights"]) == 3
        else:
            line = "step 2: found other parameters with requires_grad on some ranks than on others, expected"
            assert found["freezing"]["error"].startswith(line)


def test_step_in_which_nothing_counts_says_so(world_results: Results) -> None:
    assert re.fullmatch(
        r"step 1: found a total count of 0, expected an item that counts, samples \[[0-9, ]+\]; mend the data or set "
        "train.on_nonfinite=skip",
        world_results[0]["weightless"]["error"],
    )


def test_gradient_is_clipped_to_its_norm_and_told_before(world_results: Results) -> None:
    clipped, free = world_results[0]["clip"], world_results[0]["no clip"]
    assert free["norm"][0] == pytest.approx(5.5, rel=1e-6)
    assert clipped["norm"][0] == pytest.approx(5.5, rel=1e-6)
    assert clipped["weights"][0] == pytest.approx([0.05], rel=1e-5)
    assert free["weights"][0] == pytest.approx([0.55], rel=1e-6)


def test_scaled_steps_are_the_plain_ones(world_results: Results) -> None:
    scaled, plain = world_results[0]["scaled"], world_results[0]["no clip"]
    assert scaled["weights"] == plain["weights"]
    assert scaled["norm"] == plain["norm"]
    assert scaled["loss"] == plain["loss"]


def test_step_that_overflows_under_fp16_is_skipped_and_counted_on_all_ranks(
    world_results: Results,
) -> None:
    for found in world_results:
        overflow = found["overflow"]
        first_taken = overflow["skipped"].index(False)
        assert first_taken >= 1
        assert overflow["skipped"] == [True] * first_taken + [False] * (6 - first_taken)
        assert [w for (w,) in overflow["weights"][:first_taken]] == [0.0] * first_taken
        assert overflow["weights"][first_taken][0] > 0
        assert all(math.isfinite(loss) for loss in overflow["loss"])


def test_nan_loss_under_fp16_is_skipped_too(world_results: Results) -> None:
    found = world_results[0]["scaled nan"]
    assert [w for (w,) in found["weights"]] == pytest.approx([0.55, 0.55, 1.02], rel=1e-6)
    assert found["skipped"] == [False, True, False]


def test_count_of_a_step_is_exact_beyond_what_float32_holds(world_results: Results) -> None:
    # 2**30 - 1 items on each rank that has samples; a NaN loss and a flag travel beside it.
    found = world_results[0]["heavy"]
    assert found["count"] == [len(world_results) * (2**30 - 1)]
    assert math.isnan(found["loss"][0])
    assert found["agreed"] == [Agreed(leave=1)]


def test_flags_of_any_rank_are_known_to_all_at_their_step(world_results: Results) -> None:
    leaves = len(world_results) > 1  # rank 1 is told to leave
    assert world_results[0]["leave"]["agreed"] == [
        Agreed(),
        Agreed(leave=int(leaves), save=True),
        Agreed(),
    ]


def test_running_statistics_survive_a_skipped_step(world_results: Results) -> None:
    for found in world_results:
        mean, variance, batches, written, made, count = found["normed"]["buffers"]
        assert found["normed"]["skipped"].count(True) == 1
        assert math.isfinite(mean[0])
        assert math.isfinite(variance[0])
        assert batches == count == 1
        assert math.isfinite(written[0])
        assert made == written


@pytest.mark.parametrize("name", ["half", "half weighted"])
def test_sum_of_half_precision_losses_does_not_overflow(world_results: Results, name: str) -> None:
    found = world_results[0][name]
    assert found["skipped"] == [False]
    expected = 30000.0 if name == "half" else 30000.0 * len(world_results) / 4
    assert found["loss"] == pytest.approx([expected], rel=1e-3)


def test_rate_of_a_step_is_the_one_that_its_update_used(world_results: Results) -> None:
    assert world_results[0]["plain 4"]["lr"] == [0.1] * 3


def test_models_draws_depend_on_step_and_micro_batch_alone(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    case = Case(job="Masks", n=16, batch=8, micro=4)
    with world_of(0, 1, tmp_path_factory.mktemp("alone")) as world:
        torch.manual_seed(1)
        one = train(world, case)
        torch.manual_seed(2)
        torch.rand(100)
        assert train(world, case) == one
        assert train(world, replace(case, micro=8)) != one


def test_draws_of_to_device_do_not_depend_on_the_process(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    case = Case(job="Jittered", micro=2)
    with world_of(0, 1, tmp_path_factory.mktemp("alone")) as world:
        torch.manual_seed(1)
        one = train(world, case)
        torch.manual_seed(2)
        assert train(world, case) == one
    assert one["weights"][0][0] != pytest.approx(0.55, abs=1e-3)


def test_numbers_of_the_tracer_are_their_indices() -> None:
    assert Numbers(3)[2] == (2.0, 2)


def test_a_signal_that_comes_during_a_step_is_told_with_that_step(world_results: Results) -> None:
    assert [agreed.leave for agreed in world_results[0]["late"]["agreed"]] == [0, 1, 0]
