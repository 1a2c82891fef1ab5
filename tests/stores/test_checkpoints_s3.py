"""Checkpoints on a real S3 server: committed, split, walked back, retained, swept, shown."""

import json
from typing import Any

import pytest

from checkpoints import commands
from checkpoints.layout import is_void
from checkpoints.manager import CheckpointManager
from checkpoints.store import Store, open_store
from tests.support.object_stores import SECRET, S3Server
from tests.support.states import name, same, state


@pytest.fixture
def store(s3_server: S3Server) -> Store:
    return open_store(s3_server.url(), s3_server.options)


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
    options: list[str] = []
    for key, value in s3_server.options.items():
        text = value if isinstance(value, str) else json.dumps(value)
        options += ["--option", f"{key}={text}"]
    assert commands.main(["verify", f"{store.url}@latest", "--json", *options]) == 0
    out = capsys.readouterr().out
    found: Any = json.loads(out)
    assert [row["name"] for row in found["checkpoints"]] == [str(name(5))]
    assert SECRET not in out
