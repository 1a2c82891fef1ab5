"""One's own loop: `elastic.start` and the five calls that give a script position, state and restarts.

Stands on the same Run as the project's loop. What it adds: a loader that yields this rank's part of each
step as one batch, a communication hook that makes DDP's mean exact for uneven parts, and the agreement
of the ranks, which here takes one small exchange a step.
"""

import atexit
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

from checkpoints.errors import OptionError
from checkpoints.options import CheckpointOptions, Interval, parse_duration, parse_limit
from elastic.agreement import Agreed
from elastic.bounds import LONG_S
from elastic.core import Run
from elastic.draws import draws_of
from elastic.ending import end_worker
from elastic.entry import end_early, set_up_logging
from elastic.errors import ElasticError, StartError
from elastic.faults import leave
from elastic.identity import compare_ranks, fingerprint_dataset
from elastic.limit import check_limit
from elastic.loader import Loader, StepBatch, count_samples
from elastic.models import check_forward, check_shapes, check_wrapped
from elastic.opening import Session, Setup, code_hash, open_session
from elastic.relapse import give_up_relapse
from elastic.sampler import Plan
from elastic.seeding import mix, seed_all
from elastic.streams import hold_streams
from elastic.unreduced import check_reduced
from elastic.watching import stand, watch
from elastic.weights import model_fingerprint, unwrap
from jobs.sampling import Sampling

__all__ = ["OwnLoader", "OwnRun", "start"]


