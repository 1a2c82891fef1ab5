"""What somebody who can write to the store could put there: a clear error, no code, little memory.

Each hostile checkpoint is the newest of a run with a good one before it. All that reads checkpoints runs on
it in a process that may not take much more memory than it has.
"""

import json
import os
import pickle
import shutil
import struct
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from checkpoints import reader
from checkpoints.canonical import dump, parse
from checkpoints.errors import DamagedError
from checkpoints.layout import FileEntry, Manifest, PartSum
from checkpoints.manager import CheckpointManager
from checkpoints.store import Store, open_store
from tests.support.states import name, same, state

ROOT = Path(__file__).parents[2]
NEW = name(2)
ROOM_BYTES = 700 << 20
"""What a process may take beyond what it has after its imports."""


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two good checkpoints, to be copied."""
    path = tmp_path_factory.mktemp("good") / "run"
    manager = CheckpointManager(open_store(str(path)))
    for step in (1, 2):
        manager.commit(
            manager.stage(state(step), name=name(step), parent=None, run_id="r", info={})
        )
    return path


def forge(run: Path, file: str, data: bytes) -> None:
    """Put a file in a checkpoint's place, with a manifest that matches it."""
    (run / NEW.folder / file).write_bytes(data)
    part = PartSum(offset=0, size=len(data), xxh3_128=xxhash.xxh3_128_hexdigest(data))
    store = open_store(str(run))
    manifest = reader.read_manifest(store, NEW)
    entry = FileEntry(name=file, size_bytes=len(data), parts=(part,) if data else ())
    files = (*(other for other in manifest.files if other.name != file), entry)
    forged = Manifest(name=NEW, parent=None, run_id="r", files=files)
    store.put(NEW.manifest, forged.to_json())


