"""Weights for others, and runs at other places: every byte arrives, whatever the size."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from checkpoints import commands, copying, frozen, reader, references, spool
from checkpoints.layout import CheckpointName, Claim, claim_name
from checkpoints.manager import CheckpointManager
from checkpoints.store import Store, open_store
from checkpoints.terminal import Progress
from tests.support.disks import small_disk
from tests.support.states import name, same

__all__ = ["small_disk"]

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """References and spools are used from a kilobyte on, so that states are small."""
    monkeypatch.setattr(frozen, "SMALLEST_BYTES", 1024)
    monkeypatch.setattr(references, "SMALLEST_BYTES", 1024)
    monkeypatch.setattr(spool, "SMALL_BYTES", 1024)


def model(step: int) -> dict[str, torch.Tensor]:
    return {
        "backbone.weight": torch.nn.Parameter(torch.arange(3000.0), requires_grad=False),
        "head.weight": torch.full((20, 20), float(step), dtype=torch.bfloat16),
        "head.scale": torch.tensor(step, dtype=torch.float64),
        "flags": torch.tensor([True, False, True]),
        "none": torch.zeros(0, 4),
    }


def tree(step: int) -> dict[str, object]:
    return {"model": model(step), "optimizer": {"m": torch.full((30, 30), step / 7)}, "step": step}


def plain(step: int) -> dict[str, torch.Tensor]:
    return {key: value.detach() for key, value in model(step).items()}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A run of three checkpoints, the later ones of which refer to the first; step 2 is the best."""
    found = open_store(str(tmp_path / "run"))
    found.put("run.json", b'{"run_id": "r", "token": "a"}')
    claim = Claim(
        generation=1, run_id="r", launch="l", agents=(), world_size=1, nodes=1, hosts=("h",)
    )
    found.put_new(claim_name(1), claim.to_json())
    found.put("journal/000001.jsonl", b'{"event": "start"}\n' * 300)
    found.put("summary.json", b"{}")
    found.put("meeting/x.json", b"{}")
    manager = CheckpointManager(found)
    for step in (1, 2, 3):
        info = {"best": str(name(2))}
        manager.commit(
            manager.stage(tree(step), name=name(step), parent=None, run_id="r", info=info)
        )
    assert any(entry.owner for entry in manager.catalog.manifest(name(3)).files)
    return found


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, Any, str]:
    code = commands.main([*argv, "--json"])
    out, err = capsys.readouterr()
    return code, json.loads(out) if out else None, err


def flip(store: Store, file: str) -> None:
    data = bytearray(store.get(file))
    data[-1] ^= 1
    store.put(file, bytes(data))


