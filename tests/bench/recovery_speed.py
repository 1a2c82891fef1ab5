"""Time from the SIGKILL of a worker to the first new optimizer step, and its parts, beside the tutorial's script.

    python tests/bench/recovery_speed.py [--kills 50] [--blocks 5] [--arms warm,cold,plain] [--every 3]

Each arm is a torchrun with two workers on this node, without changes to torchrun; the arms take turns, in blocks of kills. `warm` is the
project as it is (its warm process is there some seconds after the start: `--settle`), `cold` the same with ELASTIC_WARM=0, `plain` DDP with torch.save at each step (tests/support/plain_ddp.py), `switch` the same with
TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, which its restarts need; `lightning` and `accelerate` (pip install them) with that, too. A recovery
is over when rank 0 has done a step that began after the kill; one that takes 40 s is counted as none, and that arm starts anew.
Parts: `torchrun` until new workers' processes are there, `import` until the job is made, `meet` until the ranks have met
and the process group stands, `restore` until the state is back, `step` until the first step is done.
"""

import argparse
import random
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.support import processes  # noqa: E402
from tests.support.cluster import Agent, Cluster  # noqa: E402

SCRIPTS = {
    "plain": ["plain_ddp.py"],
    "switch": ["plain_ddp.py"],
    "lightning": ["peer_ddp.py", "lightning"],
    "accelerate": ["peer_ddp.py", "accelerate"],
}
PARTS = ("torchrun", "import", "meet", "restore", "step")
BOUND_S = 40.0
START_S = 300.0
DELAY_S = 0.03


@dataclass(kw_only=True)
class Arm:
    """One torchrun that is killed again and again."""

    name: str
    root: Path
    totals: list[float] = field(default_factory=list)
    parts: list[list[float]] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)
    failed: int = 0

    def start(self) -> None:
        """Start it and wait until it trains."""
        self.folder = Path(tempfile.mkdtemp(dir=self.root))
        self.cluster = Cluster(self.folder)
        self.moments = self.folder / "moments"
        restarts = 1_000_000
        if self.name in SCRIPTS:
            script, *words = SCRIPTS[self.name]
            run = [f"{ROOT}/tests/support/{script}", *words, str(self.folder), str(DELAY_S)]
            # Without the switch two restarts of three are lost: torchrun's, and so everybody's.
            env = {} if self.name == "plain" else {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
            self.agent = self.cluster.start(None, nproc=2, max_restarts=restarts, run=run, env=env)
        else:
            self.agent = self.cluster.start(
                f"{ROOT}/tests/support/recovering.py:Recovering",
                f"args.folder={self.folder}",
                f"args.delay={DELAY_S}",
                "train.epochs=1000000",
                "audit.samples=false",
                "eval.every=off",
                "checkpoint.tier.memory=1 step",
                nproc=2,
                max_restarts=restarts,
                env={"ELASTIC_WARM": "0"} if self.name == "cold" else {},
            )
        if self._await_steps(0.0, within_s=START_S) is None:
            raise TimeoutError(f"{self.name}: no step within {START_S:g} s\n{self.agent.tail(20)}")

    def _read(self) -> list[tuple[str, float, int, int]]:
        if not self.moments.exists():
            return []
        lines = [line.split() for line in self.moments.read_text().splitlines()]
        return [(what, float(at), int(rank), int(step)) for what, at, rank, step in lines]

    def _await_steps(self, since: float, *, within_s: float = BOUND_S) -> float | None:
        """Wait for a step after a moment; returns when it was done."""
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline and self.agent.code is None:
            done = [at for what, at, _, _ in self._read() if what == "stepped" and at > since]
            if done:
                return done[0]
            time.sleep(0.002)
        return None

    def kill(self, rank: int) -> None:
        """Kill a worker and take the times."""
        old = self.agent.workers()
        last = max(step for what, _, _, step in self._read() if what == "stepped")
        killed = time.monotonic()
        processes.send([old[rank]], signal.SIGKILL)
        replaced = self._await_workers(old)
        # The survivor may end a step that it was in: what counts comes from a new process.
        stepped = None if replaced is None else self._await_steps(replaced)
        if replaced is None or stepped is None:
            self.failed += 1
            last_line = (self.agent.output().strip().splitlines() or [""])[-1]
            print(f"{self.name}: no recovery; the log's end: {last_line[:160]}", flush=True)
            self.cluster.close()
            self.start()
            return
        after = [moment for moment in self._read() if moment[1] > replaced]
        steps = [step for what, _, _, step in after if what == "stepped"]
        ends = [replaced]
        for name in ("imported", "met", "restored"):
            ends.append(max((at for what, at, _, _ in after if what == name), default=ends[-1]))
        ends.append(stepped)
        begins = [killed, *ends]
        self.totals.append(stepped - killed)
        self.parts.append([end - begin for begin, end in zip(begins, ends, strict=False)])
        self.lost.append(max(0, last - steps[0] + 1))

    def _await_workers(self, old: dict[int, int]) -> float | None:
        """Wait for new processes under the agent; returns when they were there."""
        deadline = time.monotonic() + BOUND_S
        while time.monotonic() < deadline and self.agent.code is None:
            found = _children(self.agent)
            if len(found) == 2 and not set(found) & set(old.values()):
                return time.monotonic()
            time.sleep(0.001)
        return None

    def report(self) -> None:
        """Print the figures."""
        totals = sorted(self.totals)
        if not totals:
            print(f"{self.name:6} no recovery in {self.failed}")
            return
        tenth = totals[min(len(totals) - 1, int(0.9 * len(totals)))]
        parts = "  ".join(
            f"{name} {statistics.median(p[i] for p in self.parts):.3f}"
            for i, name in enumerate(PARTS)
        )
        print(
            f"{self.name:6} median {statistics.median(totals):.3f} s  p90 {tenth:.3f}  worst {totals[-1]:.3f}  "
            f"of {len(totals)}, failed {self.failed}, most steps lost {max(self.lost)} | {parts}",
            flush=True,
        )


def _children(agent: Agent) -> list[int]:
    """The agent's children, cheaper than by all of /proc."""
    path = Path(f"/proc/{agent.pid}/task/{agent.pid}/children")
    try:
        pids = [int(word) for word in path.read_text().split()]
    except OSError:
        return []
    return [pid for pid in pids if processes.is_alive(pid)]


def main() -> None:
    """Run the arms in turns and print a line for each, of all its kills so far, after each block."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--arms", default="warm,cold,plain")
    parser.add_argument("--every", type=float, default=3.0, help="seconds of work before a kill")
    parser.add_argument(
        "--settle", type=float, default=10.0, help="seconds of work before the first"
    )
    parser.add_argument("--seed", type=int, default=0)
    found = parser.parse_args()
    moments = random.Random(found.seed)
    with tempfile.TemporaryDirectory() as name:
        arms = [Arm(name=arm, root=Path(name)) for arm in found.arms.split(",")]
        for block in range(found.blocks):
            for arm in arms:
                arm.start()
                time.sleep(found.settle)
                try:
                    for _ in range(
                        found.kills * block // found.blocks,
                        found.kills * (block + 1) // found.blocks,
                    ):
                        time.sleep(found.every + moments.random())
                        arm.kill(moments.randrange(2))
                finally:
                    arm.cluster.close()
                arm.report()
    by_name = {arm.name: statistics.median(arm.totals) for arm in arms if arm.totals}
    if {"warm", "plain"} <= set(by_name):
        print(f"warm / plain {by_name['warm'] / by_name['plain']:.3f}")


if __name__ == "__main__":
    main()
