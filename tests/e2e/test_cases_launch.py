"""Public cases on launching and configuration: C17, C48, C49."""

import contextlib
import socket
from pathlib import Path

import pytest

from tests.support import records
from tests.support.cases import assert_each_sample_once, final_weight, run_once, tracer
from tests.support.cluster import RUN, Agent, Cluster, torchrun_command

SMALL = ("args.n=12", "train.epochs=1", "train.global_batch_size=4")


def told(agent: Agent, text: str) -> list[str]:
    """The lines of the output that hold a text."""
    return [line for line in agent.output().splitlines() if text in line]


def test_c17_the_readmes_command_finds_a_free_port(cluster: Cluster) -> None:
    with socket.socket() as taken:
        # Whoever holds the port already serves the test as well.
        with contextlib.suppress(OSError):
            taken.bind(("127.0.0.1", 29400))
            taken.listen()
        command = [*torchrun_command(), "--nproc_per_node=2", "--rdzv_backend=c10d", str(RUN)]
        agent = cluster.spawn([*command, *cluster.run_arguments(tracer(), SMALL)])
        assert agent.wait(60) == 0, agent.tail()
    assert records.status(cluster.url) == "complete"


def listens(port: int) -> bool:
    """Whether anybody serves a port here."""
    with contextlib.suppress(OSError):
        socket.create_connection(("localhost", port), timeout=1).close()
        return True
    return False


def test_c17_two_runs_on_one_endpoint_do_not_mix(cluster: Cluster, tmp_path: Path) -> None:
    urls = [tmp_path / "first", tmp_path / "second"]
    overrides = ("args.n=12", "train.epochs=2", "train.global_batch_size=4")
    # The first agent's torchrun holds the store of both: it comes first, and goes when the second is done.
    agents = []
    for url, delay in zip(urls, (5.0, 0.3), strict=True):
        agents.append(
            cluster.start(
                tracer(),
                *overrides,
                f"checkpoint.url={url}",
                f"train.step_delay={delay}",
                launcher=[f"--rdzv_id={url.name}"],
            )
        )
        cluster.until(lambda: listens(cluster.port), "the store of both")
    assert agents[1].wait(90) == 0, agents[1].tail()
    assert agents[0].wait(90) == 0, agents[0].tail()
    for url in urls:
        assert records.status(url) == "complete"
        assert records.summary(url)["generations"][0]["world_size"] == 2
        assert_each_sample_once(url, 12, 2)


@pytest.mark.parametrize(
    ("job", "overrides", "telling"),
    [
        (tracer(), ("train.epoch=3",), ("train.epoch", "train.epochs")),
        ("no/such/job.yaml", (), ("no/such/job.yaml",)),
        (str(Path("no") / "such.py") + ":Job", (), ("such.py",)),
        (tracer(), ("checkpoint.url=/dev/null/run",), ("/dev/null/run",)),
        (tracer("Empty"), (), ("no samples",)),
    ],
    ids=["a-unknown-key", "b-no-file", "b-no-class-file", "d-url", "empty-dataset"],
)
def test_c48_what_no_restart_can_cure_is_told_once(
    cluster: Cluster, job: str, overrides: tuple[str, ...], telling: tuple[str, ...]
) -> None:
    agent = cluster.start(job, *overrides, max_restarts=5)
    assert agent.wait(60) != 0
    lines = told(agent, telling[0])
    assert len(lines) == 1, agent.tail()
    for part in telling:
        assert part in lines[0]
    assert "Traceback" not in agent.output()
    assert len(agent.output().splitlines()) <= 12, agent.tail()  # the rest is torchrun's own


def test_c48_an_exception_in_model_is_shown_once_and_tried_once_more(cluster: Cluster) -> None:
    agent = cluster.start(tracer("BrokenModel"), max_restarts=5)
    assert agent.wait(60) != 0
    assert agent.output().count("Traceback") == 1, agent.tail()
    assert agent.output().count("raise ValueError(") == 1, agent.tail()
    assert len(told(agent, "the same exception at the same step twice")) == 1, agent.tail()


def test_c48_restarts_still_serve_a_killed_worker(cluster: Cluster) -> None:
    cluster.start(tracer("Faulty"), "args.kind=kill", f"args.marker={cluster.folder}/once",
                  "train.epochs=1", "train.global_batch_size=4", max_restarts=5)  # fmt: skip
    assert cluster.complete()["restarts"] == 1


JOB = """
from tests.support.tracer import Tracer

class Typed(Tracer):
    def __init__(self, lr, word, n=12):
        if not (isinstance(lr, float) and isinstance(word, str)):
            raise TypeError(f"found {lr!r} and {word!r}")
        print(f"lr is {lr!r}, word is {word!r}", flush=True)
        super().__init__(n=n, lr=lr)
"""
YAML = """
job: typed.py:Typed
args: {lr: 1e-1, word: no}
train: {grad_clip: 1e0, seed: 010, epochs: 1e0, global_batch_size: 4}
"""


def test_c49_numbers_in_yaml_are_numbers(cluster: Cluster) -> None:
    (cluster.folder / "typed.py").write_text(JOB)
    (cluster.folder / "typed.yaml").write_text(YAML)
    run_once(cluster, "typed.yaml", "train.grad_clip=1e2", "args.lr=1e-1", nproc=1)
    assert "lr is 0.1, word is 'no'" in cluster.agents[-1].output()
    config = records.claims(cluster.url)[1]["config"]
    assert config["train"]["grad_clip"] == 100.0
    assert config["train"]["seed"] == 10
    assert config["train"]["epochs"] == 1
    assert final_weight(cluster.url) > 0


def test_c49_what_cannot_be_meant_is_one_line_before_anything_starts(cluster: Cluster) -> None:
    (cluster.folder / "typed.yaml").write_text(YAML.replace("seed: 010", "seed: ten"))
    agent = cluster.start("typed.yaml", max_restarts=3)
    assert agent.wait(60) != 0
    (line,) = told(agent, "train.seed")
    for part in ("ten", "typed.yaml:4", "whole number"):
        assert part in line
    assert not cluster.url.exists()


def test_c17_a_fixed_port_that_is_taken_is_named(cluster: Cluster) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        launcher = [f"--rdzv_endpoint=localhost:{port}", "--rdzv_conf=read_timeout=3,is_host=true"]
        agent = cluster.start(tracer(), *SMALL, launcher=launcher)
        assert agent.wait(60) != 0
    assert told(agent, str(port)), agent.tail()
    assert "Traceback" not in agent.output(), agent.tail()
