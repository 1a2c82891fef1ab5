"""What is trained: the Job base class, the way to load one, and the jobs that ship with the project.

Names are re-exported lazily, so that `import jobs` costs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jobs.errors import JobError
    from jobs.job import Job, JobRun, Mean, read_loss
    from jobs.loading import load_job
    from jobs.sampling import Mixture, Weighted

__all__ = ["Job", "JobError", "JobRun", "Mean", "Mixture", "Weighted", "load_job", "read_loss"]

_ROOMS = {
    "Job": "jobs.job",
    "JobError": "jobs.errors",
    "JobRun": "jobs.job",
    "Mean": "jobs.job",
    "Mixture": "jobs.sampling",
    "Weighted": "jobs.sampling",
    "load_job": "jobs.loading",
    "read_loss": "jobs.job",
}


def __getattr__(name: str) -> object:
    """Import the room that holds a public name when the name is first asked for."""
    room = _ROOMS.get(name)
    if room is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(importlib.import_module(room), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names too, loaded or not."""
    return sorted({*globals(), *__all__})
