"""Deleting by hand: what goes, what stays, and that nobody deletes beside a living run unasked."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from checkpoints import commands, segments
from checkpoints.generations import write_started
from checkpoints.journal import Journal
from checkpoints.layout import AgentId, Claim, Rollback, Started, claim_name, is_void
from checkpoints.living import may_be_at_work
from checkpoints.manager import CheckpointManager
from checkpoints.processes import boot_id, this_process
from checkpoints.store import Store, open_store
from tests.support.states import name, same, state


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A run of ten checkpoints, of which that of step 20 is the best."""
    found = open_store(str(tmp_path / "run"))
    manager = CheckpointManager(found, keep=100)
    for step in range(10, 110, 10):
        best = {"best": str(name(20))}
        tree = state(step)
        manager.commit(manager.stage(tree, name=name(step), parent=None, run_id="r", info=best))
    return found


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, Any, str]:
    code = commands.main([*argv, "--json"])
    out, err = capsys.readouterr()
    return code, json.loads(out) if out else None, err


def steps(store: Store) -> list[int]:
    return [found.step for found in CheckpointManager(store).names()]


def claim(store: Store, generation: int = 1, agent: AgentId | None = None) -> None:
    made = Claim(
        generation=generation,
        run_id="r",
        launch="l",
        agents=(agent or AgentId(host="elsewhere", boot_id="another", pid=7, start=7),),
        world_size=1,
        nodes=1,
        hosts=("elsewhere",),
    )
    store.put_new(claim_name(generation), made.to_json())


