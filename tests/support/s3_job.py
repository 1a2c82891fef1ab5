"""A job whose samples are objects on an S3 server, read one by one where the loader asks for them."""

from typing import Any

import fsspec
import torch
from torch.utils.data import Dataset

from jobs.job import Job


class Objects(Dataset[torch.Tensor]):
    """Each sample is read by whichever process wants it; the parent has read before."""

    def __init__(self, url: str, options: dict[str, Any], count: int) -> None:
        self.url, self.options, self.count = url, options, count
        self._read(0)

    def _read(self, index: int) -> bytes:
        fs = fsspec.filesystem("s3", **self.options)
        return bytes(fs.cat_file(f"{self.url}/{index}"))

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(self._read(index))])


class Remote(Job):
    """A weight that learns to be the mean of what the objects hold."""

    def __init__(self, url: str, options: dict[str, Any], count: int) -> None:
        self.url, self.options, self.count = url, options, count

    def dataset(self) -> Objects:
        """The objects."""
        return Objects(self.url, self.options, self.count)

    def model(self) -> torch.nn.Module:
        """One weight."""
        return torch.nn.Linear(1, 1)

    def optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        """Plain descent."""
        return torch.optim.SGD(model.parameters(), lr=0.01)

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        """How far off it is."""
        error: torch.Tensor = model(batch) - batch
        return error.pow(2).mean()


class Heavy(Job):
    """Checkpoints of about six megabytes, out of nothing."""

    def dataset(self) -> Any:
        """A few numbers."""
        return torch.utils.data.TensorDataset(torch.arange(16.0).unsqueeze(1))

    def model(self) -> torch.nn.Module:
        """Weights of three megabytes."""
        return torch.nn.Sequential(torch.nn.Linear(1, 700), torch.nn.Linear(700, 1000))

    def optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        """With as much state again."""
        return torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9)

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        """Anything."""
        made: torch.Tensor = model(batch[0])
        return made.pow(2).mean()
