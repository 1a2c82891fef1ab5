"""The tracer's jobs with kills at exact places: SIGKILL inside the loss of a step, on one rank, once.

`args.kill` is a text such as `4@1 9@0`: in step 4 on rank 1, in step 9 on rank 0. `args.marks` is a
folder that remembers which of them have happened. Each rank counts its own steps, and the count comes
back with a checkpoint, so that the place does not depend on how fast anything runs. When a worker dies
in the loss of step k + 1, step k and its checkpoint are done and step k + 1 is nowhere.
"""

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from jobs.job import Job, Loss
from tests.support import tracer

COPY_S = 0.5


class Killed(Job):
    """Stands in front of a job; expects one loss for each step, so no micro-batches."""

    def __init__(self, kill: str = "", marks: str = "", **args: Any) -> None:
        super().__init__(**args)
        places = (place.partition("@") for place in kill.split())
        self.kill = [(int(step), int(rank)) for step, _, rank in places]
        self.marks = Path(marks)
        self.steps = 0

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        self.steps += 1
        place = (self.steps, tracer.rank_here())
        if place in self.kill and self._is_first(place):
            # The step before is copied beside this one: what is tested is not who is faster.
            time.sleep(COPY_S)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(model, batch)

    def _is_first(self, place: tuple[int, int]) -> bool:
        self.marks.mkdir(parents=True, exist_ok=True)
        try:
            (self.marks / "{}@{}".format(*place)).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        others = dict(state)
        self.steps = others.pop("steps")
        super().load_state_dict(others)


class Tracer(Killed, tracer.Tracer):
    """C01 to C06, C09, C11."""


class AdamScalar(Killed, tracer.AdamScalar):
    """C38."""


class Cosine(Killed, tracer.Cosine):
    """C37."""


class MultiStep(Killed, tracer.MultiStep):
    """C37, by epochs."""


class Scored(Killed, tracer.Scored):
    """C43."""
