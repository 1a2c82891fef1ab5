"""What did not change is not sent again, and what is referred to is never lost."""

import json
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from checkpoints import commands, frozen, parts, reader, references
from checkpoints.errors import CheckpointError, DamagedError
from checkpoints.frozen import Watch
from checkpoints.layout import CheckpointName, FileEntry, PartSum
from checkpoints.manager import CheckpointManager
from checkpoints.store import Store, open_store
from tests.support.states import name, same

SMALL = 1024
FROZEN = "model-00002-of-00002.safetensors"
TRAINED = "model-00001-of-00002.safetensors"


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """References pay from a kilobyte on, so that states are small."""
    monkeypatch.setattr(frozen, "SMALLEST_BYTES", SMALL)
    monkeypatch.setattr(references, "SMALLEST_BYTES", SMALL)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "run"), retry_s=0.1, sleep=lambda _: None)


def tree(step: int, *, backbone: int = 0, says: bool = True) -> dict[str, object]:
    """A model of which the backbone does not change; `says`: as a parameter that wants no gradient."""
    weights = torch.full((40, 40), float(backbone))
    if says:
        weights = torch.nn.Parameter(weights, requires_grad=False)
    return {
        "model": {"backbone": weights, "head": torch.full((8, 8), float(step))},
        "optimizer": {"exp_avg": torch.full((8, 8), step / 3)},
        "step": step,
    }


def expected(step: int, backbone: int = 0) -> dict[str, object]:
    return tree(step, backbone=backbone, says=False)


def save(
    manager: CheckpointManager,
    step: int,
    generation: int = 1,
    *,
    parent: CheckpointName | None = None,
    **options: Any,
) -> CheckpointName:
    here = name(step, generation)
    snapshot = manager.stage(
        tree(step, **options), name=here, parent=parent, run_id="r", info={"step": step}
    )
    try:
        return manager.commit(snapshot).name
    finally:
        snapshot.release()


def owners(manager: CheckpointManager, found: CheckpointName) -> dict[str, CheckpointName | None]:
    return {entry.name: entry.owner for entry in manager.catalog.manifest(found).files}


def test_a_frozen_parameter_is_sent_once_and_referred_to_from_then_on(store: Store) -> None:
    manager = CheckpointManager(store, keep=9)
    for step in (1, 2, 3):
        save(manager, step)
    assert owners(manager, name(1))[FROZEN] is None
    for step in (2, 3):
        found = owners(manager, name(step))
        assert found[FROZEN] == name(1)  # the first owner, not the one before
        assert {file for file, owner in found.items() if owner} == {FROZEN}
        assert FROZEN not in {file.rpartition("/")[2] for file in store.list(name(step).folder)}
        assert same(manager.restore(name(step)), expected(step))
        reader.verify(store, manager.catalog.manifest(name(step)))


def test_the_index_leads_to_each_file_from_the_checkpoints_own_folder(
    store: Store, tmp_path: Path
) -> None:
    manager = CheckpointManager(store)
    for step in (1, 2):
        save(manager, step)
    folder = tmp_path / "run" / name(2).folder
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {"head": TRAINED, "backbone": f"../{name(1)}/{FROZEN}"}
    loaded = {
        weight: load_file(folder / file)[weight] for weight, file in index["weight_map"].items()
    }
    assert torch.equal(loaded["head"], torch.full((8, 8), 2.0))
    assert torch.equal(loaded["backbone"], torch.zeros(40, 40))


def test_a_model_in_which_nothing_is_frozen_is_one_file_and_written_each_time(
    store: Store,
) -> None:
    manager = CheckpointManager(store, keep=9)
    for step in range(1, 5):
        save(manager, step, backbone=step, says=False)
        assert set(owners(manager, name(step)).values()) == {None}
        assert "model.safetensors" in owners(manager, name(step))


def test_tensors_that_say_nothing_are_known_by_their_first_two_snapshots(store: Store) -> None:
    manager = CheckpointManager(store, keep=9)
    for step in range(1, 6):
        save(manager, step, says=False)
        assert same(manager.restore(name(step)), expected(step))
    assert owners(manager, name(2)).keys() & {"model.safetensors"}
    assert owners(manager, name(3))[FROZEN] is None  # a file of its own from here on
    assert owners(manager, name(4))[FROZEN] == name(3)
    assert owners(manager, name(5))[FROZEN] == name(3)


def test_a_key_that_does_not_change_at_all_is_referred_to_as_a_whole(store: Store) -> None:
    manager = CheckpointManager(store, keep=9)
    teacher = {"w": torch.ones(40, 40)}
    for step in (1, 2):
        state: dict[str, object] = {"model": {"w": torch.full((4,), step)}, "teacher": teacher}
        manager.commit(manager.stage(state, name=name(step), parent=None, run_id="r", info={}))
    assert owners(manager, name(2)) == {
        "model.safetensors": None,
        "state.json": None,
        "teacher.safetensors": name(1),
    }


