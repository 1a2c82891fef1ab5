"""Reads, for each step, the micro-batches that this rank owns.

Promises:
* What a step holds follows from the plan and the position asked for; how far loader workers have read ahead counts for nothing.
* Random draws of a dataset are addressed (`elastic.seeding`): equal for any number of workers, ranks and restarts.
* The main process's random state stays as it was, unless the caller seeds anew for each step anyhow and says so.
* Leaving an epoch early leaves no worker behind that is stuck. Loader workers ignore SIGINT and SIGTERM, which the trainer answers, and
  die with their trainer: a living copy would hold its sockets open, and its peers would not see that it is gone.
"""

import atexit
import contextlib
import ctypes
import multiprocessing
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, default_collate
from torch.utils.data._utils.pin_memory import pin_memory

from elastic.errors import StartError
from elastic.options import LoaderOptions
from elastic.sampler import Plan
from elastic.seeding import Addressed, Addresses, kept_random_state

__all__ = ["Loader", "MicroBatch", "StepBatch", "count_samples"]

_PR_SET_PDEATHSIG = 1
_OURS = frozenset(
    {"batch_size", "shuffle", "sampler", "batch_sampler", "drop_last", "generator", "in_order"}
)


@dataclass(kw_only=True, slots=True)
class MicroBatch:
    """The samples of one forward."""

    shard: int
    """The shard whose part this is of."""
    number: int
    """Which micro-batch of the part, from 0."""
    indices: list[int]
    """Which samples; none where the part is empty."""
    data: Any
    """What collate made of them."""
    samples: int
    """How many count; 0 where the part is empty and data holds one sample that weighs nothing."""


@dataclass(kw_only=True, slots=True)
class StepBatch:
    """What one rank does in one step."""

    step_in_epoch: int
    size: int
    """Samples of the step over all ranks."""
    micro_batches: list[MicroBatch]


def count_samples(dataset: Dataset[Any]) -> int:
    """The length of a dataset that can be asked for any sample.

    Raises:
        StartError: it only iterates, does not tell its length, or is empty.
    """
    name = type(dataset).__name__
    # torch's own __getitem__ is there to say that it is missing. What some iterable-style datasets have beside it will do.
    if getattr(type(dataset), "__getitem__", Dataset.__getitem__) is Dataset.__getitem__:
        expected = "a map-style dataset, with __len__ and __getitem__(index)"
        way_out = "index what it reads, as docs/data.md shows under Streams"
        raise StartError(
            f"dataset: found {name}, which only iterates, expected {expected}; {way_out}"
        )
    try:
        n = len(dataset)  # type: ignore[arg-type] # (torch's Dataset declares no __len__)
    except (TypeError, NotImplementedError) as error:
        if hasattr(type(dataset), "__len__") and not isinstance(error, NotImplementedError):
            told = f"{type(error).__name__}: {error}"
            raise StartError(
                f"dataset: found {name} whose __len__ fails ({told}), expected a whole number; are the job's args"
                " of the right type?"
            ) from error
        raise StartError(f"dataset: found {name} without a length, expected __len__") from error
    if n < 1:
        raise StartError(f"dataset: found {name} with no samples, expected at least 1")
    return n


