"""What one save costs a training loop, beside the ways that others have: blocked, and the slow-down of the steps beside it.

    python tests/bench/snapshot_peers.py [--large] [--rounds N] [--folder DIR]

Each arm saves once in a round, then trains on until its state is on disk; its cost is the time of those steps over the
time of as many plain steps of the same round. The unit is one warm copy of the state. Arms take turns in random order;
the figures are medians. A peer that is not installed is named (pip install lightning torchsnapshot). Prints JSON.
"""

import argparse
import copy
import importlib
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save, save

from tests.bench.snapshot_speed import LARGE, SMALL, Beside, Training, ms

if TYPE_CHECKING:
    from collections.abc import Callable

MOST_STEPS = 200


class Peer:
    """One way to save: `begin` may go on beside the steps, until `is_done`."""

    def __init__(self, name: str, training: Training, folder: Path) -> None:
        self.name, self.training, self.folder = name, training, folder / name.replace(" ", "-")
        self.blocked: list[float] = []
        self.cost: list[float] = []
        self.number = 0

    def state(self) -> dict[str, Any]:
        """What everybody saves."""
        return {
            "model": self.training.net.state_dict(),
            "optimizer": self.training.optimizer.state_dict(),
        }

    def target(self) -> Path:
        """A new place for each save; the last one's is removed."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        self.number += 1
        return self.folder / str(self.number)

    def begin(self) -> None:
        """Save, or begin to."""

    def settle(self) -> None:
        """Return once the next update may change the state."""

    def is_done(self) -> bool:
        """Tell whether the state is on disk."""
        return True

    def close(self) -> None:
        """End what runs beside."""


class Ours(Peer):
    """The runner's way: memory alone, or with the writer."""

    def __init__(self, name: str, training: Training, folder: Path, url: str | None) -> None:
        super().__init__(name, training, folder)
        self.beside = Beside(name, training, folder, url)
        self.writes = url is not None

    def begin(self) -> None:
        """Begin the copy."""
        self.beside.begin()

    def settle(self) -> None:
        """Wait for the copy; offers it to the writer."""
        self.beside.settle()

    def is_done(self) -> bool:
        """Look whether the writer has committed."""
        self.beside.future = None
        self.beside.settle()
        writer = self.beside.writer
        return writer is None or not writer.is_busy

    def close(self) -> None:
        """End the writer."""
        self.beside.close()


class Blocking(Peer):
    """A call that returns when all is written and synced."""

    def __init__(
        self, name: str, training: Training, folder: Path, save: "Callable[[dict[str, Any], Path], object]"
    ) -> None:  # fmt: skip
        super().__init__(name, training, folder)
        self.save = save

    def begin(self) -> None:
        """Save."""
        self.save(self.state(), self.target())


class Threaded(Peer):
    """deepcopy, then torch.save in a thread."""

    def __init__(self, training: Training, folder: Path) -> None:
        super().__init__("deepcopy, torch.save in a thread", training, folder)
        self.thread = threading.Thread()

    def begin(self) -> None:
        """Copy; write beside."""
        state, target = copy.deepcopy(self.state()), self.target()
        self.thread = threading.Thread(target=_torch_save, args=(state, target))
        self.thread.start()

    def is_done(self) -> bool:
        """Look whether the thread has ended."""
        return not self.thread.is_alive()


class Dcp(Peer):
    """torch.distributed.checkpoint.async_save in one of its modes."""

    def __init__(
        self, name: str, training: Training, folder: Path, kind: AsyncCheckpointerType
    ) -> None:
        super().__init__(name, training, folder)
        self.kind = kind
        self.stager: DefaultStager | None = None
        if kind is AsyncCheckpointerType.PROCESS:
            options = StagingOptions(
                use_pinned_memory=False, use_shared_memory=True, use_async_staging=True,
                use_non_blocking_copy=False,
            )  # fmt: skip
            self.stager = DefaultStager(options)
        self.answer: Any = None

    def begin(self) -> None:
        """Stage, or begin to."""
        self.answer = async_save(
            self.state(), checkpoint_id=self.target(), async_checkpointer_type=self.kind,
            async_stager=self.stager,
        )  # fmt: skip

    def settle(self) -> None:
        """Wait for the staging."""
        staged = getattr(self.answer, "staging_completion", None)
        if staged is not None:
            staged.result()

    def is_done(self) -> bool:
        """Look whether the upload is over."""
        future = getattr(self.answer, "upload_completion", self.answer)
        return bool(future is None or future.done())

    def close(self) -> None:
        """End its process."""
        if self.stager is not None:
            self.stager.close()


def _torch_save(state: dict[str, Any], target: Path) -> None:
    with target.open("wb") as file:
        torch.save(state, file)
        os.fsync(file.fileno())


