"""Workers that hang: seen, told with all stacks, ended, and the run goes on. Public case C51d and its relatives."""

import re

import pytest

from tests.support import records
from tests.support.cases import assert_each_sample_once
from tests.support.cluster import Cluster
from tests.support.distribution import ROOT

JOB = f"{ROOT / 'tests' / 'support' / 'hanging.py'}"
SHORT = ("train.epochs=1", "train.global_batch_size=4", "checkpoint.every=1 step", "hang_after=2 s")


@pytest.mark.parametrize(
    ("where", "how"), [("loss", "gil"), ("loss", "stop"), ("load", "sleep"), ("evaluate", "loop")]
)
def test_c51d_a_rank_that_hangs_is_named_and_the_run_goes_on(
    cluster: Cluster, where: str, how: str
) -> None:
    given = (f"args.where={where}", f"args.how={how}", f"args.marker={cluster.folder}/once")
    agent = cluster.start(f"{JOB}:Hanging", *SHORT, *given, max_restarts=1)
    summary = cluster.complete()
    print(agent.output())
