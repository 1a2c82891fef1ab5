"""A small GPT on the bytes of text files, by default those of Python's own standard library.

Promises: the loss is weighed by bytes, so that the short windows at the ends of files count as much
as they hold and not more, whatever the micro-batch and the world.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jobs.errors import JobError
from jobs.job import Job, Mean
from jobs.schedule import warmup_cosine
from jobs.text import Corpus, Windows

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from torch.optim.lr_scheduler import LRScheduler

    from jobs.job import Metric, Optimizers

logger = logging.getLogger(__name__)

VOCABULARY = 256
IGNORED = -100


class Attention(nn.Module):
    """Causal self-attention by torch's fused kernel, which dropout inside it would rule out."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Mix each place with the places before it."""
        batch, length, width = hidden.shape
        shape = (batch, length, 3, self.heads, width // self.heads)
        query, key, value = self.qkv(hidden).view(shape).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return out


class Block(nn.Module):
    """Attention and a feed-forward net, each normalised before and added after."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(width, bias=False)
        self.attention = Attention(width, heads)
        self.norm_mlp = nn.LayerNorm(width, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width, bias=False),
            nn.GELU(),
            nn.Linear(4 * width, width, bias=False),
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        """Add what attention and the feed-forward net find."""
        hidden = hidden + self.dropout(self.attention(self.norm_attention(hidden)))
        added: Tensor = hidden + self.dropout(self.mlp(self.norm_mlp(hidden)))
        return added


class Transformer(nn.Module):
    """Bytes to the logits of each next byte; the embedding is also the output layer."""

    def __init__(self, width: int, n_layer: int, n_head: int, block: int, dropout: float) -> None:
        super().__init__()
        self.bytes = nn.Embedding(VOCABULARY, width)
        self.places = nn.Embedding(block, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, n_head, dropout) for _ in range(n_layer))
        self.norm = nn.LayerNorm(width, bias=False)
        self._initialize(n_layer)

    def _initialize(self, n_layer: int) -> None:
        """Small normal weights; what is added to the residual stream is smaller with its depth."""
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:
                adds = name.endswith(("attention.out.weight", "mlp.2.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * n_layer) if adds else 0.02)

    def forward(self, inputs: Tensor) -> Tensor:
        """Give the logits of the byte that follows each place."""
        places = torch.arange(inputs.shape[1], device=inputs.device)
        hidden = self.dropout(self.bytes(inputs) + self.places(places))
        for block in self.blocks:
            hidden = block(hidden)
        return F.linear(self.norm(hidden), self.bytes.weight)


@dataclass(kw_only=True, eq=False)
class GPT(Job):
    """Predict the next byte of text files."""

    url: str | None = None
    """A file, a folder or a pattern, at any fsspec URL; None: the standard library's source."""

    exclude: Sequence[str] = ("site-packages", "dist-packages", "test", "tests")
    """Names of folders that are left out."""

    max_bytes: int = 4_000_000
    """How much text is read at most."""

    heldout: float = 0.05
    """The part of the text that is kept for evaluation."""

    cache: str | None = None
    """The folder of the cache file; None: elastic-trainer/ in the user's cache folder."""

    storage_options: dict[str, Any] = field(default_factory=dict, repr=False)
    """Options of the URL's file system."""

    n_layer: int = 4
    n_head: int = 2
    width: int = 128
    block: int = 128
    """Bytes that the net sees at once."""

    dropout: float = 0.1
    lr: float = 0.003
    weight_decay: float = 0.1
    warmup: float = 0.05
    """The part of all steps in which the rate rises."""

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            JobError: A number is out of its range.
        """
        for name in ("n_layer", "n_head", "block"):
            value = getattr(self, name)
            if value < 1:
                raise JobError(f"args.{name}: found {value}, expected at least 1")
        if self.width < 1 or self.width % self.n_head:
            raise JobError(
                f"args.width: found {self.width}, expected a multiple of n_head ({self.n_head})"
            )
        if not 0 <= self.dropout < 1:
            raise JobError(f"args.dropout: found {self.dropout}, expected at least 0 and below 1")
        self._corpus = Corpus(
            url=self.url,
            exclude=tuple(self.exclude),
            max_bytes=self.max_bytes,
            heldout=self.heldout,
            cache=self.cache,
            storage_options=self.storage_options,
        )

    @cached_property
    def _text(self) -> Path:
        """The cache file, looked for (and made, where it is missing) once in a process."""
        return self._corpus.prepare()

    def prepare(self) -> None:
        """Read the files into the cache file of this node."""
        logger.debug("the text is in %s", self._text)

    def dataset(self) -> Windows:
        """Windows of the training part."""
        return Windows(self._text, "train", self.block)

    def eval_dataset(self) -> Windows | None:
        """Windows of the held-out part, if there is one."""
        windows = Windows(self._text, "heldout", self.block)
        return windows if len(windows) else None

    def fingerprint(self, dataset: Any) -> str:
        """The text itself, and how it is cut: nodes with another Python have another library."""
        return f"{dataset.sha256}-{dataset.part}-{dataset.block}-{len(dataset)}"

    def collate(self, windows: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Fill windows up to one length; what is filled is never predicted."""
        inputs = torch.zeros(len(windows), self.block, dtype=torch.int64)
        targets = torch.full_like(inputs, IGNORED)
        for row, window in enumerate(windows):
            length = len(window) - 1
            inputs[row, :length] = window[:-1]
            targets[row, :length] = window[1:]
        return inputs, targets

    def model(self) -> Transformer:
        """The net, with its first weights drawn by torch's global generator."""
        return Transformer(self.width, self.n_layer, self.n_head, self.block, self.dropout)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """AdamW; only matrices are decayed."""
        parameters = list(model.parameters())
        groups = [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": self.weight_decay},
            {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=self.lr, betas=(0.9, 0.95))

    def scheduler(self, optimizer: Optimizers, total_steps: int) -> LRScheduler:
        """A warm-up, then a cosine down to a tenth, stepped each step."""
        assert isinstance(optimizer, torch.optim.Optimizer)  # optimizer() made it
        return warmup_cosine(optimizer, total_steps, warmup=self.warmup, floor=0.1)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Mean:
        """Cross entropy, weighed by predicted bytes."""
        inputs, targets = batch
        logits = model(inputs).float()
        total = F.cross_entropy(
            logits.view(-1, VOCABULARY), targets.view(-1), ignore_index=IGNORED, reduction="sum"
        )
        return Mean(total, (targets != IGNORED).sum())

    def summarize(self, totals: Mapping[str, Metric]) -> dict[str, float]:
        """The loss, and the same as perplexity and as bits per byte."""
        figures = super().summarize(totals)
        loss = figures["loss"]
        return {
            **figures,
            "perplexity": math.exp(min(loss, 700.0)),
            "bits_per_byte": loss / math.log(2),
        }
