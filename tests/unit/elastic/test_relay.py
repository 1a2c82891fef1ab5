"""The stub as a process of its own, with this test as its agent and as the other end of its socket."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic.agent import current_agent, node_folder
from elastic.ranks import read_place
from elastic.relay import ACCEPTED, ENDED, GO, REFUSED, SOCKET, is_off, pack, unpack
from tests.support.distribution import ROOT

USAGE = "usage: torchrun"
PLACE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "x"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The private folder of the agent, which is this process."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    me = {**PLACE, "ELASTIC_AGENT_PID": str(os.getpid())}
    return node_folder(current_agent(read_place(me), me))


@pytest.fixture
def listener(folder: Path) -> Iterator[socket.socket]:
    """Where the warm process would listen."""
    with socket.socket(socket.AF_UNIX) as sock:
        here = os.open(folder, os.O_PATH)
        sock.bind(f"/proc/self/fd/{here}/{SOCKET}")
        os.close(here)
        sock.listen()
        sock.settimeout(20)
        yield sock


def start(*, environ: dict[str, str] | None = None) -> "subprocess.Popen[str]":
    """Start the runner, which shows its usage where nobody takes the work over."""
    return subprocess.Popen(
        [sys.executable, "-u", str(ROOT / "elastic/run.py"), "--help"],
        env={**os.environ, **PLACE, **(environ or {})}, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def caught_by(pid: int) -> int:
    """The mask of the signals that a process has handlers for."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("\nSigCgt:")[2].split()[0], 16)


def accept(listener: socket.socket) -> socket.socket:
    """Read a stub's request to the end, close the streams that came with it, and return the connection."""
    stub, _ = listener.accept()
    stub.settimeout(20)
    data, found = b"", None
    while found is None:
        more, streams, _, _ = socket.recv_fds(stub, 1 << 20, 3)
        for stream in streams:
            os.close(stream)
        assert more
        data += more
        found = unpack(data)
    argv, cwd, environ = found
    assert argv == [str(ROOT / "elastic/run.py"), "--help"]
    assert cwd == str(Path.cwd())
    assert environ["TORCHELASTIC_RUN_ID"] == "x"
    return stub


def take_over(listener: socket.socket) -> socket.socket:
    """Accept the work."""
    stub = accept(listener)
    stub.sendall(ACCEPTED)
    assert stub.recv(1) == GO
    return stub


@pytest.mark.parametrize(
    ("status", "code"),
    [(0, 0), (75 << 8, 75), (255 << 8, 255), (9, -9), (15, -15), (11, -11), (11 | 0x80, -11)],
)
def test_the_stub_ends_as_the_worker_did(listener: socket.socket, status: int, code: int) -> None:
    process = start(environ={"PYTHONFAULTHANDLER": "1"})
    with take_over(listener) as stub:
        stub.sendall(ENDED + status.to_bytes(4, "little"))
        assert process.wait(20) == code
    assert process.communicate() == ("", "")


def test_signals_are_passed_on_and_do_not_end_the_stub(listener: socket.socket) -> None:
    process = start()
    with take_over(listener) as stub:
        numbers = (
            signal.SIGTERM,
            signal.SIGINT,
            signal.SIGUSR1,
            signal.SIGABRT,
            signal.SIGSEGV,
            40,
        )
        # Until then a signal ends it, as it would end any Python that starts.
        while not all(caught_by(process.pid) >> (number - 1) & 1 for number in numbers):
            time.sleep(0.01)
        for number in numbers:
            process.send_signal(number)
            assert stub.recv(10) == bytes([number])
        assert process.poll() is None
        stub.sendall(ENDED + bytes(4))
        process.communicate(timeout=20)
    assert process.returncode == 0


def test_a_refusal_is_one_line_and_an_ordinary_start(listener: socket.socket) -> None:
    process = start()
    with accept(listener) as stub:
        stub.sendall(REFUSED + b"job.py has changed")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0
    assert out.startswith(USAGE)
    assert err == "warm start: job.py has changed; this start is an ordinary one\n"


