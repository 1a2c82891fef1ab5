import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from elastic.agent import is_alive, process_start
from tests.support.soaking import soaked

ROOT = Path(__file__).parents[2]
WORKER = ROOT / "tests" / "support" / "ending_worker.py"
# torchrun itself, with each signal that reaches it counted in a file on the way to torch's own handler.
COUNTING = """
import os, sys
import torch.distributed.elastic.multiprocessing.api as api
from torch.distributed.run import main
inner = api._terminate_process_handler
def outer(signum, frame):
    with open(os.environ["SIGNALS"], "a") as file:
        file.write(f"{signum}\\n")
    inner(signum, frame)
api._terminate_process_handler = outer
main()
"""


def start_torchrun(act: str, world: int, folder: Path) -> subprocess.Popen[bytes]:
    """Start torchrun (its received signals counted in folder/signals) over the ending worker."""
    environ = {**os.environ, "SIGNALS": str(folder / "signals"), "TMPDIR": str(folder)}
    words = [f"--nproc_per_node={world}", "--max_restarts=3", str(WORKER), act, str(folder)]
    return subprocess.Popen(
        [sys.executable, "-c", COUNTING, *words], env=environ, stderr=subprocess.PIPE
    )


@pytest.mark.parametrize("world", [*soaked(2), 3])
@pytest.mark.parametrize("act", ["all", "one", "stagger", "thread"])
def test_worker_ends_its_agent_with_one_signal_and_without_a_restart(
    act: str, world: int, tmp_path: Path
) -> None:
    agent = start_torchrun(act, world, tmp_path)
    _, err = agent.communicate(timeout=60)
    assert agent.returncode == 1, err.decode()
    assert (tmp_path / "signals").read_text() == f"{int(signal.SIGTERM)}\n"
    assert len(list(tmp_path.glob("start.*"))) == world, err.decode()
    # Torch says so when it has waited 30 s for a worker.
    assert b"forcefully exiting via" not in err


def test_worker_does_not_outlive_its_agent(tmp_path: Path) -> None:
    agent = start_torchrun("stay", 2, tmp_path)
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob("start.*"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    pids = [int(path.name.split(".")[2]) for path in tmp_path.glob("start.*")]
    assert len(pids) == 2
    workers = [(pid, start) for pid in pids if (start := process_start(pid)) is not None]
    agent.kill()
    agent.communicate()
    deadline = time.monotonic() + 1
    while any(is_alive(*worker) for worker in workers) and time.monotonic() < deadline:
        time.sleep(0.005)
    assert not [worker for worker in workers if is_alive(*worker)]
