"""What saving costs: blocked and total against one memcpy, durable against a raw write, restore against a raw read.

`restore` makes tensors and so is held against a read into fresh memory; `fetch` fills memory that the node holds already.

    python tests/bench/snapshot_speed.py [--large] [--threads N] [--folder DIR] [--steps N]

The unit is one warm copy of the state in private memory. Steps are real: forward, backward and AdamW of a
small GPT of about 60 MB of state (1.2 GB with --large). Arms take turns in random order, step by step; the
figures are medians. Prints one JSON object.
"""

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from typing import TYPE_CHECKING

import torch
from torch import nn

from checkpoints import memory
from checkpoints.buffers import Buffers, Place
from checkpoints.copier import Copier
from checkpoints.layout import CheckpointName
from checkpoints.manager import CheckpointManager
from checkpoints.processes import this_process
from checkpoints.remote import RemoteWriter
from checkpoints.store import open_store
from elastic.state import TrainState

if TYPE_CHECKING:
    from collections.abc import Callable

SMALL = {"width": 256, "layers": 6, "tokens": 1024, "batch": 4}
LARGE = {"width": 1024, "layers": 8, "tokens": 2048, "batch": 1}


class Net(nn.Module):
    """Blocks of a transformer, whose state has the usual number of tensors."""

    def __init__(self, width: int, layers: int, tokens: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(tokens, width)
        block = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, tokens)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.head(self.blocks(self.embed(x))))


class Training:
    """The steps of a net."""

    def __init__(self, sizes: dict[str, int]) -> None:
        torch.manual_seed(0)
        self.net = Net(sizes["width"], sizes["layers"], sizes["tokens"])
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-4, foreach=True)
        self.x = torch.randint(sizes["tokens"], (sizes["batch"], 128))
        self.state = TrainState()
        self.state.attach(model=self.net, optimizer=self.optimizer)
        self.before_update: Callable[[], None] = lambda: None

    def backward(self) -> None:
        """Forward and backward."""
        self.optimizer.zero_grad(set_to_none=True)
        logits = self.net(self.x)
        nn.functional.cross_entropy(logits.flatten(0, 1), self.x.flatten()).backward()

    def update(self) -> None:
        """The optimizer's step."""
        self.optimizer.step()

    def tensors(self) -> list[torch.Tensor]:
        """All tensors of the state."""
        moments = [t for s in self.optimizer.state.values() for t in s.values()]
        return [*self.net.parameters(), *moments]


