"""A tracer that no two runs train alike: what a drill has to notice."""

import random

from torch import nn

from jobs.job import Loss, Mean
from tests.support.tracer import Batch, Tracer


class Haphazard(Tracer):
    """Each loss is weighed by a number that nobody can draw again."""

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        values, _ = batch
        each = 0.5 * model(values) ** 2 * random.SystemRandom().uniform(0.5, 1.5)
        return Mean(each.sum(), len(values))
