"""Datasets that draw from every library, importable by loader workers however they are started."""

import random

import numpy as np
import torch
from torch.utils.data import Dataset


class Drawing(Dataset[tuple[int, float, float, float]]):
    """C08: item i is i and a draw from numpy, torch and `random`."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        return index, float(np.random.rand()), torch.rand(()).item(), random.random()
