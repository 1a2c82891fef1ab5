"""Optimizer state: every bit back, by the name of the parameter."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from checkpoints.serialization import join, split
from elastic.errors import StartError
from elastic.moments import capture_moments, group_names, match_groups, restore_moments


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))  # type: ignore[no-any-return]


Maker = Callable[[Iterable[Any]], Optimizer]
OPTIMIZERS: dict[str, Maker] = {
    "sgd": lambda p: optim.SGD(p, lr=0.1),
    "momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw": lambda p: optim.AdamW(p, lr=0.01),
    "adagrad": lambda p: optim.Adagrad(p, lr=0.1),
    "adadelta": optim.Adadelta,
    "adafactor": lambda p: optim.Adafactor(p, lr=0.01),
    "rmsprop": lambda p: optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "rprop": lambda p: optim.Rprop(p, lr=0.01),
    "nadam": lambda p: optim.NAdam(p, lr=0.01),
    "asgd": lambda p: optim.ASGD(p, lr=0.01),
    "lbfgs": lambda p: optim.LBFGS(p, lr=0.1, max_iter=2),
}


def names_of(model: nn.Module) -> dict[Tensor, str]:
    return {param: name for name, param in model.named_parameters()}


def train(model: nn.Module, optimizer: Optimizer, steps: int, seed: int) -> None:
    for step in range(steps):
        batch = torch.randn(5, 3, generator=torch.Generator().manual_seed(seed + step))

        def closure(batch: Tensor = batch) -> float:
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            loss.backward()
            return float(loss.item())

        optimizer.step(closure)


def written(optimizer: Optimizer, names: dict[Tensor, str]) -> Any:
    tensors, skeleton = split(capture_moments(optimizer, group_names(optimizer, names)))
    return join(skeleton, {name: tensor.clone() for name, tensor in tensors.items()})


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_training_goes_on_bit_for_bit(kind: str) -> None:
    torch.manual_seed(0)
    model, copy = Net(), Net()
    optimizer = OPTIMIZERS[kind](model.parameters())
    train(model, optimizer, 3, 0)
    saved = written(optimizer, names_of(model))
    copy.load_state_dict(model.state_dict())
    train(model, optimizer, 3, 3)
    resumed = OPTIMIZERS[kind](copy.parameters())
    assert restore_moments(resumed, saved, names_of(copy), "optimizer") == []
    train(copy, resumed, 3, 3)
    for ours, theirs in zip(copy.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("kind", ["adamw", "momentum", "lbfgs"])
def test_a_used_optimizer_goes_back(kind: str) -> None:
    model = Net()
    optimizer = OPTIMIZERS[kind](model.parameters())
    train(model, optimizer, 2, 0)
    saved = written(optimizer, names_of(model))
    train(model, optimizer, 2, 2)
    restore_moments(optimizer, saved, names_of(model), "optimizer")
    assert split(written(optimizer, names_of(model)))[1] == split(saved)[1]
    for name, tensor in split(saved)[0].items():
        assert torch.equal(split(written(optimizer, names_of(model)))[0][name], tensor)


def test_state_that_came_later_is_gone_after_going_back() -> None:
    model = Net()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    saved = written(optimizer, names_of(model))
    train(model, optimizer, 1, 0)
    restore_moments(optimizer, saved, names_of(model), "optimizer")
    assert not optimizer.state


@pytest.mark.parametrize(
    ("param_dtype", "state_dtype"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)],
)
def test_c41_dtype_and_every_bit_of_the_state_are_kept(
    param_dtype: torch.dtype, state_dtype: torch.dtype
) -> None:
    def make() -> tuple[nn.Parameter, Optimizer]:
        param = nn.Parameter(torch.ones(3, dtype=param_dtype))
        return param, optim.AdamW([param], lr=0.1)

    param, optimizer = make()
    state = {
        "step": torch.tensor(7.0),
        "exp_avg": torch.full((3,), 0.1234567, dtype=state_dtype),
        "exp_avg_sq": torch.full((3,), 0.0001234567, dtype=state_dtype),
    }
    optimizer.state[param] = state
    saved = written(optimizer, {param: "w"})
    fresh, resumed = make()
    restore_moments(resumed, saved, {fresh: "w"}, "optimizer")
    assert resumed.state[fresh].keys() == state.keys()
    for key, tensor in state.items():
        ours = resumed.state[fresh][key]
        assert (ours.dtype, ours.shape, ours.device) == (tensor.dtype, tensor.shape, tensor.device)
        assert torch.equal(ours, tensor)
    if state_dtype is torch.float32:
        assert resumed.state[fresh]["exp_avg"][0].item() == torch.tensor(0.1234567).item()


def test_c38_moments_are_there_after_a_restore() -> None:
    def make(w: float) -> tuple[nn.Parameter, Optimizer]:
        param = nn.Parameter(torch.tensor(w))
        return param, optim.Adam([param], lr=0.1)

    def go(param: nn.Parameter, optimizer: Optimizer, steps: int) -> list[float]:
        values = []
        for _ in range(steps):
            optimizer.zero_grad()
            (0.5 * param**2).backward()
            optimizer.step()
            values.append(param.item())
        return values

    param, optimizer = make(1.0)
    assert go(param, optimizer, 4)[-1] == pytest.approx(0.6039391, rel=1e-5)
    fresh, resumed = make(param.item())
    restore_moments(resumed, written(optimizer, {param: "w"}), {fresh: "w"}, "optimizer")
    expected = [0.5079637, 0.4142365, 0.3234208, 0.2362638]
    assert go(fresh, resumed, 4) == pytest.approx(expected, rel=1e-5)


def test_a_python_number_as_step_stays_one() -> None:
    param = nn.Parameter(torch.ones(1))
    optimizer = optim.SGD([param], lr=0.1)
    optimizer.state[param] = {"step": 3, "nested": [{"x": torch.ones(1)}, None, (1, 2.5)]}
    fresh = nn.Parameter(torch.ones(1))
    resumed = optim.SGD([fresh], lr=0.1)
    restore_moments(resumed, written(optimizer, {param: "w"}), {fresh: "w"}, "optimizer")
    assert resumed.state[fresh] == {"step": 3, "nested": [{"x": torch.ones(1)}, None, (1, 2.5)]}


def test_state_that_is_no_parameters_is_kept() -> None:
    optimizer = optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    shared: dict[Any, Any] = optimizer.state
    shared["calls"] = {"count": 4, "sum": torch.ones(2)}
    resumed = optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    restore_moments(resumed, written(optimizer, {}), {}, "optimizer")
    ours: dict[Any, Any] = resumed.state
    assert ours["calls"]["count"] == 4
    assert torch.equal(ours["calls"]["sum"], torch.ones(2))


def test_the_order_of_parameters_may_change() -> None:
    model = Net()
    optimizer = optim.AdamW(model.parameters())
    train(model, optimizer, 2, 0)
    resumed = optim.AdamW(reversed(list(model.parameters())))
    restore_moments(resumed, written(optimizer, names_of(model)), names_of(model), "optimizer")
    for param in model.parameters():
        assert torch.equal(resumed.state[param]["exp_avg"], optimizer.state[param]["exp_avg"])


def test_state_has_the_layout_of_its_parameter() -> None:
    weight = nn.Parameter(torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last))
    optimizer = optim.AdamW([weight])
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    resumed = optim.AdamW([weight])
    restore_moments(resumed, written(optimizer, {weight: "w"}), {weight: "w"}, "optimizer")
    assert resumed.state[weight]["exp_avg"].stride() == weight.stride()
    assert torch.equal(resumed.state[weight]["exp_avg"], optimizer.state[weight]["exp_avg"])


@pytest.mark.parametrize(("option", "device"), [({}, "cpu"), ({"capturable": True}, "meta")])
def test_what_lay_in_host_memory_stays_there_unless_the_group_is_capturable(
    option: dict[str, bool], device: str
) -> None:
    def make() -> tuple[nn.Parameter, Optimizer]:
        param = nn.Parameter(torch.ones(2, device="meta"))  # a device that is not the host
        return param, optim.Adam([param], **option)  # type: ignore[arg-type]

    param, optimizer = make()
    optimizer.state[param] = {
        "step": torch.tensor(2.0),
        "exp_avg": torch.ones(2, device="meta"),
        "offloaded": torch.arange(2.0),
    }
    saved = capture_moments(optimizer, [["w"]])
    assert saved["on_host"] == {"w": ["offloaded", "step"]}
    saved["state"]["w"]["exp_avg"] = torch.ones(2)  # as it is read: in host memory
    fresh, resumed = make()
    restore_moments(resumed, saved, {fresh: "w"}, "optimizer")
    places = {key: value.device.type for key, value in resumed.state[fresh].items()}
    assert places == {"step": device, "exp_avg": "meta", "offloaded": device}


class Ema(optim.SGD):
    """An optimizer with a state_dict pair of its own."""

    def __init__(self, params: Iterable[Any], lr: float = 0.1) -> None:
        super().__init__(params, lr=lr)
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count = state_dict.pop("count")
        super().load_state_dict(state_dict)


def test_an_optimizer_with_its_own_pair_is_asked_for_its_state() -> None:
    model = Net()
    optimizer = Ema(model.parameters())
    optimizer.count = 5
    saved = written(optimizer, names_of(model))
    resumed = Ema(model.parameters())
    assert restore_moments(resumed, saved, names_of(model), "optimizer") == []
    assert resumed.count == 5
    restore_moments(Ema(model.parameters()), saved, names_of(model), "optimizer")  # saved is whole
    other = Ema(reversed(list(model.parameters())))
    with pytest.raises(StartError, match=r"^optimizer: .*another order"):
        restore_moments(other, saved, names_of(model), "optimizer")


def test_another_kind_of_optimizer_begins_anew_and_says_so() -> None:
    model = Net()
    saved = written(optim.SGD(model.parameters(), lr=0.1), names_of(model))
    notes = restore_moments(optim.Adam(model.parameters()), saved, names_of(model), "optimizer")
    assert notes == ["optimizer: SGD -> Adam (from code and config); its state begins anew"]


def test_adam_and_adamw_have_the_same_moments() -> None:
    model = Net()
    optimizer = optim.Adam(model.parameters())
    train(model, optimizer, 1, 0)
    resumed = optim.AdamW(model.parameters())
    notes = restore_moments(resumed, written(optimizer, names_of(model)), names_of(model), "opt")
    assert notes == ["opt: Adam -> AdamW (from code and config)"]
    assert len(resumed.state) == 4


@pytest.mark.parametrize(
    ("make", "option"),
    [(optim.AdamW, {"amsgrad": True}), (optim.RMSprop, {"centered": True, "momentum": 0.9})],
)
def test_an_option_that_needs_state_may_be_switched_on(make: Any, option: dict[str, Any]) -> None:
    model = Net()
    optimizer = make(model.parameters())
    train(model, optimizer, 2, 0)
    resumed = make(model.parameters(), **option)
    restore_moments(resumed, written(optimizer, names_of(model)), names_of(model), "optimizer")
    train(model, resumed, 1, 2)


def test_a_hook_on_the_state_dict_counts_as_its_own_pair() -> None:
    optimizer = optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    optimizer.register_state_dict_post_hook(lambda _, state: {**state, "mine": 1})
    saved = written(optimizer, {})
    assert saved["own"]["mine"] == 1
    plain = optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    with pytest.raises(StartError, match=r"^optimizer: found state of SGD with a state_dict of"):
        restore_moments(plain, saved, {}, "optimizer")


# -------------------------------------------------------------------------------------------- groups
def test_groups_are_matched_by_the_parameters_in_them() -> None:
    assert match_groups([["a", "b"], ["c"]], [["c"], ["b", "a"]], "optimizer") == [1, 0]
    assert match_groups([], [], "optimizer") == []


@pytest.mark.parametrize(
    ("saved", "own", "message"),
    [
        ([["a"]], [["a", "b"]], "parameter b: found in no group of the checkpoint, in group 0"),
        ([["a", "b"]], [["a"]], "parameter b: found in no group of the optimizer"),
        (
            [["a", "b"], ["c"]],
            [["a"], ["b", "c"]],
            "parameter b: found in group 1 of the optimizer",
        ),
        ([["a"]], [["a"], ["b"]], "parameter b: found in no group of the checkpoint, in group 1"),
        ([["a"], ["b"]], [["a"]], "parameter b: found in a group of the checkpoint, expected"),
        ([["a", "b"]], [["b", "c", "a"]], "parameter c: found in no group of the checkpoint"),
        ([], [["a"]], "parameter a: found in no group of the checkpoint, in group 0"),
    ],
)
def test_changed_groups_are_refused_naming_the_parameter(
    saved: list[list[str]], own: list[list[str]], message: str
) -> None:
    with pytest.raises(StartError) as caught:
        match_groups(saved, own, "optimizer.disc")
    assert str(caught.value).startswith(f"optimizer.disc: {message}")
    assert "\n" not in str(caught.value)


def test_a_parameter_that_is_not_the_models_is_known_by_its_place() -> None:
    model = Net()
    groups: list[dict[str, Any]] = [
        {"params": model.last.parameters()},
        {"params": [nn.Parameter(torch.ones(1))]},
    ]
    optimizer = optim.SGD(groups, lr=0.1)
    names = group_names(optimizer, names_of(model))
    assert names == [["last.weight", "last.bias"], ["group1.0"]]
