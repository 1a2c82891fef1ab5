"""What a warm process imports, whether it may be forked afterwards, and what a forked worker still needs.

Guarantees: what a module read of its rank or world while it was imported, what runs beside it (threads, children,
connections, a device), makes the process unfit: forked workers would take it for their own. Changes of the
environment and of random states that imports made are there in each worker, as if it had imported by itself.
"""

import contextlib
import importlib
import importlib.util
import os
import random
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final

from checkpoints.processes import is_alive
from elastic.sources import Stamps, files_of, stamps_of
from elastic.warming import Plan, is_of_a_start

__all__ = ["Imported", "preload"]

_WATCH_S: Final = 0.2
_LEAN: Final = ("torch", "numpy", "elastic", "checkpoints")
"""What is imported where all that the job needs cannot be."""
_DEVICES: Final = ("/dev/nvidia-uvm", "/dev/kfd", "/dev/dri/")
"""Open once a process has begun to use an accelerator, which does not survive a fork."""
_NVML: Final = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""Lets torch.cuda.is_available() look without touching a device."""


@dataclass(kw_only=True)
class Imported:
    """A process that has imported."""

    stamps: Stamps
    unfit: str
    """Why no worker may be forked from it; empty where one may."""
    set_in_environ: dict[str, str]
    taken_from_environ: list[str]
    seeded: bool
    """Whether an import has set or used Python's random numbers."""
    numpy_seeded: bool

    def set_up_worker(self, plan: Plan) -> None:
        """Bring a forked worker to where it would be had it imported by itself."""
        os.environ.update(self.set_in_environ)
        for name in self.taken_from_environ:
            os.environ.pop(name, None)
        if self.seeded:
            random.setstate(self._random_state)
        numpy: Any = sys.modules.get("numpy.random")
        if numpy is not None and not self.numpy_seeded:
            numpy.seed()  # Python's own numbers are seeded anew by each fork, numpy's are not
        # What loader workers that are spawned import again.
        main = ModuleType("__main__")
        main.__file__ = plan.script
        if plan.module is not None:
            main.__spec__ = importlib.util.find_spec(plan.module)
        sys.modules["__main__"] = main

    def __post_init__(self) -> None:
        """Keep the random state: each fork seeds it anew."""
        self._random_state = random.getstate()


def preload(plan: Plan, *, lean: bool) -> Imported:
    """Import what the plan names. Once, early, in the main thread."""
    # Noted before: a file that changes meanwhile is then another one than was noted.
    stamps = stamps_of([*plan.files, plan.script])
    sys.path[:] = plan.path
    os.environ.setdefault(
        "TORCH_CPP_LOG_LEVEL", "ERROR"
    )  # as in elastic.entry, and read at the import
    nvml = os.environ.setdefault(_NVML, "1")
    before = dict(os.environ)
    random.seed()
    with _watched_agent(plan), _watched_reads() as reads:
        _import("numpy.random")
        numpy_state = _numpy_state()
        _import("torch")
        tasks = len(os.listdir("/proc/self/task"))  # noqa: PTH208 - a number
        random_state = random.getstate()
        for name in plan.modules:
            if not lean or name.partition(".")[0] in _LEAN:
                _import(name)
    if plan.environ.get(_NVML) is None and os.environ.get(_NVML) == nvml:
        del os.environ[_NVML], before[_NVML]
    return Imported(
        stamps={**stamps_of(files_of(sys.modules)), **stamps},
        unfit=(f"a module reads {reads[0]} while it is imported" if reads else "") or _unfit(tasks),
        set_in_environ={n: text for n, text in os.environ.items() if before.get(n) != text}
        | {"TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR")},
        taken_from_environ=[name for name in before if name not in os.environ],
        seeded=random.getstate() != random_state,
        numpy_seeded=_numpy_state() != numpy_state,
    )


def _import(name: str) -> None:
    if name in sys.modules:
        return
    # Whatever it raises, it raises in the worker too, and is told there.
    with contextlib.suppress(BaseException):
        importlib.import_module(name)


def _numpy_state() -> str:
    numpy: Any = sys.modules.get("numpy.random")
    return (
        ""
        if numpy is None
        else repr(
            [part.tolist() if hasattr(part, "tolist") else part for part in numpy.get_state()]
        )
    )


def _unfit(tasks: int) -> str:
    """Say what runs in this process that a fork would tear; empty where nothing does."""
    if threading.active_count() > 1:
        names = ", ".join(thread.name for thread in threading.enumerate()[1:])
        return f"a module starts threads while it is imported ({names})"
    now = len(os.listdir("/proc/self/task"))  # noqa: PTH208 - a number
    if now > tasks:
        return f"a module computes in {now} threads while it is imported"
    with contextlib.suppress(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)
        return "a module starts processes while it is imported"
    for number in os.listdir("/proc/self/fd"):  # noqa: PTH208 - names alone
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{number}")  # noqa: PTH115 - a text
            if target.startswith("socket:"):
                return "a module opens a connection while it is imported"
            if target.startswith(_DEVICES):
                return f"a module uses {target} while it is imported"
    return ""


@contextlib.contextmanager
def _watched_agent(plan: Plan) -> Iterator[None]:
    """End at once when the agent does, in the middle of an import too."""

    def look(*_: object) -> None:
        if not is_alive(plan.agent.pid, plan.agent.start):
            os._exit(0)

    look()
    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, _WATCH_S, _WATCH_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)


class _Watched(os._Environ[str]):  # noqa: SLF001  # there is no other way to see a read
    """The environment, with a note of each look at what differs from start to start."""

    reads: list[str]

    def __getitem__(self, key: str) -> str:
        if is_of_a_start(key):
            self.reads.append(key)
        return super().__getitem__(key)


@contextlib.contextmanager
def _watched_reads() -> Iterator[list[str]]:
    """Collect the variables of rank and world that imports look at."""
    environ: Any = os.environ
    kind = type(environ)
    environ.__class__, environ.reads = _Watched, []
    try:
        yield environ.reads
    finally:
        environ.__class__ = kind
