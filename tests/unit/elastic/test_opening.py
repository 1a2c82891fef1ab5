"""The first half of a start: the store, the ranks that must be alike, and what each rank tells."""

import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from checkpoints.layout import AgentId
from checkpoints.options import CheckpointOptions
from elastic import opening
from elastic.errors import AttentionError, StartError
from elastic.monitor import Fault
from elastic.opening import agents_of, code_hash, faults_of, open_run_store
from elastic.world import World
from tests.support.ranked import place_of, run_ranks


class Folder:
    """Of a session, what opening the store needs."""

    def __init__(self, folder: Path, size: int = 1) -> None:
        self.folder = folder
        self.place = place_of(0, size)


def open_at(session: Folder, url: str, max_unsaved: float = 3600) -> Any:
    options = CheckpointOptions(url=url, max_unsaved=max_unsaved)
    return open_run_store(session, options)  # type: ignore[arg-type]


def test_store_that_was_reached_is_remembered_on_the_node(tmp_path: Path) -> None:
    session = Folder(tmp_path)
    store = open_at(session, str(tmp_path / "run"))
    assert store.is_local
    assert (tmp_path / "reached").exists()


def test_url_that_cannot_be_is_refused_at_the_first_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(StartError, match=r"^checkpoint\.url: "):
        open_at(Folder(tmp_path), str(tmp_path / "file" / "run"))
    assert not (tmp_path / "reached").exists()


def test_silence_at_a_later_start_is_waited_out_up_to_max_unsaved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(opening, "_LATER_PAUSE_S", 0.05)
    (tmp_path / "file").write_text("no folder")
    (tmp_path / "reached").touch()
    with pytest.raises(
        AttentionError, match=r"^checkpoint\.max_unsaved: the store has not answered"
    ):
        open_at(Folder(tmp_path), str(tmp_path / "file" / "run"), max_unsaved=0.3)
    assert caplog.messages[0].startswith("the store does not answer (")
    assert len(caplog.messages) > 1


def test_memory_of_one_process_is_refused_for_several_ranks(tmp_path: Path) -> None:
    message = (
        "checkpoint.url: found memory://run, which each process has for itself, with 2 ranks; "
        "expected a folder or an object store"
    )
    with pytest.raises(StartError, match=f"^{re.escape(message)}$"):
        open_at(Folder(tmp_path, size=2), "memory://run")


AGENT = asdict(AgentId(host="a", boot_id="b", pid=1, start=1))


def hello(**changes: Any) -> dict[str, Any]:
    return {
        "agent": AGENT, "has_agent": True, "host": "a", "local_rank": 0, "began": 1.0, "code": "c1",
        "config": {"train": {"epochs": 3, "seed": 0}, "job": "j"}, "faults": [], **changes,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            hello(code="c2", host="b"),
            "code: rank 2 on b runs other sources than rank 0 on a; install the same version of the "
            "project and the job everywhere",
        ),
        (
            hello(config={"train": {"epochs": 3, "seed": 1}, "job": "j"}),
            "train.seed: ranks 0 and 2 were given different values; start all nodes with the same settings",
        ),
        (
            hello(config={"train": {"epochs": 3, "seed": 0}, "job": "j", "more": 1}),
            "more: ranks 0 and 2 were given different values; start all nodes with the same settings",
        ),
    ],
)
def test_rank_with_other_code_or_settings_is_named(other: dict[str, Any], message: str) -> None:
    opening._check_alike([hello(), hello()])
    with pytest.raises(StartError, match=f"^{re.escape(message)}$"):
        opening._check_alike([hello(), hello(), other])


def test_causes_come_before_echoes_and_agents_once() -> None:
    def fault(kind: Any, time: float) -> dict[str, object]:
        return Fault(
            rank=0, local_rank=0, host="a", step=1, phase="step", kind=kind, time=time
        ).to_json()

    hellos = [hello(faults=[fault("collective", 1.0)]), hello(faults=[fault("killed", 2.0)])]
    assert [found.kind for found in faults_of(hellos)] == ["killed", "collective"]
    assert agents_of(hellos) == (AgentId(**AGENT),)


def test_code_hash_tells_a_changed_job(tmp_path: Path) -> None:
    job = tmp_path / "job.py"
    job.write_text("a = 1\n")
    one = code_hash([job])
    assert code_hash([job]) == one != code_hash()
    job.write_text("a = 2\n")
    assert code_hash([job]) != one


def look(world: World, folders: list[str]) -> str:
    from checkpoints.store import open_store

    store = open_store(folders[world.rank])
    hellos = [{"host": "a"}, {"host": "b"}]
    try:
        opening._check_shared(world, store, "session", hellos)
    except StartError as error:
        return str(error)
    return "shared"


def look_twice(world: World, one: str, other: str) -> tuple[str, str]:
    return look(world, [one, one]), look(world, [one, other])


def test_local_url_that_the_nodes_do_not_share_is_refused_on_every_rank(tmp_path: Path) -> None:
    one, other = (tmp_path / name for name in ("one", "other"))
    one.mkdir()
    other.mkdir()
    found = run_ranks(2, look_twice, str(one), str(other))
    assert [shared for shared, _ in found] == ["shared", "shared"]
    for (_, message), url in zip(found, (one, other), strict=True):
        assert message == (
            f"checkpoint.url: {url} is a local folder that rank 1 on b does not share with rank 0 on a; "
            "expected one place that all nodes see: a shared folder or an object store"
        )
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
