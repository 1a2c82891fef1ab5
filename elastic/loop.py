"""The training loop of the project: epochs of steps, evaluation, when to save and when to stop.

Reads as the specification. It stands on the same Run as anyone's own loop; what a step, an evaluation
or a save is, is theirs. Promises: a step's evaluation belongs to the state that is saved after it, so
that best and patience survive any fault; an epoch's end is done once.
"""

import contextlib
import os
from collections.abc import Callable, Generator, Mapping
from typing import Any, cast

import torch
from torch import nn

from elastic.agreement import REQUEST_SLOTS
from elastic.arithmetic import (
    check_machine,
    compile_each_shape,
    describe_machine,
    end_promise,
    fix_arithmetic,
    identity,
    pin_optimizer,
)
from elastic.average import Average
from elastic.bitwise import TreeReducer
from elastic.core import Run
from elastic.draws import draws_of
from elastic.errors import StartError
from elastic.evaluate import Evaluation
from elastic.identity import compare_ranks, fingerprint_dataset
from elastic.loader import Loader, StepBatch, count_samples
from elastic.models import check_model
from elastic.nonfinite import check_skips
from elastic.options import Settings
from elastic.phases import Phase, Schedules, by_phase, make_optimizers, make_scaler, phases_of
from elastic.reduce import PlainReducer, Reducer
from elastic.sampler import Plan
from elastic.saving import Clocked, is_due, is_due_at_epoch_end
from elastic.seeding import kept_random_state, seed_all
from elastic.shards import ShardBuffers
from elastic.step import STEP_SLOTS, Stepper, autocast
from elastic.tree import owned
from elastic.weights import model_fingerprint
from jobs.job import Job, Optimizers

__all__ = ["Training"]