def test_a_worker_that_could_not_be_set_up_is_an_ordinary_start(listener: socket.socket) -> None:
    process = start()
    with take_over(listener) as stub:
        stub.sendall(REFUSED + b"a forked worker could not be set up")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0
    assert out.startswith(USAGE)
    assert err == "warm start: a forked worker could not be set up; this start is an ordinary one\n"


def test_a_signal_is_not_lost_where_the_worker_could_not_be_set_up(listener: socket.socket) -> None:
    process = start()
    with take_over(listener) as stub:
        time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        assert stub.recv(1) == bytes([signal.SIGTERM])
        stub.sendall(REFUSED + b"no process can be forked")
    process.communicate(timeout=20)
    assert process.returncode == -signal.SIGTERM


def test_no_answer_is_an_ordinary_start_told_by_one_worker(listener: socket.socket) -> None:
    processes = [start(environ={"LOCAL_RANK": rank}) for rank in ("0", "1")]
    for _ in processes:
        stub, _ = listener.accept()
        # Heard to the end: it hangs up, so that an answer that came late would find nobody.
        while stub.recv(1 << 20):
            pass
        stub.close()
    told = [process.communicate(timeout=60) for process in processes]
    assert [out[: len(USAGE)] for out, _ in told] == [USAGE] * 2
    assert told[0][1] == "warm start: found no answer within 2 s; this start is an ordinary one\n"
    assert told[1][1] == ""


def test_a_warm_process_that_ends_before_it_answers_is_not_worth_a_line(
    listener: socket.socket,
) -> None:
    process = start()
    accept(listener).close()
    out, err = process.communicate(timeout=60)
    assert out.startswith(USAGE)
    assert err == ""


def test_a_warm_process_that_dies_ends_the_stub(listener: socket.socket) -> None:
    process = start()
    take_over(listener).close()
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("the warm process is gone and its workers with it")


@pytest.mark.parametrize("name", ["folder", "root"])
def test_a_folder_that_others_may_write_to_is_not_trusted(
    listener: socket.socket, folder: Path, name: str
) -> None:
    (folder if name == "folder" else folder.parent).chmod(0o777)
    process = start()
    out, _ = process.communicate(timeout=60)
    assert out.startswith(USAGE)
    listener.settimeout(0)
    with pytest.raises(BlockingIOError):
        listener.accept()


@pytest.mark.parametrize("environ", [{"ELASTIC_WARM": "0"}, {"ELASTIC_WARM": "Off"}])
def test_switched_off_nobody_is_asked(listener: socket.socket, environ: dict[str, str]) -> None:
    assert is_off(environ)
    process = start(environ=environ)
    assert process.communicate(timeout=60)[0].startswith(USAGE)
    listener.settimeout(0)
    with pytest.raises(BlockingIOError):
        listener.accept()


def test_a_socket_that_nobody_serves_any_more_is_an_ordinary_start(
    listener: socket.socket,
) -> None:
    listener.close()
    process = start()
    out, err = process.communicate(timeout=60)
    assert out.startswith(USAGE)
    assert err == ""


def test_what_is_packed_is_unpacked_whatever_the_bytes() -> None:
    argv = ["run.py", "", "a=b\nc", os.fsdecode(b"\xff")]
    environ = {b"NAME": b"text", b"EMPTY": b"", b"ODD": b"\xfe=\n", b"WITH": b"a=b"}
    data = pack(argv, "/some folder", environ)
    found = unpack(data)
    assert found is not None
    assert found[:2] == (argv, "/some folder")
    assert {os.fsencode(k): os.fsencode(v) for k, v in found[2].items()} == environ
    assert unpack(data[:-1]) is None
    assert unpack(b"") is None


@pytest.mark.parametrize("data", [b"9\0a", b"0\0/\0A=1", b"x\0a\0/"])
def test_nonsense_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"warm start|invalid literal"):
        unpack(len(data).to_bytes(8, "little") + data)


def test_a_stub_imports_next_to_nothing() -> None:
    code = (
        "import sys; before = set(sys.modules); import elastic.relay;"
        "print(*sorted(set(sys.modules) - before))"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    # signal needs enum, and that what collections are made of: none of them is torch, typing, socket or json.
    assert not {"torch", "typing", "socket", "json", "pathlib", "logging", "re", "ctypes"} & set(
        found
    )
