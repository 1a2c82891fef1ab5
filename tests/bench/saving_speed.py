"""What saving costs a whole training loop: jobs/gpt.yaml with a snapshot in memory at each step, and with `every: auto`.

    python tests/bench/saving_speed.py [--rounds 10] [--steps 20] [KEY=VALUE ...]

Three processes hold the same job, one without checkpoints; they take turns in random order, a block of steps each, and
stand still meanwhile. Printed: what a step in memory costs more, in copies of the state (`memory`), and samples per second
over those without checkpoints (`auto`): medians of the ratios of neighbours. The interval that auto has found is in its log.
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
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

ARMS = {
    "off": ["checkpoint.every=off"],
    "memory": ["checkpoint.every=off", "checkpoint.tier.memory=1 step"],
    "auto": ["checkpoint.every=auto"],
}
COMMON = ["eval.every=off", "train.epochs=100000", "train.max_steps=null"]


def hold(arm: str, url: str, overrides: list[str]) -> None:
    """Take as many steps as each line of standard input says; answer with the seconds and the samples."""
    import torch

    from elastic.config import parse_arguments, read_settings
    from jobs.loading import load_job
    from tests.bench.loop_speed import Ours

    words = ["jobs/gpt.yaml", f"checkpoint.url={url}", *COMMON, *ARMS[arm], *overrides]
    settings = read_settings(parse_arguments(words), root=ROOT)
    ours = Ours(load_job(settings.job, settings.args), settings)
    ours.steps(3)
    state = ours.training.model.state_dict().values()
    # Weights and AdamW's two moments.
    sources = [tensor.detach() for tensor in state for _ in range(3)]
    warm = [torch.empty_like(tensor) for tensor in sources]
    answer(0.0, 0)
    for line in sys.stdin:
        copies = []
        for _ in range(5):
            began = time.perf_counter()
            torch._foreach_copy_(warm, sources)
            copies.append(time.perf_counter() - began)
        began = time.perf_counter()
        samples = ours.steps(int(line))
        answer(time.perf_counter() - began, samples, statistics.median(copies))
    ours.run.close()


def answer(seconds: float, samples: int, copy_s: float = 0.0) -> None:
    """Tell the parent, by the one line that is JSON."""
    text = json.dumps({"seconds": seconds, "samples": samples, "copy_s": copy_s})
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

    def read(self) -> dict[str, float]:
        """Wait for an answer."""
        line = self.answers.readline()
        if not line:
            raise SystemExit(f"{self.log}: ended\n{self.log.read_text()[-2000:]}")
        found: dict[str, float] = json.loads(line)
        return found

    def steps(self, count: int) -> dict[str, float]:
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
        found: dict[str, list[dict[str, float]]] = {arm: [] for arm in ARMS}
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
    more = [a["seconds"] - b["seconds"] for a, b in zip(found["memory"], off, strict=True)]
    speeds = [b["seconds"] / a["seconds"] for a, b in zip(found["auto"], off, strict=True)]
    figures = {
        "steps_a_block": given.steps,
        "rounds": given.rounds,
        "step_ms": round(1000 * statistics.median(one["seconds"] for one in off) / given.steps, 1),
        "copy_ms": round(1000 * unit, 2),
        "memory_copies_a_step": round(statistics.median(more) / given.steps / unit, 2),
        "auto_samples_ratio": round(statistics.median(speeds), 4),
        "auto_said": told_by_auto[-3:],
    }
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