def others(training: Training, folder: Path) -> tuple[list[Peer], list[str]]:
    """Peers that have to be installed, and the names of those that are not."""
    found: list[Peer] = []
    missing: list[str] = []
    try:
        plugins = importlib.import_module("lightning.pytorch.plugins.io")
    except ImportError:
        missing.append("lightning")
    else:
        found.append(
            _Lightning(training, folder, plugins.AsyncCheckpointIO(plugins.TorchCheckpointIO()))
        )
    try:
        torchsnapshot = importlib.import_module("torchsnapshot")
    except ImportError:
        missing.append("torchsnapshot")
    else:
        found.append(_Torchsnapshot(training, folder, torchsnapshot))
    return found, missing


class _Lightning(Peer):
    def __init__(self, training: Training, folder: Path, plugin: Any) -> None:
        super().__init__("lightning AsyncCheckpointIO", training, folder)
        self.plugin = plugin
        self.written: Any = None

    def begin(self) -> None:
        self.plugin.save_checkpoint(self.state(), self.target())
        self.written = self.plugin._executor.submit(
            lambda: None
        )  # its thread takes one after the other

    def is_done(self) -> bool:
        return bool(self.written.done())

    def close(self) -> None:
        self.plugin.teardown()


class _Torchsnapshot(Peer):
    def __init__(self, training: Training, folder: Path, module: Any) -> None:
        super().__init__("torchsnapshot async_take", training, folder)
        self.module = module
        self.pending: Any = None

    def begin(self) -> None:
        state = {"model": self.training.net, "optimizer": self.training.optimizer}
        self.pending = self.module.Snapshot.async_take(str(self.target()), state)

    def is_done(self) -> bool:
        return bool(self.pending.done())


def measure(
    arms: list[Peer], training: Training, rounds: int, unit: "Callable[[], float]"
) -> dict[str, Any]:
    """Have each arm save once in each round."""
    chance = random.Random(0)
    units, plain_steps = [], []
    for number in range(rounds + 1):
        plain = [_step(training) for _ in range(3)]
        units.append(unit())
        base = statistics.median(plain)
        plain_steps.append(base)
        chance.shuffle(arms)
        for arm in arms:
            blocked, cost = _save(arm, training, base)
            if number > 0:
                arm.blocked.append(blocked / units[-1])
                arm.cost.append(cost / units[-1])
    return {
        "memcpy_ms": ms(statistics.median(units)),
        "step_ms": ms(statistics.median(plain_steps)),
        "arms": {
            arm.name: {
                "blocked": round(statistics.median(arm.blocked), 3),
                "total": round(statistics.median(arm.cost), 2),
                "total_min": round(min(arm.cost), 2),
                "total_max": round(max(arm.cost), 2),
            }
            for arm in sorted(arms, key=lambda arm: statistics.median(arm.cost))
        },
    }


def _step(training: Training) -> float:
    start = time.perf_counter()
    training.backward()
    training.update()
    return time.perf_counter() - start


def _save(arm: Peer, training: Training, base: float) -> tuple[float, float]:
    """Seconds blocked, and seconds that all steps until it was durable took longer than plain ones."""
    start = time.perf_counter()
    arm.begin()
    begun = time.perf_counter()
    training.backward()
    back = time.perf_counter()
    arm.settle()
    settled = time.perf_counter()
    training.update()
    blocked = begun - start + settled - back
    whole, steps = time.perf_counter() - start, 1
    while not arm.is_done() and steps < MOST_STEPS:
        whole += _step(training)
        steps += 1
    return blocked, whole - steps * base


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=None)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    training = Training(LARGE if given.large else SMALL)
    for _ in range(2):
        _step(training)
    warm = [torch.empty_like(t) for t in training.tensors()]

    def unit() -> float:
        start = time.perf_counter()
        torch._foreach_copy_(warm, [t.detach() for t in training.tensors()])
        return time.perf_counter() - start

    with tempfile.TemporaryDirectory(dir=given.folder) as made:
        folder = Path(made)
        installed, missing = others(training, folder)
        arms: list[Peer] = [
            Ours("memory", training, folder, None),
            Ours("writer", training, folder, str(folder / "run")),
            Blocking("torch.save", training, folder, _torch_save),
            Blocking("dcp.save", training, folder, lambda s, to: save(s, checkpoint_id=to)),
            Threaded(training, folder),
            Dcp("dcp.async_save thread", training, folder, AsyncCheckpointerType.THREAD),
            Dcp("dcp.async_save process", training, folder, AsyncCheckpointerType.PROCESS),
            *installed,
        ]
        found = measure(arms, training, given.rounds or (3 if given.large else 9), unit)
        for arm in arms:
            arm.close()
    size = sum(t.numel() * t.element_size() for t in training.tensors())
    figures = {"state_mb": round(size / 1e6, 1), **found, "not_installed": missing}
    sys.stdout.write(json.dumps(figures, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