class Loader:
    """The samples of one rank, step by step, from any position of any epoch."""

    def __init__(  # noqa: PLR0913 (all but three have defaults)
        self,
        dataset: Dataset[Any],
        plan: Plan,
        *,
        rank: int,
        shards: range | None = None,
        pads: bool = True,
        options: LoaderOptions | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        seed: int | None = None,
        keep_random_state: bool = True,
        passed: Mapping[str, Any] | None = None,
    ) -> None:
        """Read `dataset` by `plan` as a rank.

        Args:
            dataset: map-style.
            plan: its n is the dataset's length.
            rank: who reads.
            shards: the shards that it owns; the one of its number where None.
            pads: whether a step in which the rank has no samples holds one that weighs nothing, for a reduction that waits for every
                rank's backward.
            options: workers and the like.
            collate: makes a batch of a list of samples; torch's default_collate where None.
            seed: of the dataset's draws; the plan's where None.
            keep_random_state: whether the main process's random state is put back after each batch; it costs some 100 us without
                loader workers, and only who seeds before each forward can do without.
            passed: further arguments of DataLoader, which win over options.

        Raises:
            StartError: the dataset cannot be asked for any sample, or passed holds what the plan decides.
        """
        found = count_samples(dataset)
        if found != plan.n:
            raise StartError(f"dataset: found {found} samples, expected the plan's {plan.n}")
        self.plan = plan
        self.rank = rank
        self._shards = range(rank, rank + 1) if shards is None else shards
        self._pads = pads
        more = dict(passed or {})
        clash = sorted(_OURS & more.keys())
        if clash:
            raise StartError(
                f"loader: found {clash[0]}, expected none: the global batch and the position decide it"
            )
        collate = more.pop("collate_fn", None) or collate
        self._collate = collate or default_collate
        seed = plan.seed if seed is None else seed
        self._dataset = Addressed(
            dataset, seed, seeds_collate=collate is not None, n=plan.n if plan.repeats else None
        )
        self._arguments = _loader_arguments(options or LoaderOptions(), more)
        self._batches = _Batches()
        self._workers: DataLoader[Any] | None = None
        self._keep = kept_random_state if keep_random_state else nullcontext
        self._turn = 0

    def epoch(self, epoch: int, position: int = 0) -> Iterator[StepBatch]:
        """Yield this rank's share of every step of an epoch from a position on.

        The position is that of the plan's order, as counted by who trains. An epoch left early, or begun anew, ends the one before.

        Raises:
            StartError: no step begins at the position.
        """
        return self._steps(self._lay_out(epoch, position))

    def parts(self, epoch: int, position: int = 0) -> Iterator[StepBatch]:
        """As epoch, with this rank's part of a step as one micro-batch whatever the plan's micro-batch size is."""
        return self._steps(self._lay_out(epoch, position, whole=True))

    def close(self) -> None:
        """End the loader workers; the next epoch would start new ones."""
        self._batches.layout = None
        self._workers = None

    def _lay_out(self, epoch: int, position: int, *, whole: bool = False) -> "_Layout":
        first = self.plan.step_at(position)
        return _Layout(self.plan, self._shards, epoch, first, whole, self._pads)

    def _steps(self, layout: "_Layout") -> Iterator[StepBatch]:
        plan = self.plan
        self._turn = turn = self._turn + 1
        read = self._reader(layout)
        for step in range(layout.first, plan.steps):
            if turn != self._turn:
                found = "a second epoch begun while this one goes on"
                raise StartError(
                    f"loader: found {found}, expected one at a time; make a loader for each"
                )
            micro_batches = [
                MicroBatch(
                    shard=shard,
                    number=number,
                    indices=plan.samples_at(addresses),
                    data=read(addresses or padding),
                    samples=len(addresses),
                )
                for shard, number, addresses, padding in layout.step(step)
            ]
            yield StepBatch(step_in_epoch=step, size=plan.size(step), micro_batches=micro_batches)

    def _reader(self, layout: "_Layout") -> Callable[[list[int]], Any]:
        """A function that gives the micro-batches of a layout, in its order."""
        if self._arguments["num_workers"] > 0:
            batches = self._start_reading(layout)
            return lambda _: next(batches)
        # DataLoader without workers would do the same, and takes 25 us more for a batch.
        dataset, collate, keep = self._dataset, self._collate, self._keep
        pins, epoch = self._arguments["pin_memory"], layout.epoch

        def read(addresses: list[int]) -> Any:
            with keep():
                data = collate(dataset.__getitems__(Addresses(epoch, addresses)))
            return pin_memory(data) if pins else data

        return read

    def _start_reading(self, layout: "_Layout") -> Iterator[Any]:
        """Let the loader workers read a layout; persistent ones take it up where they are."""
        self._batches.layout = layout
        if self._workers is None:
            self._workers = DataLoader(
                self._dataset,
                batch_sampler=self._batches,  # type: ignore[arg-type] # (it hands them on as they are)
                collate_fn=self._collate,
                # Its own, since each epoch draws a base seed, and that may not move the main one.
                generator=torch.Generator(),
                **self._arguments,
            )
        before = set(multiprocessing.active_children())
        batches = iter(self._workers)
        _watch(set(multiprocessing.active_children()) - before)
        return batches


