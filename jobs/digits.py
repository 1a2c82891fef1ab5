"""Handwritten digits: a small convolutional net on the UCI optdigits images, the default job.

Promises: the data ships with the project (data/README.md tells its source and licence) and is read
without pickle; the held-out images are pinned in the file, ten classes of equal size.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from jobs.errors import JobError
from jobs.job import Job, Mean
from jobs.schedule import warmup_cosine
from jobs.tensors import read_tensors

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.optim.lr_scheduler import LRScheduler

    from jobs.job import Optimizers

DATA = Path(__file__).parent / "data" / "digits.safetensors"


class Images(Dataset[tuple[Tensor, int]]):
    """Images of 8 x 8 grey values in 0..1 with their digits; `shift` moves each by up to a pixel."""

    def __init__(self, images: Tensor, labels: Tensor, *, shift: bool = False) -> None:
        grey = images.to(torch.float32).div_(16).unsqueeze(1)
        self._labels: list[int] = labels.tolist()
        self._shift = shift
        if shift:
            # All nine places are made once: one draw and one index are then all that an item costs.
            padded = F.pad(grey, (1, 1, 1, 1))
            places = [padded[..., y : y + 8, x : x + 8] for y in range(3) for x in range(3)]
            grey = torch.cat(places)
        self._images = grey

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        label = self._labels[index]
        if not self._shift:
            return self._images[index], label
        # torch's global generator: the runner seeds it for each (epoch, item).
        place = int(torch.randint(9, ()))
        return self._images[place * len(self._labels) + index % len(self._labels)], label


class Net(nn.Module):
    """Three convolutions with BatchNorm, dropout, and a linear layer."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *_block(1, width),
            *_block(width, width),
            nn.MaxPool2d(2),
            *_block(width, 2 * width),
            nn.MaxPool2d(2),
            nn.Flatten(),
        )
        self.head = nn.Sequential(nn.Dropout(dropout), nn.Linear(8 * width, 10))

    def forward(self, images: Tensor) -> Tensor:
        """Give the logits of the ten digits."""
        logits: Tensor = self.head(self.features(images))
        return logits


def _block(inputs: int, outputs: int) -> list[nn.Module]:
    """A convolution, its BatchNorm and a ReLU."""
    return [
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    ]


class Digits(Job):
    """Tell handwritten digits apart."""

    def __init__(
        self,
        width: int = 32,
        dropout: float = 0.3,
        lr: float = 0.004,
        weight_decay: float = 0.05,
        augment: bool = True,
    ) -> None:
        if width < 1:
            raise JobError(f"args.width: found {width}, expected at least 1")
        if not 0 <= dropout < 1:
            raise JobError(f"args.dropout: found {dropout}, expected at least 0 and below 1")
        self.width = width
        self.dropout = dropout
        self.lr = lr
        self.weight_decay = weight_decay
        self.augment = augment

    def dataset(self) -> Images:
        """The 1437 training images."""
        data = read_tensors(DATA).tensors
        return Images(data["train_images"], data["train_labels"], shift=self.augment)

    def eval_dataset(self) -> Images:
        """The 360 held-out images, 36 of each digit."""
        data = read_tensors(DATA).tensors
        return Images(data["heldout_images"], data["heldout_labels"])

    def collate(self, items: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
        """Stack the images; half the time of torch's own collate, which looks at every item."""
        images, labels = zip(*items, strict=True)
        return torch.stack(images), torch.tensor(labels)

    def model(self) -> Net:
        """The net, with torch's own first weights."""
        return Net(self.width, self.dropout)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """AdamW; biases and BatchNorm are not decayed."""
        parameters = list(model.parameters())
        groups = [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": self.weight_decay},
            {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=self.lr)

    def scheduler(self, optimizer: Optimizers, total_steps: int) -> LRScheduler:
        """A short warm-up, then a cosine down to zero, stepped each step."""
        assert isinstance(optimizer, torch.optim.Optimizer)  # optimizer() made it
        return warmup_cosine(optimizer, total_steps, warmup=0.1)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Cross entropy, the mean over the batch."""
        images, labels = batch
        return F.cross_entropy(model(images), labels)

    def metrics(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Mapping[str, Mean]:
        """Accuracy and loss, from one forward."""
        images, labels = batch
        logits = model(images)
        hits = (logits.argmax(1) == labels).sum()
        loss = F.cross_entropy(logits, labels, reduction="sum")
        return {"accuracy": Mean(hits, len(labels)), "loss": Mean(loss, len(labels))}