def start(  # noqa: PLR0913 - each is a setting
    url: str,
    *,
    every: object = "1 epoch",
    seed: int = 0,
    backend: str = "auto",
    signals: tuple[str, ...] = ("SIGTERM",),
    timeout_s: float = 600.0,
    audit: bool = False,
    stop_before: str | None = None,
    notices: tuple[str, ...] = (),
    hang_after: object = None,
    hang_after_long: object = LONG_S,
    **checkpoint: Any,
) -> "OwnRun":
    """Meet the other ranks, start the process group, and return the run. Collective; main thread.

    An exception that ends the script from here on gets the exit code and the line of a run's end.

    Args:
        url: Where the run lies: a folder, or anything fsspec knows.
        every: How often a checkpoint is made: `500 steps`, `10 min`, `1 epoch` or `off`.
        seed: Of the order of samples and of the model's random draws.
        backend: auto, nccl, gloo or mpi.
        signals: Signals that mean: save the state and leave.
        timeout_s: Longest wait for the other ranks, at the start and in a step.
        audit: Write the indices of each step and rank to audit/.
        stop_before: As `train.stop_before`.
        notices: As `notices`.
        hang_after: When a worker counts as hung: a duration, "off", or None for what its steps take.
        hang_after_long: The same for what is rare: the start, the first step, a save, code between two steps.
        checkpoint: Other keys of the `checkpoint` section: keep, keep_every, storage_options, …
    """
    hold_streams()
    place_rank = int(os.environ.get("RANK", "0") or 0)
    set_up_logging(primary=place_rank == 0)
    session: Session | None = None
    run: OwnRun | None = None
    stderr = sys.stderr

    def end(_kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        # The hook that torch sets with the process group lends a buffer, which nobody would print.
        sys.stderr = stderr
        if session is None and isinstance(error, StartError):
            leave(end_early(error, os.environ))
        if session is not None:
            leave(end_worker(error.with_traceback(trace), session, run))
        sys.__excepthook__(_kind, error, trace)

    sys.excepthook = end
    standing = stand(os.environ)
    session = open_session(os.environ, signals, standing)
    try:
        if stop_before is not None:
            check_limit(stop_before)
        options = CheckpointOptions(url=url, every=Interval.parse(every), **checkpoint)
        bound_s, long_s = parse_limit(hang_after), parse_duration(hang_after_long)
    except (OptionError, TypeError) as error:
        raise StartError(f"elastic.start: {error}") from error
    watch(standing, os.environ, hang_after=bound_s, long_s=long_s, timeout_s=timeout_s)
    give_up_relapse(session, options)
    setup = Setup(
        checkpoint=options,
        backend=backend,
        timeout_s=timeout_s,
        audit=audit,
        stop_before=stop_before,
        notices=notices,
        config={"seed": seed, "every": str(options.every), "backend": backend},
    )
    run = OwnRun(session, setup, seed=seed)
    atexit.register(_end_unfinished, run, session)
    return run


def _end_unfinished(run: "OwnRun", session: Session) -> None:
    """At the script's end: a run that was left in the middle has neither ended nor been saved."""
    if run.is_under_way:
        error = StartError(
            f"run.epochs: the script ended in epoch {run.epoch + 1}, before the run did, and nothing after the last "
            "checkpoint is saved; end a run early with run.stop()"
        )
        leave(end_worker(error, session, run))


class OwnRun(Run):
    """The run of an own loop: `loader`, `attach`, `epochs`, `step`."""

    def __init__(self, session: Session, setup: Setup, *, seed: int) -> None:
        """Meet and start the world; use `elastic.start`."""
        self.seed = seed
        script = Path(sys.argv[0])
        code = code_hash([script] if script.is_file() else [])
        super().__init__(session, setup, code=code, prepare=lambda: None)
        self._loader: OwnLoader | None = None
        self._part: StepBatch | None = None
        self._ddps: list[DistributedDataParallel] = []
        self._told_early = False

    def loader(
        self,
        dataset: Dataset[Any],
        *,
        global_batch_size: int,
        drop_last: bool = False,
        order: str = "auto",
        sampling: Sampling | None = None,
        **passed: Any,
    ) -> "OwnLoader":
        """A DataLoader of this rank's part of each step, as one batch.

        Args:
            dataset: Map-style.
            global_batch_size: Samples of one step over all ranks.
            drop_last: Leave out the last step of an epoch where it is smaller.
            order: As `train.order`.
            sampling: `elastic.Weighted` or `elastic.Mixture`; None: each sample once in each epoch.
            passed: Goes to DataLoader.

        Raises:
            StartError: The dataset has no length or no items, or an argument is one that the plan decides.
        """
        if self._loader is not None:
            raise StartError(
                "run.loader: found a second call, expected one, which is the run's position; read an evaluation set with a "
                "DataLoader of your own"
            )
        n = count_samples(dataset)
        plan = Plan(
            n=n,
            global_batch_size=global_batch_size,
            seed=self.seed,
            shards=self.world.world_size,
            drop_last=drop_last,
            order=order,
            draws=draws_of(n, sampling, dataset),
        )
        loader = Loader(dataset, plan, rank=self.world.rank, keep_random_state=False, passed=passed)
        self._loader = OwnLoader(self, loader, dataset)
        self.epoch_samples = plan.samples
        return self._loader

    def attach(self, *, model: nn.Module, **objects: Any) -> None:
        """Take what makes up the state, and bring it to where the run stands. Collective.

        Args:
            model: The DDP module; in a world of one it may be the plain model.
            objects: optimizer, scheduler, scaler, and anything else with state_dict and load_state_dict: further DDP
                modules too, whose gradients are the exact mean as well.

        Raises:
            StartError: The URL holds another run, or what the optimizers change is not wrapped with DDP, or not all of it
                has a shape.
        """
        if self._loader is None:
            raise StartError("run.attach: found no loader, expected run.loader(...) before it")
        modules = {"model": model}
        modules |= {name: one for name, one in objects.items() if isinstance(one, nn.Module)}
        if self.world.world_size > 1:
            check_wrapped(modules, objects, self.world.world_size)
        ema = objects.get("ema")
        if ema is not None and not hasattr(ema, "begin"):
            raise StartError(
                f"run.attach: ema: found {type(ema).__name__}, expected none: the name is the project's own; give it another, "
                "for instance average="
            )
        plan = self._loader.plan
        plain = unwrap(model)
        for name, module in modules.items():
            check_shapes(unwrap(module), f"run.attach: {name}")
            check_forward(unwrap(module), f"run.attach: {name}")
        parts = {
            "dataset": fingerprint_dataset(self._loader.dataset, plan.n, None),
            "model": model_fingerprint(plain),
            **plan.sampling,
        }
        compare_ranks(self.world.gather(parts))
        self.identify(
            {
                "job": "own loop",
                "train.seed": plan.seed,
                "train.order": plan.order,
                "train.global_batch_size": plan.global_batch_size,
                "train.drop_last": plan.drop_last,
                **parts,
            }
        )
        self.claim()
        # Under their plain names, so that a world of one, with plain modules, goes on with them.
        plain_ones = {name: unwrap(module) for name, module in modules.items() if name != "model"}
        super().attach(model=model, **(objects | plain_ones))
        self.restore(lambda: None)
        self._session.signals.arm()
        for module in dict.fromkeys(modules.values()):
            if isinstance(module, DistributedDataParallel):
                module.register_comm_hook(self, _sum_weighed)
                self._ddps.append(module)

    def save(self, *, keep: bool = False) -> bool:
        """As Run.save; the copy is waited for: what a script does between two steps may change the weights."""
        saved = super().save(keep=keep)
        self.settle_snapshot()
        return saved

    def remember(self) -> None:
        """As Run.remember; the copy is waited for, as in `save`."""
        super().remember()
        self.settle_snapshot()

    def left_early(self) -> None:
        """Say once that the loop over the loader ended before its epoch did."""
        if not self._told_early:
            self._told_early = True
            self.warn(
                f"run.epochs: the loop over run.loader ended at {self.progress.position} of the epoch's {self.epoch_samples} "
                "samples: the epoch comes again, from there; what your script does once an epoch is done more often"
            )

    def step(self, loss: Tensor | float | None = None, **values: float) -> None:  # type: ignore[override]  # the design's name for both: steps done is `steps`
        """End a step: count it, save if due, look for signals, show progress. Collective.

        Args:
            loss: The mean over the batch that the loader gave; what is logged is the mean over all ranks.
            values: Further numbers for the step's journal line.

        Raises:
            StartError: A parameter was not in the loss, so that DDP has not summed; names it.
        """
        part = self._part
        if part is None:
            raise ElasticError("run.step: found no batch taken from run.loader, expected one")
        self.world.has_gradients()
        for ddp in self._ddps:
            check_reduced(ddp, "use it, or give DDP find_unused_parameters=True")
        self._part = None
        own = sum(micro.samples for micro in part.micro_batches)
        share = 0.0 if loss is None or not own else _number(loss) * own
        summed = self.world.all_sum([share, *self.request().pack()])
        agreed = Agreed.read(summed[1:])
        mean = summed[0] / part.size if loss is not None else float("nan")
        self.count(part.size, loss=mean, values=values)
        self.settle(agreed)
        self.enter_own_code()

    def enter_own_code(self) -> None:
        """Until the next batch is asked for the script does what it likes, an evaluation for instance."""
        self._session.slot.enter("own code")

    @property
    def steps(self) -> int:
        """Steps of the run that are done."""
        return self.progress.step

    @property
    def is_under_way(self) -> bool:
        """Whether the run has begun and not come to an end."""
        return self._records is not None and not self._finished

    def finish(self) -> None:
        """The run is over: as Run.finish, then give everything back. Collective."""
        if self._finished:
            return
        super().finish()
        self.close()
        self._session.slot.end(None)

    @property
    def share(self) -> float:
        """The weight of this rank's mean in the mean over the step's samples."""
        part = self._part
        if part is None:
            return 1.0 / self.world.world_size
        return sum(micro.samples for micro in part.micro_batches) / part.size

    def take(self, part: StepBatch) -> None:
        """Note the part that the loop is about to use."""
        indices = [i for micro in part.micro_batches for i in micro.indices]
        self.records.audit(self.progress, indices)
        seed_all(mix(self.seed, self.progress.step + 1, self.world.rank, 0), self.device)
        self._part = part
        self._session.slot.beat(self.progress.step + 1, "step" if self._stepped else "first step")


class OwnLoader:
    """Iterates over this rank's parts of the epoch under way, from the run's position."""

    def __init__(self, run: OwnRun, loader: Loader, dataset: Dataset[Any]) -> None:
        """Made by `run.loader`."""
        self._run, self._loader = run, loader
        self.dataset = dataset
        self.plan = loader.plan

    def __len__(self) -> int:
        """Steps that are left of the epoch under way."""
        progress = self._run.progress
        if progress.position >= self.plan.samples:
            return 0
        return self.plan.steps - self.plan.step_at(progress.position)

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches; each must be followed by one `run.step`."""
        run = self._run
        yield from self._batches()
        run.enter_own_code()

    def _batches(self) -> Iterator[Any]:
        run = self._run
        for part in self._loader.parts(run.progress.epoch, run.progress.position):
            if run.over:
                return
            before = run.progress.step
            run.take(part)
            yield part.micro_batches[0].data
            run.begin_step()
            if run.progress.step != before + 1:
                raise ElasticError(
                    f"run.step: found {run.progress.step - before} calls for a batch, expected one"
                )


def _sum_weighed(run: OwnRun, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]  # torch's stubs lack the name
    """Weigh this rank's gradient by its share of the step's samples, and sum."""
    if bucket.is_last():
        run.world.wait_for_gradients()
    buffer = bucket.buffer().mul_(run.share)
    work = dist.all_reduce(buffer, async_op=True)
    # A device says only in `run.step` that they have come.
    ends_wait = bucket.is_last() and buffer.device.type == "cpu"

    def take(future: torch.futures.Future[list[Tensor]]) -> Tensor:
        if ends_wait:
            run.world.has_gradients()
        return future.value()[0]

    return cast("torch.futures.Future[Tensor]", work.get_future().then(take))


def _number(value: Tensor | float) -> float:
    return float(value.detach()) if isinstance(value, Tensor) else float(value)
