"""A snapshot is written whole or not at all; damage of any kind is found and named."""

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from safetensors.torch import load_file

from checkpoints import parts, reader, writer
from checkpoints.buffers import Buffers, Snapshot
from checkpoints.errors import (
    CheckpointError,
    DamagedError,
    NoCheckpointError,
    OptionError,
    RecordError,
    StoreFullError,
    SupersededError,
    TransientStoreError,
    UnsupportedStateError,
)
from checkpoints.layout import FileEntry, Manifest, PartSum, void_manifest
from checkpoints.store import Store, open_store
from tests.support.states import name, same, state

SPLIT = 400  # so that model and optimizer are several files


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "run"), retry_s=0.1, sleep=lambda _: None)


@pytest.fixture(params=["local", "memory"])
def any_store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    url = str(tmp_path) if request.param == "local" else f"memory://{tmp_path.name}-{os.getpid()}"
    return open_store(url)


def stage(
    step: int, *, split_bytes: int = SPLIT, tree: dict[str, object] | None = None
) -> Snapshot:
    return Buffers(split_bytes=split_bytes).stage(
        tree or state(step), name=name(step), parent=None, run_id="r", info={"step": step}
    )


def write(store: Store, step: int, **options: Any) -> Manifest:
    return writer.write(store, stage(step, **options), part_bytes=1000)


def test_what_was_written_is_restored_exactly(any_store: Store) -> None:
    manifest = write(any_store, 3)
    assert reader.read_manifest(any_store, name(3)) == manifest
    assert same(reader.restore(any_store, manifest), state(3))
    reader.verify(any_store, manifest)


def test_parts_cover_each_file_and_hold_its_xxh3_128(store: Store) -> None:
    manifest = write(store, 3)
    for entry in manifest.files:
        data = store.get(name(3).file(entry.name))
        assert len(data) == entry.size_bytes
        for part in entry.parts:
            piece = data[part.offset : part.offset + part.size]
            assert part.size <= 1000
            assert xxhash.xxh3_128_hexdigest(piece) == part.xxh3_128


def test_the_model_is_split_by_size_with_an_index_as_hugging_face_has_it(
    store: Store, tmp_path: Path
) -> None:
    write(store, 3)
    folder = tmp_path / "run" / name(3).folder
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == {"net.weight", "net.bias", "tied"}
    assert index["metadata"]["total_size"] == 8 * 8 * 4 * 2 + 8 * 8
    for weight, file in index["weight_map"].items():
        assert file.endswith("-of-00002.safetensors")
        assert torch.equal(load_file(folder / file)[weight], state(3)["model"][weight])  # type: ignore[index]


def test_a_model_below_the_split_size_is_one_plain_file(store: Store, tmp_path: Path) -> None:
    write(store, 3, split_bytes=10**9)
    folder = tmp_path / "run" / name(3).folder
    loaded = load_file(folder / "model.safetensors")
    expected = state(3)["model"]
    assert isinstance(expected, dict)
    assert same({key: loaded[key] for key in expected}, expected)
    assert sorted(path.name for path in folder.iterdir()) == [
        "job.safetensors",
        "manifest.json",
        "model.safetensors",
        "optimizer.safetensors",
        "state.json",
    ]


def test_only_the_keys_that_are_wanted_are_read(store: Store) -> None:
    manifest = write(store, 3)
    store.delete(name(3).file("job.safetensors"))
    assert same(reader.restore(store, manifest, keys=["model"]), {"model": state(3)["model"]})
    with pytest.raises(NoCheckpointError, match="holds no 'ema', but model, optimizer"):
        reader.restore(store, manifest, keys=["ema"])


def test_many_small_tensors_across_the_borders_of_ranges_return(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "READ_BYTES", 64)
    tree: dict[str, object] = {
        "model": {f"t{i}": torch.randn(i % 7, dtype=torch.float64) for i in range(50)}
        | {"bytes": torch.arange(100, dtype=torch.uint8), "none": torch.ones(0, 3)}
    }
    manifest = writer.write(store, stage(1, tree=tree, split_bytes=10**9), part_bytes=333)
    found = reader.restore(store, manifest)
    assert same(found, tree)


def test_no_range_that_is_read_is_larger_than_the_bound(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "READ_BYTES", 1 << 16)
    lengths = []
    readinto = Store.readinto

    def counted(self: Store, file: str, start: int, buffer: memoryview) -> None:
        lengths.append(buffer.nbytes)
        readinto(self, file, start, buffer)

    monkeypatch.setattr(Store, "readinto", counted)
    tree: dict[str, object] = {"model": {"w": torch.randn(300, 300)}}
    manifest = writer.write(store, stage(1, tree=tree, split_bytes=10**9), part_bytes=150_000)
    assert same(reader.restore(store, manifest), tree)
    assert max(lengths) == 1 << 16


