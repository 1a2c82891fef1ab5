import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from elastic import monitor
from elastic.beats import STATUS
from elastic.monitor import Fault, previous_faults

ROOT = Path(__file__).parents[3]
START = """
import os, signal, sys, time
from pathlib import Path
from elastic.monitor import open_slot
slot = open_slot(Path(sys.argv[1]), 1)
slot.begin(3, 7)
slot.beat(41, "forward")
print("on", flush=True)
"""


def run_worker(folder: Path, end: str, *, number: int = 0) -> subprocess.Popen[bytes]:
    """Start a worker that opens slot 1 as rank 3 and then does `end`; send it a signal once it is on."""
    worker = subprocess.Popen(
        [sys.executable, "-c", START + end, str(folder)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert worker.stdout is not None
    assert worker.stdout.readline() == b"on\n"
    if number:
        worker.send_signal(number)
        worker.communicate()
    return worker


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1,
        signal.SIGUSR2, signal.SIGALRM, signal.SIGXCPU,
    ],
)  # fmt: skip
def test_worker_ended_by_a_signal_is_told_with_the_signal_and_where_it_was(
    tmp_path: Path, number: int
) -> None:
    worker = run_worker(tmp_path, "time.sleep(60)", number=number)
    assert worker.returncode == -number
    (fault,) = previous_faults(tmp_path)
    name = signal.Signals(number).name
    assert (fault.kind, fault.signal, fault.rank, fault.local_rank) == ("killed", name, 3, 1)
    assert (fault.step, fault.phase) == (41, "forward")
    assert str(fault) == f"worker killed ({name}, rank 3)"
    assert not fault.is_secondary


@pytest.mark.parametrize(
    ("status", "told"),
    [
        (7 << 8, "worker ended with exit code 7 and without an exception (rank 3)"),
        (0, "worker ended with exit code 0 and without an exception (rank 3)"),
        (int(signal.SIGSYS), "worker killed (SIGSYS, rank 3)"),
        (40, "worker killed (signal 40, rank 3)"),
        (int(signal.SIGKILL), "worker killed (SIGKILL, rank 3)"),
    ],
)
def test_what_the_parent_knows_is_told_of_a_worker_that_left_no_word(
    tmp_path: Path, status: int, told: str
) -> None:
    run_worker(tmp_path, "os._exit(7)").communicate()
    slot = next(path for path in tmp_path.glob("slot-*") if not path.suffix)
    slot.with_suffix(STATUS).write_text(str(status))
    assert [str(fault) for fault in previous_faults(tmp_path)] == [told]
    assert list(tmp_path.iterdir()) == []


