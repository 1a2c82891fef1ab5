"""Gradients and control numbers, summed over real ranks."""

import functools
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from elastic.errors import StartError
from elastic.reduce import PlainReducer, Turn, forward_reads_buffers, frozen
from elastic.unreduced import check_reduced
from elastic.world import World
from tests.support.ranked import run_ranks, world_of


class Net(nn.Module):
    """Two layers, one of them not always used, and a method that a loss may ask for."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 1, bias=False)
        self.spare = nn.Linear(2, 1, bias=False)
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


def forward(reducer: PlainReducer, x: Tensor, **kwargs: Any) -> Tensor:
    found: Tensor = reducer.forward(lambda model: model(x, **kwargs).sum())
    return found


def penalised(model: Any, x: Tensor) -> tuple[Tensor, int]:
    return model.penalty() + model.spare(x).sum(), 7


LAST, FIRST = Turn(shard=0), Turn(shard=0, closes=False, last=False)


def exercise(world: World) -> dict[str, Any]:
    """Everything that is asked of a reducer, on one rank; figures by name."""
    rank = world.rank
    found: dict[str, Any] = {}
    net = Net()
    if rank:
        nn.init.zeros_(net.first.weight)  # the primary's weights are everybody's
    reducer = PlainReducer(net, world, compiled=None, find_unused=False)
    found["weights"] = net.first.weight.tolist()
    found["model"] = reducer.model is net
    mine = torch.full((1, 2), rank + 1.0)

    reducer.begin(0, [0.0, rank, 1.0])
    with reducer.turn(LAST):
        reducer.backward(forward(reducer, mine), loss=2.0**24 - 1, count=4097.0)
    totals = reducer.finish()
    found["sum"] = (gradient(net), totals.loss, totals.count, totals.flags)

    net.zero_grad(set_to_none=True)
    reducer.begin(0, [])
    with reducer.turn(FIRST):
        reducer.backward(forward(reducer, mine), loss=torch.tensor(0.5), count=torch.tensor(2))
    with reducer.turn(LAST):
        reducer.backward(forward(reducer, 10 * mine), loss=torch.tensor(0.5), count=torch.tensor(3))
    totals = reducer.finish()
    found["accumulated"] = (gradient(net), totals.loss, totals.count)

    net.zero_grad(set_to_none=True)
    reducer.begin(0, [2.0**20])
    with reducer.turn(LAST):
        spoiled = forward(reducer, mine) * (math.nan if rank == world.world_size - 1 else 1.0)
        reducer.backward(spoiled, loss=spoiled.item(), count=7.0)
    totals = reducer.finish()
    found["nan"] = [str(totals.loss), totals.count, totals.flags]

    net.zero_grad(set_to_none=True)
    reducer.begin(0, [])
    with reducer.turn(LAST):
        twice = reducer.forward(lambda model: model(mine).sum() + model(mine).sum())
        reducer.backward(twice, loss=3.0, count=1.0)
    found["two forwards"] = (gradient(net), reducer.finish().loss)

    net.zero_grad(set_to_none=True)
    reducer.begin(0, [])
    with reducer.turn(LAST):
        parts: Any = reducer.forward(lambda model: penalised(model, mine))
        reducer.backward(parts[0], loss=3.0, count=1.0)
    found["parts"] = (gradient(net), reducer.finish().loss, parts[1])
    found["unused"] = exercise_unused(world)
    found["refused"] = exercise_refusals(world) if world.world_size > 1 else []
    found["in parts"] = exercise_parts(world)
    found["lacking"] = lack_on_all_but_one(world)
    found["phases"] = exercise_phases(world)
    found["codes"], found["own statistics"] = send_buffers(world)
    return found


def exercise_unused(world: World) -> Any:
    net = Net()
    reducer = PlainReducer(net, world, compiled=None, find_unused=True)
    results = []
    for spare in (False, True):
        net.zero_grad(set_to_none=True)
        reducer.begin(0, [])
        with reducer.turn(LAST):
            x = torch.full((1, 2), world.rank + 1.0)
            loss = forward(reducer, x, spare=spare)
            reducer.backward(loss, loss=1.0, count=1.0)
        results.append((gradient(net), reducer.finish().loss))
    return results


def exercise_refusals(world: World) -> list[str]:
    """What is said of a parameter that no rank's last backward reaches, in one bucket and in several."""
    told = []
    for used_before, own in ((False, False), (True, False), (False, True)):
        net = Net()
        reducer = PlainReducer(net, world, compiled=None, find_unused=False)
        x = torch.full((1, 2), world.rank + 1.0)
        reducer.begin(0, [])
        try:
            if own:
                ddp = nn.parallel.DistributedDataParallel(net)
                ddp(x, spare=False).sum().backward()
                check_reduced(ddp, "mend it")
            if used_before:
                with reducer.turn(FIRST):
                    reducer.backward(forward(reducer, x), loss=1.0, count=1.0)
            with reducer.turn(LAST):
                reducer.backward(forward(reducer, x, spare=False), loss=1.0, count=1.0)
            reducer.finish()
        except StartError as error:
            told.append(str(error))
    return told


def in_parts(model: nn.Module, x: Tensor) -> Tensor:
    one, other = (checkpoint(model, x * factor, use_reentrant=True) for factor in (1.0, 2.0))
    product: Tensor = one.sum() * other.sum()
    return product


