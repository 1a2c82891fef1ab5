"""What saving costs a whole training loop: jobs/gpt.yaml with a snapshot in memory at each step, and with `every: auto`.

    python tests/bench/saving_speed.py [--rounds 10] [--steps 20] [KEY=VALUE ...]

Three processes hold the same job. One has snapshots in memory and takes steps with and without them in random order: printed
is what a step with one costs more, in warm copies of the state (`memory`), by the clock (with its quartiles: on a noisy machine
a step varies by more than a copy takes) and by the run's own ledger, what the loop stood still. The other two, with `every: auto`
and without checkpoints, take turns, a block of steps each: printed are the samples per second of the one over those of the
other, the median of the ratios of neighbours (`auto`).
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from checkpoints.options import Interval  # noqa: E402

if TYPE_CHECKING:
    from tests.bench.loop_speed import Ours

ARMS = {
    "off": ["checkpoint.every=off"],
    "memory": ["checkpoint.every=off", "checkpoint.tier.memory=1 step"],
    "auto": ["checkpoint.every=auto"],
}
COMMON = ["eval.every=off", "train.epochs=100000", "train.max_steps=null"]


def hold(arm: str, url: str, overrides: list[str]) -> None:
    """Take as many steps as each line of standard input says; answer with the seconds and the samples."""
    import torch

    from checkpoints.serialization import split
    from elastic.config import parse_arguments, read_settings
    from jobs.loading import load_job
    from tests.bench.loop_speed import Ours

    words = ["jobs/gpt.yaml", f"checkpoint.url={url}", *COMMON, *ARMS[arm], *overrides]
    settings = read_settings(parse_arguments(words), root=ROOT)
    ours = Ours(load_job(settings.job, settings.args), settings)
    ours.steps(3)
    sources = list(split(ours.run.state.capture())[0].values())
    sources = [tensor.detach() for tensor in sources]
    warm = [torch.empty_like(tensor) for tensor in sources]
    answer(0.0, 0)
    chance = random.Random(0)
    for line in sys.stdin:
        copies = []
        for _ in range(5):
            began = time.perf_counter()
            torch._foreach_copy_(warm, sources)
            copies.append(time.perf_counter() - began)
        copy_s = statistics.median(copies)
        if arm == "memory":
            more, stood = take_pairs(ours, int(line), chance)
            answer(0.0, 0, copy_s=copy_s, more=more, stood=stood)
            continue
        began = time.perf_counter()
        samples = ours.steps(int(line))
        answer(time.perf_counter() - began, samples, copy_s=copy_s)
    ours.run.close()


def take_pairs(ours: "Ours", count: int, chance: random.Random) -> tuple[list[float], list[float]]:
    """Take steps with a snapshot and without; returns what those with one took more, and what the ledger says."""
    setup, ledger = ours.run._setup, ours.run.records.ledger
    options = setup.checkpoint
    off = replace(options, tier=replace(options.tier, memory=Interval.parse("off")))
    arms = {True: setup, False: replace(setup, checkpoint=off)}
    more, stood = [], []
    for _ in range(count):
        took: dict[bool, float] = {}
        for on in chance.sample([True, False], 2):
            ours.run._setup = arms[on]
            before, began = ledger.totals().get("checkpoint", 0.0), time.perf_counter()
            # A snapshot is begun at the end of the first step, and what it costs beside falls into the second.
            ours.steps(2)
            took[on] = (time.perf_counter() - began) / 2
            if on:
                stood.append((ledger.totals().get("checkpoint", 0.0) - before) / 2)
        more.append(took[True] - took[False])
    ours.run._setup = setup
    return more, stood


def answer(seconds: float, samples: int, **others: float | list[float]) -> None:
    """Tell the parent, by the one line that is JSON."""
    text = json.dumps({"seconds": seconds, "samples": samples, **others})
    os.write(3, f"{text}\n".encode())


class Child:
    """One arm."""

    def __init__(self, arm: str, folder: Path, overrides: list[str]) -> None:
        read, write = os.pipe()
        place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
        port = 29700 + os.getpid() % 500 + 500 * sorted(ARMS).index(arm)
        env = {**os.environ, **place, "MASTER_PORT": str(port)}
        self.log = folder / f"{arm}.log"
        command = [sys.executable, __file__, "--hold", arm, str(folder / arm), *overrides]
        # The pipe's end becomes descriptor 3, whatever its number here is.
        shell = ["bash", "-c", f'exec "$@" 3>&{write}', "bash", *command]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                shell, env=env, cwd=ROOT, stdin=subprocess.PIPE, stdout=log, stderr=log,
                pass_fds=[write],
            )  # fmt: skip
        os.close(write)
        self.answers = os.fdopen(read)
        self.read()

    def read(self) -> dict[str, Any]:
        """Wait for an answer."""
        line = self.answers.readline()
        if not line:
            raise SystemExit(f"{self.log}: ended\n{self.log.read_text()[-2000:]}")
        found: dict[str, Any] = json.loads(line)
        return found

    def steps(self, count: int) -> dict[str, Any]:
        """Let it take steps."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{count}\n".encode())
        self.process.stdin.flush()
        return self.read()

    def close(self) -> None:
        """Let it end by itself."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)


def main() -> None:
    """Time the arms in turns."""
    if sys.argv[1:2] == ["--hold"]:
        hold(sys.argv[2], sys.argv[3], sys.argv[4:])
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_args()
    chance = random.Random(0)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        children = {arm: Child(arm, folder, given.overrides) for arm in ARMS}
        found: dict[str, list[dict[str, Any]]] = {arm: [] for arm in ARMS}
        for number in range(given.rounds + 1):
            for arm in chance.sample(sorted(ARMS), len(ARMS)):
                told = children[arm].steps(given.steps)
                if number:
                    found[arm].append(told)
        for child in children.values():
            child.close()
        told_by_auto = [
            line
            for line in children["auto"].log.read_text().splitlines()
            if "checkpoint.every" in line
        ]
    off = found["off"]
    unit = statistics.median(one["copy_s"] for arm in found.values() for one in arm)
    more = [one / unit for told in found["memory"] for one in told["more"]]
    stood = [one / unit for told in found["memory"] for one in told["stood"]]
    speeds = [b["seconds"] / a["seconds"] for a, b in zip(found["auto"], off, strict=True)]
    figures = {
        "steps_a_block": given.steps,
        "rounds": given.rounds,
        "step_ms": round(1000 * statistics.median(one["seconds"] for one in off) / given.steps, 1),
        "copy_ms": round(1000 * unit, 2),
        "memory_copies_a_step": round(statistics.median(more), 2),
        "memory_quartiles": [round(one, 2) for one in statistics.quantiles(more, n=4)],
        "memory_stood_still": round(statistics.median(stood), 2),
        "auto_samples_ratio": round(statistics.median(speeds), 4),
        "auto_said": told_by_auto[-3:],
    }
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
