"""Runs that `python -m elastic launch` starts, in a test's cluster."""

import sys
from collections.abc import Mapping, Sequence

from tests.support.cases import tracer
from tests.support.cluster import Agent, Cluster

LAUNCH = [sys.executable, "-m", "elastic", "launch"]


def launch(
    cluster: Cluster,
    *overrides: str,
    job: str | None = None,
    options: Sequence[str] = (),
    nproc: int = 1,
    env: Mapping[str, str] | None = None,
) -> Agent:
    """Start a launcher over the tracer (or another job) at the cluster's URL."""
    arguments = cluster.run_arguments(job or tracer(), overrides)
    return cluster.spawn([*LAUNCH, f"--nproc_per_node={nproc}", *options, *arguments], env=env)


def two_nodes(
    cluster: Cluster, *overrides: str, env: Sequence[Mapping[str, str]] = ({}, {})
) -> list[Agent]:
    """Start two launchers, of a node each, that meet at a port; the first one holds it."""
    options = ["--nnodes=1:2", f"--rdzv_endpoint=localhost:{cluster.port}"]
    first = launch(cluster, *overrides, options=options, env=env[0])
    cluster.until_step(1)
    second = launch(cluster, *overrides, options=options, env=env[1])
    cluster.until(lambda: len(cluster.workers()) == 2, "two workers")
    cluster.until_started(2)
    cluster.until_step(1, generation=2)
    return [first, second]


def said(agent: Agent) -> list[str]:
    """What the launcher itself, or an error, said."""
    return [
        line for line in agent.output().splitlines() if line.startswith(("launch: ", "error: "))
    ]
