"""Several losses with an optimizer each: exact in every world, by DDP and by the tree."""

import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import LBFGS, SGD
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from elastic.agreement import Request
from elastic.bitwise import TreeReducer
from elastic.errors import StartError
from elastic.loader import Loader
from elastic.options import TrainOptions
from elastic.phases import Schedules, make_optimizers, make_scaler, phases_of
from elastic.reduce import PlainReducer, Reducer
from elastic.sampler import Plan
from elastic.step import Stepper
from elastic.tree import owned
from elastic.world import World
from tests.support.phased import Gan, reference
from tests.support.ranked import run_ranks, world_of

N, BATCH, EPOCHS = 10, 4, 2


def train(
    world: World, *, tree: bool, micro: int | None = None, nan_item: int | None = None
) -> dict[str, Any]:
    """Train two epochs; the weights, and what each step told."""
    job = Gan(N, nan_item)
    model = job.model()
    optimizers = make_optimizers(job, model)
    phases = phases_of(job, optimizers)
    schedules = Schedules(job.scheduler(optimizers, 6))
    parameters = [phase.parameters for phase in phases]
    shards = 4 if tree else world.world_size
    reducer: Reducer
    if tree:
        reducer = TreeReducer(model, world, parameters=parameters, shards=shards)
    else:
        reducer = PlainReducer(model, world, compiled=None, find_unused=False, phases=parameters)
    options = TrainOptions(on_nonfinite="skip")
    stepper = Stepper(job, reducer, phases, scaler=None, options=options, world=world)
    plan = Plan(n=N, global_batch_size=BATCH, seed=0, shards=shards, micro_batch_size=micro)
    own = owned(world.rank, world.world_size, shards)
    loader = Loader(job.dataset(), plan, rank=world.rank, shards=own, pads=not tree)
    told, step = [], 0
    for epoch in range(EPOCHS):
        for batch in loader.epoch(epoch):
            step += 1
            result = stepper.run(step, batch, Request())
            schedules.advance("step")
            told.append((result.skipped, result.refused, dict(result.named), result.loss))
        schedules.advance("epoch")
    weights = {name: value.flatten().tolist() for name, value in model.state_dict().items()}
    needs = [parameter.requires_grad for parameter in model.parameters()]
    return {"weights": weights, "told": told, "needs": needs}


def exercise(world: World) -> dict[str, Any]:
    return {
        "plain": train(world, tree=False),
        "plain micro": train(world, tree=False, micro=1),
        "tree": train(world, tree=True),
        "tree micro": train(world, tree=True, micro=1),
        "nan": train(world, tree=False, nan_item=7),
    }


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    with world_of(0, 1, tmp_path_factory.mktemp("alone")) as world:
        alone = [exercise(world)]
    return {1: alone, 2: run_ranks(2, exercise), 3: run_ranks(3, exercise)}


Worlds = dict[int, list[dict[str, Any]]]


@pytest.mark.parametrize("kind", ["plain", "plain micro", "tree", "tree micro"])
def test_each_phase_is_the_exact_mean_of_its_own_loss_in_every_world(
    worlds: Worlds, kind: str
) -> None:
    expected = reference(N, BATCH, EPOCHS)
    for ranks in worlds.values():
        for found in ranks:
            assert found[kind]["weights"].keys() == expected.keys()
            for name, value in found[kind]["weights"].items():
                torch.testing.assert_close(torch.tensor(value), expected[name].flatten())


@pytest.mark.parametrize("kind", ["tree", "tree micro"])
def test_bits_of_both_nets_do_not_depend_on_the_world(worlds: Worlds, kind: str) -> None:
    weights = [found[kind]["weights"] for ranks in worlds.values() for found in ranks]
    assert all(one == weights[0] for one in weights)


def test_phases_tell_their_figures_by_name(worlds: Worlds) -> None:
    skipped, refused, named, loss = worlds[2][0]["plain"]["told"][0]
    assert (skipped, refused) == (False, None)
    assert set(named) == {
        f"{what}.{name}" for what in ("loss", "grad_norm", "lr") for name in ("disc", "gen")
    }
    assert loss == named["loss.disc"] + named["loss.gen"]
    rates = [told[2]["lr.disc"] for told in worlds[2][0]["plain"]["told"]]
    assert rates == pytest.approx([0.01, 0.01, 0.005, 0.005, 0.0025, 0.0025])


def test_phase_that_is_not_finite_is_left_out_alone_on_all_ranks(worlds: Worlds) -> None:
    for ranks in worlds.values():
        told = ranks[0]["nan"]["told"]
        assert all(found["nan"]["weights"] == ranks[0]["nan"]["weights"] for found in ranks)
        # Epoch 0's order puts item 7 into a step of its own; the generator's loss knows nothing of it.
        left_out = [number for number, one in enumerate(told) if "skipped.disc" in one[2]]
        assert len(left_out) == EPOCHS
        assert not any(one[0] for one in told)
        assert "of phase disc" in told[left_out[0]][1]


