"""What a command line of `launch` becomes."""

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from checkpoints.options import CheckpointOptions
from elastic.errors import ConfigError
from elastic.hook import RENDEZVOUS, UNSHARE
from elastic.launching import LAUNCHED, RUNNER, Launch, complete, is_remote, rdzv_id, split
from elastic.options import Settings

RUN = os.path.relpath(RUNNER)


def made(command: str, *, url: str = "runs/x", environ: Mapping[str, str] | None = None) -> Launch:
    settings = Settings(job="a:B", checkpoint=CheckpointOptions(url=url))
    return complete(split(command.split()), settings, environ or {})


def options(launch: Launch) -> dict[str, str]:
    """Torchrun's options of a launch by name."""
    words = launch.argv[: launch.argv.index(RUNNER)]
    return dict(word.removeprefix("--").split("=", 1) for word in words)


@pytest.mark.parametrize(
    ("command", "words", "arguments"),
    [
        ("", (), ()),
        ("train.epochs=3", (), ("train.epochs=3",)),
        ("--train.epochs=3 x=1", (), ("--train.epochs=3", "x=1")),
        ("--nproc_per_node=2 --timeout=30s", ("--nproc_per_node=2",), ("--timeout=30s",)),
        ("--nproc-per-node 2 job.yaml a=1", ("--nproc-per-node=2",), ("job.yaml", "a=1")),
        ("-r 3 -t3 file.py:Job", ("-r3", "-t3"), ("file.py:Job",)),
        ("--standalone job.yaml --nnodes=3", ("--standalone",), ("job.yaml", "--nnodes=3")),
        ("-m elastic.run job.yaml", (), ("job.yaml",)),
        ("-- job.yaml", (), ("job.yaml",)),
    ],
)
def test_torchruns_words_and_the_runners(
    command: str, words: tuple[str, ...], arguments: tuple[str, ...]
) -> None:
    found = split(command.split())
    assert (found.words, found.arguments, found.script) == (words, arguments, RUNNER)


def test_our_script_may_be_named_and_no_other() -> None:
    found = split(["--nnodes=2", RUN, "job.yaml"])
    assert (found.script, found.arguments) == (RUN, ("job.yaml",))
    for words in (["train.py"], ["-m", "mine"], ["-m"], ["--no-python", "x"], ["--run_path", "x"]):
        with pytest.raises(ConfigError, match=r"^launch: found"):
            split(words)
    assert split(["--nnodes=2", "--help"]).help


def test_one_node_gets_a_free_port_and_restarts() -> None:
    launch = made("--nproc_per_node=2")
    assert options(launch) == {
        "nproc_per_node": "2",
        "rdzv-backend": "c10d",
        "rdzv-endpoint": "localhost:0",
        "rdzv-id": rdzv_id("runs/x"),
        "max-restarts": "100",
        "monitor-interval": "0.03",
        "signals-to-handle": "SIGPWR",
    }
    assert launch.environ == {
        LAUNCHED: "1", "TORCH_CPP_LOG_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"
    }  # fmt: skip


def test_a_remote_url_and_a_range_of_nodes_meet_through_the_store() -> None:
    launch = made("--nnodes=1:4", url="s3://bucket/run-42/")
    assert (launch.backend, launch.endpoint) == ("fsspec", "s3://bucket/run-42/rdzv")
    assert options(launch)["rdzv-endpoint"] == "s3://bucket/run-42/rdzv"
    assert "rdzv-conf" not in options(launch)
    assert UNSHARE not in launch.environ


@pytest.mark.parametrize(
    ("command", "url", "backend", "endpoint"),
    [
        ("--nnodes=1:4 --rdzv_endpoint=h:29400", "s3://b/r", "c10d", "h:29400"),
        ("--nnodes=2 --rdzv_endpoint=h:29400", "s3://b/r", "c10d", "h:29400"),
        ("--nnodes=1:4", "runs/x", "c10d", ""),
        ("--nnodes=1:4 --rdzv_endpoint=gs://b/meet", "runs/x", "fsspec", "gs://b/meet"),
        ("--nnodes=1:4 --rdzv_backend=fsspec", "/shared/x", "fsspec", "/shared/x/rdzv"),
        ("--nnodes=1:1", "s3://b/r", "c10d", "localhost:0"),
    ],
)
def test_how_agents_meet(command: str, url: str, backend: str, endpoint: str) -> None:
    launch = made(command, url=url)
    assert (launch.backend, launch.endpoint) == (backend, endpoint)


@pytest.mark.parametrize("nodes", ["0", "2:1", "1:x", "a", "1:2:3", ":3"])
def test_a_number_of_nodes_that_is_none_is_told(nodes: str) -> None:
    with pytest.raises(ConfigError, match=f"--nnodes: found {nodes}, expected"):
        made(f"--nnodes={nodes}")


@pytest.mark.parametrize("backend", ["c10d", "etcd-v2"])
def test_several_nodes_get_what_lets_them_join(backend: str) -> None:
    launch = made(f"--nnodes=1:2 --rdzv_backend={backend} --rdzv_endpoint=h:1")
    assert launch.names_id
    assert not made("--rdzv_id=mine").names_id
    assert options(launch)["rdzv-conf"] == RENDEZVOUS
    assert launch.environ[UNSHARE] == "1"
    assert made("--nnodes=1:2", environ={UNSHARE: "0"}).environ[UNSHARE] == "0"


def test_what_the_user_says_wins_also_in_the_environment() -> None:
    environ = {
        "PET_RDZV_BACKEND": "c10d",
        "PET_RDZV_ENDPOINT": "h:5",
        "PET_RDZV_ID": "mine",
        "PET_NNODES": "1:3",
        "PET_MAX_RESTARTS": "7",
        "PET_RDZV_CONF": "read_timeout=5",
        "PET_MONITOR_INTERVAL": "5",
        "OMP_NUM_THREADS": "3",
    }
    launch = made("--nproc_per_node=4", url="s3://b/r", environ=environ)
    assert options(launch) == {"nproc_per_node": "4", "signals-to-handle": "SIGPWR"}
    assert (launch.nnodes, launch.max_restarts) == ("1:3", "7")
    assert "OMP_NUM_THREADS" not in launch.environ
    assert options(made("--max_restarts=0"))["max_restarts"] == "0"
    for command in ("--standalone", "--rdzv_backend=static"):
        assert not {"rdzv-id", "rdzv-endpoint"} & {
            word.partition("=")[0].removeprefix("--") for word in made(command).argv
        }


def test_a_run_has_one_rendezvous_id_however_its_url_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    one = {
        rdzv_id(url)
        for url in ("runs/x", "./runs//x/", f"{tmp_path}/runs/x", f"file://{tmp_path}/runs/x")
    }
    assert len(one) == 1
    assert len({rdzv_id(url) for url in ("s3://b/r", "S3://b//r/", "s3://key:secret@b/r")}) == 1
    assert (
        len({rdzv_id(url) for url in ("s3://b/r", "s3://b/R", "gs://b/r", "s3://c/r", "/b/r")}) == 5
    )
    assert "secret" not in rdzv_id("s3://key:secret@b/r")
    assert [is_remote(url) for url in ("s3://b", "file:///b", "runs/x", "memory://x")] == [
        True, False, False, True
    ]  # fmt: skip
