"""How long a world of three hosts stands still when a node dies, is cut off or joins; in seconds, as root.

    python tests/bench/rendezvous_speed.py [--rounds 3] [--backend fsspec|c10d] [--by torchrun|launch]

Hosts are network namespaces with a torchrun agent and one worker each, on this machine's cores: most of each figure is
Python and torch being loaded by three workers at once. Printed: from the fault (for a join: from the last step of the
old world) to the first step of the new world, each round and the median.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.hosts.test_c10d import c10d  # noqa: E402
from tests.hosts.test_rendezvous import folder, leader_of  # noqa: E402
from tests.support import records  # noqa: E402
from tests.support.cases import tracer  # noqa: E402
from tests.support.cluster import Cluster  # noqa: E402
from tests.support.hosts import Hosts  # noqa: E402

_DELAY_S = 0.05


class Bench:
    """One run on three hosts, hurt over and over."""

    def __init__(self, hosts: Hosts, backend: str, *, by_launch: bool) -> None:
        self.hosts = hosts
        self.backend = backend
        self.by_launch = by_launch
        self.newest = 0
        self.figures: dict[str, list[float]] = {}

    def start(self, *numbers: int) -> None:
        """Start agents."""
        for number in numbers:
            rdzv = folder(self.hosts) if self.backend == "fsspec" else c10d(number)
            self.hosts.start(
                number, tracer(), "args.n=6000", "train.epochs=1000000", "train.global_batch_size=6", f"train.step_delay={_DELAY_S}",
                "checkpoint.every=20 steps", *([] if self.backend == "fsspec" else ["timeout=10s"]), rdzv=rdzv,
                by_launch=self.by_launch,
            )  # fmt: skip

    def measure(self, name: str, size: int, fault: Callable[[], None]) -> None:
        """Do something, and take the time to the first step of a world of a size."""
        began = time.monotonic()
        fault()
        self.newest = self.hosts.world(size, after=self.newest)
        self.add(name, time.monotonic() - began)

    def add(self, name: str, took_s: float) -> None:
        """Note a figure, and show it: a bench that is broken off has said something."""
        self.figures.setdefault(name, []).append(took_s)
        print(f"{name}: {took_s:.1f} s", flush=True)

    def pause(self, name: str, size: int, number: int) -> None:
        """Let a node join, and take the time in which no step was done."""
        before = self.newest
        self.start(number)
        self.newest = self.hosts.world(size, after=before)
        time.sleep(1)
        times: dict[int, list[float]] = {before: [], self.newest: []}
        for event in records.events(self.hosts.cluster.url, "step"):
            if event["generation"] in times:
                times[event["generation"]].append(float(event["time"]))
        if all(times.values()):
            # A step is written down before its delay is slept.
            gap = min(times[self.newest]) - max(times[before]) - _DELAY_S
            self.add(name, gap)

    def victim(self, *, leader: bool) -> int:
        """The host to hurt: who leads, or another; under c10d never the store's."""
        first = leader_of(self.hosts) if self.backend == "fsspec" else 1
        return first if leader else next(n for n in self.hosts.agents if n != first)


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--backend", choices=["fsspec", "c10d"], default="fsspec")
    parser.add_argument("--by", choices=["torchrun", "launch"], default="torchrun")
    given = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as temporary,
        Cluster(Path(temporary), installed=True) as cluster,
        Hosts(cluster) as hosts,
    ):
        bench = Bench(hosts, given.backend, by_launch=given.by == "launch")
        bench.measure("first start of three", 3, lambda: bench.start(1, 2, 3))
        for _ in range(given.rounds):
            for leader in (False, True) if given.backend == "fsspec" else (False,):
                whom = "leader" if leader else "not the leader"
                victim = bench.victim(leader=leader)
                bench.measure(f"killed: {whom}", 2, partial(hosts.kill_processes, victim))
                bench.pause("a node joins: the others stand still", 3, victim)
                victim = bench.victim(leader=leader)
                bench.measure(f"link cut: {whom}", 2, partial(hosts.cut, victim))
                bench.measure("link healed", 3, partial(hosts.heal, victim))
    for name, found in bench.figures.items():
        each = " ".join(f"{one:.1f}" for one in found)
        print(f"{name:40} median {statistics.median(found):5.1f} s   ({each})")


if __name__ == "__main__":
    main()
