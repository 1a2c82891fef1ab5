"""Many agents of the rendezvous as real processes, without torchrun: started, killed, stopped, and watched by their log."""

import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from elastic.ballot import Ballot
from elastic.election import Record
from tests.support.cluster import Agent, Cluster
from tests.support.distribution import ROOT

WORKER = ROOT / "tests" / "support" / "member_worker.py"


class Members:
    """Agents of one endpoint."""

    def __init__(
        self, cluster: Cluster, *, endpoint: str | None = None, env: Mapping[str, str] | None = None
    ) -> None:
        self.cluster = cluster
        self.endpoint = endpoint or str(cluster.folder / "rdzv")
        self.log = cluster.folder / "members.log"
        self._env = env
        self.agents: list[Agent] = []

    def start(self, count: int, *conf: str, nodes: str = "1:3") -> list[Agent]:
        """Start agents."""
        words = [sys.executable, str(WORKER), self.endpoint, "id", str(self.log), nodes, *conf]
        started = [self.cluster.spawn(words, env=self._env) for _ in range(count)]
        self.agents += started
        return started

    def events(self, kind: str) -> list[dict[str, Any]]:
        """The events of a kind."""
        if not self.log.exists():
            return []
        whole = self.log.read_bytes().rpartition(b"\n")[0]
        return [
            event for line in whole.splitlines() if (event := json.loads(line))["event"] == kind
        ]

    def world(
        self, size: int, *, after: float = 0.0, timeout_s: float = 60
    ) -> list[dict[str, Any]]:
        """Wait for a world of a size that formed after a time; the events of its agents by rank."""

        def formed() -> list[dict[str, Any]] | None:
            worlds: dict[tuple[int, int], list[dict[str, Any]]] = {}
            for event in self.events("world"):
                if event["size"] == size and event["time"] > after:
                    worlds.setdefault(tuple(event["world"]), []).append(event)
            whole = [found for world, found in sorted(worlds.items()) if len(found) == size]
            return sorted(whole[-1], key=lambda event: int(event["rank"])) if whole else None

        return self.cluster.until(formed, f"a world of {size}", timeout_s=timeout_s)

    def record(self) -> Record:
        """What lies on the store."""
        found = Ballot(self.endpoint, "id").peek()
        assert found is not None
        return found

    def leader(self) -> Agent:
        """The agent that leads."""
        leader = self.record().leader
        assert leader is not None
        return next(agent for agent in self.agents if f"pid {agent.pid})" in leader.name)

    def follower(self) -> Agent:
        """One that does not."""
        leader = self.leader()
        return next(agent for agent in self.agents if agent is not leader and agent.code is None)

    def kill(self, agent: Agent) -> float:
        """SIGKILL an agent; return when."""
        now = time.monotonic()
        os.kill(agent.pid, signal.SIGKILL)
        agent.process.wait(10)
        self.agents.remove(agent)
        return now

    def finish(self) -> list[int]:
        """Have the agents end the launch; their exit codes."""
        stop = Path(f"{self.log}.stop")
        stop.touch()
        codes = [agent.wait(30) for agent in self.agents]
        stop.unlink()
        return codes


@contextmanager
def members(folder: Path, **more: Any) -> Iterator[Members]:
    """Agents for one test."""
    with Cluster(folder) as cluster:
        yield Members(cluster, **more)
