import signal
import socket
import time
from pathlib import Path

import pytest

from tests.support.cluster import Agent, torchrun_command
from tests.support.ports import free_port
from tests.support.soaking import soaked
from tests.support.worlds import WORKER, Worlds, kill_often, worlds


@pytest.mark.soak
@pytest.mark.parametrize("size", [2, 3])
def test_each_kill_of_a_worker_costs_one_restart(size: int, tmp_path: Path) -> None:
    with worlds(tmp_path) as found:
        kill_often(found, size, 10)


@pytest.mark.parametrize(("size", "late"), [(3, 2), *soaked((2, 0), (2, 1), (3, 0))])
def test_rank_that_is_late_costs_nothing_more(size: int, late: int, tmp_path: Path) -> None:
    with worlds(tmp_path) as found:
        kill_often(found, size, 2, f"late_rank={late}", "late_s=2")


def test_missing_rank_is_named_by_all_within_the_time_out(tmp_path: Path) -> None:
    with worlds(tmp_path) as found:
        agent = found.start("--nproc_per_node=3", keys=("late_rank=2", "late_s=60", "timeout_s=4"))
        assert agent.wait(40) == 1
        # The one who is late says nothing; whoever is first ends the other, by the agent's hand.
        texts = [event["text"] for event in found.events("error")]
        assert texts
        told = (
            "meeting: found 2 of 3 ranks after 4 s, missing rank 2",
            "meeting: rank 0 of 3 did not answer rank 1",
        )
        assert all(text.startswith(told) for text in texts), texts


def test_rank_0_that_never_comes_is_named(tmp_path: Path) -> None:
    with worlds(tmp_path) as found:
        agent = found.start("--nproc_per_node=2", keys=("late_rank=0", "late_s=60", "timeout_s=4"))
        assert agent.wait(40) == 1
        (error,) = found.events("error")
        assert error["text"].startswith("meeting: rank 0 of 2 did not answer rank 1 within 4 s")


def by_hand(found: Worlds, rank: int, size: int, port: int | None, *keys: str) -> Agent:
    """Start one worker with its variables set by hand."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)} if port else {}
    environ = {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank), **address}
    python = torchrun_command()[0].replace("torchrun", "python")
    return found.cluster.spawn([python, str(WORKER), str(found.folder), *keys], env=environ)


def test_ranks_set_by_hand_meet_and_end_in_order(tmp_path: Path) -> None:
    with worlds(tmp_path) as found:
        port = free_port()
        agents = [by_hand(found, rank, 3, port) for rank in (2, 1, 0)]
        found.world(3)
        assert found.finish() == [0, 0, 0]
        assert not any(agent.output() for agent in agents), [agent.output() for agent in agents]


@pytest.mark.parametrize("mode", ["file", "tcp"])
def test_ranks_meet_by_an_init_method(mode: str, tmp_path: Path) -> None:
    with worlds(tmp_path) as found:
        port = free_port()
        base = tmp_path / "shared" / "base"
        base.parent.mkdir()
        method = (
            f"init_method=file://{base}"
            if mode == "file"
            else f"init_method=tcp://127.0.0.1:{port}"
        )
        wrong = free_port()  # nobody is there: the method wins
        for rank in range(2):
            by_hand(found, rank, 2, wrong if mode == "tcp" else port, method)
        found.world(2)
        assert found.finish() == [0, 0]
        assert [path for path in base.parent.iterdir() if path.is_file()] == []


def test_file_that_a_dead_world_left_is_no_obstacle(tmp_path: Path) -> None:
    with worlds(tmp_path) as found:
        method = f"init_method=file://{tmp_path / 'base'}"
        port = free_port()
        first = [by_hand(found, rank, 2, port, method) for rank in range(2)]
        found.world(2)
        began = time.time()
        for agent in first:
            agent.signal(signal.SIGKILL)
            agent.process.wait(10)
        second = [by_hand(found, rank, 2, port, method) for rank in range(2)]
        found.world(2, after=began)
        found.finish()
        assert [agent.code for agent in second] == [0, 0]


def test_c17_taken_port_is_one_line_that_names_it_and_who_should_change_what(
    tmp_path: Path,
) -> None:
    with worlds(tmp_path) as found, socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        agent = by_hand(found, 0, 2, port)
        assert agent.wait(40) == 2
        (line,) = agent.output().splitlines()
        assert f"port {port} of 127.0.0.1 is taken by another process" in line
        assert "whoever starts the ranks sets another MASTER_PORT" in line


@pytest.mark.soak
def test_c17_two_runs_at_one_endpoint_with_different_ids_do_not_mix(tmp_path: Path) -> None:
    with worlds(tmp_path) as found:
        other = Worlds(found.cluster, tmp_path / "other")
        options = (
            "--nproc_per_node=2",
            "--rdzv_backend=c10d",
            f"--rdzv_endpoint=localhost:{free_port()}",
        )
        # The first one's agent holds the store of both.
        found.start(*options, "--rdzv_id=one", keys=("limit_s=20",))
        found.world(2)
        other.start(*options, "--rdzv_id=two", keys=("limit_s=2",))
        assert found.world(2) != other.world(2)
        found.cluster.finish(60)
        for one in (found, other):
            assert len({tuple(event["pids"]) for event in one.events("world")}) == 1
            assert len(one.events("done")) == 2


def runner_like(folder: Path) -> Path:
    """Write what torchrun's command line shows as our runner, and is the worker."""
    room = folder / "elastic"
    room.mkdir()
    (room / "hook.py").touch()
    run = room / "run.py"
    run.write_text(f"import runpy\nrunpy.run_path({str(WORKER)!r}, run_name='__main__')\n")
    return run


