"""Jobs that tell what kind of process they run in, and jobs whose import does what no warm process should keep.

Each start of each rank appends a line to `folder`/facts: what a worker that torchrun started itself and a
forked one must have in common, and by what they are told apart.
"""

import json
import os
import random
import resource
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from jobs.job import Loss
from tests.support import processes
from tests.support.tracer import Batch, Counter, rank_here

os.environ["SET_AT_IMPORT"] = "by the job"


def living(name: str, parent: int, *, but: int) -> list[int]:
    """Other processes of a name under the same parent."""
    return [
        pid
        for pid in processes.children(parent)
        if pid != but
        and processes.is_alive(pid)
        and Path(f"/proc/{pid}/comm").read_text() == f"{name}\n"
    ]


def bits_of(mask: str) -> list[int]:
    """The signals of a mask, without the C library's own two, which posix_spawn lets be ignored."""
    bits = int(mask, 16)
    return [
        number for number in range(1, 65) if bits >> (number - 1) & 1 and number not in (32, 33)
    ]


class Told(Counter):
    """A Counter that tells its facts when its model is made.

    Files in `folder` steer it: with `hurry` no step is delayed any more; at `exit-N` rank N ends with 3, or the code in it.
    """

    def __init__(self, folder: str, n: int = 400, delay: float = 0.0) -> None:
        super().__init__(n, delay)
        self.folder = folder
        self.drawn = [
            random.random(),
            float(np.random.default_rng().random()),
            float(np.random.random()),
        ]

    def model(self) -> nn.Module:
        with (Path(self.folder) / "facts").open("a", encoding="utf-8") as file:
            file.write(json.dumps(self.facts()) + "\n")
        return super().model()

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        folder = Path(self.folder)
        if (folder / "hurry").exists():
            self.delay = 0.0
        if (order := folder / f"exit-{rank_here()}").exists():
            code = int(order.read_text() or 3)
            order.unlink()
            os._exit(code)
        return super().loss(model, batch)

    def facts(self) -> dict[str, Any]:
        """What is told."""
        pid = os.getpid()
        status = dict(
            line.split(":\t", 1)
            for line in Path("/proc/self/status").read_text().splitlines()
            if ":\t" in line
        )
        main = sys.modules["__main__"]
        return {
            "rank": rank_here(),
            "pid": pid,
            "parent": os.getppid(),
            "restart": int(os.environ["TORCHELASTIC_RESTART_COUNT"]),
            "drawn": self.drawn,
            "siblings": living(f"elastic rank {rank_here()}", os.getppid(), but=pid),
            "same": {
                "argv": sys.argv,
                "cwd": str(Path.cwd()),
                "script": str(Path(str(main.__file__)).resolve()),
                "module": None if main.__spec__ is None else main.__spec__.name,
                "path": sys.path,
                "flags": str(sys.flags),
                "environ": {
                    name: text
                    for name, text in os.environ.items()
                    if name not in {"MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_ERROR_FILE"}
                },
                "streams": [os.readlink(f"/proc/self/fd/{number}") for number in range(3)],  # noqa: PTH115
                "blocked, ignored": [bits_of(status[name]) for name in ("SigBlk", "SigIgn")],
                "mask": status["Umask"],
                "handlers": {name.name: str(signal.getsignal(name)) for name in signal.valid_signals() if name in (signal.SIGCHLD, signal.SIGINT, signal.SIGALRM)},
                "cores": sorted(os.sched_getaffinity(0)),
                "limits": [resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")],
                "nice": os.nice(0),
                "leads": (os.getsid(0) == pid, os.getpgid(0) == pid),
                "seed": torch.initial_seed(),
                "threads": torch.get_num_threads(),
            },
        }  # fmt: skip
