"""Fixtures of the tests under a real Slurm."""

from tests.e2e.conftest import cluster
from tests.support.slurm import slurm

__all__ = ["cluster", "slurm"]