def forge_manifest(run: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a manifest and sign it anew."""
    path = run / NEW.manifest
    values: dict[str, Any] = dict(parse(path.read_bytes(), "m"))
    values.pop("checksum")
    change(values)
    path.write_bytes(dump({**values, "checksum": xxhash.xxh3_128_hexdigest(dump(values))}))


def header(table: object, data: bytes = b"") -> bytes:
    text = table if isinstance(table, bytes) else json.dumps(table).encode()
    return struct.pack("<Q", len(text)) + text + data


class Harmful:
    """Makes a folder when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
MODEL = "model.safetensors"


def claim_size(manifest: dict[str, Any], size: int) -> None:
    """Say that the model's file has this size, in one part."""
    entry = next(file for file in manifest["files"] if file["name"] == MODEL)
    entry.update(size_bytes=size, parts=[[0, size, "0" * 32]])


def sparse_header(run: Path) -> None:
    """A header of 40 MB, which is all zeros, in a file of 100 MB that takes no space."""
    path = run / NEW.folder / MODEL
    forge(run, MODEL, struct.pack("<Q", 40_000_000))
    with path.open("rb+") as file:
        file.truncate(100_000_000)
    forge_manifest(
        run,
        lambda m: claim_size(m, 100_000_000),
    )


def first_file(change: dict[str, Any]) -> Callable[[Path], None]:
    return lambda run: forge_manifest(run, lambda m: m["files"][0].update(change))


HOSTILE: dict[str, Callable[[Path], None]] = {
    "pickle as tensors": lambda r: forge(
        r, "optimizer.safetensors", pickle.dumps(Harmful(r / "marker"))
    ),
    "pickle as state": lambda r: forge(r, "state.json", pickle.dumps(Harmful(r / "marker"))),
    "pickle beside": lambda r: forge(r, "extra.pt", pickle.dumps(Harmful(r / "marker"))),
    "pickle as manifest": lambda r: _put(r, pickle.dumps(Harmful(r / "marker"))),
    "zip as tensors": lambda r: forge(r, MODEL, b"PK\x03\x04" + bytes(10_000)),
    "header of 2**63": lambda r: forge(r, MODEL, struct.pack("<Q", 2**63) + b"{}"),
    "header of 40 MB of nothing": sparse_header,
    "header of lists": lambda r: forge(r, MODEL, header(b'{"a":[' + b"[]," * 9_000_000 + b"1]}")),
    "header of deep lists": lambda r: forge(r, MODEL, header(b"[" * 5_000_000)),
    "header of long names": lambda r: forge(
        r, MODEL, header({"x" * 12_000_000: F32, "y" * 12_000_000: F32}, bytes(8))
    ),
    "name twice": lambda r: forge(
        r, MODEL, header(b'{"a":%b,"a":%b}' % ((json.dumps(F32).encode(),) * 2), bytes(8))
    ),
    "overlap": lambda r: forge(r, MODEL, header({"a": F32, "b": F32}, bytes(8))),
    "size NaN": lambda r: forge(
        r, MODEL, header(b'{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,8]}}', bytes(8))
    ),
    "shape beyond all": lambda r: forge(
        r, MODEL, header({"a": {**F32, "shape": [2**62, 2**62, 0], "data_offsets": [0, 0]}})
    ),
    "terminal commands as names": lambda r: forge(
        r, MODEL, header({"\x1b]0;gone\x07\x1b[2J": F32}, bytes(8))
    ),
    "state of lists": lambda r: forge(
        r, "state.json", b'{"format":1,"files":{},"state":{"a":[' + b"[]," * 9_000_000 + b"1]}}"
    ),
    "state of one long number": lambda r: forge(
        r, "state.json", b'{"format":1,"files":{},"state":{"a":' + b"9" * 10_000_000 + b"}}"
    ),
    "state of escapes": lambda r: forge(
        r, "state.json", b'{"format":1,"files":{},"state":"' + b"\\u0000" * 4_000_000 + b'"}'
    ),
    "state with NaN": lambda r: forge(r, "state.json", b'{"format":1,"files":{},"state":NaN}'),
    "manifest of 70 MB": lambda r: _put(r, b"[" * (70 << 20)),
    "manifest of lists": lambda r: _put(r, b'{"files":[' + b"[]," * 9_000_000 + b"1]}"),
    "manifest of deep lists": lambda r: _put(r, b"[" * 1_000_000),
    "manifest with NaN": lambda r: _put(
        r, (r / NEW.manifest).read_bytes().replace(b'"size_bytes":', b'"size_bytes":NaN,"x":', 1)
    ),
    "a way out": first_file({"name": "../../../../etc/passwd"}),
    "a root": first_file({"name": "/etc/passwd"}),
    "an owner that leads out": first_file({"owner": "../../secret"}),
    "a size beyond all": first_file({"size_bytes": 2**60}),
    "a negative size": first_file({"size_bytes": -1}),
    "parts without end": first_file({"parts": [[0, 1, "0" * 32]] * 30_000}),
    "a run id of commands": lambda r: forge_manifest(
        r, lambda m: m.update(run_id="\x1b[2J\x1b]0;gone\x07", files=m["files"][:1])
    ),
    "the same file twice": lambda r: forge_manifest(r, lambda m: m["files"].append(m["files"][0])),
}


def _put(run: Path, data: bytes) -> None:
    (run / NEW.manifest).write_bytes(data)


READ_ALL = textwrap.dedent("""
    import contextlib, io, json, logging, resource, sys, time
    from checkpoints.commands import main
    from checkpoints.manager import CheckpointManager
    from checkpoints.store import open_store
    import torch

    torch.zeros(1)
    room = int(sys.argv[1])
    pages = int(open("/proc/self/statm").read().split()[0])
    limit = pages * resource.getpagesize() + room
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    for line in sys.stdin:
        url = line.strip()
        told, began = {}, time.monotonic()
        for argv in (
            ["ls", url], ["show", url], ["verify", url], ["export", url, url + ".weights"],
            ["prune", url, "--keep", "1", "--dry-run"], ["copy", url, url + ".copy"],
        ) if len(sys.argv) == 2 else ():
            out, err = io.StringIO(), io.StringIO()
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                code = main(argv)
            told[argv[0]] = [code, out.getvalue()[-3000:], err.getvalue()[-3000:]]
        log = io.StringIO()
        logging.basicConfig(stream=log, level="WARNING", force=True)
        found = CheckpointManager(open_store(url)).restore_newest()
        told["restored"] = found and str(found[0].name)
        told["log"] = log.getvalue()[-3000:]
        told["seconds"] = time.monotonic() - began
        print(json.dumps(told), flush=True)
""")


def test_c52_nothing_hostile_runs_takes_memory_or_is_taken_for_a_checkpoint(
    good: Path, tmp_path: Path
) -> None:
    runs = {}
    for number, (label, make) in enumerate(HOSTILE.items()):
        runs[label] = tmp_path / f"run-{number}"
        shutil.copytree(good, runs[label])
        make(runs[label])
    script = [sys.executable, "-c", READ_ALL, str(ROOM_BYTES)]
    urls = "".join(f"{run}\n" for run in runs.values())
    done = subprocess.run(script, cwd=ROOT, input=urls, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    for label, told in zip(runs, answers, strict=True):
        print(f"{told.pop('seconds'):.1f} s: {label}")
    for (label, run), told in zip(runs.items(), answers, strict=True):
        assert told.pop("restored") == str(name(1)), label
        assert str(NEW) in told.pop("log"), label
        assert told["verify"][0] == 1, (label, told["verify"])
        assert str(NEW) in told["verify"][1], label
        assert told["copy"][0] == 1, (label, told["copy"])
        for command, (code, out, err) in told.items():
            assert code in {0, 1, 2}, (label, command, err)
            assert "Traceback" not in out + err, (label, command)
            assert "\x1b" not in out + err, (label, command)
            assert max(map(len, (out + err).splitlines())) < 1500, (label, command)
        assert not (run / "marker").exists(), label
        copied = CheckpointManager(open_store(f"{run}.copy"))
        assert copied.names() == [name(1)], label


def test_a_tensor_that_no_machine_holds_is_one_clear_error(good: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(good, run)
    size = 1 << 42
    table = {"net.weight": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}
    start = header(table)
    total = len(start) + size
    forge(run, MODEL, start)
    with (run / NEW.folder / MODEL).open("rb+") as file:
        try:
            file.truncate(total)
        except OSError:
            pytest.skip("this file system has no files of 4 TB")
    forge_manifest(run, lambda m: claim_size(m, total))
    script = [sys.executable, "-c", READ_ALL, str(ROOM_BYTES)]
    done = subprocess.run(
        [*script, "restore alone"],
        cwd=ROOT,
        input=f"{run}\n",
        capture_output=True,
        text=True,
        check=False,
    )
    assert f"'net.weight': its {size} bytes are more than this machine gives" in done.stderr


# ------------------------------------------------------------------------------------------- fuzzing
@pytest.fixture(scope="module")
def store(good: Path) -> Store:
    return open_store(str(good))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_changed_bytes_of_a_checkpoint_are_damage(store: Store, data: st.DataObject) -> None:
    manifest = reader.read_manifest(store, NEW)
    entry = data.draw(st.sampled_from(manifest.files))
    path = NEW.file(entry.name)
    whole = store.get(path)
    changed = bytearray(whole)
    kind = data.draw(st.sampled_from(["flip", "cut", "insert", "repeat"]))
    at = data.draw(st.integers(0, len(whole) - 1))
    if kind == "flip":
        changed[at] ^= 1 << data.draw(st.integers(0, 7))
    elif kind == "cut":
        del changed[at:]
    elif kind == "insert":
        changed[at:at] = data.draw(st.binary(min_size=1, max_size=9))
    else:
        changed += changed[at:]
    store.put(path, bytes(changed))
    try:
        for check in (reader.verify, reader.restore):
            with pytest.raises(DamagedError, match=f"{NEW}: {entry.name}"):
                check(store, manifest)
    finally:
        store.put(path, whole)
    assert same(reader.restore(store, manifest), state(2))


PIECES: list[Any] = [
    *(None, True, 0, -1, 2**63, 1.5, "", "$", "tensor", "net.weight", "model.safetensors"),
    *(
        {},
        [],
        {"$": "tensor", "v": "net.weight"},
        {"$": "tuple", "v": []},
        {"$": "int", "v": "0x1"},
    ),
]
values = st.recursive(
    st.sampled_from(PIECES) | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["$", "v", "model", "a", "optimizer"]), inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(key=st.sampled_from(["format", "files", "state"]), inner=st.booleans(), value=values)
def test_any_state_file_that_is_signed_is_read_or_refused(
    store: Store, key: str, inner: bool, value: Any
) -> None:
    manifest = reader.read_manifest(store, NEW)
    document = json.loads(store.get(NEW.file("state.json")))
    if inner and isinstance(document[key], dict):
        document[key]["model"] = value
    else:
        document[key] = value
    data = json.dumps(document).encode()
    part = PartSum(offset=0, size=len(data), xxh3_128=xxhash.xxh3_128_hexdigest(data))
    entry = FileEntry(name="state.json", size_bytes=len(data), parts=(part,))
    files = (*(e for e in manifest.files if e.name != "state.json"), entry)
    whole = store.get(NEW.file("state.json"))
    store.put(NEW.file("state.json"), data)
    refusal, tree = f"{NEW}", None
    try:
        tree = reader.restore(store, Manifest(name=NEW, parent=None, run_id="r", files=files))
    except DamagedError as error:
        refusal = str(error)
    finally:
        store.put(NEW.file("state.json"), whole)
    assert tree is None or isinstance(tree, dict)
    assert str(NEW) in refusal
    assert len(refusal) < 1500
