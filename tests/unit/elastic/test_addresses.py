"""Which host an endpoint means, and who serves a store there, as far as torch cannot say it."""

import socket

import pytest

from checkpoints.options import CheckpointOptions
from elastic.addresses import holds_store, split_endpoint
from elastic.hook import RENDEZVOUS, prepare
from elastic.launching import complete, split
from elastic.options import Settings

UNKNOWN = "nowhere.invalid"


@pytest.fixture
def nameless(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host whose own name nobody knows, and one that resolves to an address of its own."""

    def look_up(name: str, _port: None) -> list[tuple[object, ...]]:
        if name in {UNKNOWN, "stranger"}:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        address = {"node-1": "127.0.3.1"}.get(name, name)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0))]

    monkeypatch.setattr(socket, "gethostname", lambda: UNKNOWN)
    monkeypatch.setattr(socket, "getaddrinfo", look_up)


@pytest.mark.parametrize(
    ("endpoint", "host", "port"),
    [
        ("", "", None),
        ("node-1", "node-1", None),
        ("node-1:5", "node-1", 5),
        ("[::1]:5", "::1", 5),
        ("::1", "::1", None),
        ("[fe80::2]", "fe80::2", None),
    ],
)
def test_an_endpoint_is_taken_apart(endpoint: str, host: str, port: int | None) -> None:
    assert split_endpoint(endpoint) == (host, port)


@pytest.mark.usefixtures("nameless")
@pytest.mark.parametrize(
    ("endpoint", "holds"),
    [
        ("node-1:29400", True),
        ("node-1", True),
        ("192.0.2.1:29400", False),
        ("stranger:29400", False),
        ("localhost:0", None),
        ("127.0.0.1:5", None),
        (f"{UNKNOWN}:5", None),
        ("", None),
    ],
)
def test_c16_who_serves_a_store_is_known_where_the_own_name_is_not(
    endpoint: str, holds: bool | None
) -> None:
    assert holds_store(endpoint) is holds


def test_torch_finds_out_by_itself_where_the_own_name_resolves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost.localdomain")
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: [])
    assert holds_store("10.1.2.3:29400") is None


@pytest.mark.usefixtures("nameless")
@pytest.mark.parametrize(
    ("words", "conf"),
    [
        (["--nnodes=1:2"], f"{RENDEZVOUS},is_host=True"),
        (["--nnodes=1:2", "--rdzv_conf=read_timeout=5"], "read_timeout=5,is_host=True"),
        (["--nnodes=1:2", "--rdzv_conf=is_host=0"], "is_host=0"),
        ([], "is_host=True"),
    ],
)
def test_c16_launch_says_who_serves_the_store(words: list[str], conf: str) -> None:
    command = split([*words, "--rdzv_endpoint=node-1:29400"])
    settings = Settings(job="a:B", checkpoint=CheckpointOptions(url="runs/x"))
    argv = complete(command, settings, {}).argv
    said = [word for word in argv if word.replace("_", "-").startswith("--rdzv-conf=")]
    assert said[-1].partition("=")[2] == conf


@pytest.mark.usefixtures("nameless")
@pytest.mark.parametrize(
    ("nodes", "conf"), [("1:2", f"{RENDEZVOUS},is_host=False"), ("1", "is_host=False")]
)
def test_c16_torchrun_over_our_runner_is_told_who_serves_the_store(nodes: str, conf: str) -> None:
    environ: dict[str, str] = {}
    words = [f"--nnodes={nodes}", "--rdzv_backend=c10d", "--rdzv_endpoint=192.0.2.1:5"]
    prepare(["torchrun", *words, "-m", "elastic.run"], environ)
    assert environ["PET_RDZV_CONF"] == conf