def test_agent_joins_and_leaves_where_the_package_is_installed(tmp_path: Path) -> None:
    with worlds(tmp_path, installed=True) as found:
        run = runner_like(tmp_path)
        options = (
            "--nnodes=1:2", "--nproc_per_node=1", "--rdzv_backend=c10d", f"--rdzv_endpoint=localhost:{free_port()}",
            "--rdzv_id=join", "--max_restarts=2",
        )  # fmt: skip
        url = f"url={tmp_path / 'run'}"
        first = found.start(*options, run=run, keys=(url,))
        found.world(1, timeout_s=25)  # 30 s more without the hook's settings
        began = time.time()
        second = found.start(*options, run=run, keys=(url,))
        found.world(2, after=began)
        began = time.time()
        second.signal(signal.SIGTERM)
        found.world(1, after=began)
        assert second.wait() == 1
        assert second.output().count("Traceback") == 0, second.output()
        assert "torchrun: ended by signal SIGTERM" in second.output()
        (found.folder / "stop").touch()
        assert first.wait() == 0, first.tail()


def test_wall_of_torchrun_is_one_line_where_the_package_is_installed(tmp_path: Path) -> None:
    with worlds(tmp_path, installed=True) as found:
        agent = found.start(
            "--nproc_per_node=2",
            run=runner_like(tmp_path),
            keys=("late_rank=1", "late_s=60", "timeout_s=1"),
        )
        assert agent.wait(40) == 1
        last = agent.output().splitlines()[-1]
        assert last.startswith("torchrun: rank 0 failed (exit code 1"), agent.output()
        assert "Traceback" not in agent.output()


def test_hook_leaves_a_foreign_torchrun_as_it_is(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, sys\nprint('PET_RDZV_CONF' in os.environ, 'TORCH_DISABLE_SHARE_RDZV_TCP_STORE' in os.environ)\nsys.exit(3)\n"
    )
    with worlds(tmp_path, installed=True) as found:
        endpoint = f"--rdzv_endpoint=localhost:{free_port()}"
        agent = found.cluster.spawn(
            [
                *torchrun_command(),
                "--nnodes=1:2",
                "--rdzv_conf=last_call_timeout=1",
                "--rdzv_backend=c10d",
                endpoint,
                str(script),
            ]
        )
        assert agent.wait(60) == 1
        assert "False False" in agent.output()
        assert "Traceback" in agent.output()
        assert "out of tree plugin" not in agent.output()
