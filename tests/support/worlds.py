"""Worlds of the meeting worker under real torchruns: started, killed at random moments, and watched by their log."""

import json
import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support import processes
from tests.support.cluster import Agent, Cluster, torchrun_command
from tests.support.distribution import ROOT
from tests.support.ports import free_port

WORKER = ROOT / "tests" / "support" / "meeting_worker.py"


class Worlds:
    """Agents over the meeting worker, and what its log tells."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster = cluster
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self._events: list[dict[str, Any]] = []
        self._read_bytes = 0

    def start(self, *options: str, run: Path = WORKER, keys: tuple[str, ...] = ()) -> Agent:
        """Start a torchrun over the worker."""
        return self.cluster.spawn(
            [*torchrun_command(), *options, str(run), str(self.folder), *keys]
        )

    def events(self, kind: str) -> list[dict[str, Any]]:
        """The events of a kind, in order."""
        path = self.folder / "log"
        if path.exists():
            with path.open("rb") as file:
                file.seek(self._read_bytes)
                whole = file.read().rpartition(b"\n")[0]
            if whole:
                self._read_bytes += len(whole) + 1
                self._events += [json.loads(line) for line in whole.splitlines()]
        return [event for event in self._events if event["event"] == kind]

    def up(self, restart: int, size: int) -> dict[int, int]:
        """Wait for all workers of a restart; their pids by rank."""

        def there() -> dict[int, int] | None:
            pids = {
                event["rank"]: event["pid"]
                for event in self.events("up")
                if event["restart"] == restart
            }
            return pids if len(pids) == size else None

        return self.cluster.until(there, f"{size} workers of restart {restart}")

    def world(self, size: int, *, after: float = 0.0, timeout_s: float = 60) -> str:
        """Wait for a world that formed after a time on all its ranks, and made steps; its session."""

        def formed() -> str | None:
            ranks: dict[str, set[int]] = {}
            for event in self.events("world"):
                if event["size"] == size and event["time"] > after:
                    ranks.setdefault(event["session"], set()).add(event["rank"])
            stepped = {event["session"] for event in self.events("step")}
            whole = [
                session
                for session, found in ranks.items()
                if len(found) == size and session in stepped
            ]
            return whole[-1] if whole else None

        return self.cluster.until(formed, f"a world of {size}", timeout_s=timeout_s)

    def finish(self) -> list[int]:
        """Tell rank 0 to stop, and wait for the agents."""
        (self.folder / "stop").touch()
        return self.cluster.finish(60)


@contextmanager
def worlds(tmp_path: Path, *, installed: bool = False) -> Iterator[Worlds]:
    """A cluster for one test."""
    with Cluster(tmp_path, installed=installed) as cluster:
        yield Worlds(cluster, tmp_path / "log")


def kill_often(found: Worlds, size: int, kills: int, *keys: str) -> None:
    """SIGKILL a random worker at a random moment, start and meeting included; each costs exactly one restart."""
    seed = random.SystemRandom().randrange(10**6)
    chance = random.Random(seed)
    agent = found.start(
        f"--nproc_per_node={size}", "--rdzv_backend=c10d", f"--rdzv_endpoint=localhost:{free_port()}",
        f"--max_restarts={kills + 5}", keys=keys,
    )  # fmt: skip
    for kill in range(kills):
        pids = found.up(kill, size)
        if chance.random() < 0.5:
            time.sleep(chance.uniform(0, 1.5))
        else:
            found.world(size, after=max(event["time"] for event in found.events("up")))
            time.sleep(chance.uniform(0, 0.2))
        assert agent.code is None, agent.tail()
        processes.send([pids[chance.randrange(size)]], signal.SIGKILL)
    found.up(kills, size)
    found.world(size, after=max(event["time"] for event in found.events("up")))
    assert found.finish() == [0], agent.tail()
    restarts = max(event["restart"] for event in found.events("up"))
    assert restarts == kills, f"seed {seed}: {[event['text'] for event in found.events('error')]}"