# -------------------------------------------------------------------------------------- failed writes
class Failing:
    """Lets a call of the store fail once it has been made some times."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, method: str, at: int, error: Exception
    ) -> None:
        self.calls = 0
        real: Callable[..., Any] = getattr(Store, method)

        def wrapped(store: Store, *args: Any) -> Any:
            self.calls += 1
            if self.calls == at:
                raise error
            return real(store, *args)

        monkeypatch.setattr(Store, method, wrapped)


def test_c28_no_manifest_for_files_that_could_not_be_written_and_their_ruins_are_taken_away(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    Failing(monkeypatch, "put", 2, StoreFullError("no room"))
    snapshot = stage(3)
    with pytest.raises(StoreFullError):
        writer.write(store, snapshot, part_bytes=1000)
    assert store.list() == []
    writer.write(store, snapshot, part_bytes=1000)  # still held: there may be room later
    assert same(reader.restore(store, reader.read_manifest(store, name(3))), state(3))


def test_c34_a_file_that_arrived_short_is_never_committed(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = Store.put

    def short(self: Store, file: str, data: Any) -> None:
        put(self, file, data[:-1] if file.endswith("optimizer.safetensors") else data)

    monkeypatch.setattr(Store, "put", short)
    with pytest.raises(DamagedError, match=r"optimizer.*found \d+ bytes .* expected"):
        write(store, 3)
    assert store.list() == []


def test_the_fence_is_asked_after_all_files_and_right_before_the_manifest(store: Store) -> None:
    seen: list[list[str]] = []

    def fence() -> None:
        seen.append(store.list())
        raise SupersededError("newer", generation=1, newest=2)

    with pytest.raises(SupersededError):
        writer.write(store, stage(3), part_bytes=1000, fence=fence)
    assert len(seen[0]) == 6
    assert not any(file.endswith("manifest.json") for file in seen[0])
    assert store.list() == []


def test_a_manifest_of_unknown_outcome_keeps_its_files_and_is_settled_by_writing_again(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_new = Store.put_new
    lost = [True]

    def reply_lost(self: Store, file: str, data: bytes) -> bool:
        result = put_new(self, file, data)
        if lost.pop():
            raise TransientStoreError("the reply was lost")
        return result

    snapshot = stage(3)
    with monkeypatch.context() as patch:
        patch.setattr(Store, "put_new", reply_lost)
        with pytest.raises(TransientStoreError):
            writer.write(store, snapshot, part_bytes=1000)
    assert snapshot.is_doubtful
    manifest = reader.read_manifest(store, name(3))
    with monkeypatch.context() as patch:
        Failing(patch, "put", 1, StoreFullError("no room"))
        assert writer.write(store, snapshot, part_bytes=1000) == manifest  # nothing is sent again
    assert same(reader.restore(store, manifest), state(3))
    assert not snapshot.is_doubtful


def test_a_manifest_of_unknown_outcome_keeps_its_files_when_the_next_try_fails_too(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = stage(3)
    with monkeypatch.context() as patch:
        Failing(patch, "put_new", 1, TransientStoreError("no reply"))
        with pytest.raises(TransientStoreError):
            writer.write(store, snapshot, part_bytes=1000)
    before = store.list()
    with monkeypatch.context() as patch:
        Failing(patch, "put", 3, StoreFullError("no room"))
        with pytest.raises(StoreFullError):
            writer.write(store, snapshot, part_bytes=1000)
    assert store.list() == before != []


def test_a_name_that_was_swept_is_not_committed_any_more(store: Store) -> None:
    store.put_new(name(3).manifest, void_manifest())
    with pytest.raises(CheckpointError, match="was swept before it was committed"):
        write(store, 3)
    with pytest.raises(NoCheckpointError, match="was swept"):
        reader.read_manifest(store, name(3))


def test_a_second_writer_of_the_same_name_is_refused_before_it_writes(any_store: Store) -> None:
    first = write(any_store, 3)
    other: dict[str, object] = {**state(4), "job": {"cursor": 99}}
    with pytest.raises(CheckpointError, match=r"committed by another writer.*greater generation"):
        write(any_store, 3, tree=other)
    assert reader.read_manifest(any_store, name(3)) == first
    assert same(reader.restore(any_store, first), state(3))


@pytest.mark.parametrize("manifest", [void_manifest(), b"torn"], ids=["void", "torn"])
def test_under_a_name_that_is_taken_nothing_is_written(store: Store, manifest: bytes) -> None:
    store.put_new(name(3).manifest, manifest)
    with pytest.raises(CheckpointError):
        write(store, 3)
    assert store.list() == [name(3).manifest]


def test_an_attempt_that_fails_leaves_the_files_of_the_one_that_won_meanwhile(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = Store.put
    fails = [True]

    def overtaken(self: Store, file: str, data: Any) -> None:
        if fails and fails.pop():
            write(store, 3)
            raise StoreFullError("no room")
        put(self, file, data)

    monkeypatch.setattr(Store, "put", overtaken)
    with pytest.raises(StoreFullError):
        writer.write(store, stage(3), part_bytes=1000)
    assert same(reader.restore(store, reader.read_manifest(store, name(3))), state(3))


def test_a_fence_that_says_why_a_name_is_taken_is_believed(store: Store) -> None:
    write(store, 3)

    def fence() -> None:
        raise SupersededError("newer", generation=1, newest=2)

    with pytest.raises(SupersededError):
        writer.write(store, stage(3), part_bytes=1000, fence=fence)


@pytest.mark.parametrize(
    ("run_id", "found"), [("", "nothing"), ("r" * 201, "201 characters")], ids=["empty", "long"]
)
def test_a_run_id_that_nobody_reads_back_is_refused(store: Store, run_id: str, found: str) -> None:
    expected = f"^run_id: found {found}, expected 1 to 200 characters$"
    with pytest.raises(OptionError, match=expected):
        Buffers(split_bytes=SPLIT).stage(
            state(3), name=name(3), parent=None, run_id=run_id, info={}
        )
    snapshot = stage(3)
    snapshot.run_id = run_id  # what another way to make a snapshot might let through
    with pytest.raises(RecordError, match=r"nobody could read it: .*run_id"):
        writer.write(store, snapshot, part_bytes=1000)
    assert store.list() == []


def test_an_info_or_a_manifest_that_is_too_large_is_refused_before_anything_is_sent(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        UnsupportedStateError, match=r"^info: found 1048\d+ bytes, expected at most"
    ):
        Buffers(split_bytes=SPLIT).stage(
            state(3), name=name(3), parent=None, run_id="r", info={"text": "x" * (1 << 20)}
        )
    monkeypatch.setattr(Store, "put", None)  # not a file is sent
    monkeypatch.setattr(writer, "LARGEST_NEW", 5000)
    with pytest.raises(RecordError, match=r"a manifest of \d+ bytes, .*at most 5000: more part_b"):
        writer.write(store, stage(3), part_bytes=100)


def test_a_released_snapshot_is_not_written(store: Store) -> None:
    snapshot = stage(3)
    snapshot.release()
    with pytest.raises(CheckpointError, match="was released already"):
        writer.write(store, snapshot, part_bytes=1000)


# -------------------------------------------------------------------------------------------- damage
FILES = [
    "job.safetensors",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
    "model.safetensors.index.json",
    "optimizer.safetensors",
    "state.json",
    "manifest.json",
]


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\x00")


def flip_first(path: Path) -> None:
    flip(path, 0)


def flip_middle(path: Path) -> None:
    flip(path, path.stat().st_size // 2)


def flip_last(path: Path) -> None:
    flip(path, path.stat().st_size - 1)


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def remove(path: Path) -> None:
    path.unlink()


def swap_with_other_step(path: Path) -> None:
    path.write_bytes((path.parent.parent / str(name(2)) / path.name).read_bytes())


def swap_with_pickle(path: Path) -> None:
    path.write_bytes(pickle.dumps({"a": 1}).ljust(path.stat().st_size, b"."))


DAMAGES = [
    truncate,
    empty,
    lengthen,
    flip_first,
    flip_middle,
    flip_last,
    remove,
    swap_with_other_step,
    swap_with_pickle,
]


CASES = [
    pytest.param(file, damage, id=f"{damage.__name__}-{file}")
    for file in FILES
    for damage in DAMAGES
    # The index of both steps is the same in every byte.
    if (file, damage) != ("model.safetensors.index.json", swap_with_other_step)
]


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two checkpoints, to be copied."""
    path = tmp_path_factory.mktemp("two") / "run"
    for step in (2, 3):
        write(open_store(str(path)), step)
    return path


