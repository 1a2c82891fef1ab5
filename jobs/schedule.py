"""Learning-rate schedules in closed form: the rate of a step depends on that step alone.

Promises: no rate is computed from the one before it, so that a run that was resumed, rolled back or
prolonged has exactly the rates of one that was planned so from its start.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torch.optim.lr_scheduler import LambdaLR

if TYPE_CHECKING:
    from torch.optim import Optimizer


def warmup_cosine(
    optimizer: Optimizer, total_steps: int, *, warmup: float = 0.05, floor: float = 0.0
) -> LambdaLR:
    """Rise linearly over the first part of the steps, then fall along half a cosine.

    Args:
        optimizer: Its rates are the peak.
        total_steps: Steps of the whole run.
        warmup: The part of the steps in which the rate rises.
        floor: What is left of the peak at the end.
    """
    rising = max(1, round(total_steps * warmup))
    falling = max(1, total_steps - rising)

    def factor(step: int) -> float:
        if step < rising:
            return (step + 1) / (rising + 1)
        done = min(1.0, (step - rising) / falling)
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done))

    return LambdaLR(optimizer, factor)
