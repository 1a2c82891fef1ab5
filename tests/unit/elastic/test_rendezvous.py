"""The handler as torchrun makes it: found by its entry point, refused in one line, and what the docs say of it."""

import re
import signal
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousParameters,
    RendezvousTimeoutError,
)

from elastic.errors import ConfigError
from elastic.plugin import handlers
from elastic.rendezvous import FsspecHandler
from elastic.terms import _DEFAULTS

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def own_wakeup() -> Iterator[None]:
    yield
    signal.set_wakeup_fd(-1)


def handler(endpoint: Path | str, rdzv_id: str = "id", **conf: object) -> FsspecHandler:
    made = handlers()(
        RendezvousParameters(
            "fsspec", str(endpoint), rdzv_id, 1, 2, "127.0.0.1", last_call_timeout="0.1", **conf
        )
    )
    assert isinstance(made, FsspecHandler)
    return made


def test_one_agent_gets_a_world_with_a_fresh_store_each_time_and_ends_it(tmp_path: Path) -> None:
    one = handler(tmp_path)
    assert (one.get_backend(), one.get_run_id(), one.use_agent_store) == ("fsspec", "id", True)
    first = one.next_rendezvous()
    assert (first.rank, first.world_size, one.num_nodes_waiting()) == (0, 1, 0)
    first.store.set("key", "value")
    assert first.store.get("key") == b"value"
    second = one.next_rendezvous()
    assert not second.store.check(["key"])
    info = [one.bootstrap_store_info for one in (first, second)]
    assert info[0] is not None
    assert info[1] is not None
    assert info[0].master_port != info[1].master_port
    assert one.shutdown()
    assert one.is_closed()
    with pytest.raises(RendezvousClosedError, match="the launch has ended"):
        one.next_rendezvous()


def test_store_of_a_doomed_world_makes_up_its_answers_in_place_of_waiting(tmp_path: Path) -> None:
    one = handler(tmp_path)
    store = one.next_rendezvous().store
    store.set("torchelastic/role_info/0", "mine")
    one._member.link.recall()
    assert store.multi_get(["torchelastic/role_info/0", "torchelastic/role_info/1"]) == [
        b"mine",
        b"mine",
    ]
    assert store.get("torchelastic/assigned_ranks/0") == b"[0, 1, 0, 1]"
    store.wait(["never"])
    one.shutdown()


def test_time_out_is_one_line_and_closes_nothing(tmp_path: Path) -> None:
    late = FsspecHandler(
        RendezvousParameters("fsspec", str(tmp_path), "id", 2, 2, "127.0.0.1", join_timeout="0.5")
    )
    with pytest.raises(
        RendezvousTimeoutError, match=r"no world formed with this node within 0 s|within 1 s"
    ):
        late.next_rendezvous()
    late.shutdown()
    assert not late.is_closed()
    one = handler(tmp_path)
    assert one.next_rendezvous().world_size == 1
    one.shutdown()


@pytest.mark.parametrize("endpoint", ["", "nosuch://bucket/run"])
def test_endpoint_that_nothing_serves_is_refused_in_one_line(endpoint: str) -> None:
    with pytest.raises(RendezvousConnectionError) as raised:
        handler(endpoint)
    assert "\n" not in str(raised.value)


def test_unknown_setting_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean join_timeout"):
        handler(tmp_path, join_timout="1")


def test_entry_point_of_the_package_leads_here() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    value = project["entry-points"]["torchrun.handlers"]["fsspec"]
    assert EntryPoint("fsspec", value, "torchrun.handlers").load() is handlers


def test_settings_of_the_docs_are_those_of_the_code() -> None:
    text = (ROOT / "docs" / "rendezvous.md").read_text(encoding="utf-8")
    told = {
        key: float(value)
        for key, value in re.findall(r"^\| `(\w+)` \| ([\d.]+) \|", text, re.MULTILINE)
    }
    assert told == dict(_DEFAULTS)