class Training:
    """One generation of the project's own loop."""

    def __init__(self, job: Job, settings: Settings, run: Run) -> None:
        """Build the job's parts, check them against the other ranks and the run, restore.

        Collective.

        Raises:
            StartError: Ranks or starts differ, or the job's parts do not fit.
        """
        self.job, self.settings, self.run = job, settings, run
        train = settings.train
        self._bitwise = train.reproducible == "bitwise"
        if self._bitwise:
            self._threads = fix_arithmetic(train.threads)
        else:
            self._threads = train.threads or _threads(run.world.local_world_size)
            torch.set_num_threads(self._threads)
        dataset = job.dataset()
        self.plan = self._plan(dataset)
        run.epoch_samples = self.plan.samples
        run.max_steps = train.max_steps
        run.keep_best = settings.eval.keep_best
        seed_all(train.seed, run.device)
        model = job.model()
        check_model(model, type(job).__name__, in_shards=train.logical_shards is not None)
        model.to(run.device)
        optimizer = make_optimizers(job, model)
        phases = phases_of(job, optimizer)
        self._evaluation = self._prepare_evaluation()
        self._check_monitor(model)
        self._identify(dataset, model, optimizer)
        run.claim()
        self._schedules = Schedules(job.scheduler(optimizer, self._total_steps()))
        scaler = make_scaler(optimizer, train.precision, run.device)
        self._average = None if train.ema is None else Average(model, train.ema)
        run.attach(
            model=model,
            optimizer=optimizer,
            scheduler=self._schedules.given,
            scaler=scaler,
            job=job,
            ema=self._average,
        )
        run.check_position = self.plan.step_at
        run.restore(lambda: job.initialize(model))
        self.model = model
        if self._bitwise:
            self._check_machines()
        if train.on_nonfinite == "rollback" and run.step == 0:
            run.save()  # so that there is always something to return to
        self._buffers: ShardBuffers | None = None
        if train.logical_shards is not None:
            shards, ranks = train.logical_shards, run.world.world_size
            run.paces.shards = lambda rank: owned(rank, ranks, shards)
            self._buffers = ShardBuffers(model, run.world, shards)
        self._stepper = Stepper(
            job,
            self._reducer(phases),
            phases,
            scaler=scaler,
            options=train,
            world=run.world,
            buffers=self._buffers,
            told=run.signals,
        )
        self._loader = Loader(
            dataset,
            self.plan,
            rank=run.world.rank,
            shards=owned(run.world.rank, run.world.world_size, self.plan.shards),
            pads=not self._bitwise,
            options=settings.loader,
            collate=job.collate,
            # Each forward is seeded anew, so that what the loader draws changes nothing.
            keep_random_state=False,
        )
        self._eval_clock = Clocked(interval=settings.eval.every)
        self._eval_clock.restart()
        self._evaluated_at = -1
        self._hooks_steps = type(job).on_step is not Job.on_step

    # ---------------------------------------------------------------------------- the loop
    def train(self) -> None:
        """Train to the end, as this generation can. Collective."""
        run = self.run
        for _ in run.epochs(self.settings.train.epochs):
            self._catch_up()
            while (refused := self._train_epoch(run.epoch)) is not None:
                self._roll_back(refused)
            if run.at_epoch_end:
                self._end_epoch(run.epoch)
            elif run.over and run.progress.stopped is None and self._evaluated_at != run.step:
                self._evaluate()  # train.max_steps ends inside an epoch: its figures all the same
        self._hook(self.job.on_end)

    def _train_epoch(self, epoch: int) -> str | None:
        """Take the epoch's steps; returns what was not finite where the run is to go back."""
        run, train = self.run, self.settings.train
        batches = self._loader.epoch(epoch, run.progress.position)
        with contextlib.closing(cast("Generator[StepBatch]", batches)):
            for batch in batches:
                if run.over:
                    return None
                run.records.audit(run.progress, [i for m in batch.micro_batches for i in m.indices])
                if run.is_left_out(batch.size):
                    result = self._stepper.leave_out()
                else:
                    request = run.request(evaluate=self._eval_clock.due)
                    result = self._stepper.run(run.step + 1, batch, request)
                if result.refused is not None and train.on_nonfinite == "rollback":
                    return result.refused
                if self._average is not None and not result.skipped:
                    self._average.update()
                self._schedules.advance("step")
                run.count(
                    batch.size,
                    loss=result.loss,
                    skipped=result.skipped,
                    values={"lr": result.lr, "grad_norm": result.grad_norm, **result.named},
                )
                check_skips(run.progress.skipped_in_row, train.precision, result.refused)
                if self._hooks_steps:
                    self._hook(self.job.on_step)
                due = is_due(self.settings.eval.every, run.step) or result.agreed.evaluate
                # At an epoch's last step it is done once, at the epoch's end.
                if due and not result.agreed.leaving and not run.at_epoch_end:
                    self._evaluate()
                elif due:
                    run.progress.evaluation_due = True
                run.settle(result.agreed)
        return None

    def _roll_back(self, refused: str) -> None:
        """Go on from an older checkpoint without the step that was refused. Collective."""
        began = self.run.progress.arithmetic
        self.run.roll_back(refused)
        if self._bitwise:
            # An older generation's checkpoint knows nothing of what has changed since.
            self.run.progress.arithmetic = self.run.progress.arithmetic or began
            self._check_machines()
        self._eval_clock.restart()
        self._evaluated_at = -1
        self._catch_up()

    def _end_epoch(self, epoch: int) -> None:
        due = is_due_at_epoch_end(self.settings.eval.every, epoch)
        if due or self.run.progress.evaluation_due:
            self._evaluate()
        self._schedules.advance("epoch")
        self._hook(self.job.on_epoch)

    def _catch_up(self) -> None:
        """Do the evaluation that a signal cut off, before anything else."""
        if self.run.progress.evaluation_due and not self.run.at_epoch_end:
            self._evaluate()

    def _hook(self, hook: Callable[[Any], None]) -> None:
        run = self.run
        if run.is_primary:
            with run.in_phase("hook"), kept_random_state(run.device):
                hook(run)

    # ---------------------------------------------------------------------------- evaluation
    def _evaluate(self) -> None:
        """Evaluate, judge, and ask for what follows from it. Collective."""
        run, options = self.run, self.settings.eval
        run.progress.evaluation_due = True
        if self._evaluation is None:
            run.progress.evaluation_due = False
            return
        shown = contextlib.nullcontext() if self._average is None else self._average.shown()
        with run.in_phase("evaluation"), run.records.spend("eval"), shown:
            if self._buffers is None:
                run.world.broadcast_tensors(list(self.model.buffers()))
            metrics = self._evaluation.run(self.model, leaving=run.told_to_leave)
        self._eval_clock.restart()
        self._evaluated_at = run.step
        if metrics is None:
            run.leave()
            return
        if options.monitor is not None and options.monitor not in metrics:
            raise StartError(
                f"eval.monitor: found {options.monitor}, expected one of {', '.join(metrics)}"
            )
        run.progress.judge(
            metrics, monitor=options.monitor, mode=options.mode, keep_best=options.keep_best
        )
        if options.keep_best and run.progress.best_unsaved:
            run.save_soon()
        if options.patience is not None and run.progress.bad_evaluations >= options.patience:
            run.progress.stopped = (
                f"eval.patience: {run.progress.bad_evaluations} evaluations without a better "
                f"{options.monitor}"
            )
        run.evaluated(metrics)
        self._hook(lambda run: self.job.on_eval(run, metrics))

    def _check_monitor(self, model: nn.Module) -> None:
        """Look before the first step whether the evaluation will have what `eval.monitor` names. Collective."""
        monitor, is_off = self.settings.eval.monitor, self.settings.eval.every.is_off
        if monitor is None or is_off:
            return
        if self._evaluation is None:
            raise StartError(
                f"eval.monitor: found {monitor}, expected none: {type(self.job).__name__} has no eval_dataset() to take it "
                "from; write one, or leave eval.monitor and eval.patience out"
            )
        names = self._evaluation.names(model)
        if names is not None and monitor not in names:
            raise StartError(f"eval.monitor: found {monitor}, expected one of {', '.join(names)}")

    def _prepare_evaluation(self) -> Evaluation | None:
        sets = self.job.eval_dataset()
        if sets is None or self.settings.eval.every.is_off:
            return None
        named = dict(sets) if isinstance(sets, Mapping) else {"": sets}
        train, world = self.settings.train, self.run.world
        batch = self.settings.eval.batch_size or -(-train.global_batch_size // self.plan.shards)
        context = autocast(train.precision, self.run.device)
        fixed = train.logical_shards is not None
        return Evaluation(self.job, named, world, batch_size=batch, context=context, fixed=fixed)

    # ---------------------------------------------------------------------------- the parts
    def _plan(self, dataset: Any) -> Plan:
        train = self.settings.train
        n = count_samples(dataset)
        return Plan(
            n=n,
            global_batch_size=train.global_batch_size,
            seed=train.seed,
            shards=train.logical_shards or self.run.world.world_size,
            micro_batch_size=train.micro_batch_size,
            drop_last=train.drop_last,
            order=train.order,
            draws=draws_of(n, self.job.sampling(dataset), dataset),
        )

    def _reducer(self, phases: list[Phase]) -> Reducer:
        """What sums the gradients; says so where some ranks have no part in a step."""
        train, run = self.settings.train, self.run
        shards, ranks = self.plan.shards, run.world.world_size
        if ranks > shards:
            idle = (
                f"rank {shards} owns"
                if ranks == shards + 1
                else f"ranks {shards} to {ranks - 1} own"
            )
            run.tell(
                [
                    f"train.logical_shards: {shards} shards for {ranks} ranks: {idle} none, but holds "
                    "the state and evaluates"
                ]
            )
        compiled: nn.Module | None = None
        if train.compile and self._bitwise:
            compiled = compile_each_shape(self.model)
        elif train.compile:
            compiled = cast("nn.Module", torch.compile(self.model))
        if self._bitwise:
            return TreeReducer(
                self.model if compiled is None else compiled,
                run.world,
                parameters=[phase.parameters for phase in phases],
                shards=shards,
            )
        return PlainReducer(
            self.model,
            run.world,
            compiled=compiled,
            find_unused=train.find_unused_parameters,
            phases=[phase.parameters for phase in phases],
            flags=REQUEST_SLOTS
            + run.paces.slots
            + STEP_SLOTS
            + (self._buffers.slots if self._buffers else 0),
            merges_buffers=self._buffers is not None,
        )

    def _check_machines(self) -> None:
        """Say loudly, and keep, from which step on equal bits are not promised. Collective."""
        run = self.run
        told = run.world.gather(describe_machine(run.device))
        before = run.progress.bits_until
        changed = [*check_machine(run.progress, told), *run.accepted]
        if not changed:
            return
        end_promise(run.progress)
        for what in changed:
            run.warn(f"bits: {what}")
        run.warn(
            f"bits: equal bits are promised up to step {run.progress.bits_until} and not beyond; "
            "the run goes on"
        )
        run.records.event("bits", changed=changed, bits_until=run.progress.bits_until)
        if run.is_primary and before is None:
            run.records.summarize("running", run.progress)

    def _identify(self, dataset: Any, model: nn.Module, optimizer: Optimizers) -> None:
        train, run = self.settings.train, self.run
        own = self.job.fingerprint(dataset)
        parts = {
            "dataset": fingerprint_dataset(dataset, self.plan.n, own),
            "model": model_fingerprint(model),
            **self.plan.sampling,
        }
        compare_ranks(run.world.gather(parts))
        run.identify(
            {
                "job": type(self.job).__name__,
                "train.seed": train.seed,
                "train.order": self.plan.order,
                "train.global_batch_size": train.global_batch_size,
                "train.drop_last": train.drop_last,
                **parts,
                **self._bits(optimizer),
            }
        )

    def _bits(self, optimizer: Optimizers) -> dict[str, Any]:
        """In bitwise mode what the bits depend on: other settings make another run."""
        if not self._bitwise:
            return {}
        kernels = {name: pin_optimizer(one) for name, one in by_phase(optimizer).items()}
        return identity(self.settings.train, threads=self._threads, kernels=kernels)

    def _total_steps(self) -> int:
        train = self.settings.train
        total = self.plan.steps * train.epochs
        return total if train.max_steps is None else min(total, train.max_steps)


def _threads(local_world_size: int) -> int:
    """Threads of one worker: what the environment says, else the node's cores shared fairly."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    if given.isdigit() and int(given) > 0:
        return int(given)
    return max(1, len(os.sched_getaffinity(0)) // max(1, local_world_size))
