"""Flat buffers of gradients: how each parameter's part lies in memory."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from elastic.flats import Flat


def model() -> nn.Sequential:
    """A net with weights in three orders of dimensions, one of a single element, and an empty one."""
    torch.manual_seed(3)
    conv, linear = nn.Conv2d(3, 4, 3), nn.Linear(4, 5)
    ordered = conv.weight.detach().to(memory_format=torch.channels_last)
    conv.weight, linear.weight = nn.Parameter(ordered), nn.Parameter(torch.randn(4, 5).t())
    net = nn.Sequential(conv, linear)
    net.append(nn.PReLU())
    net.register_parameter("empty", nn.Parameter(torch.empty(0, 3)))
    return net


def loss(net: nn.Module, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(2, 3, 6, 6, generator=generator)
    conv, linear, act = list(net)  # type: ignore[call-overload]  # a Sequential
    return act(linear(conv(images).mean((2, 3)))).square().sum()  # type: ignore[no-any-return]


def test_each_parameter_finds_its_gradient_in_its_own_order_of_dimensions() -> None:
    net = model()
    flat = Flat(list(net.parameters()), 3)
    buffer = flat.take()
    for parameter, view in zip(flat.parameters, buffer.views, strict=True):
        assert (view.shape, view.stride()) == (parameter.shape, parameter.stride())
        view.fill_(1.0)
    # No two of them share an element, and none is missing.
    assert sum(float(row.sum()) for row in buffer.flats) == sum(p.numel() for p in flat.parameters)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_a_fused_optimizer_takes_the_steps_of_a_plain_one(
    kind: Any,
) -> None:
    net = model()
    other = copy.deepcopy(net)
    options: dict[str, Any] = {"lr": 0.1, **({"momentum": 0.9} if kind is torch.optim.SGD else {})}
    fused = kind(net.parameters(), fused=True, **options)
    plain = kind(other.parameters(), fused=False, **options)
    flat = Flat(list(net.parameters()), 1)
    for seed in range(4):
        buffer = flat.take()
        buffer.clear()
        flat.point_at(buffer)
        loss(net, seed).backward()
        flat.show(buffer, flat.used)
        fused.step()
        flat.give_back(buffer)
        plain.zero_grad()
        loss(other, seed).backward()
        plain.step()
    for one, two in zip(net.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, two)
