"""A residual net with BatchNorm and dropout on images of 32 x 32: 1.2 million parameters, steps of some 100 ms on two cores."""

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from jobs.job import Job
from jobs.schedule import warmup_cosine

if TYPE_CHECKING:
    from torch.optim.lr_scheduler import LRScheduler

    from jobs.job import Optimizers

IMAGES = 1024
CLASSES = 10


class Block(nn.Module):
    """Two convolutions, the first of which halves the image, beside a straight way."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.straight = nn.Conv2d(inputs, outputs, 1, stride=2, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(outputs) for _ in range(3))

    def forward(self, images: Tensor) -> Tensor:
        """Halve the images."""
        first, second, straight = self.norms
        deep = second(self.second(F.relu(first(self.first(images)))))
        return F.relu(deep + straight(self.straight(images)))


class Convnet(Job):
    """Images of noise and their classes."""

    def dataset(self) -> Dataset[tuple[Tensor, ...]]:
        """Make the images; the same in every process."""
        drawn = torch.Generator().manual_seed(1)
        images = torch.randn(IMAGES, 3, 32, 32, generator=drawn)
        return TensorDataset(images, torch.randint(CLASSES, (IMAGES,), generator=drawn))

    def model(self) -> nn.Module:
        """The net, with torch's own first weights."""
        stem = [nn.Conv2d(3, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()]
        blocks = [Block(32, 64), Block(64, 128), Block(128, 256)]
        head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(256, CLASSES)]
        return nn.Sequential(*stem, *blocks, *head)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Give AdamW."""
        return torch.optim.AdamW(model.parameters(), lr=0.001)

    def scheduler(self, optimizer: "Optimizers", total_steps: int) -> "LRScheduler":
        """Warm up and go down, stepped each step."""
        assert isinstance(optimizer, torch.optim.Optimizer)
        return warmup_cosine(optimizer, total_steps, warmup=0.1)

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Tensor:
        """Mean cross-entropy."""
        images, labels = batch
        return F.cross_entropy(model(images), labels)