@pytest.mark.parametrize(("file", "damage"), CASES)
def test_damage_to_any_file_is_found_by_verify_and_by_restore_and_named(
    file: str, damage: Callable[[Path], None], two_steps: Path, store: Store, tmp_path: Path
) -> None:
    shutil.copytree(two_steps, tmp_path / "run")
    damage(tmp_path / "run" / name(3).folder / file)
    expected = NoCheckpointError if (file, damage) == ("manifest.json", remove) else DamagedError
    for check in (reader.verify, reader.restore):
        with pytest.raises(expected, match=f"{name(3)}.*" + ("" if "manifest" in file else file)):
            check(store, reader.read_manifest(store, name(3)))
    reader.verify(store, reader.read_manifest(store, name(2)))


def rewrite(store: Store, manifest: Manifest, file: str, data: bytes) -> Manifest:
    """A manifest that is valid for other bytes: what someone who can write to the store could do."""
    store.put(manifest.name.file(file), data)
    parts = (PartSum(offset=0, size=len(data), xxh3_128=xxhash.xxh3_128_hexdigest(data)),)
    entry = FileEntry(name=file, size_bytes=len(data), parts=parts)
    files = (*(other for other in manifest.files if other.name != file), entry)
    forged = Manifest(name=manifest.name, parent=None, run_id="r", files=files)
    store.put(manifest.name.manifest, forged.to_json())
    return reader.read_manifest(store, manifest.name)


