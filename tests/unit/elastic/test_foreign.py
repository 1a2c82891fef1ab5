"""Weights of others: formats, names, and nothing that is read is run."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from checkpoints.layout import CheckpointName
from checkpoints.manager import CheckpointManager
from checkpoints.store import open_store
from checkpoints.tensorfile import encode
from elastic import foreign
from elastic.errors import StartError
from elastic.foreign import match_names, read_weights

TENSORS = {
    "a.weight": torch.arange(6.0).reshape(2, 3),
    "a.bias": torch.tensor([1, 2], dtype=torch.bfloat16),
    "flag": torch.tensor(True),
    "none": torch.ones(0, 2),
}


class Harmful:
    """A pickle that leaves a mark where it is executed."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.marker,))


def write_safe(path: Path, tensors: dict[str, Tensor]) -> None:
    header, views = encode(tensors)
    path.write_bytes(header + b"".join(views))


def check_equal(read: dict[str, Tensor], expected: dict[str, Tensor] = TENSORS) -> None:
    assert set(read) == set(expected)
    for name, tensor in expected.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor)


# ------------------------------------------------------------------------------------------- formats
def test_a_safetensors_file_is_read(tmp_path: Path) -> None:
    write_safe(tmp_path / "model.safetensors", TENSORS)
    check_equal(read_weights(str(tmp_path / "model.safetensors")))
    check_equal(read_weights(str(tmp_path)))


def test_a_file_that_safetensors_itself_wrote_is_read(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    odd = {"flags": torch.tensor([True, False, True]), "w": torch.randn(3, 5)}
    safetensors.save_file(odd, tmp_path / "x.safetensors")
    check_equal(read_weights(str(tmp_path / "x.safetensors")), odd)


def test_small_tensors_are_read_together_and_large_ones_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(foreign, "_RUN_BYTES", 100)
    tensors = {
        f"t{i}": torch.full((size,), float(i)) for i, size in enumerate((3, 9, 50, 0, 2, 26))
    }
    write_safe(tmp_path / "x.safetensors", tensors)
    check_equal(read_weights(str(tmp_path / "x.safetensors")), tensors)


def test_other_filesystems_are_read_through_the_store() -> None:
    header, views = encode(TENSORS)
    open_store("memory://foreign").put("deep/model.safetensors", header + b"".join(views))
    check_equal(read_weights("memory://foreign/deep/model.safetensors"))
    open_store("memory://").put("top.safetensors", header + b"".join(views))
    check_equal(read_weights("memory://top.safetensors"))


def test_a_file_in_the_current_folder_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_safe(tmp_path / "x.safetensors", TENSORS)
    monkeypatch.chdir(tmp_path)
    check_equal(read_weights("x.safetensors"))


@pytest.mark.parametrize("given", ["", "model.safetensors.index.json"])
def test_a_hugging_face_index_is_read(tmp_path: Path, given: str) -> None:
    first = {name: TENSORS[name] for name in ("a.weight", "none")}
    second = {name: TENSORS[name] for name in ("a.bias", "flag")}
    write_safe(tmp_path / "model-00001-of-00002.safetensors", first)
    write_safe(tmp_path / "model-00002-of-00002.safetensors", second)
    table = dict.fromkeys(first, "model-00001-of-00002.safetensors")
    table |= dict.fromkeys(second, "model-00002-of-00002.safetensors")
    index = {"metadata": {"total_size": 1}, "weight_map": table}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    check_equal(read_weights(str(tmp_path / given)))


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"x": "../../secret.safetensors"}, "found file '../../secret.safetensors', expected one"),
        ({"x": "/etc/secret.safetensors"}, "found file '/etc/secret.safetensors', expected one"),
        ({"x": "code.py"}, "found file 'code.py', expected one"),
        ({"x": "gone.safetensors"}, "gone.safetensors: found no such file"),
        ({"x": "model.safetensors"}, "found no tensor 'x' in model.safetensors"),
        ([], "found no table 'weight_map'"),
        (None, "found no table 'weight_map'"),
    ],
)
def test_a_wrong_index_is_one_line(tmp_path: Path, table: object, message: str) -> None:
    write_safe(tmp_path / "model.safetensors", TENSORS)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": table} if table is not None else []))
    with pytest.raises(StartError) as caught:
        read_weights(str(index))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("suffix", ["pt", "pth", "bin", "ckpt"])
@pytest.mark.parametrize("key", [None, "state_dict", "model"])
def test_a_torch_save_file_is_read(tmp_path: Path, suffix: str, key: str | None) -> None:
    path = tmp_path / f"weights.{suffix}"
    torch.save(TENSORS if key is None else {key: TENSORS, "epoch": 3}, path)
    check_equal(read_weights(str(path)))


def test_parameters_in_a_torch_save_file_come_without_their_gradient(tmp_path: Path) -> None:
    torch.save(torch.nn.Linear(2, 2).state_dict(keep_vars=True), tmp_path / "w.pt")
    assert not any(tensor.requires_grad for tensor in read_weights(str(tmp_path / "w.pt")).values())


@pytest.mark.parametrize("content", [{"epoch": 3}, [torch.ones(1)], 7])
def test_a_torch_save_file_without_named_tensors_is_one_line(tmp_path: Path, content: Any) -> None:
    torch.save(content, tmp_path / "w.pt")
    with pytest.raises(StartError, match=r"w\.pt: found no tensors by name in it"):
        read_weights(str(tmp_path / "w.pt"))


