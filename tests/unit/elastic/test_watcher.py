"""The node's watcher beside real processes that stop, sleep, spin and hold Python's lock."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic.agent import process_start
from elastic.broken import note_broken
from elastic.fault import Fault
from elastic.monitor import previous_faults

ROOT = Path(__file__).parents[3]
WORKER = """
import ctypes, os, signal, sys, threading, time
from pathlib import Path
from elastic.bounds import Bounds
from elastic.monitor import open_slot
rank = int(sys.argv[2])
slot = open_slot(Path(sys.argv[1]), rank)
slot.begin(rank, 7)
slot.stand(stub=int(sys.argv[3]), world_is_here=True)
slot.bounds = Bounds({bound}, {bound}, timeout_s=60, alone=False)
slot.beat(41, "step")
print("on", flush=True)
def stuck_here():
    {do}
stuck_here()
"""
WORKS = "while True: slot.beat(41, 'step'); time.sleep(0.05)"
WAITS = "slot.wait(60); time.sleep(60)"
IN_DDP = """exec(compile("time.sleep(60)", "/x/torch/nn/parallel/distributed.py", "exec"))"""
HANGS = {
    "sleeps": "time.sleep(60)",
    "spins": "while True: pass",
    "holds Python's lock": "while True: ctypes.PyDLL(None).sleep(60)",
    "is stopped": "os.kill(os.getpid(), signal.SIGSTOP); time.sleep(60)",
    "is stopped, and would go on": f"os.kill(os.getpid(), signal.SIGSTOP)\n    {WORKS}",
    "is stopped while it waits": "slot.wait(60); os.kill(os.getpid(), signal.SIGSTOP); time.sleep(60)",
}


class Node:
    """Workers and the watcher of one agent, which is the first of the workers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, *command: str) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            [sys.executable, *command], cwd=ROOT, stdout=pipe, stderr=pipe, text=True
        )
        self.processes.append(process)
        return process

    def worker(
        self, rank: int, do: str, *, bound: float = 0.4, stub: int = 0
    ) -> subprocess.Popen[str]:
        code = WORKER.format(do=do, bound=bound)
        worker = self.start("-c", code, str(self.folder), str(rank), str(stub))
        assert worker.stdout is not None
        assert worker.stdout.readline() == "on\n"
        return worker

    def watch(self, agent: int, starter: int) -> subprocess.Popen[str]:
        code = "import sys; from elastic.watcher import main; main(sys.argv[1:])"
        given = (agent, process_start(agent), starter, process_start(starter))
        return self.start("-S", "-c", code, str(self.folder), *map(str, given))


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path)
    yield made
    for process in made.processes:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.communicate()


def fault_of(folder: Path, rank: int) -> Fault:
    (found,) = (fault for fault in previous_faults(folder) if fault.rank == rank)
    return found


@pytest.mark.parametrize("how", HANGS)
def test_a_worker_that_hangs_is_told_with_its_stack_and_ended(how: str, node: Node) -> None:
    waiting = node.worker(0, WAITS)
    hanging = node.worker(1, HANGS[how])
    watcher = node.watch(os.getpid(), waiting.pid)
    assert hanging.wait(20) == -signal.SIGKILL
    waiting.send_signal(signal.SIGTERM)  # as torchrun does it
    _, told = watcher.communicate(timeout=20)
    assert watcher.returncode == 0
    first, *_, last = told.splitlines()
    why = "it was stopped (SIGSTOP)" if "stopped" in how else "no sign of life"
    assert f"in phase 'step' of step 41: {why} for " in first
    assert first.startswith("hang: rank 1 on ")
    assert last == f"{first}; it is ended, the stacks of all ranks of this node are above"
    assert f"--- rank 0 (pid {waiting.pid}, step 41, step) waits for others:\n" in told
    assert told.count("in stuck_here\n") == 2
    faults = previous_faults(node.folder)
    assert [(f.rank, f.kind, f.is_secondary) for f in faults] == [
        (1, "hung", False),
        (0, "ended", True),
    ]
    assert str(faults[0]).startswith("worker hung (rank 1, step 41, step, ")
    assert list(node.folder.iterdir()) == []


def test_a_worker_that_goes_on_when_it_is_asked_for_its_stack_is_left_alone(node: Node) -> None:
    # A signal ends a sleep of C's library, whoever holds Python's lock.
    waiting = node.worker(
        0, "while True: slot.wait(60); time.sleep(0.05); slot.resume()", bound=1.0
    )
    goes_on = (
        "ctypes.PyDLL(None).sleep(60)\n    while True: slot.beat(42, 'step'); time.sleep(0.05)"
    )
    woken = node.worker(1, goes_on, bound=1.0)
    watcher = node.watch(os.getpid(), waiting.pid)
    time.sleep(5)
    assert [process.poll() for process in (waiting, woken, watcher)] == [None] * 3
    for worker in (waiting, woken):
        worker.kill()
    _, told = watcher.communicate(timeout=20)
    line = (
        "rank 1 goes on in step 42: it was asked for its stack, as nothing was heard of it for long"
    )
    assert set(told.splitlines()) == {line}
    assert {fault.kind for fault in previous_faults(node.folder)} == {"killed"}