class Harmful:
    """Makes a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize(
    "file", ["optimizer.safetensors", "state.json", "model.safetensors.index.json", "extra.pt"]
)
def test_c52_a_pickle_with_a_matching_manifest_is_damage_and_runs_nothing(
    file: str, store: Store, tmp_path: Path
) -> None:
    marker = tmp_path / "marker"
    forged = rewrite(store, write(store, 3), file, pickle.dumps(Harmful(marker)))
    for check in (reader.verify, reader.restore):
        with pytest.raises(DamagedError, match=f"{name(3)}: {file}: .*expected|not a JSON"):
            check(store, forged)
    assert not marker.exists()
    pickle.loads(pickle.dumps(Harmful(marker)))  # noqa: S301 - the pickle would have done it
    assert marker.exists()


def state_json(store: Store) -> Any:
    return json.loads(store.get(name(3).file("state.json")))


MISFITS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "format": (lambda d: d.update(format=2), "found format 2, expected 1"),
    "no state": (lambda d: d.pop("state"), "found no table of state"),
    "file left out": (lambda d: d["files"].pop("job"), "names the files"),
    "file elsewhere": (lambda d: d["files"].update(job=["../../x.safetensors"]), "names the files"),
    "no list": (lambda d: d["files"].update(job=5), "expected a list of files"),
    "other key": (lambda d: d["files"].update(other=d["files"].pop("job")), "names the files"),
    "tensor left over": (lambda d: d["state"]["model"].pop("tied"), "'tied' has no place"),
    "tensor missing": (
        lambda d: d["state"].update(job={"$": "tensor", "v": "no"}),
        "tensor 'no' is missing",
    ),
    "mark": (
        lambda d: d["state"].update(job={"$": "os.system", "v": []}),
        "expected a saved state",
    ),
}


@pytest.mark.parametrize(("change", "message"), MISFITS.values(), ids=MISFITS)
def test_a_state_file_that_does_not_fit_the_tensors_is_damage(
    change: Callable[[Any], None], message: str, store: Store
) -> None:
    manifest = write(store, 3)
    document = state_json(store)
    change(document)
    forged = rewrite(store, manifest, "state.json", json.dumps(document).encode())
    with pytest.raises(DamagedError, match=f"{name(3)}: state.json.*{message}"):
        reader.restore(store, forged)


def test_a_store_that_does_not_answer_is_not_taken_for_damage(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = write(store, 3)
    Failing(monkeypatch, "readinto", 3, TransientStoreError("no answer"))
    with pytest.raises(TransientStoreError):
        reader.restore(store, manifest)


def test_files_of_another_checkpoint_are_read_from_their_owner(store: Store) -> None:
    first = write(store, 2)
    owned = tuple(
        FileEntry(name=e.name, size_bytes=e.size_bytes, parts=e.parts, owner=name(2))
        for e in first.files
    )
    referring = Manifest(name=name(3), parent=name(2), run_id="r", files=owned)
    store.put_new(name(3).manifest, referring.to_json())
    assert same(reader.restore(store, reader.read_manifest(store, name(3))), state(2))
