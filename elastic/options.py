"""The settings of a run as frozen dataclasses, one for each section of the YAML file.

A value that is impossible, or that this version does not serve, raises ConfigError when the dataclass is made; the text starts with
the key inside the section, and `elastic.config` adds the section, the file and the line. The text under each field is what `--help`
shows. Imports no torch: a wrong setting is told before anything heavy is loaded. Types are the reader's business, ranges are this one's.
"""

import math
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from checkpoints.errors import OptionError
from checkpoints.options import (
    CheckpointOptions,
    Duration,
    Interval,
    Limit,
    parse_duration,
    parse_limit,
)
from elastic.bounds import LONG_S
from elastic.errors import ConfigError
from elastic.limit import check_limit
from elastic.notices import KINDS

__all__ = [
    "AuditOptions",
    "EvalOptions",
    "LoaderOptions",
    "RunOptions",
    "Settings",
    "TrainOptions",
]

_EACH_EPOCH = Interval("epochs", 1)
_HIDDEN = {"hidden": True}
_LARGEST_SEED = 2**63 - 1
_DURATIONS: Mapping[str, Callable[[object], float | None]] = {
    "timeout": parse_duration,
    "hang_after": parse_limit,
    "hang_after_long": parse_duration,
}
IDENTITY: Final = (
    "job",
    "dataset",
    "sampling",
    "train.seed",
    "train.order",
    "train.global_batch_size",
    "train.drop_last",
    "train.reproducible",
    "train.logical_shards",
    "train.micro_batch_size",
    "train.precision",
    "train.compile",
    "train.threads",
    "train.fused",
)
"""The keys of a run's identity that `run.accept` may name; the model is never accepted."""
_UNCATCHABLE = frozenset({"SIGKILL", "SIGSTOP"})
# Hard faults must end the worker, and these are the interpreter's own tools: a handler that only notes them would loop for ever.
_FAULTS = frozenset({"SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGABRT", "SIGCHLD"})


def _require(key: str, found: object, expected: str, *, holds: bool) -> None:
    if not holds:
        raise ConfigError(f"{key}: found {found}, expected {expected}")


def _at_least(key: str, found: float | None, least: int) -> None:
    _require(key, found, f"at least {least}", holds=found is None or found >= least)