class Arm:
    """One way to take snapshots; what it costs in each step."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.blocked: list[float] = []
        self.steps: list[float] = []

    def begin(self) -> None:
        """After the update."""

    def settle(self) -> None:
        """Right before the next one."""


class Synchronous(Arm):
    """One foreach copy into warm memory, while the loop waits."""

    def __init__(self, training: Training) -> None:
        super().__init__("synchronous")
        self.tensors = training.tensors()
        self.warm = [torch.empty_like(t) for t in self.tensors]

    def begin(self) -> None:
        with torch.no_grad():
            torch._foreach_copy_(self.warm, self.tensors)


class Beside(Arm):
    """As the runner does it: prepared shared memory, a thread, optionally the writer."""

    def __init__(self, name: str, training: Training, folder: Path, url: str | None) -> None:
        super().__init__(name)
        self.training, self.copier = training, Copier()
        self.buffers = Buffers(split_bytes=10**10, place=Place())
        self.writer: RemoteWriter | None = None
        self.number = 0
        self.durable: list[float] = []
        if url is not None:
            (folder / name).mkdir()
            self.writer = RemoteWriter(folder / name, this_process(), self.buffers)
            self.writer.open(
                {"url": url, "storage_options": {}, "keep": 3, "keep_every": None,
                 "part_bytes": 64 << 20, "claim": None, "retry_s": 5, "pause_s": 1}
            )  # fmt: skip

    def begin(self) -> None:
        self.number += 1
        self.future = None
        if not self.buffers.has_free:
            return
        filling = self.buffers.begin(
            {**self.training.state.capture(), "progress": {"step": self.number}},
            name=CheckpointName(1, self.number),
            parent=None,
            run_id="bench",
            info={},
            still=self.training.state.still(),
        )
        offers = self.writer is not None and not self.writer.is_busy

        def copy() -> None:
            snapshot = filling.copy()
            if offers and self.writer is not None:
                self.writer.offer(snapshot)
            else:
                snapshot.release()

        self.future = self.copier.start(copy)

    def settle(self) -> None:
        if self.future is not None:
            self.future.result()
        if self.writer is not None:
            done = [m for m in self.writer.look() if m["op"] == "committed"]
            self.durable += [float(m["seconds"]) for m in done]

    def close(self) -> None:
        if self.writer is not None:
            self.writer.wait(60)
            self.writer.finish()
        self.copier.close()
        self.buffers.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=None)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    training = Training(LARGE if given.large else SMALL)
    for _ in range(2):
        training.backward()
        training.update()
    size = sum(t.numel() * t.element_size() for t in training.tensors())
    with tempfile.TemporaryDirectory(dir=given.folder) as made:
        folder = Path(made)
        figures: dict[str, object] = {
            "state_mb": round(size / 1e6, 1),
            "tensors": len(training.tensors()),
        }
        figures |= measure_loop(training, folder, given.steps or (6 if given.large else 40))
        figures |= measure_disk(training, folder, 3 if given.large else 9)
    sys.stdout.write(json.dumps(figures, indent=1) + "\n")


def measure_loop(training: Training, folder: Path, steps: int) -> dict[str, object]:
    """Blocked and total of each arm, in units of one memcpy."""
    memory_arm = Beside("memory", training, folder, None)
    writer_arm = Beside("writer", training, folder, str(folder / "run"))
    arms: list[Arm] = [Arm("none"), Synchronous(training), memory_arm, writer_arm]
    warm = [torch.empty_like(t) for t in training.tensors()]
    copies: list[float] = []
    chance = random.Random(0)
    for number in range(steps + 2):
        chance.shuffle(arms)
        for arm in arms:
            start = time.perf_counter()
            arm.begin()
            begun = time.perf_counter()
            training.backward()
            back = time.perf_counter()
            arm.settle()
            settled = time.perf_counter()
            training.update()
            if number >= 2:
                arm.blocked.append(begun - start + settled - back)
                arm.steps.append(time.perf_counter() - start)
        start = time.perf_counter()
        torch._foreach_copy_(warm, [t.detach() for t in training.tensors()])
        copies.append(time.perf_counter() - start)
    memory_arm.close()
    writer_arm.close()
    unit = statistics.median(copies)
    plain = next(arm for arm in arms if arm.name == "none")
    base = statistics.median(plain.steps)
    found: dict[str, object] = {"memcpy_ms": ms(unit), "step_ms": ms(base)}
    for arm in arms:
        if arm is not plain:
            blocked = statistics.median(arm.blocked)
            # Each step against the plain one of its own round: load comes and goes.
            more = statistics.median(a - b for a, b in zip(arm.steps, plain.steps, strict=True))
            found[arm.name] = {
                "blocked_ms": ms(blocked), "blocked": round(blocked / unit, 3),
                "total": round(more / unit, 2),
            }  # fmt: skip
    if writer_arm.durable:
        found["durable_in_loop_ms"] = ms(statistics.median(writer_arm.durable))
    return found


def measure_disk(training: Training, folder: Path, rounds: int) -> dict[str, object]:
    """Durable against a raw write and fsync; restore against a raw read; both with checksums."""
    url = str(folder / "disk")
    store = open_store(url)
    buffers = Buffers(split_bytes=10**10, place=Place())
    (folder / "node").mkdir()
    writer = RemoteWriter(folder / "node", this_process(), buffers)
    writer.open(
        {"url": url, "storage_options": {}, "keep": 1000, "keep_every": None,
         "part_bytes": 64 << 20, "claim": None, "retry_s": 5, "pause_s": 1}
    )  # fmt: skip
    times: dict[str, list[float]] = {}

    def note(name: str, start: float) -> None:
        times.setdefault(name, []).append(time.perf_counter() - start)

    views = [
        t.detach().contiguous().view(-1).view(torch.uint8).numpy().data
        for t in training.tensors()
        if t.dim()
    ]
    warm = {name: torch.empty_like(t) for name, t in training.net.state_dict().items()}
    changing = [t.detach() for t in training.tensors()]
    for number in range(1, rounds + 2):
        torch._foreach_mul_(changing, 1.001)  # what is the same would not be written again
        snapshot = buffers.stage(
            training.state.capture(),
            name=CheckpointName(1, number),
            parent=None,
            run_id="b",
            info={},
        )
        start = time.perf_counter()
        with (folder / "raw").open("wb", buffering=0) as file:
            for view in views:
                file.write(view)
            os.fsync(file.fileno())
        note("raw_write", start)
        start = time.perf_counter()
        writer.offer(snapshot)
        writer.wait(120)
        note("durable", start)
        size = (folder / "raw").stat().st_size
        note("raw_read", read_raw(folder / "raw", bytearray(size)))
        # As a process that restores has it: memory that nobody has touched yet.
        fresh = torch.empty(size, dtype=torch.uint8).numpy().data
        note("raw_read_fresh", read_raw(folder / "raw", fresh))
        del fresh
        manager = CheckpointManager(store)
        start = time.perf_counter()
        tree = manager.restore(CheckpointName(1, number))
        note("restore", start)
        manifest = manager.catalog.manifest(CheckpointName(1, number))
        slot = buffers.reserve(memory.size_of(manifest))
        start = time.perf_counter()
        memory.fetch(store, manifest, slot.memory.view())
        note("fetch", start)
        start = time.perf_counter()
        tree = memory.load(f"/proc/self/fd/{slot.memory.fd}", CheckpointName(1, number))
        training.state.restore(tree)
        note("from_memory", start)
        slot.free()
        del tree
    writer.finish()
    buffers.close()
    del warm
    median = {name: statistics.median(values[1:]) for name, values in times.items()}
    return {
        **{f"{name}_ms": ms(value) for name, value in median.items()},
        "durable_to_raw": round(median["durable"] / median["raw_write"], 2),
        "restore_to_raw": round(median["restore"] / median["raw_read_fresh"], 2),
        "fetch_to_raw": round(median["fetch"] / median["raw_read"], 2),
    }


def read_raw(path: Path, target: bytearray | memoryview) -> float:
    """Read a file at once, and return when that began."""
    start = time.perf_counter()
    with path.open("rb", buffering=0) as file:
        file.readinto(target)
    return start


def ms(seconds: float) -> float:
    """Milliseconds, as they are shown."""
    return round(seconds * 1000, 2)


if __name__ == "__main__":
    main()
