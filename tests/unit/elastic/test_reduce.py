"""Gradients and control numbers, summed over real ranks."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elastic.reduce import CONTROL_SLOTS, Reducer, forward_reads_buffers
from elastic.world import World
from tests.support.ranked import run_ranks, world_of


class Net(nn.Module):
    """Two layers, one of them not always used, and an attribute that a loss may ask for."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 1, bias=False)
        self.spare = nn.Linear(2, 1, bias=False)
        self.width = 2
        nn.init.ones_(self.first.weight)
        nn.init.ones_(self.spare.weight)

    def forward(self, x: Tensor, spare: bool = True) -> Tensor:
        out: Tensor = self.first(x)
        return out + self.spare(x) if spare else out

    def penalty(self) -> Tensor:
        return self.first.weight.sum()


def gradient(net: Net) -> Any:
    found = net.first.weight.grad
    return None if found is None else found.tolist()


def numbers(*values: float) -> Tensor:
    return torch.tensor([*values, *[0.0] * (CONTROL_SLOTS - len(values))])


class Through:
    """The model as a loss calls it, each call by the reducer's forward."""

    def __init__(self, reducer: Reducer) -> None:
        self.reducer = reducer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.reducer.forward(lambda model: model(*args, **kwargs))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.reducer.model, name)


def exercise(world: World) -> dict[str, Any]:
    """Everything that is asked of a reducer, on one rank; figures by name."""
    rank = world.rank
    found: dict[str, Any] = {}
    net = Net()
    if rank:
        nn.init.zeros_(net.first.weight)  # the primary's weights are everybody's
    reducer = Reducer(net, world, compiled=None, find_unused=False)
    model = Through(reducer)
    found["weights"] = net.first.weight.tolist()
    found["attributes"] = (model.width, float(model.penalty().detach()))
    found["parameters"] = [name for name, _ in model.named_parameters()], len([*model.parameters()])
    mine = torch.full((1, 2), rank + 1.0)

    reducer.start_step()
    reducer.backward(model(mine).sum(), numbers(2.0**24 - 1, 0.0, rank, 1.0))
    found["sum"] = (gradient(net), reducer.summed()[:5])

    net.zero_grad(set_to_none=True)
    reducer.start_step()
    with reducer.accumulate(last=False):
        reducer.backward(model(mine).sum(), None)
    with reducer.accumulate(last=True):
        reducer.backward(model(10 * mine).sum(), numbers(1.0))
    found["accumulated"] = (gradient(net), reducer.summed()[:2])

    net.zero_grad(set_to_none=True)
    reducer.start_step()
    spoiled = model(mine).sum() * (math.nan if rank == world.world_size - 1 else 1.0)
    reducer.backward(spoiled, numbers(spoiled.item(), 7.0, 2.0**20))
    found["nan"] = [str(value) for value in reducer.summed()[:3]]

    net.zero_grad(set_to_none=True)
    reducer.start_step()
    first = model(mine).sum()
    reducer.backward(first + model(mine).sum(), numbers(3.0))
    found["two forwards"] = (gradient(net), reducer.summed()[0])

    def in_parts(model: Any) -> Any:
        return model.first(mine).sum() + model.spare(mine).sum() + model.penalty()

    net.zero_grad(set_to_none=True)
    reducer.start_step()
    parts = reducer.forward(in_parts)
    reducer.backward(parts, numbers(4.0))
    found["parts"] = (gradient(net), reducer.summed()[0])
    found["unused"] = exercise_unused(world)
    found["codes"], found["own statistics"] = send_buffers(world)
    return found


def exercise_unused(world: World) -> Any:
    net = Net()
    reducer = Reducer(net, world, compiled=None, find_unused=True)
    model = Through(reducer)
    results = []
    for spare in (False, True):
        net.zero_grad(set_to_none=True)
        reducer.start_step()
        loss = model(torch.full((1, 2), world.rank + 1.0), spare=spare).sum()
        reducer.backward(loss, numbers(1.0))
        results.append((gradient(net), reducer.summed()[0]))
    return results


