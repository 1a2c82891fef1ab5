"""Signals as flags, echoes of a peer's death, and tracebacks of the user's own code."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist

from elastic import faults
from elastic.errors import CollectiveError, ElasticError, StartError
from elastic.faults import Signals, is_collective, say_once, user_traceback
from elastic.metrics import Ledger
from elastic.world import World
from tests.support.distribution import ROOT
from tests.support.ranked import run_ranks


# ------------------------------------------------------------------------------------------ signals
@pytest.fixture
def restored() -> Iterator[None]:
    names = (signal.SIGTERM, signal.SIGUSR1)
    before = {name: signal.getsignal(name) for name in names}
    yield
    for name, handler in before.items():
        signal.signal(name, handler)


@pytest.mark.usefixtures("restored")
def test_sigterm_is_leave_and_the_others_are_notices() -> None:
    signals = Signals(["SIGTERM", "SIGUSR1"])
    signals.install()
    signals.arm()
    assert not signals.pending
    signal.raise_signal(signal.SIGTERM)
    assert (signals.leave, signals.notice, signals.pending) == (True, False, True)
    signal.raise_signal(signal.SIGUSR1)
    assert (signals.leave, signals.notice) == (True, True)


@pytest.mark.usefixtures("restored")
def test_signal_changes_nothing_once_the_work_is_saved() -> None:
    signals = Signals(["SIGTERM"])
    signals.install()
    signals.ignore()
    signal.raise_signal(signal.SIGTERM)
    assert not signals.pending


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize("name", ["SIGFOO", "term", "SIGKILL"])
def test_name_that_is_no_signal_is_refused(name: str) -> None:
    message = f"signals: found {name!r}, expected names like SIGTERM or SIGUSR1"
    with pytest.raises(StartError, match=f"^{re.escape(message)}$"):
        Signals([name]).install()


@pytest.mark.parametrize(
    ("armed", "sent", "within_s", "code", "said"),
    [
        (False, 1, 0, 75, "ended now\n"),
        (True, 3, 0, 75, "ended now\n"),
        (True, 2, 0, 0, "2 signals\n"),
        (True, 5, 60, 0, "5 signals\n"),  # one event, told by several
    ],
)
def test_signal_ends_at_once_before_there_is_anything_to_save_and_at_the_third(
    armed: bool, sent: int, within_s: int, code: int, said: str
) -> None:
    script = f"""
import signal, sys
from elastic import faults
from elastic.faults import Signals
faults._ONE_S = {within_s}
signals = Signals(["SIGTERM"], end_now=lambda: print("ended now", flush=True))
signals.install()
if {armed}:
    signals.arm()
for _ in range({sent}):
    signal.raise_signal(signal.SIGTERM)
print({sent}, "signals")
"""
    found = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (found.returncode, found.stdout) == (code, said), found.stderr


# ------------------------------------------------------------------------------------------- echoes
def lose_a_peer(world: World, how: str) -> dict[str, Any]:
    """On rank 0: what a collective raises when rank 1 has gone."""
    world.barrier()
    if world.rank == 1:
        time.sleep(0.2)  # rank 0 is past the barrier, too
        os._exit(0)
    try:
        if how == "plain":
            for _ in range(100):
                dist.all_reduce(torch.ones(10_000))
        elif how == "control":
            for _ in range(100):
                world.gather("hello")
        else:
            ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
            ddp(torch.ones(1, 2)).sum().backward()
    except Exception as error:  # noqa: BLE001  # whatever it is, that is what is looked at
        return {"type": type(error).__name__, "text": str(error), "told": is_collective(error)}
    return {}


def gone_peer(world: World, how: str, folder: str) -> None:
    found = lose_a_peer(world, how)
    (Path(folder) / "found").write_text(repr(found))
    os._exit(0)  # an orderly end would wait for the peer


@pytest.mark.parametrize("how", ["plain", "control", "ddp"])
def test_real_error_of_gloo_after_a_peers_death_is_an_echo(how: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="ended without a word"):
        run_ranks(2, gone_peer, how, str(tmp_path))
    found = (tmp_path / "found").read_text()
    assert "'told': True" in found, found


def lose_peer() -> NoReturn:
    raise CollectiveError("gather: a peer is gone")


def chained() -> ElasticError:
    try:
        try:
            lose_peer()
        except CollectiveError as error:
            raise ValueError("the step failed") from error
    except ValueError as error:
        outer = ElasticError("wrapped")
        outer.__cause__ = error
        return outer


def suppressed() -> ValueError:
    try:
        try:
            lose_peer()
        except CollectiveError:
            raise ValueError("a fault of its own") from None
    except ValueError as error:
        return error


@pytest.mark.parametrize(
    ("error", "echo"),
    [
        (CollectiveError("gather: a peer is gone"), True),
        (chained(), True),
        (suppressed(), False),
        (RuntimeError("[pair.cc:534] Connection closed by peer [127.0.0.1]:3"), True),
        (RuntimeError("NCCL communicator was aborted on rank 1"), True),
        (dist.DistStoreError("wait timeout after 10000ms"), True),
        (dist.DistNetworkError("failed to recv"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("expected 3 columns"), False),
        (ConnectionResetError("Connection reset by peer"), False),
        (KeyError("gloo"), False),
    ],
)
def test_echo_is_told_from_a_fault_of_ones_own(error: Exception, echo: bool) -> None:
    assert is_collective(error) is echo


# --------------------------------------------------------------------------------------- tracebacks
def users_code() -> None:
    raise ValueError("the user's own")


def raised_through_ours() -> BaseException:
    """A ValueError of this file's code, called through a frame of ours."""
    ledger = Ledger()

    def call() -> None:
        # The frame of the context manager is ours, that of the function is the user's.
        with ledger.spend("eval"):
            users_code()

    try:
        ledger_runs(call)
    except ValueError as error:
        return error
    raise AssertionError


