"""Kills of random agents with their workers, as when nodes die; the suite does a tenth, a soak all of them."""

import random
import signal

from tests.support import processes, records
from tests.support.cases import assert_each_sample_once, tracer
from tests.support.cluster import Agent, Cluster

NODES = 3
N = 20


def recover_from_agent_kills(cluster: Cluster, kills: int, seed: int) -> None:
    """SIGKILL random agents with their workers and replace each; a death and a return cost one generation each."""
    moments = random.Random(seed)
    agents = [_start(cluster) for _ in range(NODES)]
    newest = _until_world(cluster, NODES, after=0)
    for _ in range(kills):
        cluster.until_step(1, generation=newest)
        victim = agents.pop(moments.randrange(NODES))
        processes.send([victim.pid, *victim.workers().values()], signal.SIGKILL)
        assert _until_world(cluster, NODES - 1, after=newest) == newest + 1
        cluster.until_step(1, generation=newest + 1)
        agents.append(_start(cluster))
        before, newest = newest, _until_world(cluster, NODES, after=newest + 1)
        assert newest == before + 2
    epochs = max(line["epoch"] for line in records.audit(cluster.url)) + 1
    for agent in agents:
        agent.process.terminate()
    for agent in agents:
        agent.wait(60)
    end = cluster.start(*_arguments(epochs), nproc=1)
    assert end.wait(60) == 0, end.tail()
    generations = len(records.claims(cluster.url))
    # Those before the first whole world, two for each kill, and the last start.
    assert generations <= NODES + 2 * kills + 1
    assert_each_sample_once(cluster.url, N, epochs)


def _arguments(epochs: int) -> tuple[str, ...]:
    return (
        tracer(), f"args.n={N}", "train.global_batch_size=4", f"train.epochs={epochs}",
        "checkpoint.every=2 steps", "checkpoint.tier.memory=1 step", "train.step_delay=0.05",
    )  # fmt: skip


def _start(cluster: Cluster) -> Agent:
    rdzv = ("--rdzv_backend=fsspec", f"--rdzv_endpoint={cluster.folder / 'rdzv'}")
    return cluster.start(
        *_arguments(100_000), nproc=1, nnodes=f"1:{NODES}", max_restarts=100, launcher=rdzv
    )


def _last(cluster: Cluster) -> int:
    return max(records.started(cluster.url), default=0)


def _until_world(cluster: Cluster, size: int, *, after: int) -> int:
    """Wait until a world of some size has begun in a later generation; its number."""

    def there() -> int | None:
        claims = records.claims(cluster.url)
        last = _last(cluster)
        return last if last > after and claims[last]["world_size"] == size else None

    return cluster.until(there, f"a world of {size} after generation {after}")
