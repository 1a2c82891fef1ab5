"""The tracer with a backbone that does not learn: 2 MiB that every checkpoint needs and none should send."""

import torch
from torch import Tensor, nn

from tests.support import killed, tracer


class WithBackbone(tracer.Scalar):
    """The tracer's scalar beside a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        frozen = torch.arange(1 << 19, dtype=torch.float32)
        self.backbone = nn.Parameter(frozen, requires_grad=False)

    def forward(self, values: Tensor) -> Tensor:
        return super().forward(values) + 0 * self.backbone[0]


class Frozen(killed.Tracer):
    """Trains w alone."""

    def model(self) -> nn.Module:
        return WithBackbone()