@pytest.fixture(scope="module", params=[1, 2, 3])
def worlds(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    size: int = request.param
    if size == 1:
        with world_of(0, 1, tmp_path_factory.mktemp("alone")) as world:
            return [exercise(world)]
    return run_ranks(size, exercise)


def test_all_ranks_hold_the_same(worlds: list[dict[str, Any]]) -> None:
    shared = [{**found, "own statistics": None} for found in worlds]
    assert all(found == shared[0] for found in shared)


def test_weights_are_the_primarys(worlds: list[dict[str, Any]]) -> None:
    assert worlds[0]["weights"] == [[1.0, 1.0]]


def test_wrapped_model_has_the_plain_ones_attributes(worlds: list[dict[str, Any]]) -> None:
    assert worlds[0]["attributes"] == (2, 2.0)


def test_loss_sees_the_plain_models_parameters_and_no_more(worlds: list[dict[str, Any]]) -> None:
    assert worlds[0]["parameters"] == (["first.weight", "spare.weight"], 2)


def test_gradients_and_control_numbers_are_summed_and_never_divided(
    worlds: list[dict[str, Any]],
) -> None:
    size = len(worlds)
    total = sum(range(1, size + 1))
    found, control = worlds[0]["sum"]
    assert found == [[total, total]]
    # A sum beyond 2**24 is rounded; each rank's own number never is.
    assert control[1:] == [0.0, total - size, size, 0.0]
    if size == 1:
        assert control[0] == 2**24 - 1


def test_loss_may_use_parts_and_methods_of_the_model(worlds: list[dict[str, Any]]) -> None:
    size = len(worlds)
    total = (
        sum(range(1, size + 1)) + size
    )  # of the layer's input, and 1 of the penalty from each rank
    assert worlds[0]["parts"] == ([[total, total]], 4.0 * size)


def test_micro_batches_add_up_and_are_sent_once(worlds: list[dict[str, Any]]) -> None:
    total = 11 * sum(range(1, len(worlds) + 1))
    assert worlds[0]["accumulated"] == ([[total, total]], [float(len(worlds)), 0.0])


def test_loss_that_is_not_finite_leaves_the_other_numbers_exact(
    worlds: list[dict[str, Any]],
) -> None:
    size = len(worlds)
    assert worlds[0]["nan"] == ["nan", str(7.0 * size), str(2.0**20 * size)]


def test_model_may_be_called_twice_in_a_step(worlds: list[dict[str, Any]]) -> None:
    size = len(worlds)
    total = 2 * sum(range(1, size + 1))
    assert worlds[0]["two forwards"] == ([[total, total]], 3.0 * size)


def test_parameters_that_a_step_does_not_use_are_found(worlds: list[dict[str, Any]]) -> None:
    total = sum(range(1, len(worlds) + 1))
    assert worlds[0]["unused"] == [([[total, total]], float(len(worlds)))] * 2


def test_control_numbers_before_a_backward_are_refused(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    with world_of(0, 1, tmp_path_factory.mktemp("alone")) as world:
        net = Net()
        reducer = Reducer(net, world, compiled=None, find_unused=False)
        assert reducer.model is net
        message = "^no control numbers yet: found none, expected a backward with control$"
        with pytest.raises(ValueError, match=message):
            reducer.summed()
        reducer.backward(net(torch.ones(1, 2)).sum(), numbers(5.0))
        assert reducer.summed()[0] == 5.0
        reducer.start_step()
        with pytest.raises(ValueError, match=message):
            reducer.summed()


def frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[1].eval()
    return model


class Codebook(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.zeros(4))


@pytest.mark.parametrize(
    ("model", "reads"),
    [
        (nn.Linear(2, 2), False),
        (nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), False),
        (nn.Sequential(nn.Conv2d(1, 2, 3), nn.SyncBatchNorm(2)), False),
        (nn.InstanceNorm1d(2, track_running_stats=True), False),
        (nn.BatchNorm1d(2, track_running_stats=False), False),
        (frozen(), True),
        (nn.utils.parametrizations.spectral_norm(nn.Linear(2, 2)), True),
        (nn.Sequential(nn.BatchNorm1d(2), Codebook()), True),
    ],
    ids=["none", "batch", "sync", "instance", "no statistics", "frozen", "spectral", "codebook"],
)
def test_buffers_are_sent_only_where_a_forward_reads_them(model: nn.Module, reads: bool) -> None:
    assert forward_reads_buffers(model) is reads


def send_buffers(world: World) -> Any:
    """Whether ranks that differ in a buffer are alike after a forward."""
    found = []
    for module in (Codebook(), nn.BatchNorm1d(1)):
        net = nn.Sequential(nn.Linear(1, 1), nn.Identity())
        net.add_module("extra", module)
        if isinstance(module, Codebook):
            module.forward = lambda x: x
        reducer = Reducer(net, world, compiled=None, find_unused=False)
        buffer = next(iter(module.buffers()))
        buffer.fill_(world.rank + 1.0)
        reducer.start_step()
        loss = reducer.forward(lambda m: m(torch.tensor([[1.0], [2.0]]) * (world.rank + 1))).sum()
        reducer.backward(loss, numbers(1.0))
        found.append(buffer.tolist())
    return found


def test_codebook_is_the_primarys_and_running_statistics_are_each_ranks_own(
    worlds: list[dict[str, Any]],
) -> None:
    assert {str(found["codes"]) for found in worlds} == {str([1.0] * 4)}
    assert len({str(found["own statistics"]) for found in worlds}) == len(worlds)
