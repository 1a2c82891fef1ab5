from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from elastic.errors import StartError
from elastic.meeting import meet
from elastic.ranks import Place, read_place
from elastic.world import World, choose_backend, start_world


@pytest.fixture
def world() -> Iterator[World]:
    place = read_place({})
    meeting = meet(place, {"host": "here"}, channel=None, init_method=None, timeout_s=1)
    found = start_world(place, meeting, backend="auto", init_method=None, timeout_s=10)
    yield found
    found.close()
    meeting.close()
    assert not dist.is_initialized()


def test_world_of_one_has_all_the_collectives(world: World) -> None:
    assert (world.rank, world.world_size, world.nodes, world.hosts) == (0, 1, 1, ("here",))
    assert world.is_primary
    assert world.gather({"a": [1, None, "ü"]}) == [{"a": [1, None, "ü"]}]
    assert world.broadcast({"b": 2.5}) == {"b": 2.5}
    assert world.all_sum([0.1, 2.0]) == [0.1, 2.0]
    assert world.flags_async(0b1010).wait() == 0b1010
    tensor = torch.arange(3)
    world.broadcast_tensors([tensor])
    assert tensor.tolist() == [0, 1, 2]
    world.barrier()


@pytest.mark.parametrize("size", [0, 1, 4085, 4086, 4087, 100_000])
def test_message_of_any_size_arrives(size: int, world: World) -> None:
    assert world.gather("x" * size) == ["x" * size]
    assert world.broadcast("x" * size) == "x" * size


@pytest.mark.parametrize("bits", [-1, 1 << 32])
def test_flags_that_do_not_fit_are_refused(bits: int, world: World) -> None:
    with pytest.raises(ValueError, match="expected 32 bits"):
        world.flags_async(bits)


def test_all_32_flags_fit(world: World) -> None:
    assert world.flags_async((1 << 32) - 1).wait() == (1 << 32) - 1


def test_ddp_works_on_the_world(world: World) -> None:
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    model(torch.ones(1, 2)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert world.device.type == ("cuda" if torch.cuda.is_available() else "cpu")


def test_back_end_is_nccl_with_cuda_and_gloo_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert choose_backend("auto") == "gloo"
    assert choose_backend("gloo") == "gloo"
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: True)
    assert choose_backend("auto") == "nccl"


@pytest.mark.parametrize("name", ["mpi", "nccl", "ucc"])
def test_back_end_that_is_not_there_is_told_with_those_that_are(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(
        StartError, match=rf"backend: found {name} \(.*\), expected auto or one of: gloo"
    ):
        choose_backend(name)


def test_rank_without_a_device_is_told_how_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    from elastic.world import _device

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    fields: dict[str, Any] = {
        "rank": 1, "world_size": 2, "local_rank": 1, "local_world_size": 2, "node_rank": 0, "nodes": 1,
        "launcher": "torchrun", "group": "g", "restart_count": 0, "address": None, "agent_store": True,
    }  # fmt: skip
    with pytest.raises(StartError, match="LOCAL_RANK: found 1 but 1 CUDA devices"):
        _device(Place(**fields), "nccl")
