"""Which checkpoint is newest, which ones stay, and that no fault at any moment loses the last one."""

import json
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import IO, Any

import pytest
import torch

from checkpoints import commands, reader
from checkpoints.canonical import JSON, parse
from checkpoints.catalog import split_address
from checkpoints.errors import (
    CheckpointError,
    DamagedError,
    NewerFormatError,
    NoCheckpointError,
    OptionError,
    PermanentStoreError,
    RecordError,
    StoreFullError,
    SupersededError,
    UnsupportedStateError,
)
from checkpoints.layout import CheckpointName, FileEntry, Manifest, is_void, void_manifest
from checkpoints.manager import CheckpointManager
from checkpoints.store import Store, open_store
from tests.support.states import name, same, signed, state

ROOT = Path(__file__).parents[3]


@pytest.fixture(params=["local", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    url = f"memory://{os.getpid()}-{tmp_path.name}"
    return open_store(str(tmp_path / "run") if request.param == "local" else url)


@pytest.fixture
def local(tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "run"), retry_s=0.1, sleep=lambda _: None)


def save(
    manager: CheckpointManager,
    step: int,
    generation: int = 1,
    *,
    parent: CheckpointName | None = None,
    protect: Collection[CheckpointName] = (),
    best: CheckpointName | None = None,
) -> CheckpointName:
    info = {"best": {"checkpoint": str(best)}} if best else {}
    here = name(step, generation)
    tree = state(step)
    snapshot = manager.stage(tree, name=here, parent=parent, run_id="r", info=info)  # type: ignore[arg-type]  # dict is invariant
    try:
        return manager.commit(snapshot, protect=protect).name
    finally:
        snapshot.release()


def steps(manager: CheckpointManager) -> list[int]:
    return [found.step for found in manager.names()]


def test_what_is_committed_is_listed_told_and_restored(store: Store) -> None:
    manager = CheckpointManager(store)
    assert manager.latest() is None
    assert manager.restore_newest() is None
    first = save(manager, 10)
    second = save(manager, 20, parent=first)
    assert manager.names() == [second, first]
    told = manager.info(second)
    assert (told.name, told.parent, told.run_id) == (second, first, "r")
    assert told.size_bytes > 8 * 8 * 4 * 3
    assert same(manager.restore(second), state(20))
    assert manager.latest(exclude=[second]) == first
    assert manager.wait(1.0)
    assert manager.adopt() == ()
    manager.close()


def test_another_reader_sees_what_was_written_and_deleted_at_once(store: Store) -> None:
    manager, other = CheckpointManager(store, keep=1), CheckpointManager(open_store(store.url))
    for step in (1, 2, 3):
        save(manager, step)
        assert steps(other) == [step]
        assert other.info(name(step)).name == name(step)


def test_c29_newest_is_decided_by_numbers(store: Store) -> None:
    manager = CheckpointManager(store, keep=100)
    for step in (9, 10, 99, 100, 999, 1000):
        save(manager, step)
    assert steps(manager) == [1000, 999, 100, 99, 10, 9]
    save(manager, 998, generation=2)
    assert manager.latest() == name(998, 2)
    for generation in (9, 10):
        save(manager, 5, generation=generation)
    assert manager.names()[:3] == [name(5, 10), name(5, 9), name(998, 2)]


def test_c29_keep_two_keeps_the_two_greatest(store: Store) -> None:
    manager = CheckpointManager(store, keep=2)
    for step in (9, 10, 99, 100, 999, 1000):
        save(manager, step)
    assert steps(manager) == [1000, 999]
    save(manager, 998, generation=2)
    assert manager.names() == [name(998, 2), name(1000)]


def test_retention_keeps_every_nth_and_the_protected_and_leaves_no_file_of_others(
    store: Store,
) -> None:
    manager = CheckpointManager(store, keep=2, keep_every=50)
    for step in range(10, 130, 10):
        save(manager, step, protect=[name(30)])
    assert steps(manager) == [120, 110, 100, 50, 30]
    folders = {file.split("/")[1] for file in store.list("checkpoints/")}
    assert folders == {str(found) for found in manager.names()}
    for found in manager.names():
        assert same(manager.restore(found), state(found.step))


def test_c30_the_last_good_one_survives_any_number_of_failed_saves_and_restarts(
    local: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = save(CheckpointManager(local, keep=1), 1)
    put = Store.put

    def failing(self: Store, file: str, data: Any) -> None:
        if file.endswith("state.json"):
            raise StoreFullError("no room")
        put(self, file, data)

    monkeypatch.setattr(Store, "put", failing)
    for generation in (2, 3):
        manager = CheckpointManager(local, keep=1)
        for step in (2, 3, 4):
            with pytest.raises(StoreFullError):
                save(manager, step, generation, parent=good)
        assert manager.names() == [good]
        assert same(manager.restore(good), state(1))
    monkeypatch.undo()
    save(CheckpointManager(local, keep=1), 2, 4, parent=good)
    assert CheckpointManager(local).names() == [name(2, 4)]


def test_c30_a_new_line_after_a_roll_back_by_hand_keeps_its_own(local: Store) -> None:
    manager = CheckpointManager(local, keep=3)
    for step in (300, 400, 500, 600, 700):
        save(manager, step, protect=[name(300)])
    for step in (500, 600, 700):
        local.delete_tree(name(step).folder)
    manager = CheckpointManager(local, keep=3)
    assert manager.latest() == name(300)
    for step in (400, 500):
        save(manager, step, generation=2, parent=name(300))
    assert manager.names() == [name(500, 2), name(400, 2), name(300)]


def test_what_is_newer_than_the_own_commit_is_never_deleted(local: Store) -> None:
    newer = CheckpointManager(local, keep=5)
    for step in (1, 2, 3):
        save(newer, step, generation=7)
    older = CheckpointManager(local, keep=1)
    save(older, 90, generation=6)
    save(older, 91, generation=6)
    assert newer.names() == [name(3, 7), name(2, 7), name(1, 7), name(91, 6)]


def test_with_keep_one_the_older_goes_only_when_the_newer_was_read_back(
    local: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    manager = CheckpointManager(local, keep=1)
    save(manager, 1)
    put = Store.put

    def shifted(self: Store, file: str, data: Any) -> None:
        wrong = bytes(data[:4200]) + b"\0" + bytes(data[4200:-1])
        put(self, file, wrong if len(data) > 4200 else data)

    with monkeypatch.context() as patch:  # C34: the right size, wrong bytes
        patch.setattr(Store, "put", shifted)
        save(manager, 2)
    assert steps(manager) == [2, 1]
    assert "do not verify" in caplog.text
    found = manager.restore_newest()
    assert found is not None
    assert same(found[1], state(1))
    save(manager, 3)
    assert steps(manager) == [3]


@pytest.mark.parametrize("kind", ["itself", "nowhere"])
def test_a_data_file_that_is_a_link_to_nothing_is_damage(
    kind: str, local: Store, caplog: pytest.LogCaptureFixture
) -> None:
    manager = CheckpointManager(local)
    save(manager, 1)
    save(manager, 2)
    assert local.folder is not None
    file = local.folder / name(2).folder / "model.safetensors"
    file.unlink()
    file.symlink_to(file.name if kind == "itself" else "elsewhere")
    found = CheckpointManager(local).restore_newest()
    assert found is not None
    assert same(found[1], state(1))
    assert str(name(2)) in caplog.text


def test_checkpoints_behind_a_link_that_leads_nowhere_are_not_taken_for_none(local: Store) -> None:
    save(CheckpointManager(local), 1)
    assert local.folder is not None
    disk = local.folder.with_name("disk")
    (local.folder / "checkpoints").rename(disk)
    (local.folder / "checkpoints").symlink_to(disk)
    assert steps(CheckpointManager(local)) == [1]
    disk.rename(disk.with_name("elsewhere"))
    with pytest.raises(PermanentStoreError, match="a link that leads nowhere"):
        CheckpointManager(local).restore_newest()
    with pytest.raises(CheckpointError, match="a link that leads nowhere"):
        save(CheckpointManager(local), 2)


def test_a_checkpoint_of_a_newer_version_is_refused_and_stays(local: Store) -> None:
    manager = CheckpointManager(local, keep=1)
    save(manager, 1)
    path = name(1).manifest
    values = parse(local.get(path), path)
    values["format"] = 2
    local.put(path, signed(values))
    for step in (2, 3):
        manager = CheckpointManager(local, keep=1)
        with pytest.raises(NewerFormatError, match="a newer version of this package wrote it"):
            manager.restore_newest()
        save(manager, step)
    assert local.exists(path)


@pytest.mark.parametrize("key", [0, None, True, ("a",), "a/b"])
def test_a_key_that_names_no_file_is_refused_by_its_name(key: Any, local: Store) -> None:
    with pytest.raises(UnsupportedStateError, match="found a key that makes no file name"):
        CheckpointManager(local).stage(
            {"model": {}, key: torch.ones(1)}, name=name(1), parent=None, run_id="r", info={}
        )


def test_a_manifest_that_arrived_torn_is_seen_before_the_older_checkpoint_goes(
    local: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    manager = CheckpointManager(local, keep=1)
    save(manager, 1)
    put_new = Store.put_new

    def torn(self: Store, file: str, data: bytes) -> bool:
        return put_new(self, file, data[:-9])

    with monkeypatch.context() as patch:
        patch.setattr(Store, "put_new", torn)
        save(manager, 2)
    assert "old checkpoints stay for now" in caplog.text
    found = manager.restore_newest()
    assert found is not None
    assert same(found[1], state(1))


def test_the_example_of_the_docs_goes_on_at_each_start_and_releases_what_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (ROOT / "docs" / "checkpoint-format.md").read_text(encoding="utf-8")
    example = compile(page.rpartition("```python\n")[2].partition("```")[0], "example", "exec")
    monkeypatch.chdir(tmp_path)
    for start in (1, 2):
        names: dict[str, Any] = {}
        exec(example, names)  # noqa: S102  # what the docs tell people to run
        assert names["manager"].latest() == name(3 * start, start)

    def full(*_: Any) -> None:
        raise StoreFullError("no room")

    monkeypatch.setattr(Store, "put", full)
    names = {}
    with pytest.raises(StoreFullError):
        exec(example, names)  # noqa: S102
    assert names["snapshot"].is_released
    assert names["manager"].latest() == name(6, 2)


def test_failing_retention_is_told_and_does_not_fail_the_commit(
    local: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    manager = CheckpointManager(local, keep=1)
    save(manager, 1)

    def refused(*_: Any) -> None:
        raise PermanentStoreError("may not delete")

    with monkeypatch.context() as patch:
        patch.setattr(Store, "delete", refused)
        save(manager, 2)
    assert "old checkpoints stay for now" in caplog.text
    assert "may not delete" in caplog.text
    assert steps(manager) == [2, 1]
    save(manager, 3)
    assert steps(manager) == [3]


def test_files_to_which_a_remaining_manifest_refers_stay(local: Store) -> None:
    manager = CheckpointManager(local, keep=1)
    save(manager, 1)
    first = manager.catalog.manifest(name(1))
    files = tuple(
        FileEntry(name=e.name, size_bytes=e.size_bytes, parts=e.parts, owner=name(1))
        if e.name == "model.safetensors"
        else e
        for e in first.files
    )
    for entry in files:
        if entry.owner is None:
            local.put(name(2).file(entry.name), local.get(name(1).file(entry.name)))
    referring = Manifest(name=name(2), parent=name(1), run_id="r", files=files)
    local.put_new(name(2).manifest, referring.to_json())
    save(manager, 3, protect=[name(2)])
    assert steps(manager) == [3, 2]
    assert local.list(name(1).folder) == [
        name(1).manifest,  # void: nobody can write over the file
        name(1).file("model.safetensors"),
    ]
    assert same(manager.restore(name(2)), state(1))
    save(manager, 4, protect=[name(2)])  # the remains of 1 are swept now, but not this file
    assert same(CheckpointManager(local).restore(name(2)), state(1))
    save(manager, 5)
    save(manager, 6)
    assert [file for file in local.list("checkpoints/") if file.endswith("tensors")] == [
        name(6).file(f"{key}.safetensors") for key in ("job", "model", "optimizer")
    ]


# ------------------------------------------------------------------------------------------ leftovers
def test_c25_a_folder_without_a_manifest_is_ignored_and_swept_after_its_name_is_taken(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    manager = CheckpointManager(store)
    save(manager, 1)
    store.put(name(99).file("model.safetensors"), b"half")
    assert manager.latest() == name(1)
    assert manager.latest() == name(1)
    assert caplog.text.count(f"{name(99)}: was never committed; it is left out") == 1
    save(manager, 2)  # 99 could still be on its way: it is of this generation, and greater
    assert store.exists(name(99).file("model.safetensors"))
    save(manager, 5, generation=2)
    assert store.list(name(99).folder) == [name(99).manifest]
    assert is_void(store.get(name(99).manifest))
    assert manager.names() == [name(5, 2), name(2), name(1)]
    assert CheckpointManager(store).names() == [name(5, 2), name(2), name(1)]
    assert manager.catalog.inventory().void == {name(99)}


def test_a_writer_that_was_swept_cannot_commit_any_more(store: Store) -> None:
    slow, fast = CheckpointManager(store), CheckpointManager(store)
    snapshot = slow.stage(state(7), name=name(7), parent=None, run_id="r", info={})
    store.put(name(7).file("model.safetensors"), b"half")
    save(fast, 1, generation=2)
    with pytest.raises(CheckpointError, match="was swept before it was committed"):
        slow.commit(snapshot)
    assert fast.names() == [name(1, 2)]


def test_a_writer_that_was_only_slow_wins_against_the_sweep(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, fast = CheckpointManager(store), CheckpointManager(store)
    snapshot = slow.stage(state(7), name=name(7), parent=None, run_id="r", info={})
    store.put(name(7).file("model.safetensors"), b"half")
    put_new = Store.put_new

    def slow_commits_first(self: Store, file: str, data: bytes) -> bool:
        if file == name(7).manifest and is_void(data):
            with monkeypatch.context() as patch:
                patch.setattr(Store, "put_new", put_new)
                slow.commit(snapshot)
        return put_new(self, file, data)

    monkeypatch.setattr(Store, "put_new", slow_commits_first)
    save(fast, 1, generation=2)
    assert fast.names() == [name(1, 2), name(7)]
    assert same(fast.restore(name(7)), state(7))


def test_a_sweep_that_was_killed_is_finished_later(store: Store) -> None:
    store.put(name(7).file("model.safetensors"), b"half")
    store.put_new(name(7).manifest, void_manifest())
    manager = CheckpointManager(store)
    assert manager.names() == []
    save(manager, 1, generation=2)
    assert store.list(name(7).folder) == [name(7).manifest]


def test_what_a_writer_killed_in_its_first_file_left_unseen_is_swept(
    local: Store, tmp_path: Path
) -> None:
    folder = tmp_path / "run" / name(7).folder
    folder.mkdir(parents=True)
    (folder / ".tmp-1-abcdef").write_bytes(b"half a model")
    assert local.list() == []
    manager = CheckpointManager(local)
    save(manager, 1, generation=2)
    assert [path.name for path in folder.iterdir()] == ["manifest.json"]


# ----------------------------------------------------------------------------------- fence and threads
def test_nothing_is_committed_or_deleted_once_a_newer_generation_was_claimed(local: Store) -> None:
    claimed: list[int] = []

    def fence() -> None:
        if claimed:
            raise SupersededError("a newer generation was claimed", generation=1, newest=2)

    manager = CheckpointManager(local, keep=1, fence=fence)
    save(manager, 1)
    claimed.append(2)
    with pytest.raises(SupersededError):
        save(manager, 2)
    assert manager.names() == [name(1)]


def test_a_writer_that_is_overtaken_between_commit_and_retention_deletes_nothing(
    local: Store,
) -> None:
    asked: list[int] = []

    def fence() -> None:
        asked.append(1)
        if len(asked) == 3:
            raise SupersededError("a newer generation was claimed", generation=1, newest=2)

    manager = CheckpointManager(local, keep=1, fence=fence)
    save(manager, 1)
    save(manager, 2)
    assert steps(manager) == [2, 1]


def test_commits_run_in_a_thread_while_the_next_state_is_staged(local: Store) -> None:
    manager = CheckpointManager(local, keep=100)
    weights = torch.zeros(1000)
    for step in range(1, 11):
        weights.fill_(step)
        tree: dict[str, object] = {"model": {"w": weights}, "step": step}
        snapshot = manager.stage(tree, name=name(step), parent=None, run_id="r", info={})
        thread = threading.Thread(target=manager.commit, args=(snapshot,))
        thread.start()
        weights.fill_(-1)
        if step % 2:
            thread.join()
    thread.join()
    assert manager.wait(10)
    for found in manager.names():
        tree = manager.restore(found)
        model = tree["model"]
        assert isinstance(model, dict)
        assert bool((model["w"] == found.step).all())
        assert tree["step"] == found.step
    assert len(manager.names()) == 10


def test_wait_gives_up_after_its_time(local: Store) -> None:
    entered, leave = threading.Event(), threading.Event()

    def fence() -> None:
        entered.set()
        leave.wait()

    manager = CheckpointManager(local, fence=fence)
    thread = threading.Thread(target=save, args=(manager, 1))
    thread.start()
    entered.wait()
    assert not manager.wait(0.05)
    leave.set()
    thread.join()
    assert manager.wait(0.05)


# ------------------------------------------------------------------------------------------- walk-back
def flip(store: Store, file: str) -> None:
    data = bytearray(store.get(file))
    data[len(data) // 2] ^= 1
    store.put(file, bytes(data))


def cut(store: Store, file: str) -> None:
    store.put(file, store.get(file)[:-3])


def drop(store: Store, file: str) -> None:
    store.delete(file)


def swap(store: Store, file: str) -> None:
    store.put(file, store.get(file.replace(str(name(3)), str(name(2)))))


@pytest.mark.parametrize("damage", [flip, cut, drop, swap], ids=lambda d: d.__name__)
@pytest.mark.parametrize(
    "file",
    [
        "model.safetensors",
        "optimizer.safetensors",
        "job.safetensors",
        "state.json",
        "manifest.json",
    ],
)
def test_older_checkpoint_is_used_when_newest_is_damaged(
    file: str,
    damage: Callable[[Store, str], None],
    store: Store,
    caplog: pytest.LogCaptureFixture,
) -> None:
    manager = CheckpointManager(store)
    for step in (1, 2, 3):
        save(manager, step)
    damage(store, name(3).file(file))
    found = CheckpointManager(store).restore_newest()
    assert found is not None
    assert found[0].name == name(2)
    assert same(found[1], state(2))
    without_manifest = file == "manifest.json" and damage is drop
    assert without_manifest or str(name(3)) in caplog.text


def test_a_damaged_checkpoint_does_not_count_for_retention_and_goes_in_the_end(
    local: Store,
) -> None:
    manager = CheckpointManager(local, keep=2)
    for step in (1, 2):
        save(manager, step)
    flip(local, name(2).manifest)
    with pytest.raises(DamagedError):
        manager.restore(name(2))
    save(manager, 3)
    assert steps(manager) == [3, 2, 1]  # two good ones, and one that may be looked at
    save(manager, 4)
    assert steps(manager) == [4, 3]


# --------------------------------------------------------------------------------------------- resolve
def test_a_checkpoint_is_found_by_latest_best_step_and_name(store: Store) -> None:
    manager = CheckpointManager(store, keep=9)
    save(manager, 10)
    save(manager, 20)
    save(manager, 20, generation=2, best=name(10))
    assert manager.resolve("latest") == name(20, 2)
    assert manager.resolve("best") == name(10)
    assert manager.resolve("20") == name(20, 2)
    assert manager.resolve(str(name(20))) == name(20)
    for which in ("30", str(name(30)), "worst"):
        with pytest.raises(
            NoCheckpointError, match=f"no checkpoint '{which}'; newest steps: 20, 20"
        ):
            manager.resolve(which)


def test_the_best_is_taken_from_the_summary_where_the_checkpoint_does_not_tell(
    store: Store,
) -> None:
    manager = CheckpointManager(store)
    save(manager, 10)
    save(manager, 20)
    with pytest.raises(NoCheckpointError, match="no checkpoint 'best'"):
        manager.resolve("best")
    summary = {"best": {"metric": "loss", "value": 0.1, "step": 10, "checkpoint": str(name(10))}}
    store.put("summary.json", json.dumps(summary).encode())
    assert manager.resolve("best") == name(10)


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("s3://b/run@best", ("s3://b/run", "best")),
        ("runs/digits@latest", ("runs/digits", "latest")),
        ("runs/digits@1200", ("runs/digits", "1200")),
        ("runs/x@000007-000000001200", ("runs/x", "000007-000000001200")),
        ("sftp://user:pa55@host/run", ("sftp://user:pa55@host/run", None)),
        ("sftp://user:pa55@host/run@best", ("sftp://user:pa55@host/run", "best")),
        ("runs/a@b", ("runs/a@b", None)),
        ("@best", ("@best", None)),
    ],
)
def test_an_address_may_name_a_checkpoint(address: str, expected: tuple[str, str | None]) -> None:
    assert split_address(address) == expected


@pytest.mark.parametrize("option", ["keep", "keep_every", "part_bytes", "split_bytes"])
def test_an_impossible_option_is_refused(option: str, local: Store) -> None:
    impossible: Any = {option: -1}
    with pytest.raises(
        OptionError, match=f"^{option}: found -1, expected a whole number of at least 1"
    ):
        CheckpointManager(local, **impossible)


# -------------------------------------------------------------------------------------------- SIGKILL
# Imports once, then forks one saver for each line that it reads, and tells when that one is dead.
SAVERS = """
import os, sys, torch
from checkpoints.layout import CheckpointName
from checkpoints.manager import CheckpointManager
from checkpoints.store import open_store

def save_for_ever(url, generation):
    manager = CheckpointManager(open_store(url), keep=2, split_bytes=3_000_000)
    found = manager.restore_newest()
    step = found[1]["step"] if found else 0
    parent = found[0].name if found else None
    weights = torch.full((1_000_000,), float(step))
    print("ready", flush=True)
    while True:
        step += 1
        weights += 1
        tree = {"model": {"w": weights, "half": weights[:500_000]}, "step": step}
        name = CheckpointName(generation, step)
        manager.commit(manager.stage(tree, name=name, parent=parent, run_id="r", info={}))
        print(step, flush=True)

for line in sys.stdin:
    pid = os.fork()
    if pid == 0:
        save_for_ever(sys.argv[1], int(line))
    print("pid", pid, flush=True)
    os.waitpid(pid, 0)
    print("dead", flush=True)
"""


def until(stream: IO[str], *words: str) -> list[str]:
    """Read lines until each of the words began one."""
    lines: list[str] = []
    while not all(any(line.startswith(word) for line in lines) for word in words):
        line = stream.readline()
        assert line, f"the savers ended: {lines}"
        lines.append(line.strip())
    return lines


def test_c25_killed_at_any_moment_of_a_save_the_newest_committed_one_verifies(
    tmp_path: Path,
) -> None:
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    draw = random.Random(seed)
    url = str(tmp_path / "run")
    command = [sys.executable, "-c", SAVERS, url]
    known = 0
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True) as savers:
        assert savers.stdin is not None
        assert savers.stdout is not None
        for generation in range(1, 11):
            savers.stdin.write(f"{generation}\n")
            savers.stdin.flush()
            lines = until(savers.stdout, "pid", "ready")
            began = time.monotonic()
            lines.append(savers.stdout.readline().strip())
            time.sleep(draw.uniform(0.0, 1.2) * (time.monotonic() - began))
            pid = next(int(line.split()[1]) for line in lines if line.startswith("pid"))
            os.kill(pid, signal.SIGKILL)
            lines += until(savers.stdout, "dead")
            known = max([known, *(int(line) for line in lines if line.isdecimal())])
            known = check_newest(url, known)
        savers.stdin.close()
    assert known > 0
    manager = CheckpointManager(open_store(url))
    inventory = manager.catalog.inventory()
    temps = list((tmp_path / "run").rglob(".tmp-*"))
    assert {temp.parent.name for temp in temps} <= {str(found) for found in inventory.unfinished}
    save(manager, known + 1, generation=11)
    assert manager.catalog.inventory().unfinished == []


def check_newest(url: str, known: int) -> int:
    """Verify the newest checkpoint; its step is at least the last one that was told."""
    manager = CheckpointManager(open_store(url))
    newest = manager.latest()
    if newest is None:
        assert known == 0
        return 0
    reader.verify(manager.store, manager.catalog.manifest(newest))
    tree = manager.restore(newest)
    model = tree["model"]
    assert isinstance(model, dict)
    assert bool((model["w"] == newest.step).all())
    assert tree["step"] == newest.step
    assert newest.step >= known
    return newest.step


def test_a_start_after_damage_or_a_sweep_has_names_that_are_free(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    manager = CheckpointManager(store)
    assert manager.next_generation() == 1
    for generation in (1, 2):
        own = CheckpointName(generation=generation, step=4)
        manager.commit(manager.stage(state(4), name=own, parent=None, run_id="r", info={}))
    store.put(CheckpointName(generation=2, step=4).manifest, b"damaged")
    assert CheckpointManager(store).next_generation() == 3
    store.put(CheckpointName(generation=3, step=5).file("model.safetensors"), b"begun")
    assert commands.main(["sweep", str(tmp_path), "--force"]) == 0
    assert CheckpointManager(store).next_generation() == 4


@pytest.mark.parametrize("info", [{"a": "\N{GRINNING FACE}" * 20_000}, {"a": '"' * 400_000}])
def test_info_of_any_letters_has_room(tmp_path: Path, info: dict[str, JSON]) -> None:
    manager = CheckpointManager(open_store(tmp_path))
    manager.commit(manager.stage(state(1), name=name(1), parent=None, run_id="r", info=info))
    assert CheckpointManager(manager.store).catalog.info(name(1)).info == info


@pytest.mark.parametrize("numbers", [{"keep": 2.5}, {"keep": "3"}, {"keep_every": 0}])
def test_numbers_that_are_none_are_refused_before_anything_is_saved(
    tmp_path: Path, numbers: dict[str, Any]
) -> None:
    with pytest.raises(OptionError, match="expected a whole number of at least 1"):
        CheckpointManager(open_store(tmp_path), **numbers)


@pytest.mark.parametrize("step", [1.0, True, torch.tensor(3)])
def test_a_name_of_what_is_no_whole_number_is_refused(step: Any) -> None:
    with pytest.raises(RecordError, match="expected whole numbers"):
        CheckpointName(generation=1, step=step)


@pytest.mark.parametrize("shape", [[1] * 65, [0, 2**40, 2**21], [0, 2**62]])
def test_a_shape_that_no_reader_takes_is_refused_when_it_is_staged(
    tmp_path: Path, shape: list[int]
) -> None:
    manager = CheckpointManager(open_store(tmp_path))
    tree = {"model": {"w": torch.zeros(shape)}}
    with pytest.raises(UnsupportedStateError, match="'w': found shape"):
        manager.stage(tree, name=name(1), parent=None, run_id="r", info={})
