"""Step time of bitwise mode against the tutorial's bare DDP loop, side by side in one run.

    torchrun --nproc_per_node=2 tests/bench/bitwise_speed.py gpt
    torchrun --nproc_per_node=4 tests/bench/bitwise_speed.py convnet
    torchrun --nproc_per_node=4 tests/bench/bitwise_speed.py digits --shards 4

Both arms train the same model with the same global batch, optimizer, schedule, clipping and precision,
in blocks that take turns; the bare one takes a rank's part of a step at once (or in its micro-batches), the
bitwise one in logical shards. What is printed is the median of the ratios of neighbours, time per sample
of bitwise over bare: 1.05 means five per cent slower; the same for the processor time of all ranks, which
says more where the machine has other work. Both have one thread.
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch.distributed as dist  # noqa: E402

from elastic.config import parse_arguments, read_settings  # noqa: E402
from jobs.loading import load_job  # noqa: E402
from tests.bench.loop_speed import Bare, Ours  # noqa: E402

STEPS = {"convnet": 8, "digits": 40, "gpt": 4}
JOBS = {"convnet": "tests/bench/convnet.py:Convnet"}
# Enough work in a shard that it is the reduction that is measured.
SIZES = {
    "convnet": ["train.global_batch_size=32", "train.grad_clip=1.0"],
    "digits": ["args.width=64", "train.global_batch_size=128"],
    "gpt": [
        "args.n_layer=4",
        "args.width=256",
        "train.global_batch_size=32",
        "train.micro_batch_size=null",
    ],
}


def main() -> None:
    """Time both arms in turns and print the ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("job", choices=sorted(STEPS))
    parser.add_argument("--shards", type=int, help="logical shards (default: the world size)")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int)
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_args()
    steps = given.steps or STEPS[given.job]
    world_size = int(os.environ["WORLD_SIZE"])
    shards = given.shards or world_size
    # Of this start alone: what a killed bench left is another run.
    folder = Path(tempfile.gettempdir()) / f"bitwise-speed-{os.environ['MASTER_PORT']}"
    common = [
        f"checkpoint.url={folder}",
        "checkpoint.every=off",
        "eval.every=off",
        "train.epochs=100000",
        "train.reproducible=bitwise",
        f"train.logical_shards={shards}",
    ]
    arguments = [
        JOBS.get(given.job, f"jobs/{given.job}.yaml"),
        *SIZES[given.job],
        *common,
        *given.overrides,
    ]
    settings = read_settings(parse_arguments(arguments), root=ROOT)
    job = load_job(settings.job, settings.args)
    bitwise = Ours(job, settings)
    bare = Bare(job, settings, world_size)
    arms: dict[str, Any] = {"bare": bare, "bitwise": bitwise}
    times: dict[str, list[float]] = {name: [] for name in arms}
    used: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(given.rounds + 1):
        for name in sorted(arms, reverse=bool(number % 2)):
            dist.barrier()
            began, worked = time.perf_counter(), time.process_time()
            samples = arms[name].steps(steps)
            worked = bitwise.run.world.all_sum([time.process_time() - worked])[0]
            if number:
                times[name].append((time.perf_counter() - began) / samples)
                used[name].append(worked / samples)
    if dist.get_rank() == 0:
        ratios = [a / b for a, b in zip(times["bitwise"], times["bare"], strict=True)]
        work = [a / b for a, b in zip(used["bitwise"], used["bare"], strict=True)]
        step_ms = statistics.median(times["bare"]) * settings.train.global_batch_size / world_size
        print(
            json.dumps(
                {
                    "job": given.job,
                    "parameters": sum(p.numel() for p in bitwise.training.model.parameters()),
                    "world_size": world_size,
                    "shards": shards,
                    "steps_a_block": steps,
                    "rounds": given.rounds,
                    "bare_step_ms": round(step_ms * 1000, 1),
                    "ratio_median": round(statistics.median(ratios), 3),
                    "ratio_min": round(min(ratios), 3),
                    "ratio_max": round(max(ratios), 3),
                    "processor_ratio_median": round(statistics.median(work), 3),
                }
            )
        )
    bitwise.run.world.barrier()
    bitwise.run.close()
    if bitwise.run.is_primary:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
