"""The warm process that a launcher starts before the first workers: from the config alone, while it imports torch itself.

So the first workers are forks already, and a node that joins announces itself when it has nothing more to import: nobody
waits for it. Guarantees: what can't be known before torchrun has started its first worker makes no difference to a worker
(the warm process refuses what differs, and that start is an ordinary one). Does not import torch.
"""

import contextlib
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from checkpoints.layout import AgentId
from elastic.launching import RUNNER
from elastic.options import Settings
from elastic.relay import SOCKET, is_off
from elastic.warming import Plan, is_of_a_start, spawn

__all__ = ["Prewarm", "plan_of"]

_LONGEST_S: Final = 300.0
"""Workers that import for so long would do it by themselves as well."""
_POLL_S: Final = 0.005
_ALWAYS: Final = ("elastic.worker", "elastic.entry", "checkpoints.backend_local")
"""What a worker imports by its first step, whatever the job is."""
_BY_SCHEME: Final = {
    "s3": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "az": "adlfs",
    "abfs": "adlfs",
    "abfss": "adlfs",
}
_NCCL: Final = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


class Prewarm:
    """A warm process that was started, or not."""

    def __init__(self, plan: Plan | None) -> None:
        """Start it where there is a plan."""
        self._folder = Path() if plan is None else Path(plan.folder)
        self._pid = 0 if plan is None else spawn(plan, ["-u"])

    def wait(self) -> None:
        """Wait until workers can be forked from it, or it has given up. Main thread."""
        deadline = time.monotonic() + _LONGEST_S
        socket = self._folder / SOCKET
        while self._pid and not socket.exists() and time.monotonic() < deadline:
            self._reap()
            time.sleep(_POLL_S)

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            if os.waitpid(self._pid, os.WNOHANG)[0]:
                self._pid = 0


def is_wanted(
    settings: Settings, environ: Mapping[str, str], *, restarts: str, nnodes: str
) -> bool:
    """Tell whether there is use for one: workers may be started again, and nobody has switched it off."""
    least, _, most = nnodes.partition(":")
    again = restarts != "0" or most not in ("", least)
    own_python = bool(environ.get("PYTHON_EXEC"))  # which may import something else
    return settings.train.warm_start == "auto" and not is_off(environ) and again and not own_python


def plan_of(
    settings: Settings,
    *,
    agent: AgentId,
    folder: Path,
    script: str,
    arguments: Sequence[str],
    environ: Mapping[str, str],
) -> Plan:
    """Say what a worker of torchrun will look like, and what it will import."""
    job, _, _ = settings.job.rpartition(":")
    path, files = _worker_path(), []
    if job.endswith(".py") or "/" in job:
        file = Path(job).expanduser().resolve()
        module, files = file.stem, [str(file)]
        folders = [str(file.parent), str(Path.cwd())]
    else:
        module, folders = job, [str(Path.cwd())]
    path += [folder for folder in dict.fromkeys(folders) if folder not in path]  # as jobs.loading
    scheme = urlsplit(settings.checkpoint.url).scheme
    store = ["checkpoints.backend_fsspec", *([_BY_SCHEME[scheme]] if scheme in _BY_SCHEME else [])]
    return Plan(
        agent=agent,
        folder=str(folder),
        argv=[script, *arguments],
        cwd=os.getcwd(),  # noqa: PTH109 - a text
        environ={
            **{name: text for name, text in environ.items() if not is_of_a_start(name)},
            _NCCL: environ.get(_NCCL, "1"),
        },
        path=path,
        modules=[
            _ALWAYS[0],
            module,
            *_ALWAYS[1:],
            *(store if "://" in settings.checkpoint.url else []),
        ],
        files=files,
        script=RUNNER,
        module=None,
    )


def _worker_path() -> list[str]:
    """The path of a worker, as elastic/run.py makes it: not what `python -m` put before this process's."""
    root = str(Path(RUNNER).parent.parent)
    path = list(sys.path if sys.flags.safe_path else sys.path[1:])
    found = [os.path.realpath(entry or ".") for entry in path]
    return path if root in found else [root, *path]
