"""A tracer on a machine that Slurm takes away some seconds after the job was made, however long that took."""

import os
import time
from pathlib import Path
from typing import Any

from tests.support import tracer


class Tracer(tracer.Tracer):
    """As the plain one; tells its end in a file."""

    def __init__(self, told: str, left_s: int, **given: Any) -> None:
        import torch._dynamo  # noqa: F401 - what the first step would wait for

        super().__init__(**given)
        os.environ["SLURM_JOB_END_TIME"] = str(int(time.time()) + left_s)
        Path(told).write_text(os.environ["SLURM_JOB_END_TIME"])
