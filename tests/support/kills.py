"""Kills of random workers at random moments, counted; the suite does a tenth, a soak all of them."""

import random
import time

from tests.support import processes, records
from tests.support.cases import assert_each_sample_once, tracer
from tests.support.cluster import Agent, Cluster

STEPS_PER_EPOCH = 5
N = 20


def recover_from_kills(cluster: Cluster, world: int, kills: int, seed: int) -> records.Record:
    """SIGKILL random workers at random moments until all kills are done; each must cost one restart.

    The moments fall into everything that a worker does: its start, the meeting, restore, steps,
    evaluations, saves. A run of Graded has an evaluation and a save in each short epoch.
    """
    moments = random.Random(seed)
    agent = cluster.start(
        tracer("Graded"),
        f"args.n={N}",
        "train.global_batch_size=4",
        "train.epochs=100000",
        "train.step_delay=0.02",
        "checkpoint.every=2 steps",
        nproc=world,
        max_restarts=kills,
    )
    for kill in range(kills):
        _until_all_there(cluster, agent, world, kill)
        time.sleep(moments.uniform(0, 2.5))  # reaches from the import to the tenth epoch
        old = list(agent.workers().values())
        cluster.kill(moments.randrange(world))
        _until_gone(cluster, old, kill)
    _until_all_there(cluster, agent, world, kills)
    newest = max(records.started(cluster.url), default=0)
    # It goes on: a further generation's step, then an orderly end with fewer epochs.
    step = records.newest_step(cluster.url)
    cluster.until_committed(step + 2 * STEPS_PER_EPOCH)
    assert agent.restart_count() == kills, agent.tail()
    agent.process.terminate()
    agent.wait(60)
    epochs = max(line["epoch"] for line in records.audit(cluster.url)) + 1
    end = cluster.start(
        tracer("Graded"),
        f"args.n={N}",
        "train.global_batch_size=4",
        f"train.epochs={epochs}",
        "checkpoint.every=2 steps",
        nproc=world,
    )
    assert end.wait(60) == 0, end.tail()
    assert newest <= kills + 2
    assert_each_sample_once(cluster.url, N, epochs)
    return records.summary(cluster.url)


def _until_all_there(cluster: Cluster, agent: Agent, world: int, kills: int) -> None:
    """Wait for all workers of the start that follows so many kills."""

    def there() -> bool:
        return len(agent.workers()) == world and agent.restart_count() >= kills

    cluster.until(there, f"{world} workers after {kills} kills")
    assert agent.restart_count() == kills, agent.tail()


def _until_gone(cluster: Cluster, workers: list[int], kill: int) -> None:
    """Wait until none of these workers lives."""

    def gone() -> bool:
        return not any(processes.is_alive(pid) for pid in workers)

    cluster.until(gone, f"the end of the workers of kill {kill + 1}")
