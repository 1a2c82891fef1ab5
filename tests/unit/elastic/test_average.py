"""The average of the weights: exact, kept apart, saved under plain names, restored bit by bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from checkpoints.layout import CheckpointName
from checkpoints.manager import CheckpointManager
from checkpoints.store import open_store
from elastic.average import Average
from elastic.errors import StartError
from elastic.foreign import read_weights
from elastic.state import TrainState


class Net(nn.Module):
    """Tied weights, a batch norm, a buffer of whole numbers, a half-precision parameter, complex ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2, bias=False)
        self.second = nn.Linear(2, 2, bias=False)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(2)
        self.small = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        self.turned = nn.Parameter(torch.ones(2, dtype=torch.complex64))


def move(model: nn.Module, amount: float) -> None:
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.add_(
                amount if tensor.is_floating_point() or tensor.is_complex() else int(amount)
            )


def copies(tensors: Any) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


def test_average_begins_at_the_first_weights_and_follows_without_warm_up() -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    average = Average(model, 0.9)
    seen = []
    for w in (0.55, 1.07, 1.488):
        nn.init.constant_(model.weight, w)
        average.update()
        seen.append(float(average.tensors()["weight"]))
    assert seen == pytest.approx([0.055, 0.1565, 0.28965])


def test_floating_buffers_are_averaged_and_the_others_taken_as_they_are() -> None:
    model = Net()
    average = Average(model, 0.5)
    move(model, 2.0)
    average.update()
    found = average.tensors()
    assert list(found) == list(model.state_dict())
    assert found["norm.running_mean"].tolist() == [1.0, 1.0]
    assert found["turned"].tolist() == [2.0, 2.0]
    assert int(found["norm.num_batches_tracked"]) == 2
    assert found["small"].dtype is torch.float32
    assert found["first.weight"] is found["second.weight"]


def test_model_shows_the_average_and_gets_its_weights_back() -> None:
    model = Net()
    average = Average(model, 0.5)
    move(model, 2.0)
    average.update()
    before, means = copies(model.state_dict()), copies(average.tensors())
    parameters = list(model.parameters())
    with average.shown():
        shown = copies(model.state_dict())
        assert all(torch.equal(shown[n], means[n].to(shown[n].dtype)) for n in shown)
        assert same(copies(average.raw()), {n: before[n] for n in average.raw()})
        assert same(copies(average.tensors()), means)
    assert same(copies(model.state_dict()), before)
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))


def test_weights_come_back_where_an_evaluation_raises() -> None:
    model = Net()
    average = Average(model, 0.5)
    move(model, 2.0)
    before = copies(model.state_dict())
    with pytest.raises(ValueError, match="in the middle"), average.shown():
        raise ValueError("in the middle")
    assert same(copies(model.state_dict()), before)


def test_what_is_captured_while_the_average_is_shown_are_both_sets_unmixed() -> None:
    model = Net()
    average = Average(model, 0.5)
    state = TrainState()
    state.attach(model=model, ema=average)
    move(model, 2.0)
    average.update()
    outside = state.capture()
    outside = {key: copies(outside[key]) for key in ("model", "ema")}
    digest = state.digest()
    with average.shown():
        inside = state.capture()
        assert same(copies(inside["model"]), outside["model"])
        assert same(copies(inside["ema"]), outside["ema"])
        assert state.digest() == digest


def test_buffer_that_a_module_replaces_is_still_followed() -> None:
    model = Net()
    average = Average(model, 0.5)
    model.norm.running_mean = torch.full((2,), 4.0)
    average.update()
    assert average.tensors()["norm.running_mean"].tolist() == [2.0, 2.0]


@pytest.fixture
def run(tmp_path: Path) -> tuple[Path, CheckpointName, dict[str, Tensor], dict[str, Tensor]]:
    """A checkpoint with both sets."""
    model = Net()
    average = Average(model, 0.75)
    state = TrainState()
    state.attach(model=model, ema=average)
    move(model, 1.0)
    average.update()
    with CheckpointManagerAt(tmp_path) as manager:
        name = CheckpointName(generation=1, step=1)
        tree = state.capture()
        manager.commit(manager.stage(tree, name=name, parent=None, run_id="r", info={}))
    return tmp_path, name, copies(model.state_dict()), copies(average.tensors())


class CheckpointManagerAt:
    def __init__(self, path: Path) -> None:
        self.manager = CheckpointManager(open_store(str(path)))

    def __enter__(self) -> CheckpointManager:
        return self.manager

    def __exit__(self, *_: object) -> None:
        self.manager.close()


Made = tuple[Path, CheckpointName, dict[str, Tensor], dict[str, Tensor]]


def test_average_is_a_file_of_its_own_with_plain_names(run: Made) -> None:
    path, name, raw, means = run
    folder = path / name.folder
    assert same(load_file(folder / "model.safetensors"), raw)
    found = load_file(folder / "ema.safetensors")
    assert same(found, means)
    Net().load_state_dict(found, strict=True)


def test_restore_brings_both_sets_back_bit_by_bit(run: Made) -> None:
    path, name, raw, means = run
    model = Net()
    average = Average(model, 0.75)
    state = TrainState()
    state.attach(model=model, ema=average)
    with CheckpointManagerAt(path) as manager:
        assert state.restore(manager.restore(name)) == []
    assert same(copies(model.state_dict()), raw)
    assert same(copies(average.tensors()), means)


def test_average_that_came_or_went_is_told(run: Made) -> None:
    path, name, raw, _ = run
    with CheckpointManagerAt(path) as manager:
        tree = manager.restore(name)
    state = TrainState()
    state.attach(model=Net())
    assert state.restore(tree) == ["ema: in the checkpoint, not attached; left aside"]
    model = Net()
    average = Average(model, 0.75)
    state = TrainState()
    state.attach(model=model, ema=average)
    notes = state.restore({key: value for key, value in tree.items() if key != "ema"})
    assert notes == ["ema: not in the checkpoint; it begins at the weights"]
    assert torch.equal(average.tensors()["norm.running_mean"], raw["norm.running_mean"])


@pytest.mark.parametrize("which", ["@ema", "@latest:ema", "@1:ema"])
def test_average_is_taken_where_it_is_asked_for_and_the_weights_elsewhere(
    run: Made, which: str
) -> None:
    path, name, raw, means = run
    assert same(read_weights(f"{path}{which}"), means)
    assert same(read_weights(f"{path}/{name.folder}/ema.safetensors"), means)
    assert same(read_weights(f"{path}@latest"), raw)
    assert same(read_weights(str(path)), raw)


def test_asking_for_an_average_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    state = TrainState()
    state.attach(model=Net())
    with CheckpointManagerAt(tmp_path) as manager:
        name = CheckpointName(generation=1, step=1)
        manager.commit(manager.stage(state.capture(), name=name, parent=None, run_id="r", info={}))
    with pytest.raises(StartError, match=r"holds no 'ema', .* without :ema$"):
        read_weights(f"{tmp_path}@ema")