@dataclass(frozen=True, slots=True)
class _Layout:
    """What is to be read of one epoch."""

    plan: Plan
    shards: range
    epoch: int
    first: int
    whole: bool
    pads: bool

    def step(self, step: int) -> list[tuple[int, int, list[int], list[int]]]:
        """Shard, number and addresses of each micro-batch of a step, and what to read where there are none."""
        plan, epoch = self.plan, self.epoch
        found = []
        for shard in self.shards:
            if self.whole:
                addresses = plan.addresses(epoch, step, shard)
                parts = [addresses] if addresses else []
            else:
                parts = plan.micro_batches(epoch, step, shard)
            found += [(shard, number, part, part) for number, part in enumerate(parts)]
        if found or not self.pads:
            return found
        # Every rank does at least one forward and backward, or the others would wait for it in the reduction.
        shard = self.shards.start if self.shards else plan.shards
        return [(shard, 0, [], [plan.first(epoch, step)])]


class _Batches:
    """The batch sampler of the loader workers: the addresses of a layout, in order."""

    layout: _Layout | None = None

    def __iter__(self) -> Iterator[Addresses]:
        layout = self.layout
        if layout is not None:
            for step in range(layout.first, layout.plan.steps):
                for _, _, addresses, padding in layout.step(step):
                    yield Addresses(layout.epoch, addresses or padding)


class _WorkerStart:
    """What a loader worker does first: signals, and dying with its trainer."""

    def __init__(self, then: Callable[[int], None] | None) -> None:
        self.then = then
        self.trainer = os.getpid()
        # The kernel watches the thread that forked; the main one alone lives as long as the process.
        self.watches = threading.current_thread() is threading.main_thread()

    def __call__(self, worker: int) -> None:
        # Ctrl-C goes to the whole group: the trainer ends its workers when it has saved.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # A launcher's SIGTERM goes to the whole group as well: the trainer saves first, and needs its batches for that.
        # A handler, since a process that the dataset starts would inherit SIG_IGN.
        signal.signal(signal.SIGTERM, _overhear)
        if self.watches and os.getppid() == self.trainer:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != self.trainer:
                os._exit(1)
        if self.then is not None:
            self.then(worker)


def _overhear(_number: int, _frame: FrameType | None) -> None:
    """Answer a signal by nothing."""


_watched: "weakref.WeakSet[BaseProcess]" = weakref.WeakSet()


def _watch(workers: set[BaseProcess]) -> None:
    """See that these end with this process: at its end Python sends SIGTERM, which they overhear, and waits for ever."""
    if not _watched:
        atexit.unregister(_kill_watched)
        atexit.register(_kill_watched)
    _watched.update(workers)


def _kill_watched() -> None:
    with contextlib.suppress(ValueError):  # not the main thread
        # torch's handler would raise here what this does on purpose.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for worker in list(_watched):
        with contextlib.suppress(ValueError, AssertionError):  # it was closed, or this is a fork
            worker.kill()


def _loader_arguments(options: LoaderOptions, passed: Mapping[str, Any]) -> dict[str, Any]:
    """DataLoader's arguments; those that need workers only where there are some."""
    arguments: dict[str, Any] = {
        "num_workers": options.workers,
        "pin_memory": options.pin_memory,
        "persistent_workers": options.persistent,
        "prefetch_factor": options.prefetch,
        "multiprocessing_context": options.start_method,
        **passed,
    }
    if arguments["pin_memory"] is None:
        arguments["pin_memory"] = torch.cuda.is_available()
    if arguments["num_workers"] > 0:
        arguments["worker_init_fn"] = _WorkerStart(arguments.get("worker_init_fn"))
    return arguments