# -------------------------------------------------------------------------------------------- prune
def test_prune_keeps_the_newest_every_so_many_th_and_the_best(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    code, told, _ = run(capsys, "prune", store.url, "--keep", "2", "--keep-every", "50")
    assert code == 0
    assert steps(store) == [100, 90, 50, 20]
    assert told["deleted"] == [str(name(step)) for step in (10, 30, 40, 60, 70, 80)]
    assert told["kept"] == [str(name(step)) for step in (100, 90, 50, 20)]
    assert told["verified"] == str(name(100))
    assert told["freed_bytes"] > 6 * 8 * 8 * 4
    folders = {file.split("/")[1] for file in store.list("checkpoints/")}
    assert folders == {str(name(step)) for step in (100, 90, 50, 20)}
    for step in (100, 90, 50, 20):
        assert same(CheckpointManager(store).restore(name(step)), state(step))


def test_where_the_best_is_not_known_none_that_may_be_it_is_pruned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(str(tmp_path))
    manager = CheckpointManager(store, keep=100)
    for step in (1, 2, 3):
        manager.commit(
            manager.stage(state(step), name=name(step), parent=None, run_id="r", info={})
        )
    store.put("summary.json", b"{")
    code, answer, _ = run(capsys, "prune", store.url, "--keep", "1", "--force")
    assert code == 0
    assert answer["deleted"] == []
    assert "which checkpoint is the best is not known, so none is deleted" in caplog.text
    store.delete("summary.json")
    run(capsys, "prune", store.url, "--keep", "1", "--force")
    assert steps(store) == [3]


def test_what_a_rollback_left_behind_counts_for_nothing(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    claim(store, 1)
    back = Rollback(generation=2, to=name(50))
    mine = Claim.from_json(store.get(claim_name(1)), claim_name(1))
    store.put_new(claim_name(2), replace(mine, generation=2, rollbacks=(back,)).to_json())
    assert steps(store) == [50, 40, 30, 20, 10]
    _, told, _ = run(capsys, "prune", store.url, "--keep", "2", "--force")
    assert told["verified"] == str(name(50))
    assert steps(store) == [50, 40, 20]  # the best is of step 20


def test_a_dry_run_says_the_same_and_deletes_nothing(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    claim(store)  # a dry run is harmless beside a living one
    before = store.list()
    _, planned, _ = run(capsys, "prune", store.url, "--keep", "1", "--dry-run")
    assert store.list() == before
    assert planned["dry_run"]
    assert commands.main(["prune", store.url, "--keep", "1", "--dry-run"]) == 0
    assert f"would delete {name(90)}" in capsys.readouterr().out
    _, done, _ = run(capsys, "prune", store.url, "--keep", "1", "--force")
    for key in ("deleted", "kept", "freed_bytes"):
        assert planned[key] == done[key]


def test_what_is_damaged_does_not_count_and_one_that_verifies_always_stays(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (100, 90):
        file = name(step).file("model.safetensors")
        data = bytearray(store.get(file))
        data[-1] ^= 1
        store.put(file, bytes(data))
    code, told, _ = run(capsys, "prune", store.url, "--keep", "1")
    assert code == 0
    assert told["damaged"] == [str(name(100)), str(name(90))]
    assert told["verified"] == str(name(80))
    assert steps(store) == [100, 90, 80, 20]  # someone may want to look at the damaged ones
    found = CheckpointManager(store).restore_newest()
    assert found is not None
    assert found[0].name == name(80)


def test_where_none_verifies_nothing_is_deleted(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in range(10, 110, 10):
        store.delete(name(step).file("state.json"))
    code, told, _ = run(capsys, "prune", store.url, "--keep", "1")
    assert (code, told["deleted"], told["verified"]) == (0, [], None)
    assert len(steps(store)) == 10


def test_c30_the_one_that_the_newest_generation_began_from_stays(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    claim(store, 2)
    parent = str(name(40))
    write_started(
        store,
        Started(generation=2, parent=parent, source="store", start_step=40, position=(0, 0)),
    )
    run(capsys, "prune", store.url, "--keep", "1", "--force")
    assert steps(store) == [100, 40, 20]


# ------------------------------------------------------------------------------------------- living
def summary(store: Store, generation: int, status: str) -> None:
    store.put("summary.json", json.dumps({"generation": generation, "status": status}).encode())


def test_beside_a_run_that_may_be_at_work_both_want_to_be_forced(
    store: Store, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    claim(store)
    summary(store, 1, "running")
    for argv in (["prune", store.url, "--keep", "1"], ["sweep", store.url]):
        code, told, err = run(capsys, *argv)
        assert (code, told) == (2, None)
        assert "generation 1 has not said that it ended" in err
        assert "--force" in err
        assert len(steps(store)) == 10
    code, _, _ = run(capsys, "prune", store.url, "--keep", "1", "--force")
    assert code == 0
    assert "going on, since --force was given" in caplog.text
    assert steps(store) == [100, 20]


def test_a_run_rests_when_it_has_said_so_or_all_its_agents_are_dead_on_this_machine(
    store: Store,
) -> None:
    assert may_be_at_work(store) is None  # nothing ever claimed: a library user's own loop
    claim(store)
    for status in ("running", "complete", "preempted", "stopped", "failed"):
        summary(store, 1, status)
        assert (may_be_at_work(store) is None) == (status != "running")
    store.put("summary.json", b'{"generation": [1], "status": ["complete"]}')
    assert may_be_at_work(store) is not None  # that is no summary
    claim(store, 2)
    assert may_be_at_work(store) is not None  # what an older generation said does not count
    with Journal(store, 2) as journal:
        journal.event("end", status="complete")
    assert may_be_at_work(store) is None
    claim(store, 3, this_process())
    assert may_be_at_work(store) is not None
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        child.wait()
    dead = AgentId(host="here", boot_id=boot_id(), pid=child.pid, start=1)
    claim(store, 4, dead)
    assert may_be_at_work(store) is None
    claim(store, 5)
    store.put(claim_name(5), b"{}")  # a claim that cannot be read proves nothing
    assert may_be_at_work(store) is not None


# -------------------------------------------------------------------------------------------- sweep
def test_sweep_takes_the_name_first_and_then_the_remains(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    claim(store)
    summary(store, 1, "failed")
    for step in (95, 200):
        store.put(name(step).file("model.safetensors"), b"half")
    (tmp_path / "run" / name(200).folder / ".tmp-1-a").write_bytes(b"half")
    (tmp_path / "run" / name(100).folder / ".tmp-1-b").write_bytes(b"half")
    (tmp_path / "run" / ".tmp-1-c").write_bytes(b"half")
    kept = CheckpointManager(store).names()
    _, planned, _ = run(capsys, "sweep", store.url, "--dry-run")
    assert store.exists(name(200).file("model.safetensors"))
    code, told, _ = run(capsys, "sweep", store.url)
    assert code == 0
    assert told["swept"] == planned["swept"] == [str(name(95)), str(name(200))]
    assert told["freed_bytes"] == planned["freed_bytes"] == 8
    for step in (95, 200):
        assert store.list(name(step).folder) == [name(step).manifest]
        assert is_void(store.get(name(step).manifest))
    assert not list((tmp_path / "run").rglob(".tmp-*"))
    assert CheckpointManager(store).names() == kept
    code, told, _ = run(capsys, "sweep", store.url)
    assert (code, told["swept"], told["files"]) == (0, [], [])
    assert commands.main(["sweep", store.url]) == 0
    assert "swept 0 files (0 B)" in capsys.readouterr().out


def test_a_paused_writer_that_commits_beside_the_sweep_keeps_its_checkpoint_or_learns_of_it(
    store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = CheckpointManager(store)
    snapshot = slow.stage(state(200), name=name(200), parent=None, run_id="r", info={})
    store.put(name(200).file("model.safetensors"), b"half")
    put_new = Store.put_new

    def slow_commits_first(self: Store, file: str, data: bytes) -> bool:
        if file == name(200).manifest and is_void(data):
            with monkeypatch.context() as patch:
                patch.setattr(Store, "put_new", put_new)
                slow.commit(snapshot)
        return put_new(self, file, data)

    with monkeypatch.context() as patch:
        patch.setattr(Store, "put_new", slow_commits_first)
        code, told, _ = run(capsys, "sweep", store.url, "--force")
    assert (code, told["swept"]) == (0, [])
    assert told["committed_meanwhile"] == [str(name(200))]
    assert same(CheckpointManager(store).restore(name(200)), state(200))
    late = slow.stage(state(300), name=name(300), parent=None, run_id="r", info={})
    store.put(name(300).file("model.safetensors"), b"half")
    run(capsys, "sweep", store.url, "--force")
    with pytest.raises(Exception, match="was swept before it was committed"):
        slow.commit(late)
    assert CheckpointManager(store).latest() == name(200)


def test_beside_a_loop_of_ones_own_sweep_leaves_what_may_be_under_way(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, live = (name(step).file("model.safetensors") for step in (95, 200))
    first = tmp_path / "run" / ".tmp-1-c"  # on S3: an upload to a folder that no listing shows
    first.write_bytes(b"half")
    store.put(old, b"half")
    store.put(live, b"half")
    code, _, err = run(capsys, "sweep", store.url)
    assert (code, store.exists(old), store.exists(live)) == (2, True, True)
    assert f"checkpoint {name(200)} was begun, and no generation tells" in err
    store.delete(live)
    store.delete_tree(name(200).folder)
    code, told, _ = run(capsys, "sweep", store.url)  # 95 is older than what was committed since
    assert (code, told["swept"]) == (0, [str(name(95))])
    assert first.exists()


def test_sweep_clears_the_memory_of_dead_runs_and_leaves_that_of_the_living(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        child.wait()
    dead = AgentId(host="here", boot_id=boot_id(), pid=child.pid, start=1)
    gone = segments.segment_path(dead, "r", 1)
    stays = segments.segment_path(this_process(), "r", 1)
    for path in (gone, stays):
        path.write_bytes(b"snapshot")
    try:
        _, planned, _ = run(capsys, "sweep", store.url, "--dry-run")
        assert str(gone) in planned["memory"]
        assert gone.exists()
        _, told, _ = run(capsys, "sweep", store.url)
        assert str(gone) in told["memory"]
        assert not gone.exists()
        assert stays.exists()
    finally:
        stays.unlink(missing_ok=True)
        gone.unlink(missing_ok=True)


def test_what_is_no_file_is_told_waited_for_by_nobody_and_harms_no_other(
    store: Store,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = tmp_path / "run"
    (folder / name(200).folder).mkdir()
    os.mkfifo(folder / name(200).manifest)
    (folder / name(201).manifest).mkdir(parents=True)
    (folder / name(202).folder).mkdir()
    (folder / name(202).manifest).symlink_to("manifest.json")
    (folder / name(202).file("up")).symlink_to("..")
    _, listed, _ = run(capsys, "ls", store.url)
    assert len(listed["checkpoints"]) >= 10
    code, answer, _ = run(capsys, "verify", store.url)
    assert code == 1
    assert any("manifest.json: found a FIFO, expected a file" in line for line in problems(answer))
    run(capsys, "sweep", store.url, "--force")
    assert f"checkpoint {name(201)}: left as it is" in caplog.text
    assert {100, 90, 10} <= set(steps(store))
    manager = CheckpointManager(store)
    found = manager.restore_newest()
    assert found is not None
    assert found[0].name == name(100)


def test_links_to_folders_outside_are_no_checkpoints_and_nothing_behind_them_is_deleted(
    store: Store,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    outside = tmp_path / "outside"
    for kind in ("begun", "copy"):
        (outside / kind).mkdir(parents=True)
        (outside / kind / "precious.txt").write_text("precious")
    folder = tmp_path / "run"
    shutil.copytree(folder / name(10).folder, outside / "copy", dirs_exist_ok=True)
    (folder / name(5).folder).symlink_to(outside / "begun")
    (folder / name(6).folder).symlink_to(outside / "copy")
    (folder / name(10).folder / "deeper").symlink_to(outside / "begun")
    before = sorted(outside.rglob("*"))
    code, listed, _ = run(capsys, "ls", store.url)
    assert code == 0
    assert not listed["unfinished"]
    assert "found a link to a folder, which is passed over" in caplog.text
    assert {5, 6} & set(steps(store)) == set()
    run(capsys, "sweep", store.url, "--force")
    run(capsys, "prune", store.url, "--keep", "1", "--force")
    # The automatic sweep and retention of a commit, which deletes the rest.
    manager = CheckpointManager(open_store(store.url), keep=1)
    manager.commit(manager.stage(state(200), name=name(200), parent=None, run_id="r", info={}))
    assert steps(store) == [200]
    assert sorted(outside.rglob("*")) == before


def test_a_run_whose_checkpoints_lie_on_another_disk_by_a_link_is_kept_in_order(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run" / "checkpoints").rename(tmp_path / "disk")
    (tmp_path / "run" / "checkpoints").symlink_to(tmp_path / "disk")
    run(capsys, "prune", store.url, "--keep", "2", "--force")
    assert steps(store) == [100, 90, 20]
    assert len(list((tmp_path / "disk").iterdir())) == 3


@pytest.mark.parametrize("kind", ["folder", "fifo"])
def test_what_is_no_file_in_place_of_a_claim_stops_no_command(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    claim(store)
    path = tmp_path / "run" / claim_name(2)
    if kind == "folder":
        path.mkdir()
    else:
        os.mkfifo(path)
    for command in (["ls"], ["verify"], ["prune", "--keep", "2", "--force"], ["sweep", "--force"]):
        code, answer, told = run(capsys, command[0], store.url, *command[1:])
        assert code == 0, told
        assert answer is not None
    assert steps(store) == [100, 90, 20]


def test_a_file_in_place_of_a_checkpoint_is_left_and_told(
    store: Store,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "run" / name(50, 2).folder).write_text("not a folder")
    code = commands.main(["sweep", store.url, "--force"])
    assert code == 0
    assert "found a file at 000002-000000000050, expected a folder" in caplog.text
    assert f"{name(50, 2)}: left as it is" in capsys.readouterr().out
    manager = CheckpointManager(store, keep=2)
    manager.commit(manager.stage(state(9), name=name(9, 3), parent=None, run_id="r", info={}))
    assert len(steps(store)) == 2


def problems(answer: Any) -> list[str]:
    return [line for one in answer["checkpoints"] for line in one["problems"]]


def test_forced_beside_a_living_run_temp_files_stay(store: Store, tmp_path: Path) -> None:
    claim(store)
    temp = tmp_path / "run" / name(100).folder / ".tmp-1-b"
    temp.write_bytes(b"somebody is writing this")
    assert commands.main(["sweep", store.url, "--force"]) == 0
    assert temp.exists()