def test_an_ignored_signal_is_no_end(tmp_path: Path) -> None:
    ignoring = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
    worker = subprocess.Popen(
        [sys.executable, "-c", f"{ignoring}{START}\nsys.stdin.read()", str(tmp_path)],
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert worker.stdout is not None
    assert worker.stdout.readline() == b"on\n"
    worker.send_signal(signal.SIGHUP)
    worker.kill()
    worker.communicate()
    assert [str(fault) for fault in previous_faults(tmp_path)] == [
        "worker killed (SIGKILL, rank 3)"
    ]


def test_segfault_in_native_code_is_told_with_the_line(tmp_path: Path) -> None:
    worker = run_worker(tmp_path, "import ctypes; ctypes.string_at(0)")
    worker.communicate()
    (fault,) = previous_faults(tmp_path)
    assert fault.signal == "SIGSEGV"
    assert fault.where is not None


def test_worker_that_the_agent_told_to_end_is_no_cause(tmp_path: Path) -> None:
    worker = run_worker(tmp_path, "time.sleep(60)", number=signal.SIGTERM)
    assert worker.returncode == -signal.SIGTERM
    (fault,) = previous_faults(tmp_path)
    assert (fault.kind, fault.signal, fault.is_secondary) == ("ended", "SIGTERM", True)


def test_an_interrupted_worker_is_told_as_that(tmp_path: Path) -> None:
    end = (
        "try:\n    print('set', flush=True)\n    time.sleep(60)\n"
        "except KeyboardInterrupt as error:\n    slot.end(slot.fault(error, 'ended'))"
    )
    worker = run_worker(tmp_path, end)
    assert worker.stdout is not None
    worker.stdout.readline()
    worker.send_signal(signal.SIGINT)
    worker.communicate()
    (fault,) = previous_faults(tmp_path)
    assert (fault.is_secondary, str(fault)) == (True, "worker interrupted (SIGINT, rank 3)")


def test_python_handler_for_sigterm_takes_over(tmp_path: Path) -> None:
    end = "signal.signal(signal.SIGTERM, lambda *_: (slot.end(None), sys.exit(5)))\nprint('set', flush=True)\ntime.sleep(60)"
    worker = run_worker(tmp_path, end)
    assert worker.stdout is not None
    worker.stdout.readline()
    worker.terminate()
    worker.communicate()
    assert worker.returncode == 5
    assert previous_faults(tmp_path) == []


def test_exception_is_told_with_type_message_and_line(tmp_path: Path) -> None:
    job = tmp_path / "job.py"
    job.write_text("def loss(n):\n    raise ValueError(f'bad batch {n}')\n")
    end = (
        "sys.path.append(str(Path(sys.argv[1])))\nimport job\ntry:\n    job.loss({n})\n"
        "except ValueError as error:\n    slot.end(slot.fault(error))\n    slot.end(None)\n    os._exit(1)"
    )
    faults = []
    for n in (1, 22):
        run_worker(tmp_path, end.format(n=n)).communicate()
        faults += previous_faults(tmp_path)
    fault, again = faults
    assert (fault.kind, fault.type, fault.message) == ("exception", "ValueError", "bad batch 1")
    assert fault.where == f"{job}:2"
    assert fault.signature == again.signature
    assert str(fault) == f"worker raised ValueError: bad batch 1 (rank 3, step 41, {job}:2)"


def test_worker_that_ended_in_order_leaves_no_fault(tmp_path: Path) -> None:
    run_worker(tmp_path, "slot.end(None)").communicate()
    assert previous_faults(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_living_worker_is_left_alone(tmp_path: Path) -> None:
    worker = run_worker(tmp_path, "sys.stdin.read()")
    assert previous_faults(tmp_path) == []
    worker.kill()
    worker.communicate()
    assert len(previous_faults(tmp_path)) == 1


def test_fault_is_handed_out_once_though_all_workers_ask_at_once(tmp_path: Path) -> None:
    for _ in range(3):
        run_worker(tmp_path, "time.sleep(60)", number=signal.SIGKILL)
    ask = (
        "import sys; from pathlib import Path; from elastic.monitor import previous_faults;"
        "print(len(previous_faults(Path(sys.argv[1]))))"
    )
    askers = [
        subprocess.Popen(
            [sys.executable, "-c", ask, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE
        )
        for _ in range(4)
    ]
    assert sum(int(asker.communicate()[0]) for asker in askers) == 3
    assert list(tmp_path.iterdir()) == []


def test_broken_slot_is_skipped(tmp_path: Path) -> None:
    worker = run_worker(tmp_path, "time.sleep(60)", number=signal.SIGKILL)
    slot = next(path for path in tmp_path.glob("slot-*") if not path.suffix)
    slot.write_bytes(os.urandom(100))
    (tmp_path / f"slot-9-{worker.pid}-1").write_bytes(b"")
    assert previous_faults(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_long_message_still_makes_a_readable_record(tmp_path: Path) -> None:
    run_worker(tmp_path, "slot.end(slot.fault(ValueError('é' * 5000)))").communicate()
    (fault,) = previous_faults(tmp_path)
    assert fault.type == "ValueError"


def test_beat_takes_a_few_microseconds_at_most(tmp_path: Path) -> None:
    end = "a = time.perf_counter()\nfor i in range(20000): slot.beat(i + 1, 'forward')\nprint((time.perf_counter() - a) / 20000, flush=True)"
    worker = run_worker(tmp_path, end)
    out, _ = worker.communicate()
    assert float(out) < 20e-6  # 1 µs on an idle core


def test_fault_survives_its_json_form() -> None:
    fault = Fault(
        rank=1,
        local_rank=0,
        host="h",
        step=4,
        phase="save",
        kind="killed",
        signal="SIGKILL",
        time=1.5,
    )
    assert Fault.from_json(fault.to_json()) == fault


@pytest.mark.parametrize("found", [None, [], {"rank": 1}, {"rank": 1, "colour": "red"}])
def test_fault_from_strange_json_is_refused(found: object) -> None:
    with pytest.raises(ValueError, match="fault: found"):
        Fault.from_json(found)


def test_memory_killed_worker_names_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_worker(tmp_path, "time.sleep(60)", number=signal.SIGKILL)
    monkeypatch.setattr("elastic.monitor._oom_kills", lambda: 10**6)
    (fault,) = previous_faults(tmp_path)
    assert fault.message.startswith("out of memory")


def test_kills_for_memory_are_counted_by_the_cgroup_or_by_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert monitor._oom_kills() >= 0
    counters = [tmp_path / name for name in ("none", "unreadable", "events", "vmstat")]
    counters[1].write_text("oom_kill many\n")
    counters[2].write_text("low 0\noom 7\noom_kill 3\n")
    counters[3].write_text("oom_kill 9\n")
    monkeypatch.setattr(monitor, "_oom_counters", lambda: iter(counters))
    assert monitor._oom_kills() == 3
    counters[2].unlink()
    assert monitor._oom_kills() == 9


def test_worker_ended_before_it_could_say_more_is_known_by_its_local_rank(tmp_path: Path) -> None:
    program = (
        "import sys, os, signal; from pathlib import Path; from elastic.monitor import open_slot;"
        "open_slot(Path(sys.argv[1]), 2); os.kill(os.getpid(), signal.SIGKILL)"
    )
    before = time.time()
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], cwd=ROOT, check=False)
    (fault,) = previous_faults(tmp_path)
    assert (fault.local_rank, fault.phase, fault.step) == (2, "start", 0)
    assert fault.time >= before
