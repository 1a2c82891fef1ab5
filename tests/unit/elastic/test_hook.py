import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from elastic.hook import RENDEZVOUS, UNSHARE, handlers, prepare, starts_our_runner

ROOT = Path(__file__).parents[3]
RUN = str(ROOT / "elastic" / "run.py")
RANGE = ["--nnodes=1:4", "--rdzv_backend=c10d"]


@pytest.fixture(autouse=True)
def own_excepthook() -> Iterator[None]:
    before = sys.excepthook
    yield
    sys.excepthook = before


@pytest.mark.parametrize(
    "words",
    [
        [RUN],
        [*RANGE, RUN, "job.yaml"],
        ["--nnodes", "1:4", "--rdzv_backend", "c10d", RUN],
        ["-m", "elastic.run"],
        ["--module", "--nnodes=2", "elastic.run", "a.yaml"],
        ["--standalone", RUN],
        ["--nproc_per_node", "2", "--no_python", RUN],
        ["--", RUN],
    ],
)
def test_torchrun_over_our_runner_is_known(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "os.path.isfile", lambda path: str(path) == str(ROOT / "elastic" / "hook.py")
    )
    assert starts_our_runner(["/opt/bin/torchrun", *words])
    assert starts_our_runner(["/lib/torch/distributed/run.py", *words])


@pytest.mark.parametrize(
    "argv",
    [
        ["torchrun", "train.py", "elastic/run.py"],
        ["torchrun", "--role", RUN, "train.py"],
        ["torchrun", "-m", "mine.run"],
        ["torchrun", "somewhere/run.py"],
        ["torchrun", "elastic.run"],
        ["torchrun", "--help"],
        ["torchrun"],
        ["pytest", RUN],
        [],
    ],
)
def test_any_other_command_is_left_alone(argv: list[str]) -> None:
    environ: dict[str, str] = {}
    before = sys.excepthook
    prepare(argv, environ)
    assert not starts_our_runner(argv)
    assert environ == {}
    assert sys.excepthook is before


@pytest.mark.parametrize("backend", ["c10d", "etcd-v2"])
def test_nodes_in_a_range_get_the_settings_that_let_them_join(backend: str) -> None:
    environ: dict[str, str] = {}
    prepare(["torchrun", *RANGE, f"--rdzv_backend={backend}", "-m", "elastic.run"], environ)
    assert environ == {UNSHARE: "1", "PET_RDZV_CONF": RENDEZVOUS}


def test_one_node_alone_gets_a_free_port() -> None:
    environ: dict[str, str] = {}
    prepare(["torchrun", "--nproc_per_node=2", "--rdzv_backend=c10d", RUN], environ)
    assert environ == {"PET_RDZV_ENDPOINT": "localhost:0"}


def test_settings_of_the_user_win() -> None:
    mine = {UNSHARE: "0", "PET_RDZV_CONF": "last_call_timeout=9"}
    environ = dict(mine)
    prepare(["torchrun", *RANGE, "-m", "elastic.run"], environ)
    assert environ == mine


def test_settings_may_stand_in_the_environment() -> None:
    environ = {"PET_NNODES": "1:3", "PET_RDZV_BACKEND": "c10d"}
    prepare(["torchrun", "-m", "elastic.run"], environ)
    assert environ[UNSHARE] == "1"


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--standalone", "--nnodes=1:4"],
        ["--nnodes=1", "--rdzv_backend=c10d", "--rdzv_endpoint=localhost:29511"],
        ["--nnodes=2", "--node_rank=0", "--master_addr=h"],
        ["--nnodes=1:4", "--rdzv_backend=etcd"],
        ["--nnodes=1", "--rdzv_backend=etcd-v2"],
    ],
)
def test_no_setting_where_no_node_can_join_or_the_back_end_is_another(words: list[str]) -> None:
    environ: dict[str, str] = {}
    prepare(["torchrun", *words, "-m", "elastic.run"], environ)
    assert environ == {}


def test_back_end_by_our_name_is_refused_in_one_line() -> None:
    create = handlers()
    with pytest.raises(
        ValueError, match=r"rdzv_backend: found 'elastic'.*use --rdzv_backend=fsspec, or c10d"
    ):
        create(SimpleNamespace(backend="elastic"))


@dataclass
class Failure:
    exitcode: int
    timestamp: int
    pid: int = 11

    def signal_name(self) -> str:
        return {-9: "SIGKILL", -15: "SIGTERM"}[self.exitcode]


class ChildFailedError(Exception):
    def __init__(self, failures: dict[int, Failure]) -> None:
        self.failures = failures


class SignalException(Exception):  # noqa: N818 - torch's name
    def __init__(self) -> None:
        self.sigval = SimpleNamespace(name="SIGTERM")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (
            ChildFailedError({0: Failure(-15, 1), 1: Failure(1, 2)}),
            "torchrun: rank 1 failed (exit code 1, pid 11)\n",
        ),
        (
            ChildFailedError({0: Failure(1, 3), 2: Failure(-9, 2)}),
            "torchrun: rank 2 failed (SIGKILL, pid 11); rank 0 failed (exit code 1, pid 11)\n",
        ),
        (ChildFailedError({}), "torchrun: a worker failed\n"),
        (SignalException(), "torchrun: ended by signal SIGTERM\n"),
    ],
)
def test_wall_of_torchrun_is_one_line(
    error: Exception, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare(["torchrun", "-m", "elastic.run"], {})
    sys.excepthook(type(error), error, None)
    assert capsys.readouterr().err == line


class RendezvousConnectionError(Exception):
    """Torch's own, by name."""


def test_a_taken_port_is_one_line_that_names_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["torchrun", "--rdzv_endpoint=h1:29511", "-m", "elastic.run"])
    prepare(sys.argv, {})
    error = RendezvousConnectionError("no store")
    error.__cause__ = OSError("port: 29511, address already in use\nand more")
    sys.excepthook(type(error), error, None)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "torchrun: no rendezvous at h1:29511: port: 29511, address already in use;"
    )
    assert "--rdzv_endpoint" in line


class RendezvousClosedError(Exception):
    """Torch's own, by name."""


class EtcdStubError(ImportError):
    """Torch's own, by name."""


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (
            RendezvousClosedError(),
            "the rendezvous mine at h1:2379 is closed: a launch has ended there; give all nodes another --rdzv_id and"
            " start again: the run goes on",
        ),
        (
            EtcdStubError(),
            "--rdzv_backend=etcd-v2: found no module etcd; pip install python-etcd",
        ),
    ],
)
def test_what_etcd_lacks_is_one_line(
    error: Exception,
    line: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = ["--rdzv_backend=etcd-v2", "--rdzv_endpoint=h1:2379", "--rdzv_id=mine"]
    monkeypatch.setattr(sys, "argv", ["torchrun", *words, "-m", "elastic.run"])
    prepare(sys.argv, {})
    sys.excepthook(type(error), error, None)
    assert capsys.readouterr().err == f"torchrun: {line}\n"


def test_any_other_error_keeps_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    prepare(["torchrun", "-m", "elastic.run"], {})
    sys.excepthook(KeyError, KeyError("x"), None)
    assert capsys.readouterr().err == "KeyError: 'x'\n"


def test_hook_loads_nothing_but_what_python_has() -> None:
    program = "import sys, logging; before = set(sys.modules); import elastic.hook; print(*(set(sys.modules) - before))"
    out = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    loaded = {name.partition(".")[0].lstrip("_") for name in out.split()}
    assert loaded <= {"elastic", "future", "importlib", "typing"}, (
        "small rooms of Python itself alone"
    )