def test_every_parameter_asks_for_a_gradient_again_behind_a_step(worlds: Worlds) -> None:
    assert all(all(found["plain"]["needs"]) for ranks in worlds.values() for found in ranks)


class Named(Gan):
    """Losses and optimizers that do not fit."""

    def __init__(self, losses: Any) -> None:
        super().__init__()
        self._losses = losses

    def losses(self) -> Any:
        return self._losses


def loss_of(_model: nn.Module, _batch: Any) -> Any:
    raise AssertionError


@pytest.mark.parametrize(
    ("losses", "message"),
    [
        ({"disc": loss_of}, "found losses {disc} and optimizer {gen, disc}"),
        ({"a": loss_of, "b": loss_of}, "found losses {a, b} and optimizer {gen, disc}"),
        (None, "Named.optimizer: found {gen, disc}, expected one optimizer, or losses()"),
    ],
)
def test_losses_and_optimizers_that_do_not_fit_are_one_line(losses: Any, message: str) -> None:
    job = Named(losses)
    with pytest.raises(StartError) as caught:
        phases_of(job, job.optimizer(job.model()))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_losses_with_one_optimizer_without_a_name_are_refused() -> None:
    job = Gan()
    with pytest.raises(StartError, match="optimizer one without a name, expected an optimizer of"):
        phases_of(job, SGD(job.model().parameters(), lr=0.1))


@pytest.mark.parametrize(
    ("driver", "message"),
    [
        (ReduceLROnPlateau, "scheduler: found ReduceLROnPlateau, whose step() wants a metric, expected"),
        (lambda o: (StepLR(o, 1), "epochs"), "scheduler: found (StepLR, 'epochs'), expected 'step' or 'epoch' there"),
        (lambda _: 0.1, "scheduler: found float, expected one of torch.optim.lr_scheduler's"),
        (lambda o: [StepLR(o, 1)], "scheduler: found list, expected one of torch.optim.lr_scheduler's"),
    ],
)  # fmt: skip
def test_scheduler_that_the_loop_cannot_step_is_refused(driver: Any, message: str) -> None:
    with pytest.raises(StartError, match="^" + re.escape(message)):
        Schedules(driver(SGD(Gan().model().parameters(), lr=0.1)))


@pytest.mark.parametrize("given", [None, {}, {"disc": 1}, [1]])
def test_what_is_no_optimizer_is_refused(given: Any) -> None:
    class Wrong(Gan):
        def optimizer(self, model: nn.Module) -> Any:  # noqa: ARG002
            return given

    with pytest.raises(StartError, match=r"^Wrong.optimizer: found .*, expected a torch Optimizer"):
        make_optimizers(Wrong(), Gan().model())


def test_optimizer_that_wants_a_closure_is_refused() -> None:
    class Closed(Gan):
        def optimizer(self, model: nn.Module) -> Any:
            return LBFGS(model.parameters())

    with pytest.raises(
        StartError,
        match=r"^Closed.optimizer: found LBFGS, whose step\(\) wants a closure, expected",
    ):
        make_optimizers(Closed(), Gan().model())


def test_optimizer_with_a_parameter_that_is_not_the_models_is_refused() -> None:
    class Temperature(Gan):
        def optimizer(self, model: nn.Module) -> Any:
            more = nn.Parameter(torch.ones(3))
            return super().optimizer(model) | {"other": SGD([*model.parameters(), more], lr=0.1)}  # type: ignore[operator]

    message = (
        r"^Temperature.optimizer: found a parameter that is not the model's \(group 0, place 8, shape \(3,\)\), "
        r"expected model.parameters\(\) alone: .*; make it part of model\(\)$"
    )
    with pytest.raises(StartError, match=message):
        make_optimizers(Temperature(), Gan().model())


def test_each_phase_has_a_scaler_of_its_own_with_fp16_alone() -> None:
    job = Gan()
    optimizers = job.optimizer(job.model())
    cpu = torch.device("cpu")
    assert make_scaler(optimizers, "fp32", cpu) is None
    scalers = make_scaler(optimizers, "fp16", cpu)
    assert isinstance(scalers, dict)
    assert set(scalers) == {"disc", "gen"}
    one = make_scaler(SGD(job.model().parameters(), lr=0.1), "fp16", cpu)
    assert isinstance(one, torch.amp.GradScaler)


def test_a_scaler_of_a_rank_without_micro_batch_can_unscale_and_update() -> None:
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    optimizer = SGD([weight], lr=1.0)
    scaler = make_scaler(optimizer, "fp16", torch.device("cpu"))
    assert isinstance(scaler, torch.amp.GradScaler)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert weight.grad.eq(1 / 65536).all()