# ------------------------------------------------------------------------------------------- export
@pytest.mark.parametrize(("which", "step"), [("", 3), ("@latest", 3), ("@best", 2), ("@1", 1)])
def test_one_file_of_weights_opens_with_safetensors_alone(
    which: str, step: int, store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "out" / "weights.safetensors"
    code, told, _ = run(capsys, "export", store.url + which, str(target))
    assert code == 0
    loaded = load_file(target)
    assert same({key: loaded[key] for key in plain(step)}, plain(step))
    assert told["checkpoint"] == str(name(step))
    assert told["tensors"] == len(loaded) == 5
    assert told["size_bytes"] == target.stat().st_size
    assert [path.name for path in target.parent.iterdir()] == [target.name]


def test_or_with_torch_alone_and_weights_only(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "weights.pt"
    code, told, _ = run(capsys, "export", store.url, str(target), "--format", "torch")
    assert code == 0
    loaded = torch.load(target, weights_only=True)
    assert same({key: loaded[key] for key in plain(3)}, plain(3))
    assert told["size_bytes"] == target.stat().st_size < 60_000  # each storage once, and its own


def test_a_file_that_is_there_is_replaced_only_when_forced(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "w.safetensors"
    target.write_bytes(b"mine")
    code, _, err = run(capsys, "export", store.url, str(target))
    assert (code, target.read_bytes()) == (2, b"mine")
    assert "there is a file already; --force replaces it" in err
    assert run(capsys, "export", store.url, str(target), "--force")[0] == 0
    assert len(load_file(target)) == 5


def test_export_to_any_url_and_of_any_key(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"memory://{os.getpid()}-{tmp_path.name}"
    code, _, _ = run(capsys, "export", store.url, f"{url}/m.safetensors", "--key", "optimizer")
    assert code == 0
    local = tmp_path / "m.safetensors"
    local.write_bytes(open_store(url).get("m.safetensors"))
    assert same(load_file(local), {"m": torch.full((30, 30), 3 / 7)})


def test_a_damaged_checkpoint_is_not_exported(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flip(store, name(1).file("model-00002-of-00002.safetensors"))
    code, _, err = run(capsys, "export", store.url, str(tmp_path / "w.safetensors"))
    assert code == 1
    assert "model-00002-of-00002.safetensors: bytes 0 to" in err
    assert not (tmp_path / "w.safetensors").exists()


def test_wrapped_names_never_leave(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manager = CheckpointManager(open_store(str(tmp_path / "run")))
    wrapped: dict[str, object] = {
        "model": {"module._orig_mod.w": torch.ones(3), "module.b": torch.zeros(1)}
    }
    manager.commit(manager.stage(wrapped, name=name(1), parent=None, run_id="r", info={}))
    target = tmp_path / "w.safetensors"
    # `module` may be an honest child of the model: who wrapped it knows, nobody else.
    assert run(capsys, "export", manager.store.url, str(target))[0] == 0
    assert set(load_file(target)) == {"module.w", "module.b"}
    argv = ["export", manager.store.url, str(target), "--force", "--strip", "module."]
    assert run(capsys, *argv)[0] == 0
    assert set(load_file(target)) == {"w", "b"}
    for prefix, told in (("module.w", "leaves nothing"), ("module.b", "leaves nothing")):
        code, _, err = run(capsys, *argv[:-1], prefix)
        assert (code, told in err) == (2, True)


def test_a_prefix_whose_loss_makes_two_names_equal_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manager = CheckpointManager(open_store(str(tmp_path / "run")))
    two: dict[str, object] = {"model": {"a.w": torch.ones(3), "w": torch.zeros(1)}}
    manager.commit(manager.stage(two, name=name(1), parent=None, run_id="r", info={}))
    target = tmp_path / "w.safetensors"
    code, _, err = run(capsys, "export", manager.store.url, str(target), "--strip", "a.")
    assert code == 2
    assert "--strip: 'a.' makes 'w' of two tensors ('" in err
    assert not target.exists()


def test_little_memory_is_needed_whatever_the_size(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    manager = CheckpointManager(open_store(url), split_bytes=64 << 20)
    big: dict[str, object] = {
        "model": {f"w{i}": torch.full((16 << 20,), float(i)) for i in range(3)}
    }
    manager.commit(manager.stage(big, name=name(1), parent=None, run_id="r", info={}))
    code = textwrap.dedent("""
        import sys
        from checkpoints.commands import main
        codes = [main(["export", sys.argv[1], sys.argv[2]]), main(["copy", sys.argv[1], sys.argv[3]])]
        anonymous = max(
            int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon")
        )
        assert codes == [0, 0]
        assert "torch" not in sys.modules
        assert anonymous < 100_000, anonymous
    """)
    argv = [sys.executable, "-c", code, url, str(tmp_path / "w.safetensors"), str(tmp_path / "to")]
    subprocess.run(argv, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    loaded = load_file(tmp_path / "w.safetensors")
    for i in range(3):
        assert bool((loaded[f"w{i}"] == i).all())


# --------------------------------------------------------------------------------------------- copy
@pytest.fixture(params=["local", "memory"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    url = f"memory://to-{os.getpid()}-{tmp_path.name}"
    return open_store(str(tmp_path / "to") if request.param == "local" else url)


def test_a_whole_run_is_copied_and_read_back_with_what_it_refers_to(
    store: Store, target: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    code, told, _ = run(capsys, "copy", store.url, target.url)
    assert code == 0
    assert told["copied"] == [str(name(step)) for step in (3, 2, 1)]
    there = CheckpointManager(target)
    for step in (1, 2, 3):
        assert same(there.restore(name(step)), {**tree(step), "model": plain(step)})
        assert target.get(name(step).manifest) == store.get(name(step).manifest)
    mine = [file for file in store.list() if not file.startswith("meeting/")]
    assert target.list() == mine
    for file in mine:
        assert target.get(file) == store.get(file)
    before = told["copied_bytes"]
    code, told, _ = run(capsys, "copy", store.url, target.url)  # again: nothing is left to do
    assert (code, told["copied"], told["copied_bytes"]) == (0, [], 0)
    assert told["skipped_bytes"] >= before * 0.9


def test_a_single_checkpoint_is_copied_whole(
    store: Store, target: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    code, told, _ = run(capsys, "copy", f"{store.url}@best", target.url)
    assert (code, told["copied"]) == (0, [str(name(2))])
    there = CheckpointManager(target)
    assert there.names() == [name(2)]
    manifest = there.catalog.manifest(name(2))
    assert {entry.owner for entry in manifest.files} == {None}
    reader.verify(target, manifest)
    assert same(there.restore(name(2)), {**tree(2), "model": plain(2)})
    index = json.loads(target.get(name(2).file("model.safetensors.index.json")))
    assert not any("/" in path for path in index["weight_map"].values())
    assert target.list("generations/") == [claim_name(1)]  # a run may go on from here
    assert run(capsys, "copy", f"{store.url}@best", target.url)[1]["copied"] == []


def test_a_copy_that_was_cut_short_goes_on_where_it_stopped(
    store: Store,
    target: Store,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    put_new = Store.put_new

    def killed(self: Store, file: str, data: bytes) -> bool:
        if file == name(2).manifest:
            raise KeyboardInterrupt
        return put_new(self, file, data)

    with monkeypatch.context() as patch:
        patch.setattr(Store, "put_new", killed)
        assert run(capsys, "copy", store.url, target.url)[0] == 130
    assert CheckpointManager(target).names() == [name(3)]
    sent: list[str] = []
    put = Store.put

    def counted(self: Store, file: str, data: Any) -> None:
        sent.append(file)
        put(self, file, data)

    monkeypatch.setattr(Store, "put", counted)
    code, told, _ = run(capsys, "copy", store.url, target.url)
    assert code == 0
    assert told["copied"] == [str(name(2)), str(name(1))]
    # The files of 2 were there already, and the frozen one of 1, to which 3 refers.
    assert not [file for file in sent if str(name(2)) in file]
    assert name(1).file("model-00002-of-00002.safetensors") not in sent
    for step in (1, 2, 3):
        assert same(
            CheckpointManager(target).restore(name(step)), {**tree(step), "model": plain(step)}
        )


def test_another_run_is_never_written_over(
    store: Store, target: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    target.put("run.json", b'{"run_id": "other", "token": "b"}')
    code, _, err = run(capsys, "copy", store.url, target.url)
    assert code == 2
    assert "found another run" in err
    assert target.list() == ["run.json"]
    target.put("run.json", store.get("run.json"))
    target.put(claim_name(2), b"{}")
    code, _, err = run(capsys, "copy", store.url, target.url)
    assert code == 2
    assert "has gone on there by itself" in err


def test_where_a_copy_has_gone_on_by_itself_none_of_its_files_is_touched(
    tmp_path: Path, target: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    def save(store: Store, generation: int, step: int, value: float) -> None:
        manager = CheckpointManager(store, keep=9)
        state = {"model": {"w": torch.full((9000,), value)}, "step": step}
        own = CheckpointName(generation=generation, step=step)
        manager.commit(manager.stage(state, name=own, parent=None, run_id="by-hand", info={}))

    source = open_store(str(tmp_path / "hand"))
    save(source, 1, 1, 1.0)
    run(capsys, "copy", source.url, target.url)
    save(source, 2, 2, 2.0)
    save(target, 2, 2, 3.0)
    code, _, err = run(capsys, "copy", source.url, target.url)
    assert code == 2
    assert "is another checkpoint's" in err
    assert run(capsys, "verify", target.url)[0] == 0


@pytest.mark.parametrize("alone_first", [True, False])
def test_a_checkpoint_is_copied_alone_and_with_its_run_and_stays_whole(
    store: Store, target: Store, capsys: pytest.CaptureFixture[str], alone_first: bool
) -> None:
    for address in [f"{store.url}@3", store.url][:: 1 if alone_first else -1]:
        code, told, _ = run(capsys, "copy", address, target.url)
        assert (code, told["problems"]) == (0, [])
        assert run(capsys, "verify", target.url)[0] == 0
    assert told["present"][0] == str(name(3))
    assert same(CheckpointManager(target).restore(name(3)), {**tree(3), "model": plain(3)})


def test_export_does_not_replace_a_file_of_a_checkpoint(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    file = f"{store.url}/{name(1).file('model.safetensors')}"
    code, _, err = run(capsys, "export", store.url, file, "--force")
    assert code == 2
    assert "lies among the run's own checkpoints" in err
    assert run(capsys, "verify", store.url)[0] == 0


@pytest.mark.parametrize("spelling", ["file://{run}", "{run}/.", "{link}", "{run}/copies/one"])
def test_a_run_is_not_copied_into_itself(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str], spelling: str
) -> None:
    (tmp_path / "link").symlink_to("run")
    there = spelling.format(run=store.url, link=tmp_path / "link")
    before = store.list()
    code, _, err = run(capsys, "copy", store.url, there)
    assert code == 2
    assert "the same place twice" in err or "lies in" in err
    assert store.list() == before


def test_checkpoints_without_a_run_are_told_apart_by_their_run_id(
    tmp_path: Path, target: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    source = CheckpointManager(open_store(str(tmp_path / "own")))
    theirs = CheckpointManager(target)
    for manager, run_id in ((source, "mine"), (theirs, "theirs")):
        manager.commit(manager.stage(tree(1), name=name(1), parent=None, run_id=run_id, info={}))
    code, _, err = run(capsys, "copy", source.store.url, target.url)
    assert (code, "found another run (theirs)" in err) == (2, True)


def test_what_is_damaged_is_left_out_and_told(
    store: Store, target: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    flip(store, name(2).file("optimizer.safetensors"))
    code, told, _ = run(capsys, "copy", store.url, target.url)
    assert code == 1
    assert told["copied"] == [str(name(3)), str(name(1))]
    assert len(told["problems"]) == 1
    assert "optimizer.safetensors" in told["problems"][0]
    assert CheckpointManager(target).names() == [name(3), name(1)]


def test_a_name_that_was_swept_at_the_target_is_not_committed(
    store: Store, target: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    target.put_new(name(3).manifest, b'{"format":1,"token":"x","void":true}')
    code, _, err = run(capsys, "copy", store.url, target.url)
    assert code == 2
    assert "the name was swept" in err


def test_bytes_that_change_on_their_way_are_found(
    store: Store, target: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    put = Store.put

    def bad(self: Store, file: str, data: Any) -> None:
        changed = bytearray(b"".join(data) if isinstance(data, list) else data)
        changed[-1] ^= 1
        put(self, file, bytes(changed) if file.endswith("tensors") else data)

    monkeypatch.setattr(Store, "put", bad)
    code, _, err = run(capsys, "copy", store.url, target.url)
    assert code == 2
    assert "other bytes arrived" in err
    assert CheckpointManager(target).names() == []


def test_a_checkpoint_that_retention_deletes_meanwhile_is_no_damage(
    store: Store, target: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = copying._copy_records

    def deleting(work: copying.Copy, newest: int | None) -> None:
        real(work, newest)
        store.delete(name(1).manifest)
        store.delete(name(1).file("optimizer.safetensors"))

    monkeypatch.setattr(copying, "_copy_records", deleting)
    code, told, _ = run(capsys, "copy", store.url, target.url)
    assert code == 1
    assert told["problems"] == [f"checkpoint {name(1)}: was deleted while it was copied"]
    assert told["copied"] == [str(name(3)), str(name(2))]


# ------------------------------------------------------------------------------------------ the bar
class Terminal:
    def __init__(self, is_terminal: bool) -> None:
        self.is_terminal, self.text = is_terminal, ""

    def isatty(self) -> bool:
        return self.is_terminal

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        pass


def test_a_bar_is_drawn_on_a_terminal_alone_and_is_gone_in_the_end() -> None:
    now = [0.0]
    terminal, pipe = Terminal(True), Terminal(False)
    for stream in (terminal, pipe):
        with Progress("verify", 4_000_000, stream=stream, clock=lambda: now[0]) as progress:  # type: ignore[arg-type]  # what it needs of a stream
            for _ in range(4):
                now[0] += 0.5
                progress.add(1_000_000)
        progress.add(1)
    assert pipe.text == ""
    lines = terminal.text.split("\r\x1b[K")
    assert lines[1] == "verify [######..................]  25% of 4.0 MB, 2.0 MB/s, 2 s left"
    assert lines[4].startswith("verify [########################] 100%")
    assert lines[-1] == ""


def test_a_device_is_not_replaced_by_force(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    code, _, told = run(capsys, "export", store.url, str(fifo), "--force")
    assert code == 2
    assert "found a device, FIFO or socket, expected the name of a file to write" in told
    assert fifo.is_fifo()


def test_a_link_is_not_replaced_by_force(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    link = tmp_path / "stdout"
    link.symlink_to(tmp_path / "file")
    (tmp_path / "file").touch()
    code, _, told = run(capsys, "export", store.url, str(link), "--force")
    assert code == 2
    assert "found a link, expected the name of a file to write" in told
    assert link.is_symlink()


@pytest.mark.parametrize(("kind", "count"), [("safetensors", 5 << 20), ("torch", 3 << 20)])
def test_a_full_disk_is_told_with_what_is_needed_and_what_is_free(
    small_disk: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    kind: str,
    count: int,
) -> None:
    manager = CheckpointManager(open_store(str(tmp_path / "large")))
    tree = {"model": {"w": torch.zeros(count)}}
    manager.commit(manager.stage(tree, name=name(1), parent=None, run_id="r", info={}))
    target = small_disk / "weights"
    code, _, told = run(capsys, "export", manager.store.url, str(target), "--format", kind)
    assert code == 2
    assert (
        f"expected {(count * 4 + 4096) / 1e6:.1f} MB for a temporary copy; make room there" in told
    )
    assert told.count("\n") == 1
    assert list(small_disk.iterdir()) == []