def _positive(key: str, found: float | None) -> None:
    holds = found is None or (math.isfinite(found) and found > 0)
    _require(key, found, "a finite number above 0", holds=holds)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainOptions:
    """How the model is trained."""

    epochs: int = 10
    """Passes over the dataset."""
    max_steps: int | None = None
    """End after this many steps of the run, even inside an epoch."""
    global_batch_size: int = 64
    """Samples of one step over all ranks, whatever the number of ranks is."""
    micro_batch_size: int | None = None
    """Most samples of one forward on one rank; a larger part is cut, its gradient stays the exact mean."""
    seed: int = 0
    """Of the order of samples and of every random draw."""
    order: Literal["auto", "torch", "feistel"] = "auto"
    """`torch`: the permutation of torch's DistributedSampler; `feistel`: one without a table, for any number of samples; `auto`: `torch` up to 2**24 samples an epoch."""
    drop_last: bool = False
    """Leave out the last step of an epoch where it is smaller than a global batch."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Type of the forward's arithmetic; weights stay as the model made them."""
    grad_clip: float | None = None
    """Largest norm of a step's gradient; larger ones are scaled down to it."""
    compile: bool = False
    """Run the model through torch.compile."""
    find_unused_parameters: bool = False
    """Let DDP look for parameters that a forward did not use; without it these are refused where there are several ranks."""
    threads: int | None = None
    """Threads of one worker's CPU arithmetic; by default what OMP_NUM_THREADS says, else the cores shared, with `bitwise` 1."""
    on_nonfinite: Literal["stop", "skip", "rollback"] = "stop"
    """Where a loss or a gradient is not finite, agreed by all ranks: `stop` the run, `skip` the update, or `rollback` to a checkpoint and leave the step out."""
    ema: float | None = None
    """Decay of an average of the weights, kept beside them and used by evaluations; from the first weights on, no warm-up."""
    logical_shards: int | None = None
    """Fixed slices of the global batch: dropout and BatchNorm then belong to a slice, whatever the number of ranks."""
    reproducible: Literal["off", "bitwise"] = "off"
    """`bitwise`: equal bits of the final weights for every number of ranks and history of faults; needs logical_shards."""
    warm_start: Literal["auto", "off"] = "auto"
    """`auto`: where workers may be started again, a process on each node holds what they import, and forks them; `off`: each start imports anew (ELASTIC_WARM=0 does the same)."""
    stop_before: str | None = None
    """Save and end (75) before this: a duration since the launch began (`11 h`), a time (`23:30`, `2027-01-31T23:30`), or `slurm`: the job's end."""
    step_delay: float = field(default=0.0, metadata=_HIDDEN)
    """Seconds slept in each step, for drills and tests."""

    def __post_init__(self) -> None:
        """Check the ranges, then what this version does not serve."""
        _at_least("epochs", self.epochs, 1)
        _at_least("max_steps", self.max_steps, 1)
        _at_least("global_batch_size", self.global_batch_size, 1)
        _at_least("micro_batch_size", self.micro_batch_size, 1)
        in_range = 0 <= self.seed <= _LARGEST_SEED
        _require("seed", self.seed, f"0 to {_LARGEST_SEED}", holds=in_range)
        _positive("grad_clip", self.grad_clip)
        holds = self.ema is None or 0 <= self.ema < 1
        _require("ema", self.ema, "a decay from 0 up to 1, such as 0.999", holds=holds)
        _at_least("threads", self.threads, 1)
        _at_least("logical_shards", self.logical_shards, 1)
        if self.logical_shards is not None and self.logical_shards > self.global_batch_size:
            expected = f"at most global_batch_size ({self.global_batch_size})"
            raise ConfigError(f"logical_shards: found {self.logical_shards}, expected {expected}")
        if self.reproducible == "bitwise" and self.logical_shards is None:
            expected = "it set: the slices of a batch whose sums have one order, 8 for instance"
            raise ConfigError(
                f"reproducible: found bitwise without logical_shards, expected {expected}"
            )
        delays = math.isfinite(self.step_delay) and self.step_delay >= 0
        _require("step_delay", self.step_delay, "seconds, 0 or more", holds=delays)
        if self.stop_before is not None:
            check_limit(self.stop_before)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderOptions:
    """How samples are read."""

    workers: int = 0
    """Processes of each rank that read samples; 0 reads in the rank itself."""
    prefetch: int | None = None
    """Micro-batches that each loader worker reads ahead (torch's own default: 2)."""
    start_method: Literal["fork", "spawn", "forkserver"] | None = None
    """How loader workers are started; by default the way of this Python."""
    pin_memory: bool | None = None
    """Keep batches in page-locked memory; by default where the run is on CUDA."""
    persistent: bool = True
    """Keep the loader workers from one epoch to the next."""

    def __post_init__(self) -> None:
        """Check the ranges."""
        _at_least("workers", self.workers, 0)
        _at_least("prefetch", self.prefetch, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalOptions:
    """How the model is evaluated."""

    every: Interval = _EACH_EPOCH
    """When to evaluate: `500 steps`, `10 min`, `1 epoch` or `off`."""
    batch_size: int | None = None
    """Samples of one evaluation batch on one rank; by default a rank's part of the global batch."""
    monitor: str | None = None
    """Metric by which the best checkpoint is chosen and patience is counted."""
    mode: Literal["min", "max"] = "min"
    """Whether a smaller or a larger value of the metric is better."""
    keep_best: int = 1
    """Best checkpoints that retention leaves in place."""
    patience: int | None = None
    """End after this many evaluations in a row that were no better."""

    def __post_init__(self) -> None:
        """Check the ranges and that patience has a metric to look at."""
        try:
            object.__setattr__(self, "every", Interval.parse(self.every))
        except OptionError as error:
            raise ConfigError(f"every: {error}") from error
        _at_least("batch_size", self.batch_size, 1)
        _at_least("keep_best", self.keep_best, 0)
        _at_least("patience", self.patience, 1)
        if self.patience is not None and self.monitor is None:
            found = f"{self.patience} without eval.monitor"
            raise ConfigError(f"patience: found {found}, expected a metric named there too")


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditOptions:
    """What is written down so that others can check the run."""

    samples: bool = False
    """Write the indices of each step and rank to audit/ at the run's URL."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOptions:
    """How a start treats the run that it finds at the URL."""

    accept: tuple[str, ...] = ()
    """Keys of the run's identity that may differ from what the run began with."""

    def __post_init__(self) -> None:
        """Check that such keys exist: one that does not would accept nothing."""
        for key in self.accept:
            _require("accept", key, f"one of {', '.join(IDENTITY)}", holds=key in IDENTITY)


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """All settings of a run."""

    job: str
    """What is trained: `path/to/file.py:Class` or `package.module:Class`."""
    args: Mapping[str, object] = field(default_factory=dict)
    """Arguments of the job's class."""
    train: TrainOptions = field(default_factory=TrainOptions)
    """How the model is trained."""
    loader: LoaderOptions = field(default_factory=LoaderOptions)
    """How samples are read."""
    eval: EvalOptions = field(default_factory=EvalOptions)
    """How the model is evaluated."""
    checkpoint: CheckpointOptions
    """Where and when the state is saved."""
    audit: AuditOptions = field(default_factory=AuditOptions)
    """What is written down so that others can check the run."""
    run: RunOptions = field(default_factory=RunOptions)
    """How a start treats the run that it finds at the URL."""
    backend: Literal["auto", "nccl", "gloo", "mpi"] = "auto"
    """Of the process group; `auto` is nccl with CUDA and gloo without."""
    init_method: str | None = None
    """Where ranks meet: `env://`, `tcp://host:port` or `file:///path`; by default what the launcher says."""
    timeout: Duration = 600.0
    """Longest wait for the other ranks, at the start and in a step."""
    hang_after: Limit | None = None
    """End a worker whose step or evaluation batch gives no sign of life for this long; null: ten times the longest so far, 5 min at least; off: never."""
    hang_after_long: Duration = LONG_S
    """The same for what is rare and may be long: the start, restore, the first step, a save, a hook."""
    signals: tuple[str, ...] = ("SIGTERM",)
    """Signals that mean: save the state and leave."""
    notices: tuple[str, ...] = ()
    """Who is asked whether this node is to leave: `aws`, `aws-rebalance`, `gcp` (the metadata services), `slurm` (the job's end)."""

    def __post_init__(self) -> None:
        """Check the ranges."""
        _require(
            "job", repr(self.job), "file.py:Class or package.module:Class", holds=":" in self.job
        )
        method = self.init_method
        known = method is None or method.startswith(("env://", "tcp://", "file://"))
        _require("init_method", method, "env://, tcp://host:port or file:///path", holds=known)
        for key, parse in _DURATIONS.items():
            try:
                object.__setattr__(self, key, parse(getattr(self, key)))
            except OptionError as error:
                raise ConfigError(f"{key}: {error}") from error
        for name in self.signals:
            catchable = name in signal.Signals.__members__ and name not in _UNCATCHABLE | _FAULTS
            _require("signals", name, "names like SIGTERM or SIGUSR1", holds=catchable)
        for name in self.notices:
            _require("notices", name, f"one of {', '.join(KINDS)}", holds=name in KINDS)