def ledger_runs(call: Any) -> None:
    """Call from code that counts as a file of the runner, by way of one of torch's."""
    for file in (
        "/env/lib/python3.11/site-packages/torch/nn/modules/module.py",
        str(ROOT / "elastic" / "loop.py"),
    ):
        code = compile("def run(call):\n    return lambda: call()\n", file, "exec")
        names: dict[str, Any] = {}
        exec(code, names)  # noqa: S102  # a frame whose file is one of ours
        call = names["run"](call)
    call()


def test_traceback_begins_with_the_users_own_code() -> None:
    error = raised_through_ours()
    error.__traceback__ = error.__traceback__.tb_next.tb_next  # type: ignore[union-attr]  # the runner's frame is the first
    assert "elastic/loop.py" in "".join(__import__("traceback").format_exception(error))
    text = user_traceback(error)
    assert text.startswith("Traceback (most recent call last):\n  File ")
    assert "elastic/loop.py" not in text
    assert "site-packages/torch" not in text
    assert text.endswith("ValueError: the user's own")
    assert "users_code()" in text


def test_error_of_the_runners_own_is_shown_whole() -> None:
    try:
        Signals(["SIGFOO"]).install()
    except StartError as error:
        error.__traceback__ = error.__traceback__.tb_next  # type: ignore[union-attr]
        text = user_traceback(error)
    assert "elastic/faults.py" in text


def test_folder_that_only_begins_like_ours_is_the_users() -> None:
    assert faults._is_between(str(ROOT / "elastic" / "loop.py"))
    assert faults._is_between(str(ROOT / "checkpoints" / "store.py"))
    assert not faults._is_between(str(ROOT / "elastic_jobs" / "mine.py"))
    assert not faults._is_between(str(ROOT / "jobs" / "digits.py"))


# ---------------------------------------------------------------------------------------- say once
SAYER = """
import sys
from pathlib import Path
from elastic.faults import say_once
told = say_once(Path(sys.argv[1]), "error: the same", fresh=sys.argv[2] == "fresh")
print(told)
"""


@pytest.mark.parametrize("mode", ["once", "fresh"])
def test_line_is_said_by_one_of_many_processes(mode: str, tmp_path: Path) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SAYER, str(tmp_path), mode],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for _ in range(4)
    ]  # fmt: skip
    outputs = [process.communicate(timeout=60) for process in processes]
    assert sorted(out for out, _ in outputs) == ["False\n"] * 3 + ["True\n"]
    assert "".join(err for _, err in outputs) == "error: the same\n"


def test_fresh_line_is_said_again_later_but_not_across_a_tick_of_the_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 1_700_000_004.9

    def say(at: float) -> bool:
        monkeypatch.setattr("time.time", lambda: at)
        told = say_once(tmp_path, "lost a peer", fresh=True)
        for mark in tmp_path.glob("said-*"):
            if told and mark not in seen:
                os.utime(mark, (at, at))
                seen.add(mark)
        return told

    seen: set[Path] = set()
    assert [say(now), say(now), say(now + 0.2), say(now + 6)] == [True, False, False, True]
    assert capsys.readouterr().err == "lost a peer\n" * 2


def test_lines_of_one_key_are_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert say_once(tmp_path, "rank 0: it failed\n", key="k")
    assert not say_once(tmp_path, "rank 1: it failed", key="k")
    assert say_once(tmp_path, "rank 1: it failed", key="l")
    assert capsys.readouterr().err == "rank 0: it failed\nrank 1: it failed\n"


def test_line_is_said_where_no_mark_can_be_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert say_once(tmp_path / "gone", "hello")
    assert capsys.readouterr().err == "hello\n"


# -------------------------------------------------------------------------------------------- leave
@pytest.mark.parametrize(("code", "out"), [(0, "at exit\n"), (1, "")])
def test_process_leaves_with_its_code_whatever_threads_there_are(code: int, out: str) -> None:
    script = f"""
import atexit, threading, time
from elastic.faults import leave
threading.Thread(target=time.sleep, args=(600,)).start()
atexit.register(lambda: print("at exit"))
leave({code})
"""
    found = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )  # fmt: skip
    assert (found.returncode, found.stdout) == (code, out), found.stderr