def test_a_thawed_parameter_is_written_again_and_the_rest_goes_on(store: Store) -> None:
    manager = CheckpointManager(store, keep=9)
    save(manager, 1)
    save(manager, 2)
    save(manager, 3, backbone=7)
    save(manager, 4, backbone=7)
    assert owners(manager, name(3))[FROZEN] is None
    assert owners(manager, name(4))[FROZEN] == name(3)
    for step, backbone in ((2, 0), (3, 7), (4, 7)):
        assert same(manager.restore(name(step)), expected(step, backbone))


def test_the_next_generation_refers_to_what_it_began_from(store: Store) -> None:
    save(CheckpointManager(store), 1)
    restored = CheckpointManager(store)
    assert restored.restore_newest() is not None
    save(restored, 2, 2, parent=name(1))
    assert owners(restored, name(2, 2))[FROZEN] == name(1)
    # The writer of a generation has not restored itself: it takes the parent that it is told.
    fresh = CheckpointManager(store)
    save(fresh, 3, 3, parent=name(2, 2))
    assert owners(fresh, name(3, 3))[FROZEN] == name(1)
    stranger = CheckpointManager(store)
    save(stranger, 4, 4)
    assert owners(stranger, name(4, 4))[FROZEN] is None


def test_what_was_deleted_by_hand_in_the_meantime_is_written_again(store: Store) -> None:
    manager = CheckpointManager(store)
    save(manager, 1)

    def fence() -> None:
        store.delete(name(1).file(FROZEN))

    manager._fence = fence
    save(manager, 2)
    assert owners(manager, name(2))[FROZEN] is None
    assert same(CheckpointManager(store).restore(name(2)), expected(2))


