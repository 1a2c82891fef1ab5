"""The fence, looked at now and then."""

import time
from pathlib import Path

import pytest

from checkpoints.errors import PartedError, SupersededError
from checkpoints.layout import AgentId, Claim, claim_name
from checkpoints.store import open_store
from elastic import fence
from elastic.fence import FenceWatch


def claim_of(generation: int, launch: str) -> Claim:
    return Claim(
        generation=generation, run_id="r", launch=launch, world_size=1, nodes=1, hosts=("h",),
        agents=(AgentId(host="h", boot_id="b", pid=generation, start=1),),
    )  # fmt: skip


@pytest.mark.parametrize(("launch", "kind"), [("other", SupersededError), ("mine", PartedError)])
def test_newer_claim_is_found_and_told_as_what_it_is(
    launch: str, kind: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fence, "_FENCE_S", 0.02)
    store = open_store(str(tmp_path))
    mine = claim_of(4, "mine")
    store.put_new(claim_name(4), mine.to_json())
    watch = FenceWatch(store, mine)
    time.sleep(0.1)
    assert watch.found is None
    store.put_new(claim_name(5), claim_of(5, launch).to_json())
    deadline = time.monotonic() + 20
    while watch.found is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert isinstance(watch.found, kind)
    watch.stop()


def test_store_that_does_not_answer_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fence, "_FENCE_S", 0.02)
    store = open_store(str(tmp_path / "run"))
    mine = claim_of(4, "mine")
    store.put_new(claim_name(4), mine.to_json())
    (tmp_path / "run" / "generations").rename(tmp_path / "aside")
    (tmp_path / "run" / "generations").write_text("no folder")
    watch = FenceWatch(store, mine)
    time.sleep(0.2)
    assert watch.found is None
    (tmp_path / "run" / "generations").unlink()
    (tmp_path / "aside").rename(tmp_path / "run" / "generations")
    store.put_new(claim_name(5), claim_of(5, "other").to_json())
    deadline = time.monotonic() + 20
    while watch.found is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert isinstance(watch.found, SupersededError)
    watch.stop()


def test_watch_ends_at_once_when_told(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    watch = FenceWatch(store, claim_of(1, "mine"))
    watch.stop()
    assert not watch._thread.is_alive()
