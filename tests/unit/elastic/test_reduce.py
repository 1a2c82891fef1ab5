"""Gradients and control numbers, summed over real ranks."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elastic.reduce import PlainReducer, Turn, forward_reads_buffers
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


LAST, FIRST = Turn(shard=0), Turn(shard=0, closes=False, last=False)


def exercise(world: World) -> dict[str, Any]:
    """Everything that is asked of a reducer, on one rank; figures by name."""
    rank = world.rank
    found: dict[str, Any] = {}
    net = Net()
    if rank:
        nn.init.zeros_(net.first.weight)  # the primary's weights are everybody's
    reducer = PlainReducer(net, world, compiled=None, find_unused=False)
    model: Any = reducer.model
    found["weights"] = net.first.weight.tolist()
    found["attributes"] = (model.width, float(model.penalty().detach()))
    mine = torch.full((1, 2), rank + 1.0)

    reducer.begin(0, [0.0, rank, 1.0])
    with reducer.turn(LAST):
        reducer.backward(model(mine).sum(), loss=2.0**24 - 1, count=4097.0)
    totals = reducer.finish()
    found["sum"] = (gradient(net), totals.loss, totals.count, totals.flags)

    net.zero_grad(set_to_none=True)
    reducer.begin(0, [])
    with reducer.turn(FIRST):
        reducer.backward(model(mine).sum(), loss=torch.tensor(0.5), count=torch.tensor(2))
    with reducer.turn(LAST):
        reducer.backward(model(10 * mine).sum(), loss=torch.tensor(0.5), count=torch.tensor(3))
    totals = reducer.finish()
    found["accumulated"] = (gradient(net), totals.loss, totals.count)

    net.zero_grad(set_to_none=True)
    reducer.begin(0, [2.0**20])
    with reducer.turn(LAST):
        spoiled = model(mine).sum() * (math.nan if rank == world.world_size - 1 else 1.0)
        reducer.backward(spoiled, loss=spoiled.item(), count=7.0)
    totals = reducer.finish()
    found["nan"] = [str(totals.loss), totals.count, totals.flags]

    net.zero_grad(set_to_none=True)
    reducer.begin(0, [])
    with reducer.turn(LAST):
        first = model(mine).sum()
        reducer.backward(first + model(mine).sum(), loss=3.0, count=1.0)
    found["two forwards"] = (gradient(net), reducer.finish().loss)
    found["unused"] = exercise_unused(world)
    found["codes"], found["own statistics"] = send_buffers(world)
    return found


def exercise_unused(world: World) -> Any:
    net = Net()
    reducer = PlainReducer(net, world, compiled=None, find_unused=True)
    model: Any = reducer.model
    results = []
    for spare in (False, True):
        net.zero_grad(set_to_none=True)
        reducer.begin(0, [])
        with reducer.turn(LAST):
            loss = model(torch.full((1, 2), world.rank + 1.0), spare=spare).sum()
            reducer.backward(loss, loss=1.0, count=1.0)
        results.append((gradient(net), reducer.finish().loss))
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


def test_gradients_and_control_numbers_are_summed_and_never_divided(
    worlds: list[dict[str, Any]],
) -> None:
    size = len(worlds)
    total = sum(range(1, size + 1))
    found, loss, count, flags = worlds[0]["sum"]
    assert found == [[total, total]]
    assert count == 4097 * size
    assert flags == (0.0, total - size, size)
    # A sum beyond 2**24 is rounded; each rank's own number never is.
    if size == 1:
        assert loss == 2**24 - 1


def test_micro_batches_add_up_and_are_sent_once(worlds: list[dict[str, Any]]) -> None:
    size = len(worlds)
    total = 11 * sum(range(1, size + 1))
    assert worlds[0]["accumulated"] == ([[total, total]], size, 5 * size)


def test_loss_that_is_not_finite_leaves_the_other_numbers_exact(
    worlds: list[dict[str, Any]],
) -> None:
    size = len(worlds)
    assert worlds[0]["nan"] == ["nan", 7 * size, (2.0**20 * size,)]


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
        reducer = PlainReducer(net, world, compiled=None, find_unused=False)
        assert reducer.model is net
        message = "^no numbers yet: found none, expected a backward of the last turn$"
        reducer.begin(0, [])
        with pytest.raises(ValueError, match=message):
            reducer.finish()
        with reducer.turn(LAST):
            reducer.backward(net(torch.ones(1, 2)).sum(), loss=5.0, count=1.0)
        assert reducer.finish().loss == 5.0
        reducer.begin(0, [])
        with pytest.raises(ValueError, match=message):
            reducer.finish()
        with pytest.raises(
            ValueError, match=r"^phase: found 1, expected 0: DDP reduces one phase$"
        ):
            reducer.begin(1, [])


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
        reducer = PlainReducer(net, world, compiled=None, find_unused=False)
        buffer = next(iter(module.buffers()))
        buffer.fill_(world.rank + 1.0)
        reducer.begin(0, [])
        with reducer.turn(LAST):
            loss = reducer.model(torch.tensor([[1.0], [2.0]]) * (world.rank + 1)).sum()
            reducer.backward(loss, loss=1.0, count=1.0)
        found.append(buffer.tolist())
    return found


def test_codebook_is_the_primarys_and_running_statistics_are_each_ranks_own(
    worlds: list[dict[str, Any]],
) -> None:
    assert {str(found["codes"]) for found in worlds} == {str([1.0] * 4)}
    assert len({str(found["own statistics"]) for found in worlds}) == len(worlds)
