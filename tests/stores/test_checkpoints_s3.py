"""Checkpoints on a real S3 server: committed, split, walked back, retained, swept, shown."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from safetensors.torch import load_file

from checkpoints import commands, frozen, references
from checkpoints.layout import is_void
from checkpoints.manager import CheckpointManager
from checkpoints.store import Store, open_store
from tests.support.object_stores import SECRET, S3Server
from tests.support.states import name, same, state


@pytest.fixture
def store(s3_server: S3Server) -> Store:
    return open_store(s3_server.url(), s3_server.options)


def option_words(options: Mapping[str, object], flag: str = "--option") -> list[str]:
    words: list[str] = []
    for key, value in options.items():
        words += [flag, f"{key}={value if isinstance(value, str) else json.dumps(value)}"]
    return words


def save(manager: CheckpointManager, step: int, generation: int = 1) -> None:
    here = name(step, generation)
    manager.commit(manager.stage(state(step), name=here, parent=None, run_id="r", info={}))


def test_checkpoints_are_committed_retained_and_walked_back_on_s3(store: Store) -> None:
    manager = CheckpointManager(store, keep=2, split_bytes=400, part_bytes=1000)
    for step in (9, 10, 99):
        save(manager, step)
    assert manager.names() == [name(99), name(10)]
    assert not store.list(name(9).folder)
    assert same(manager.restore(name(99)), state(99))
    file = name(99).file("optimizer.safetensors")
    store.put(file, store.get(file)[:-1] + b"x")
    found = CheckpointManager(store).restore_newest()
    assert found is not None
    assert found[0].name == name(10)
    assert same(found[1], state(10))


def test_what_was_never_committed_is_swept_and_its_name_is_taken_on_s3(store: Store) -> None:
    manager = CheckpointManager(store)
    slow = manager.stage(state(7), name=name(7), parent=None, run_id="r", info={})
    store.put(name(7).file("model.safetensors"), b"half")
    save(manager, 1, generation=2)
    assert store.list(name(7).folder) == [name(7).manifest]
    assert is_void(store.get(name(7).manifest))
    with pytest.raises(Exception, match="was swept before it was committed"):
        manager.commit(slow)
    assert manager.names() == [name(1, 2)]


def test_the_commands_ask_s3_with_the_options_they_are_given(
    store: Store, s3_server: S3Server, capsys: pytest.CaptureFixture[str]
) -> None:
    save(CheckpointManager(store), 5)
    options = option_words(s3_server.options)
    assert commands.main(["verify", f"{store.url}@latest", "--json", *options]) == 0
    out = capsys.readouterr().out
    found: Any = json.loads(out)
    assert [row["name"] for row in found["checkpoints"]] == [str(name(5))]
    assert SECRET not in out


def uploads_under(server: S3Server, url: str) -> list[str]:
    """The keys of unfinished uploads, as the server lists them."""
    fs = fsspec.filesystem("s3", **server.options, skip_instance_cache=True)
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    found = fs.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=f"{prefix}/")
    return [upload["Key"].removeprefix(f"{prefix}/") for upload in found.get("Uploads", ())]


def begin_upload(server: S3Server, url: str, file: str) -> None:
    """What a writer that was killed in the middle of a large file leaves."""
    fs = fsspec.filesystem("s3", **server.options, skip_instance_cache=True)
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    where = {"Bucket": bucket, "Key": f"{prefix}/{file}"}
    begun = fs.call_s3("create_multipart_upload", **where)
    fs.call_s3(
        "upload_part", **where, UploadId=begun["UploadId"], PartNumber=1, Body=b"x" * (5 << 20)
    )


def test_unfinished_uploads_go_with_the_checkpoint_that_is_swept_and_others_stay(
    store: Store, s3_server: S3Server, capsys: pytest.CaptureFixture[str]
) -> None:
    manager = CheckpointManager(store)
    store.put(name(7).file("state.json"), b"half")
    for step in (7, 99):
        begin_upload(s3_server, store.url, name(step, step).file("model.safetensors"))
        store.put(name(step, step).file("state.json"), b"half")
    assert len(uploads_under(s3_server, store.url)) == 2
    save(manager, 1, generation=8)  # 99 is of a later generation: it may be on its way
    assert uploads_under(s3_server, store.url) == [name(99, 99).file("model.safetensors")]
    words = option_words(s3_server.options)
    assert commands.main(["sweep", store.url, "--json", "--force", *words]) == 0
    assert str(name(99, 99)) in capsys.readouterr().out
    assert uploads_under(s3_server, store.url) == []
    assert manager.names() == [name(1, 8)]


def test_frozen_weights_are_sent_once_and_runs_go_to_and_from_s3(
    store: Store,
    s3_server: S3Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for room in (frozen, references):
        monkeypatch.setattr(room, "SMALLEST_BYTES", 1024)
    manager = CheckpointManager(store, keep=9)
    backbone = torch.nn.Parameter(torch.arange(1000.0), requires_grad=False)
    for step in (1, 2, 3):
        tree: dict[str, object] = {"model": {"b": backbone, "h": torch.full((9,), float(step))}}
        manager.commit(manager.stage(tree, name=name(step), parent=None, run_id="r", info={}))
    assert [file for file in store.list() if "00002-of-00002" in file] == [
        name(1).file("model-00002-of-00002.safetensors")
    ]
    here, back = str(tmp_path / "here"), s3_server.url()
    words = option_words(s3_server.options)
    assert commands.main(["copy", store.url, here, *words]) == 0
    assert commands.main(["copy", here, back, *option_words(s3_server.options, "--to-option")]) == 0
    assert commands.main(["prune", back, "--keep", "1", *words]) == 0
    assert commands.main(["verify", back, *words]) == 0
    weights = tmp_path / "w.safetensors"
    assert commands.main(["export", f"{back}@latest", str(weights), *words]) == 0
    out = capsys.readouterr()
    assert SECRET not in out.out + out.err
    loaded = load_file(weights)
    assert torch.equal(loaded["b"], backbone.detach())
    assert torch.equal(loaded["h"], torch.full((9,), 3.0))