def exercise_parts(world: World) -> list[str]:
    """What is said of a weight that is in two reentrant checkpoints, with and without a search for unused ones."""
    told = []
    for find_unused in (False, True):
        net = Net()
        reducer = PlainReducer(net, world, compiled=None, find_unused=find_unused)
        x = torch.full((1, 2), world.rank + 1.0, requires_grad=True)
        reducer.begin(0, [])
        try:
            for turn in (FIRST, LAST):
                with reducer.turn(turn):
                    twice = reducer.forward(functools.partial(in_parts, x=x))
                    reducer.backward(twice, loss=1.0, count=1.0)
            reducer.finish()
        except StartError as error:
            told.append(str(error))
    return told


def lack_on_all_but_one(world: World) -> str:
    """All ranks but the first leave a parameter out of their loss."""
    reducer = PlainReducer(Net(), world, compiled=None, find_unused=False, flags=1)
    reducer.begin(0, [])
    with reducer.turn(LAST):
        loss = forward(reducer, torch.ones(1, 2), spare=world.rank == 0)
        reducer.backward(loss, loss=1.0, count=1.0)
    try:
        reducer.finish()
    except StartError as error:
        # The first waits for the bucket; in a run it is this process' end that ends its wait.
        dist.all_reduce(torch.zeros(3 + 1 + 2 + 2))
        return str(error)
    return ""


def exercise_phases(world: World) -> Any:
    """Two phases over one loss: each gives its own parameters a gradient and the other's none."""
    net = Net()
    parts = [list(net.first.parameters()), list(net.spare.parameters())]
    reducer = PlainReducer(net, world, compiled=None, find_unused=False, phases=parts)
    found = []
    for _ in range(2):
        for phase, other in ((0, 1), (1, 0)):
            net.zero_grad(set_to_none=True)
            reducer.begin(phase, [1.0])
            with frozen(parts[other]), reducer.turn(LAST):
                loss = forward(reducer, torch.full((1, 2), world.rank + 1.0))
                reducer.backward(loss, loss=1.0 + phase, count=1.0)
            totals = reducer.finish()
            grads = [None if p.grad is None else p.grad.tolist() for p in net.parameters()]
            found.append((grads, totals.loss, totals.flags))
    return found


@pytest.fixture(scope="module", params=[1, 2, 3])
def worlds(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    size: int = request.param
    if size == 1:
        with world_of(0, 1, tmp_path_factory.mktemp("alone")) as world:
            return [exercise(world)]
    return run_ranks(size, exercise)


def test_all_ranks_hold_the_same(worlds: list[dict[str, Any]]) -> None:
    own = {"own statistics": None, "refused": None, "lacking": None}
    shared = [{**found, **own} for found in worlds]
    assert all(found == shared[0] for found in shared)


def test_weights_are_the_primarys(worlds: list[dict[str, Any]]) -> None:
    assert worlds[0]["weights"] == [[1.0, 1.0]]


def test_loss_is_given_the_plain_model_and_may_use_its_parts(worlds: list[dict[str, Any]]) -> None:
    size = float(len(worlds))
    assert worlds[0]["model"]
    assert worlds[0]["parts"] == ([[size, size]], 3.0 * size, 7)


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


def test_parameter_that_is_not_in_the_loss_is_refused_where_ddp_does_not_sum(
    worlds: list[dict[str, Any]],
) -> None:
    line = (
        "gradients: found none of parameter spare.weight in a backward, expected each in the loss of every rank: "
        "nothing would be summed over the ranks; "
    )
    for found in worlds:
        ways = ["use it, or set train.find_unused_parameters=true"] * 2 + ["mend it"]
        assert found["refused"] == ([line + way for way in ways] if len(worlds) > 1 else [])


def test_gradient_that_comes_in_parts_is_refused_where_ddp_sums_one_of_them(
    worlds: list[dict[str, Any]],
) -> None:
    for found in worlds:
        if len(worlds) == 1:
            assert found["in parts"] == []
        else:
            known, unknown = found["in parts"]
            assert known.startswith("gradients: found that of ")
            assert unknown.startswith(
                "gradients: found one in parts in one backward, expected it whole"
            )


def test_parameter_that_is_in_one_ranks_loss_alone_is_refused_by_the_others(
    worlds: list[dict[str, Any]],
) -> None:
    assert worlds[0]["lacking"] == ""
    assert all("none of parameter spare.weight in a backward," in f["lacking"] for f in worlds[1:])


def test_each_phase_sums_its_own_parameters_and_no_others(worlds: list[dict[str, Any]]) -> None:
    size = len(worlds)
    total = [[float(sum(range(1, size + 1)))] * 2]
    first = ([total, None], 1.0 * size, (float(size),))
    second = ([None, total], 2.0 * size, (float(size),))
    assert worlds[0]["phases"] == [first, second] * 2


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
            reducer.backward(forward(reducer, torch.ones(1, 2)), loss=5.0, count=1.0)
        assert reducer.finish().loss == 5.0
        reducer.begin(0, [])
        with pytest.raises(ValueError, match=message):
            reducer.finish()


def frozen_norm() -> nn.Module:
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
        (frozen_norm(), True),
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
            loss = forward(reducer, torch.tensor([[1.0], [2.0]]) * (world.rank + 1))
            reducer.backward(loss, loss=1.0, count=1.0)
        found.append(buffer.tolist())
    return found


def test_codebook_is_the_primarys_and_running_statistics_are_each_ranks_own(
    worlds: list[dict[str, Any]],
) -> None:
    assert {str(found["codes"]) for found in worlds} == {str([1.0] * 4)}
    assert len({str(found["own statistics"]) for found in worlds}) == len(worlds)
