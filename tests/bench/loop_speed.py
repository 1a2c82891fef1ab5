"""Samples per second of the project's loop over the tutorial's bare DDP loop, side by side in one run.

    torchrun --nproc_per_node=2 tests/bench/loop_speed.py digits
    torchrun --nproc_per_node=2 tests/bench/loop_speed.py gpt

Both arms train the same model on the same data with the same global batch, optimizer, schedule, clipping
and precision, in blocks that take turns; what is printed is the median of the ratios of neighbours.
The bare arm is DistributedSampler, DataLoader and DDP as in the tutorial, with nothing else in its loop.
"""

import argparse
import contextlib
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch.nn.utils import clip_grad_norm_  # noqa: E402
from torch.utils.data import DataLoader, DistributedSampler  # noqa: E402

from elastic.config import parse_arguments, read_settings  # noqa: E402
from elastic.core import Run  # noqa: E402
from elastic.loop import Training  # noqa: E402
from elastic.opening import open_session  # noqa: E402
from elastic.options import Settings  # noqa: E402
from elastic.worker import setup_of  # noqa: E402
from jobs.job import Job, Mean, read_loss  # noqa: E402
from jobs.loading import load_job  # noqa: E402

STEPS = {"digits": 200, "gpt": 20}
ROUNDS = 12


class Bare:
    """The tutorial's loop."""

    def __init__(self, job: Job, settings: Settings, world_size: int) -> None:
        train = settings.train
        self.job, self.train = job, train
        torch.manual_seed(train.seed)
        dataset = cast("Any", job.dataset())
        self.sampler: DistributedSampler[Any] = DistributedSampler(dataset, seed=train.seed)
        part = train.global_batch_size // world_size
        self.micro = train.micro_batch_size or part
        self.accumulate = part // self.micro
        self.loader = DataLoader(
            dataset, batch_size=self.micro, sampler=self.sampler, collate_fn=job.collate
        )
        model = job.model()
        self.model = DistributedDataParallel(model)
        self.optimizer = cast("torch.optim.Optimizer", job.optimizer(model))
        self.scheduler = cast("Any", job.scheduler(self.optimizer, 100_000))
        self.batches = self._forever()

    def _forever(self) -> Iterator[Any]:
        epoch = 0
        while True:
            self.sampler.set_epoch(epoch)
            yield from self.loader
            epoch += 1

    def steps(self, count: int) -> int:
        """Take steps; returns the samples of this rank."""
        samples = 0
        for _ in range(count):
            self.optimizer.zero_grad()
            for number in range(self.accumulate):
                batch = next(self.batches)
                samples += len(batch[0])
                last = number == self.accumulate - 1
                with contextlib.nullcontext() if last else self.model.no_sync():
                    with self._autocast():
                        loss = read_loss(self.job.loss(self.model, batch))
                    mean = loss.sum / loss.count if isinstance(loss, Mean) else loss
                    (mean / self.accumulate).backward()
            if self.train.grad_clip is not None:
                clip_grad_norm_(self.model.parameters(), self.train.grad_clip)
            self.optimizer.step()
            self.scheduler.step()
        return samples

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.train.precision == "bf16":
            return torch.autocast("cpu", dtype=torch.bfloat16)
        return contextlib.nullcontext()


class Ours:
    """The project's loop."""

    def __init__(self, job: Job, settings: Settings) -> None:
        session = open_session(os.environ, ())
        self.run = Run(session, setup_of(settings), code="bench", prepare=job.prepare)
        self.training = Training(job, settings, self.run)

    def steps(self, count: int) -> int:
        """Take steps; returns the samples of this rank."""
        run, before = self.run, self.run.progress.samples
        run.max_steps = run.progress.step + count
        while not run.over:
            self.training._train_epoch(run.progress.epoch)
            if run.at_epoch_end:
                run.end_epoch()
        return (run.progress.samples - before) // run.world.world_size


def main() -> None:
    """Time both arms in turns and print the ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("job", choices=sorted(STEPS))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--steps", type=int)
    given = parser.parse_args()
    steps = given.steps or STEPS[given.job]
    folder = Path(tempfile.gettempdir()) / f"loop-speed-{os.environ['TORCHELASTIC_RUN_ID']}"
    settings = read_settings(
        parse_arguments(
            [
                f"jobs/{given.job}.yaml",
                f"checkpoint.url={folder}",
                "checkpoint.every=off",
                "eval.every=off",
                "train.epochs=100000",
            ]
        ),
        root=ROOT,
    )
    job = load_job(settings.job, settings.args)
    ours = Ours(job, settings)
    bare = Bare(job, settings, ours.run.world.world_size)
    arms: dict[str, Any] = {"bare": bare, "ours": ours}
    speeds: dict[str, list[float]] = {"bare": [], "ours": []}
    for number in range(given.rounds + 1):
        for name in sorted(arms, reverse=bool(number % 2)):
            dist.barrier()
            began = time.perf_counter()
            samples = arms[name].steps(steps)
            dist.barrier()
            if number:
                speeds[name].append(samples / (time.perf_counter() - began))
    if dist.get_rank() == 0:
        ratios = [a / b for a, b in zip(speeds["ours"], speeds["bare"], strict=True)]
        print(
            json.dumps(
                {
                    "job": given.job,
                    "world_size": dist.get_world_size(),
                    "steps_a_block": steps,
                    "rounds": given.rounds,
                    "bare_samples_per_s_and_rank": round(statistics.median(speeds["bare"]), 1),
                    "ratio_median": round(statistics.median(ratios), 3),
                    "ratio_min": round(min(ratios), 3),
                    "ratio_max": round(max(ratios), 3),
                }
            )
        )
    ours.run.world.barrier()
    ours.run.close()
    if ours.run.is_primary:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