@pytest.mark.parametrize("name", ["harm.pt", "harm.bin", "harm.safetensors", "x.index.json"])
@pytest.mark.parametrize("writer", ["pickle", "torch"])
@pytest.mark.parametrize("forced", [False, True])
def test_c52_a_harmful_pickle_is_refused_and_nothing_is_run(
    tmp_path: Path, name: str, writer: str, forced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if forced:
        monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    marker = tmp_path / "marker"
    content = {"w": Harmful(marker), "v": torch.ones(1)}
    if writer == "torch":
        torch.save(content, tmp_path / name)
    else:
        (tmp_path / name).write_bytes(pickle.dumps(content))
    with pytest.raises(StartError) as caught:
        read_weights(str(tmp_path / name))
    assert not marker.exists()
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["w.pt", "w.safetensors"])
@given(data=st.binary(max_size=200))
def test_c52_any_bytes_are_one_line(
    tmp_path_factory: pytest.TempPathFactory, name: str, data: bytes
) -> None:
    path = tmp_path_factory.mktemp("any") / name
    path.write_bytes(data)
    with pytest.raises(StartError, match=r"^[^\n]*$"):  # no such bytes are a state_dict
        read_weights(str(path))


def test_a_url_without_weights_is_one_line(tmp_path: Path) -> None:
    for url in (tmp_path, tmp_path / "nothing", tmp_path / "no.safetensors", tmp_path / "no.pt"):
        with pytest.raises(StartError, match=r"expected a \.safetensors file") as caught:
            read_weights(str(url))
        assert "\n" not in str(caught.value)


# --------------------------------------------------------------------------------------- checkpoints
@pytest.fixture
def run_url(tmp_path: Path) -> str:
    """A run with three checkpoints, of which that of step 2 is the best."""
    url = str(tmp_path / "run")
    manager = CheckpointManager(open_store(url))
    for step in (1, 2, 3):
        name = CheckpointName(generation=1, step=step)
        tree = {"model": {"w": torch.full((2,), float(step))}, "job": {"x": torch.ones(1)}}
        best: Any = {"checkpoint": "000001-000000000002", "step": 2, "value": 1.0, "metric": "loss"}
        snapshot = manager.stage(tree, name=name, parent=None, run_id="r", info={"best": best})
        manager.commit(snapshot)
    manager.close()
    return url


@pytest.mark.parametrize(
    ("suffix", "value"),
    [("", 3), ("@latest", 3), ("@best", 2), ("@1", 1), ("/checkpoints/000001-000000000002", 2)],
)
def test_weights_of_a_run_are_read(run_url: str, suffix: str, value: float) -> None:
    check_equal(read_weights(run_url + suffix), {"w": torch.full((2,), float(value))})


def test_a_checkpoint_that_is_not_there_is_one_line(run_url: str) -> None:
    with pytest.raises(StartError, match="found no weights there"):
        read_weights(f"{run_url}@77")


# --------------------------------------------------------------------------------------------- names
PLAIN = ["backbone.module.weight", "backbone.norm.weight", "head.weight"]


@pytest.mark.parametrize(
    "prefix", ["", "module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."]
)
def test_c42_prefixes_of_wrappers_are_left_out(prefix: str) -> None:
    found = [prefix + name for name in PLAIN]
    assert match_names(found, PLAIN) == dict(zip(found, PLAIN, strict=True))


def test_c42_wrappers_in_the_middle_are_left_out() -> None:
    found = ["backbone._orig_mod.module.weight", "backbone._orig_mod.norm.weight", "head.weight"]
    assert list(match_names(found, PLAIN).values()) == PLAIN
    found = [f"module.{name}" for name in found]
    assert list(match_names(found, PLAIN).values()) == PLAIN


def test_c42_an_honest_module_child_keeps_its_name() -> None:
    wanted = ["module.w", "w"]
    assert match_names(["module.w", "w"], wanted) == {"module.w": "module.w", "w": "w"}
    wrapped = match_names(["module.module.w", "module.w"], wanted)
    assert wrapped == {"module.module.w": "module.w", "module.w": "w"}
    assert match_names(["module.w"], ["module.w"]) == {"module.w": "module.w"}
    assert match_names(["module.module.w"], ["module.w"]) == {"module.module.w": "module.w"}


def test_what_matches_nothing_keeps_its_name() -> None:
    found = ["module.head.weight", "module.other"]
    assert match_names(found, PLAIN) == {
        "module.head.weight": "head.weight",
        "module.other": "module.other",
    }
    assert match_names([], PLAIN) == {}
    assert match_names(["module"], []) == {"module": "module"}


def test_two_foreign_names_never_become_one() -> None:
    found = ["a.module.w", "a._orig_mod.w"]
    assert match_names(found, ["a.w"]) == {"a.module.w": "a.w", "a._orig_mod.w": "a._orig_mod.w"}


@given(
    st.lists(
        st.sampled_from(["module.w", "w", "a.module.w", "a.w", "b.module.module"]), unique=True
    ),
    st.lists(st.sampled_from(["module", "_orig_mod"]), max_size=3),
)
def test_names_under_any_wrappers_match_themselves(wanted: list[str], wrappers: list[str]) -> None:
    prefix = "".join(f"{wrapper}." for wrapper in wrappers)
    found = [prefix + name for name in wanted]
    assert match_names(found, wanted) == dict(zip(found, wanted, strict=True))
