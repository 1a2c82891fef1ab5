"""Start of an epoch and resume at a position: ours at 10^9 samples against torch's DistributedSampler, in one run.

    python tests/bench/sampler_speed.py

Each case runs in a process of its own, in turns. What counts begins after all imports: seconds to the first
index (for ours with everything that makes it: plan, order, the first slice), and what the peak of resident
memory grew by. DistributedSampler is run at 10^6 and 10^7 and extrapolated linearly, since at 10^9 it needs some
45 GB; `--largest 100000000` takes one more size. On a busy machine a case may wait for its core: so the
processor's time stands beside the clock's, and the limits are held against the processor's median.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
N = 10**9
LIMIT_MS = 5.0
LIMIT_MB = 10.0

MEASURE = """
import json, resource, sys, time
import numpy, torch
from torch.utils.data import DistributedSampler
from elastic.sampler import ElasticSampler, Plan
from elastic.draws import draws_of
from jobs.sampling import Mixture

def peak():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) / 1000

def theirs(n):
    sampler = DistributedSampler(range(n), num_replicas=2, rank=0)
    sampler.set_epoch(1)
    return next(iter(sampler))

def plan(n, where):
    plan = Plan(n=n, global_batch_size=64, shards=2)
    return plan.indices(1, int(plan.steps * where), 1)[0]

def sampler(n, where):
    sampler = ElasticSampler(range(n), 2, 1, global_batch_size=64)
    sampler.set_epoch(1)
    sampler.advance(int(n * where) // 64 * 64)
    return next(iter(sampler))

def mixture(n, where):
    draws = draws_of(n, Mixture([3, 1], [n // 10 * 9, n // 10]))
    plan = Plan(n=n, global_batch_size=64, shards=2, draws=draws)
    return plan.indices(1, int(plan.steps * where), 1)[0]

resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
before, began, worked = peak(), time.perf_counter(), time.process_time()
index = {call}
took, worked = time.perf_counter() - began, time.process_time() - worked
print(json.dumps(dict(ms=1000 * took, cpu_ms=1000 * worked, mb=peak() - before, index=index)))
"""


def measure(call: str) -> dict[str, float]:
    """Run one case in a new process."""
    process = subprocess.run(
        [sys.executable, "-c", MEASURE.replace("{call}", call)],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    found: dict[str, float] = json.loads(process.stdout)
    return found


def main() -> None:
    """Run all cases in turns and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--largest", type=int, default=10**7)
    given = parser.parse_args()
    ours = {
        "plan, start of an epoch": f"plan({N}, 0)",
        "plan, resume at 0.9": f"plan({N}, 0.9)",
        "ElasticSampler, start of an epoch": f"sampler({N}, 0)",
        "ElasticSampler, resume at 0.9": f"sampler({N}, 0.9)",
        "mixture of two parts, resume at 0.9": f"mixture({N}, 0.9)",
    }
    sizes = [10**k for k in range(6, 10) if 10**k <= given.largest]
    theirs = {f"DistributedSampler, {n:.0e}": f"theirs({n})" for n in sizes}
    found: dict[str, list[dict[str, float]]] = {}
    for _ in range(given.rounds):
        for name, call in {**ours, **theirs}.items():
            found.setdefault(name, []).append(measure(call))
    cases = {name: _told(runs) for name, runs in found.items()}
    last = cases[f"DistributedSampler, {sizes[-1]:.0e}"]
    factor = N / sizes[-1]
    result: dict[str, Any] = {
        "n": N,
        "rounds": given.rounds,
        "cases": cases,
        "DistributedSampler, 1e+09, extrapolated": {
            "cpu_s": round(last["cpu_ms"] * factor / 1000, 1),
            "gb": round(last["mb"] * factor / 1000, 1),
        },
        "within_limits": all(
            cases[name]["cpu_ms"] < LIMIT_MS and cases[name]["mb"] < LIMIT_MB for name in ours
        ),
    }
    print(json.dumps(result, indent=1))


def _told(runs: list[dict[str, float]]) -> dict[str, float]:
    return {
        "ms": round(statistics.median(run["ms"] for run in runs), 2),
        "ms_min": round(min(run["ms"] for run in runs), 2),
        "ms_max": round(max(run["ms"] for run in runs), 2),
        "cpu_ms": round(statistics.median(run["cpu_ms"] for run in runs), 2),
        "mb": round(statistics.median(run["mb"] for run in runs), 1),
    }


if __name__ == "__main__":
    main()
