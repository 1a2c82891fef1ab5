"""A forked worker: from a copy of the warm process to what torchrun would have started.

Promises: arguments, environment, folder, streams, session, signals, cores, limits and random state are those of a
process that was started by itself; what cannot be set up so is told, and the stub starts the ordinary way instead.
"""

import contextlib
import os
import resource
import signal
import sys
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NoReturn

from elastic.preloading import Imported
from elastic.warming import LINK, Plan
from elastic.watching import STUB

__all__ = ["BROKEN", "Order", "become_worker"]

BROKEN: Final = b"!"
"""On the link: this worker could not be set up."""


@dataclass(kw_only=True)
class Order:
    """A worker to be, in the process that becomes it."""

    argv: list[str]
    cwd: str
    environ: dict[str, str]
    """What its `main` is given: what torchrun set, and what ties it to agent and warm process."""
    streams: list[int]
    stub_pid: int
    parent: int
    own: list[int] = field(default_factory=list)
    """Descriptors of the warm process, to be closed."""


def become_worker(order: Order, plan: Plan, imported: Imported) -> NoReturn:
    """Become the worker that torchrun would have started."""
    try:
        _set_up(order, plan, imported)
        from elastic.entry import main as run
        from elastic.faults import leave
    except BaseException:  # noqa: BLE001 - whatever it is, the stub can still start the ordinary way
        os.write(int(order.environ[LINK]), BROKEN)
        traceback.print_exc()
        os._exit(1)
    leave(run(order.argv[1:], order.environ))


def _set_up(order: Order, plan: Plan, imported: Imported) -> None:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number in order.own:
        os.close(number)
    _take_after(order.stub_pid)
    os.chdir(order.cwd)
    sys.argv[:] = order.argv
    os.environ.clear()
    own = ("ELASTIC_AGENT_PID", LINK, STUB)  # not for what the worker starts itself
    os.environ.update({name: text for name, text in order.environ.items() if name not in own})
    imported.set_up_worker(plan)
    os.setsid()
    for number, stream in enumerate(order.streams):
        os.dup2(stream, number)
        os.close(stream)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def _take_after(stub: int) -> None:
    """Take over what the launcher may have set for this one process: cores, limits, the mask of new files."""
    with contextlib.suppress(OSError, ValueError):
        os.sched_setaffinity(0, os.sched_getaffinity(stub))
        text = Path(f"/proc/{stub}/status").read_text(encoding="utf-8")
        os.umask(int(text.partition("\nUmask:")[2].split(maxsplit=1)[0], 8))
        for name in dir(resource):
            if name.startswith("RLIMIT_"):
                limit = getattr(resource, name)
                resource.setrlimit(limit, resource.prlimit(stub, limit))
