"""Copies tensors into host memory beside the training: one thread, one call, one core.

Promises: the interpreter is free while it copies, so that a training loop in Python does not stand still;
a copy begins after all that was queued on the tensors' devices before it. Who changes the tensors has to
wait for it first. On CUDA the memory is pinned where the driver lets it, and a stream of its own copies.
"""

from __future__ import annotations

import ctypes
import logging
import queue
import re
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from checkpoints.tensorfile import unsupported

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch
    from torch import Tensor

logger = logging.getLogger(__name__)

_OPENMP: Final = re.compile(r"(/\S*lib(?:gomp|iomp5|omp)\S*\.so\S*)")


class Copier:
    """One thread that copies and hashes; made once and used for every snapshot."""

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = (
            queue.SimpleQueue()
        )
        self._thread: threading.Thread | None = None

    def start(self, task: Callable[[], Any]) -> Future[Any]:
        """Do something in the thread, after what was given to it before."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="snapshot", daemon=True)
            self._thread.start()
        future: Future[Any] = Future()
        self._tasks.put((task, future))
        return future

    def close(self) -> None:
        """Finish what was given, and end the thread."""
        if self._thread is not None:
            self._tasks.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        _use_one_core()
        while (item := self._tasks.get()) is not None:
            task, future = item
            try:
                future.set_result(task())
            except BaseException as error:  # noqa: BLE001  # the top of the thread: whoever waits gets it
                future.set_exception(error)
            del item, task, future  # what was copied is not kept until the next one comes


def _use_one_core() -> None:
    """Let this thread's own calls run on one core: a team would wait for cores that are at work."""
    import torch

    torch.get_num_threads()  # torch sets up each thread at its first call, and would undo ours later
    library = _openmp()
    if library is not None:
        library.omp_set_num_threads(1)


def _openmp() -> ctypes.CDLL | None:
    """The OpenMP library that torch has loaded."""
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    for path in dict.fromkeys(_OPENMP.findall(maps)):
        try:
            library = ctypes.CDLL(path)
            library.omp_set_num_threads  # noqa: B018  # is this the one?
        except (OSError, AttributeError):
            continue
        return library
    return None


def keep(value: object, still: frozenset[int]) -> object:
    """A state whose containers and tensors nobody else changes; tensors that are still stay the same.

    What is of a kind that nobody can save is passed on as it is, to be refused by whoever reads it.
    """
    import torch

    tensor = torch.Tensor
    scalars = (str, int, float, bool, type(None))

    def is_still(item: Tensor) -> bool:
        try:
            return item.data_ptr() in still
        except (RuntimeError, ValueError):  # one that has no memory
            return False

    # Called for each leaf at each snapshot, while the loop stands still.
    def kept(item: object) -> object:
        if isinstance(item, tensor):
            stays = is_still(item) or unsupported(item) is not None
            return item if stays else item.detach().clone()
        if type(item) in scalars:
            return item
        if type(item) is dict:
            return {key: kept(inner) for key, inner in item.items()}
        if type(item) in (list, tuple) and isinstance(item, list | tuple):
            return type(item)(map(kept, item))
        if isinstance(item, dict):  # a Counter, an OrderedDict, a defaultdict
            copied = item.copy()
            for key, inner in copied.items():
                copied[key] = kept(inner)
            return copied
        return item

    return kept(value)


def marks_of(value: object) -> dict[object, object]:
    """Of each CUDA device that a state has tensors on: how far the device's work is queued by now."""
    import torch

    if not torch.cuda.is_available():
        return {}
    devices: set[torch.device] = set()

    def look(item: object) -> None:
        if isinstance(item, torch.Tensor):
            if item.is_cuda:
                devices.add(item.device)
        elif isinstance(item, dict):
            for inner in item.values():
                look(inner)
        elif isinstance(item, list | tuple):
            for inner in item:
                look(inner)

    look(value)
    return {device: torch.cuda.current_stream(device).record_event() for device in devices}


class DeviceCopy:
    """One set of tensors on its way to host memory; `run` in any thread, once."""

    def __init__(
        self,
        places: Sequence[Tensor],
        sources: Sequence[Tensor],
        marks: Mapping[object, object],
        *,
        pinned: bool,
    ) -> None:
        """Note where each tensor goes.

        Args:
            places: In host memory.
            sources: On any device.
            marks: Of CUDA devices, after which of their work the tensors are what is meant.
            pinned: Whether the places are in pinned memory.
        """
        self._places, self._sources = list(places), list(sources)
        self._marks: dict[object, Any] = dict(marks)
        self._pinned = pinned

    def run(self) -> None:
        """Copy; all of it is in host memory when this returns."""
        import torch

        with torch.no_grad():
            for device in {source.device for source in self._sources}:
                pairs = [
                    (place, source)
                    for place, source in zip(self._places, self._sources, strict=True)
                    if source.device == device
                ]
                self._run_on(device, [p for p, _ in pairs], [s for _, s in pairs])

    def _run_on(self, device: torch.device, places: list[Tensor], sources: list[Tensor]) -> None:
        import torch

        if device.type != "cuda":
            # One call for all: the interpreter is free for other threads while it copies.
            torch._foreach_copy_(places, sources)
            return
        # A stream of its own: the copy waits for what the loop had queued, and the loop not for the copy.
        stream = torch.cuda.Stream(device)
        mark = self._marks.get(device) or torch.cuda.current_stream(device).record_event()
        stream.wait_event(mark)
        with torch.cuda.stream(stream):
            for place, source in zip(places, sources, strict=True):
                place.copy_(source, non_blocking=self._pinned)
        stream.synchronize()


def pin(buffer: Tensor) -> bool:
    """Tell the CUDA driver that this memory stays where it is; False where it does not take it."""
    import torch

    try:
        code = int(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.numel(), 0))
    except (RuntimeError, AttributeError) as error:
        logger.info("snapshots go through memory that is not pinned: %s", error)
        return False
    if code != 0:
        logger.info("snapshots go through memory that is not pinned: CUDA error %d", code)
    return code == 0


def unpin(buffer: Tensor) -> None:
    """Take it back, before the memory goes."""
    import torch

    torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr())
