"""What the bits of a training depend on beside the job: settings that we fix, and the machine's arithmetic.

In bitwise mode settings belong to the run's identity, so that a start with others is refused. What a
night may change under a run (another release of torch, another kind of processor) is told loudly, and
how far equal bits were promised stays in the run's progress.
"""

import logging
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import nn
from torch.optim import Optimizer

from elastic.options import TrainOptions
from elastic.progress import Progress

__all__ = [
    "BITS",
    "check_machine",
    "compile_each_shape",
    "describe_machine",
    "fix_arithmetic",
    "identity",
    "pin_optimizer",
]

logger = logging.getLogger(__name__)

# What chooses kernels at run time; where one is set, it is part of the kind of processor.
_CHOOSERS: Final = ("ATEN_CPU_CAPABILITY", "MKL_CBWR", "ONEDNN_MAX_CPU_ISA")
_WORKSPACE: Final = "CUBLAS_WORKSPACE_CONFIG"
_SHAPES: Final = 1 << 20
"""So many shapes are compiled each by itself: as good as all."""
BITS: Final = (
    "train.reproducible",
    "train.logical_shards",
    "train.micro_batch_size",
    "train.precision",
    "train.compile",
    "train.threads",
    "train.fused",
)
"""The keys of a run's identity that only bitwise mode has."""


def fix_arithmetic(threads: int | None) -> int:
    """Make kernels repeatable in this process; returns the number of threads. Call before the model is made.

    The number of threads changes sums, and launchers set it for some worlds and not for others, so it
    is never theirs to choose: one, where the settings say nothing.
    """
    # cuBLAS reads it when a device is first used.
    os.environ.setdefault(_WORKSPACE, ":4096:8")
    torch.use_deterministic_algorithms(True)
    # It would fill each new tensor with NaN, which costs time and changes nothing for code that writes before it reads.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # torch's stubs lack it
    torch.backends.cudnn.benchmark = False
    torch.set_flush_denormal(False)
    count = threads or 1
    torch.set_num_threads(count)
    return count


def compile_each_shape(model: nn.Module) -> nn.Module:
    """Compile the model for each shape by itself, however many there are.

    By itself torch would compile for the shapes that it happens to see first, and run those beyond the eighth
    uncompiled: with other bits, that depend on what this process has seen.
    """
    from torch._dynamo import config  # a third of a worker's start

    config.recompile_limit = config.accumulated_recompile_limit = _SHAPES
    return cast("nn.Module", torch.compile(model, dynamic=False))


def pin_optimizer(optimizer: Optimizer) -> str:
    """Choose the optimizer's kernel in code, where torch would by itself; returns which it is."""
    kinds = []
    for group in optimizer.param_groups:
        if "foreach" not in group and "fused" not in group:
            kinds.append("own")
            continue
        if "fused" in group and group["fused"] is None:
            group["fused"] = False
        if group.get("foreach") is None:
            on_device = any(parameter.is_cuda for parameter in group["params"])
            group["foreach"] = on_device and not group.get("fused")
        # The loop and foreach give equal bits; fused has its own.
        kinds.append("fused" if group.get("fused") else "plain")
    return ", ".join(dict.fromkeys(kinds))


def identity(train: TrainOptions, *, threads: int, kernels: Mapping[str, str]) -> dict[str, Any]:
    """The settings that the bits depend on, as keys of the run's identity."""
    values = (
        train.reproducible,
        train.logical_shards,
        train.micro_batch_size,
        train.precision,
        train.compile,
        threads,
        dict(kernels),
    )
    return dict(zip(BITS, values, strict=True))


def describe_machine(device: torch.device) -> dict[str, str]:
    """The releases and the kind of processor whose arithmetic this rank uses."""
    found = {"torch": torch.__version__, "cpu": f"{_processor()} ({_capability()})"}
    found |= {name: os.environ[name] for name in _CHOOSERS if os.environ.get(name)}
    if device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
        found["cuda"] = f"{torch.version.cuda}, cudnn {torch.backends.cudnn.version()}"
    return found


def _capability() -> str:
    return str(torch.backends.cpu.get_cpu_capability())


def _processor() -> str:
    """The processor's own name; where it has none, its architecture."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    except OSError:
        logger.debug("the processor's name could not be read")
    return platform.machine()


def check_machine(progress: Progress, told: Sequence[Mapping[str, str]]) -> list[str]:
    """Compare the ranks' machines with the one that the run began on; `told` is by rank.

    The first difference ends the promise of equal bits at the step that is done; the run goes on.
    Returns what has to be said loudly.
    """
    if progress.arithmetic is None:
        progress.arithmetic = dict(told[0])
    began = progress.arithmetic
    notes: list[str] = []
    for rank, machine in enumerate(told):
        for key in sorted({*began, *machine}):
            if began.get(key) != machine.get(key):
                what = f"{key}: the run's is {began.get(key)}, rank {rank} has {machine.get(key)}"
                notes.append(what)
    if notes:
        end_promise(progress)
    return notes


def end_promise(progress: Progress) -> None:
    """From here on equal bits are not promised any more."""
    if progress.bits_until is None:
        progress.bits_until = progress.step