def test_a_manifest_of_unknown_outcome_with_references_is_settled_by_writing_again(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = CheckpointManager(store)
    save(manager, 1)
    snapshot = manager.stage(tree(2), name=name(2), parent=None, run_id="r", info={})
    put_new = Store.put_new

    def reply_lost(self: Store, file: str, data: bytes) -> bool:
        put_new(self, file, data)
        raise CheckpointError("the reply was lost")

    with monkeypatch.context() as patch:
        patch.setattr(Store, "put_new", reply_lost)
        with pytest.raises(CheckpointError):
            manager.commit(snapshot)
    manager.commit(snapshot)
    assert same(CheckpointManager(store).restore(name(2)), expected(2))


# ----------------------------------------------------------------------------------------- retention
@pytest.mark.parametrize("cut_short", [False, True])
def test_the_name_of_a_deleted_checkpoint_is_not_free_while_a_file_of_it_is_needed(
    store: Store, cut_short: bool
) -> None:
    manager = CheckpointManager(store, keep=1)
    save(manager, 1)
    save(manager, 2)  # refers to 1, which is deleted now
    if cut_short:
        store.delete(name(1).manifest)
        save(manager, 3)
    before = store.get(name(1).file(FROZEN))
    with pytest.raises(CheckpointError, match="was swept before it was committed, or deleted"):
        save(CheckpointManager(store), 1, backbone=7)
    assert store.get(name(1).file(FROZEN)) == before
    newest = 3 if cut_short else 2
    assert manager.names() == [name(newest)]
    assert same(manager.restore(name(newest)), expected(newest))


def test_a_file_that_others_refer_to_outlives_its_checkpoint_and_goes_with_the_last(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    manager = CheckpointManager(store, keep=2)
    for step in range(1, 7):
        save(manager, step)
    assert [found.step for found in manager.names()] == [6, 5]
    assert name(1).file(FROZEN) in store.list()
    assert manager.catalog.inventory().unfinished == []
    assert commands.main(["ls", store.url]) == 0
    assert str(name(1)) not in capsys.readouterr().out
    for step in (5, 6):
        assert same(CheckpointManager(store).restore(name(step)), expected(step))
    for step in (7, 8, 9):
        save(manager, step, backbone=1)
    assert not [file for file in store.list(name(1).folder) if file.endswith(".safetensors")]
    assert [found.step for found in manager.names()] == [9, 8]
    for step in (8, 9):
        assert same(CheckpointManager(store).restore(name(step)), expected(step, 1))


def flip(store: Store, file: str) -> None:
    data = bytearray(store.get(file))
    data[-5] ^= 1
    store.put(file, bytes(data))


def cut(store: Store, file: str) -> None:
    store.put(file, store.get(file)[:-3])


def swap(store: Store, file: str) -> None:
    store.put(file, store.get(file.replace(str(name(2)), str(name(1)))))


@pytest.mark.parametrize("damage", [flip, cut, Store.delete, swap], ids=lambda d: d.__name__)
def test_damage_of_a_file_that_is_referred_to_is_found_in_each_that_refers_and_the_one_before_is_taken(
    damage: Callable[[Store, str], None],
    store: Store,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    manager = CheckpointManager(store, keep=9)
    save(manager, 1)
    for step in (2, 3, 4):
        save(manager, step, backbone=7)
    damage(store, name(2).file(FROZEN))
    assert commands.main(["verify", store.url, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [row["health"] for row in found] == ["damaged"] * 3 + ["ok"]
    assert all(FROZEN in row["problems"][0] for row in found[:3])
    manager = CheckpointManager(store, keep=9)
    resumed = manager.restore_newest()
    assert resumed is not None
    assert resumed[0].name == name(1)
    assert same(resumed[1], expected(1))
    for step in (4, 3, 2):
        assert str(name(step)) in caplog.text
    # What comes next does not refer to what is damaged.
    save(manager, 5, 2, parent=name(1), backbone=7)
    assert owners(manager, name(5, 2))[FROZEN] is None
    assert same(manager.restore(name(5, 2)), expected(5, 7))


def test_a_rotten_file_is_not_referred_to_for_ever(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    manager = CheckpointManager(store, keep=2)
    save(manager, 1)
    flip(store, name(1).file(FROZEN))
    for step in range(2, 9):
        save(manager, step)
    assert "do not verify" in caplog.text
    found = CheckpointManager(store).restore_newest()
    assert found is not None
    assert same(found[1], expected(8))


def test_an_index_that_leads_elsewhere_is_damage(store: Store) -> None:
    manager = CheckpointManager(store)
    save(manager, 1)
    manifest = manager.catalog.manifest(name(1))
    file = "model.safetensors.index.json"
    index = json.loads(store.get(name(1).file(file)))
    for path in ("../../../etc/passwd", f"../{name(9)}/{FROZEN}", "/etc/passwd", "", 5):
        index["weight_map"]["backbone"] = path
        data = json.dumps(index).encode()
        store.put(name(1).file(file), data)
        part = PartSum(offset=0, size=len(data), xxh3_128=xxhash.xxh3_128_hexdigest(data))
        entry = FileEntry(name=file, size_bytes=len(data), parts=(part,))
        with pytest.raises(DamagedError, match="found no map"):
            reader.read_index(store, manifest, entry)


# --------------------------------------------------------------------------------------- the property
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("commit"), st.integers(0, 2), st.booleans()),
        st.tuples(st.just("restart"), st.integers(1, 3), st.just(False)),
        st.tuples(st.just("prune"), st.integers(1, 3), st.booleans()),
        st.tuples(st.just("sweep"), st.just(0), st.just(False)),
        st.tuples(st.just("leave"), st.integers(0, 5), st.booleans()),
        st.tuples(st.just("damage"), st.integers(0, 30), st.booleans()),
    ),
    min_size=3,
    max_size=14,
)


@settings(
    max_examples=30,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(steps=STEPS)
def test_whatever_is_committed_pruned_swept_and_damaged_what_remains_loads(
    steps: list[tuple[str, int, bool]], capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"memory://{os.getpid()}-{secrets.token_hex(6)}"
    store = open_store(url)
    store.put("run.json", b"{}")
    manager = CheckpointManager(store, keep=2)
    generation, step = 1, 0
    parent: CheckpointName | None = None
    truth: dict[CheckpointName, dict[str, object]] = {}
    rotten: set[str] = set()
    for kind, number, flag in steps:
        if kind == "commit":
            step += 1
            here = save(manager, step, generation, parent=parent, backbone=number, says=flag)
            truth[here] = expected(step, number)
        elif kind == "restart":
            manager = CheckpointManager(store, keep=number)
            found = manager.restore_newest()
            parent = found[0].name if found else None
            step = parent.step if parent else 0
            generation += 1
        elif kind == "prune":
            argv = ["prune", url, "--keep", str(number), *(["--keep-every", "3"] if flag else [])]
            assert commands.main(argv) == 0
        elif kind == "sweep":
            assert commands.main(["sweep", url, "--force"]) == 0
        elif kind == "leave":
            ruin = name(step + number, generation - 1) if flag and generation > 1 else None
            if ruin is not None and ruin not in truth:
                store.put(ruin.file(FROZEN), b"half a file")
        else:
            files = [
                f for f in store.list("checkpoints/") if f.endswith((".safetensors", "state.json"))
            ]
            if files and len(rotten) < 2:
                file = files[number % len(files)]
                flip(store, file)
                rotten ^= {file}
        check_all(store, truth, rotten)
    capsys.readouterr()


def check_all(
    store: Store, truth: dict[CheckpointName, dict[str, object]], rotten: set[str]
) -> None:
    """Each committed checkpoint loads exactly, unless a file of it was damaged."""
    looking = CheckpointManager(store)
    for found in looking.names():
        manifest = looking.catalog.manifest(found)
        paths = {parts.object_name(manifest, entry) for entry in manifest.files}
        if paths & rotten:
            with pytest.raises(DamagedError):
                looking.restore(found)
        else:
            assert same(looking.restore(found), truth[found])


def test_the_watch_forgets_what_it_saw_of_a_state_that_was_saved_twice() -> None:
    watch = Watch()
    views = {("model", "a"): memoryview(bytes(2000)), ("model", "b"): memoryview(b"x" * 2000)}
    watch.look(views)
    watch.look(views)
    assert not watch.is_done
    watch.look({**views, ("model", "b"): memoryview(b"y" * 2000)})
    assert watch.is_done
    assert watch.seen == {"model": frozenset({"a"})}
    watch.look(views)
    assert watch.seen == {"model": frozenset({"a"})}
