"""What the doctor says of a node: a finding for each thing that would go wrong, and nothing started."""

import errno
import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from checkpoints.store import Store, open_store
from elastic import __main__, reachable
from elastic.doctor import _memory, _try_exclusive
from elastic.entry import main
from tests.support.cases import tracer
from tests.support.ranked import run_alone

JOB = tracer()


@pytest.fixture
def examine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, Any]]:
    def run(*words: str, url: str = "", job: str = JOB) -> tuple[int, Any]:
        launch = [w for w in words if w.startswith("--")]
        rest = [w for w in words if not w.startswith("--")]
        url = url or str(tmp_path / "run")
        code = __main__.main(["doctor", "--json", *launch, job, f"checkpoint.url={url}", *rest])
        told = json.loads(capsys.readouterr().out)
        return code, {(one["what"], one["kind"]): one["told"] for one in told}

    return run


def test_a_node_where_all_is_well(examine: Callable[..., Any], tmp_path: Path) -> None:
    code, told = examine()
    assert code == 0
    assert {kind for _, kind in told} == {"ok"}
    assert [what for what, _ in told] == [
        "versions", "config", "job", "devices", "store", "run", "memory", "folder",
    ]  # fmt: skip
    assert told["run", "ok"] == "there is none yet: a start begins it"
    assert [path for path in (tmp_path / "run").rglob("*") if path.is_file()] == []


def test_a_run_that_is_there_is_told_and_left_alone(
    examine: Callable[..., Any], tmp_path: Path
) -> None:
    url = tmp_path / "run"
    assert run_alone(main, [JOB, f"checkpoint.url={url}", "train.epochs=1"], {}).code == 0
    before = {path: path.read_bytes() for path in url.rglob("*") if path.is_file()}
    code, told = examine()
    assert (code, told["run", "ok"].partition(",")[0]) == (0, "complete")
    assert told["memory", "ok"].startswith("room for 3 snapshots of ")
    assert {path: path.read_bytes() for path in url.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("words", "what", "told"),
    [
        (("train.epcohs=3",), "config", "did you mean train.epochs?"),
        (("args.m=3",), "job", "args.m: Tracer"),
        (("backend=mpi",), "devices", "found no mpi here"),
        (("--nnodes=2",), "rendezvous", "found no --rdzv_endpoint, expected HOST:PORT"),
        (("--nnodes=2:1",), "config", "--nnodes: found 2:1"),
        (
            ("--nnodes=2", "--rdzv_endpoint=nobody.invalid:29400"),
            "rendezvous",
            "'nobody.invalid' does not resolve on this host",
        ),
        (("--rdzv_backend=fsspec", "--rdzv_endpoint=/proc/none"), "rendezvous", "/proc/none"),
    ],
)
def test_what_would_fail_is_wrong_and_two(
    examine: Callable[..., Any], words: tuple[str, ...], what: str, told: str
) -> None:
    code, found = examine(*words)
    assert code == 2
    assert [key for key in found if key[1] == "wrong"] == [(what, "wrong")]
    assert told in found[what, "wrong"]


def test_a_store_that_cannot_be_written_to_is_wrong(
    examine: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    code, found = examine(url=str(tmp_path / "file"))
    assert (code, "file" in found["store", "wrong"]) == (2, True)


def test_a_store_that_creates_twice_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(str(tmp_path))
    assert _try_exclusive(store) is not None
    monkeypatch.setattr(Store, "put_new", lambda self, at, data: self.put(at, data) or True)
    assert _try_exclusive(store) is None
    assert store.list("meeting") == []


def test_too_little_memory_is_a_warning() -> None:
    assert _memory(1 << 50, 3, named=True).kind == "warn"
    assert _memory(1 << 20, 3, named=True).kind == "ok"


def test_c17_a_port_that_is_taken_is_told() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        found = reachable.look_at_endpoint(f"127.0.0.1:{port}")
        assert (found.kind, f"port {port} of this host is taken" in found.told) == ("warn", True)
    assert reachable.look_at_endpoint(f"127.0.0.1:{port}").kind == "ok"
    assert reachable.look_at_endpoint("localhost:0").kind == "ok"


@pytest.mark.parametrize(
    ("trouble", "kind", "told"),
    [
        (0, "ok", "somebody listens there"),
        (errno.ECONNREFUSED, "ok", "no agent listens yet"),
        (errno.ETIMEDOUT, "warn", "firewall"),
    ],
)
def test_an_endpoint_on_another_host(trouble: int, kind: str, told: str) -> None:
    found = reachable._told_other(trouble)
    assert (found[0], told in found[1]) == (kind, True)


@pytest.mark.parametrize(
    ("resolved", "kind", "told"),
    [
        ([], "warn", "does not resolve on this host"),
        (["127.0.1.1"], "warn", "means 127.0.1.1 here"),
        (["10.1.2.3"], "ok", "is 10.1.2.3"),
    ],
)
def test_c16_what_the_own_name_means(
    resolved: list[str], kind: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reachable, "_resolve", lambda _: resolved)
    monkeypatch.setattr(reachable, "own_addresses", lambda **_: ("10.1.2.3", "127.0.0.1"))
    found = reachable.look_at_name(None)
    assert (found.kind, told in found.told) == (kind, True)
    assert kind == "ok" or "--local_addr=10.1.2.3" in found.told
    assert reachable.look_at_name("10.1.2.3").kind == "ok"


def test_help_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert __main__.main(["doctor", "--help"]) == 0
    assert capsys.readouterr().out.startswith("usage: python -m elastic doctor")
