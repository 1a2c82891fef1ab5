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

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

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


class DeviceCopy:
    """One set of tensors on its way to host memory; `run` in any thread, once."""

    def __init__(
        self, places: Sequence[Tensor], sources: Sequence[Tensor], *, pinned: bool
    ) -> None:
        """Note where each tensor goes; on CUDA the place in the order of the device's work is now."""
        self._places, self._sources = list(places), list(sources)
        self._pinned = pinned
        self._marks: dict[torch.device, Any] = {}
        for device in {source.device for source in self._sources}:
            if device.type == "cuda":
                import torch

                # What the loop has queued up to here has to be done first, and nothing after it.
                self._marks[device] = torch.cuda.current_stream(device).record_event()

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

        mark = self._marks.get(device)
        if mark is None:
            # One call for all: the interpreter is free for other threads while it copies.
            torch._foreach_copy_(places, sources)
            return
        stream = torch.cuda.Stream(device)
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
