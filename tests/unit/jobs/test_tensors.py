"""The tiny safetensors reader and writer."""

import json
import pickle
import re
import struct
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from jobs import JobError
from jobs.digits import DATA
from jobs.tensors import read_tensors, write_tensors


def test_what_is_written_is_read_back_here_and_by_the_safetensors_library(tmp_path: Path) -> None:
    path = tmp_path / "some.safetensors"
    tensors = {
        "bytes": torch.arange(7, dtype=torch.uint8),
        "numbers": torch.tensor([[1, -2, 1 << 40]]),
        "none": torch.zeros(0, dtype=torch.int64),
    }
    write_tensors(path, tensors, {"sha256": "abc"})
    ours = read_tensors(path)
    assert ours.notes == {"sha256": "abc"}
    with safe_open(path, framework="pt") as theirs:
        assert theirs.metadata() == ours.notes
        for name, tensor in tensors.items():
            assert torch.equal(ours.tensors[name], tensor)
            assert torch.equal(theirs.get_tensor(name), tensor)
    assert [p.name for p in tmp_path.iterdir()] == ["some.safetensors"]


def test_a_failed_write_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(KeyError):
        write_tensors(tmp_path / "a", {"w": torch.zeros(3)}, {})
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"):
        write_tensors(tmp_path / "folder", {"w": torch.arange(3)}, {})
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]


@pytest.mark.parametrize("cut", [1, 7, 8, 100, 400, 117_000])
def test_a_cut_file_is_one_clear_line(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "digits.safetensors"
    path.write_bytes(DATA.read_bytes()[:cut])
    with pytest.raises(JobError, match=f"^{re.escape(str(path))}: not a whole safetensors file"):
        read_tensors(path)


def test_a_missing_or_empty_file_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="No such file"):
        read_tensors(tmp_path / "none.safetensors")
    (tmp_path / "empty.safetensors").touch()
    with pytest.raises(JobError, match="not a whole safetensors file"):
        read_tensors(tmp_path / "empty.safetensors")


@pytest.mark.parametrize(
    "header",
    [
        [],
        {"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}},
        {"w": {"dtype": "U8", "shape": [5], "data_offsets": [0, 5]}},
        {"w": {"dtype": "U8", "shape": [4], "data_offsets": [-4, 0]}},
        {"w": {"dtype": "U8", "shape": [3], "data_offsets": [0, 4]}},
        {"w": {"dtype": "U8", "shape": [4]}},
        {"w": 3},
    ],
)
def test_a_header_that_does_not_fit_is_refused(tmp_path: Path, header: object) -> None:
    path = tmp_path / "strange.safetensors"
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"1234")
    with pytest.raises(JobError, match="not a whole safetensors file"):
        read_tensors(path)


def test_a_pickle_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "pickle.safetensors"
    path.write_bytes(pickle.dumps({"a": list(range(100))}))
    with pytest.raises(JobError, match="not a whole safetensors file"):
        read_tensors(path)