def test_where_everybody_waits_all_are_ended(node: Node) -> None:
    workers = [node.worker(rank, WAITS) for rank in range(2)]
    watcher = node.watch(os.getpid(), workers[0].pid)
    assert [worker.wait(20) for worker in workers] == [-signal.SIGKILL] * 2
    _, told = watcher.communicate(timeout=20)
    assert told.count("it waits in a collective to which nobody comes") == 4
    assert {fault.kind for fault in previous_faults(node.folder)} == {"hung"}


def test_who_is_behind_is_named_where_everybody_waits(node: Node) -> None:
    ahead = node.worker(0, f"slot.beat(42, 'step'); {WAITS}")
    behind = node.worker(1, WAITS)
    watcher = node.watch(os.getpid(), ahead.pid)
    assert behind.wait(20) == -signal.SIGKILL
    # It ignores its peer's end, as one in a native wait does: then it is ended too, and is no cause.
    assert ahead.wait(20) == -signal.SIGKILL
    _, told = watcher.communicate(timeout=20)
    assert told.splitlines()[0].startswith("hang: rank 1 on ")
    assert [(f.rank, f.kind) for f in previous_faults(node.folder)] == [(1, "hung"), (0, "ended")]


def test_workers_that_give_signs_of_life_are_left_alone_and_the_watcher_ends_with_them(
    node: Node,
) -> None:
    workers = [node.worker(0, WORKS), node.worker(1, "time.sleep(60)", bound=0)]
    watcher = node.watch(os.getpid(), workers[0].pid)
    time.sleep(1.5)
    assert [process.poll() for process in (*workers, watcher)] == [None] * 3
    for worker in workers:
        worker.kill()
    assert watcher.wait(5) == 0


def test_watcher_ends_at_once_with_its_agent(node: Node) -> None:
    agent = node.start("-c", "import time; time.sleep(60)")
    worker = node.worker(0, WORKS, bound=60)
    watcher = node.watch(agent.pid, worker.pid)
    time.sleep(1)
    agent.kill()
    agent.wait(5)
    assert watcher.wait(5) == 0
    assert worker.poll() is None


def test_a_stub_that_was_stopped_with_its_worker_goes_on(node: Node) -> None:
    stub = node.start("-c", "import time; print('on', flush=True); time.sleep(60)")
    assert stub.stdout is not None
    stub.stdout.readline()
    stub.send_signal(signal.SIGSTOP)
    worker = node.worker(0, HANGS["is stopped"], stub=stub.pid)
    node.watch(os.getpid(), worker.pid)
    assert worker.wait(20) == -signal.SIGKILL
    deadline = time.monotonic() + 5
    while Path(f"/proc/{stub.pid}/stat").read_text().split()[2] == "T":
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_forks_of_the_one_that_hangs_show_their_stacks_and_end_and_what_it_started_does_not(
    node: Node,
) -> None:
    fork = "import subprocess; other = subprocess.Popen(['sleep', '60'], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL); "
    fork += (
        "child = os.fork(); print(child, other.pid, flush=True) if child else None; time.sleep(60)"
    )
    worker = node.worker(0, fork)
    assert worker.stdout is not None
    child, other = map(int, worker.stdout.readline().split())
    watcher = node.watch(os.getpid(), worker.pid)
    assert worker.wait(20) == -signal.SIGKILL
    _, told = watcher.communicate(timeout=20)
    assert told.count("in stuck_here\n") == 2
    assert process_start(child) is None
    assert process_start(other) is not None
    os.kill(other, signal.SIGKILL)


@pytest.mark.parametrize("do", [WAITS, IN_DDP], ids=["says so", "in a collective of DDP's"])
def test_who_waits_for_a_node_that_is_gone_is_ended_once_the_agent_says_so(
    do: str, node: Node
) -> None:
    worker = node.worker(0, do, bound=50)
    note_broken(str(node.folder))  # of a world before: this one's watcher is not concerned
    watcher = node.watch(os.getpid(), worker.pid)
    with pytest.raises(subprocess.TimeoutExpired):
        worker.wait(4)
    note_broken(str(node.folder))
    assert worker.wait(20) == -signal.SIGKILL
    watcher.communicate(timeout=20)
    (fault,) = previous_faults(node.folder)
    assert (fault.kind, fault.is_secondary) == ("ended", True)


def test_who_is_at_work_is_not_ended_for_a_node_that_is_gone(node: Node) -> None:
    worker = node.worker(0, WORKS, bound=50)
    node.watch(os.getpid(), worker.pid)
    time.sleep(0.5)
    note_broken(str(node.folder))
    with pytest.raises(subprocess.TimeoutExpired):
        worker.wait(5)
