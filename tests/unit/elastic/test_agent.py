import dataclasses
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from elastic.agent import (
    current_agent,
    die_with_agent,
    has_agent,
    is_alive,
    node_folder,
    process_start,
)
from elastic.errors import StartError

TORCHRUN = SimpleNamespace(launcher="torchrun")
HAND = SimpleNamespace(launcher="hand")
ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def own_tmpdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def test_agent_is_the_parent_under_torchrun_and_the_worker_itself_elsewhere() -> None:
    assert current_agent(TORCHRUN, {}).pid == os.getppid()
    assert current_agent(HAND, {}).pid == os.getpid()
    assert has_agent(TORCHRUN)
    assert not has_agent(HAND)


def test_agent_passed_on_by_a_warm_start_is_believed() -> None:
    assert current_agent(TORCHRUN, {"ELASTIC_AGENT_PID": str(os.getpid())}).pid == os.getpid()


def test_agent_that_is_gone_is_one_clear_error() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    with pytest.raises(StartError, match=f"found no process {child.pid}"):
        current_agent(TORCHRUN, {"ELASTIC_AGENT_PID": str(child.pid)})


def test_start_time_tells_a_process_from_a_later_one_with_its_pid() -> None:
    start = process_start(os.getpid())
    assert start is not None
    assert is_alive(os.getpid(), start)
    assert not is_alive(os.getpid(), start + 1)


def test_zombie_counts_as_gone() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    deadline = time.monotonic() + 20
    while process_start(child.pid) is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert process_start(child.pid) is None
    child.wait()


def test_process_name_with_spaces_and_parentheses_is_no_obstacle(tmp_path: Path) -> None:
    odd = tmp_path / "a) (b"
    odd.symlink_to("/bin/sleep")
    with subprocess.Popen([odd, "30"]) as child:
        mine = process_start(os.getpid())
        theirs = process_start(child.pid)
        assert mine is not None
        assert theirs is not None
        assert theirs >= mine
        child.kill()


def test_node_folder_is_private_and_the_same_again() -> None:
    agent = current_agent(HAND, {})
    folder = node_folder(agent)
    assert folder == node_folder(agent)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert folder.name == f"{agent.boot_id[:8]}-{agent.pid}-{agent.start}"


def test_folder_that_others_may_write_to_is_refused() -> None:
    folder = node_folder(current_agent(HAND, {}))
    folder.parent.chmod(0o777)
    with pytest.raises(StartError, match="expected a folder that only user"):
        node_folder(current_agent(HAND, {}))


def test_folder_that_is_a_link_is_refused(tmp_path: Path) -> None:
    agent = current_agent(HAND, {})
    folder = node_folder(agent)
    folder.rmdir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    folder.symlink_to(elsewhere)
    with pytest.raises(StartError, match="expected a folder"):
        node_folder(agent)


def test_folders_of_agents_that_are_gone_are_swept() -> None:
    agent = current_agent(HAND, {})
    kept = node_folder(agent)
    gone = node_folder(dataclasses.replace(agent, start=agent.start + 1))
    (gone / "slot").touch()
    other_boot = kept.with_name(f"00000000-{agent.pid}-{agent.start}")
    other_boot.mkdir()
    foreign = kept.with_name("notes")
    foreign.mkdir()
    node_folder(dataclasses.replace(agent, start=agent.start + 2))
    assert kept.is_dir()
    assert foreign.is_dir()
    assert not gone.exists()
    assert not other_boot.exists()


def test_worker_without_a_launcher_is_not_tied_to_its_parent() -> None:
    program = (
        "import sys; from types import SimpleNamespace; from elastic.agent import die_with_agent;"
        "die_with_agent(SimpleNamespace(launcher='hand')); print('on', flush=True); sys.stdin.read()"
    )
    assert _outlives_its_parent(program)


def test_worker_under_torchrun_dies_with_its_parent() -> None:
    program = (
        "import sys; from types import SimpleNamespace; from elastic.agent import die_with_agent;"
        "die_with_agent(SimpleNamespace(launcher='torchrun')); print('on', flush=True); sys.stdin.read()"
    )
    assert not _outlives_its_parent(program)


def _outlives_its_parent(program: str) -> bool:
    """Start a parent that starts the program; SIGKILL the parent; tell whether the program lives on."""
    parent_program = (
        "import subprocess, sys, time;"
        f"p = subprocess.Popen([sys.executable, '-c', {program!r}], stdin=subprocess.PIPE, stdout=subprocess.PIPE);"
        "p.stdout.readline(); print(p.pid, flush=True); time.sleep(60)"
    )
    # The pipe to the child's stdin must outlive the parent, or the child would end by itself.
    parent = subprocess.Popen(
        [sys.executable, "-c", parent_program], stdout=subprocess.PIPE, cwd=ROOT
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    start = process_start(pid)
    assert start is not None
    held = os.open(f"/proc/{parent.pid}/fd/{_pipe_to(parent.pid, pid)}", os.O_WRONLY)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 1
    while is_alive(pid, start) and time.monotonic() < deadline:
        time.sleep(0.01)
    alive = is_alive(pid, start)
    if alive:
        os.kill(pid, signal.SIGKILL)
    os.close(held)
    return alive


def _pipe_to(parent: int, child: int) -> int:
    """Find the parent's descriptor that is the other end of the child's stdin."""
    pipe = Path(f"/proc/{child}/fd/0").readlink()
    for descriptor in Path(f"/proc/{parent}/fd").iterdir():
        if descriptor.readlink() == pipe:
            return int(descriptor.name)
    raise AssertionError(f"no descriptor of {parent} is {pipe}")


def test_nothing_is_tied_without_an_agent_in_this_process() -> None:
    die_with_agent(HAND)  # would end the test run with its parent otherwise


AT_EACH_LINE = """
import os, signal, subprocess, sys
from elastic.agent import agent_of, end_agent

def leave_with_the_signal_at(line):
    sleeper = subprocess.Popen(["sleep", "60"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    agent = agent_of(sleeper.pid)
    lines = -1
    def trace(frame, event, _):
        nonlocal lines
        if lines < 0 and frame.f_code.co_name == "_signal_once":
            return returns
        if lines >= 0 and event == "line":
            lines += 1
            if lines == line:
                os.kill(os.getpid(), signal.SIGTERM)
        return trace
    def returns(frame, event, _):
        nonlocal lines
        if event == "return":
            lines = 0
        return returns
    sys.settrace(trace)
    sys._getframe().f_trace = trace
    end_agent(agent, 76)

codes = []
for line in range(1, 41):
    child = os.fork()
    if child == 0:
        signal.alarm(10)
        leave_with_the_signal_at(line)
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(codes)
"""


def test_worker_leaves_wherever_it_is_when_its_agents_signal_comes() -> None:
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", AT_EACH_LINE],
        check=False,
        env=environ,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout == f"{[76] * 40}\n", done.stderr
