"""Text files as windows of bytes."""

import itertools
import pickle
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from jobs import JobError
from jobs.tensors import read_tensors
from jobs.text import Corpus, Windows, cut


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Thirty files in folders, each with bytes of its own, and what is not text for us."""
    root = tmp_path / "texts"
    for i in range(30):
        path = root / f"part{i % 3}" / f"file{i}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes([65 + i]) * (10 + 7 * i))
    (root / "part0" / "empty.txt").touch()
    (root / "skipped").mkdir()
    (root / "skipped" / "other.txt").write_text("not this one" * 10)
    return root


def corpus(folder: Path, **options: Any) -> Corpus:
    options = {"exclude": ("skipped",), "cache": str(folder.parent / "cache"), **options}
    return Corpus(url=str(folder), **options)


def test_order_depends_on_names_alone_wherever_the_folder_lies(folder: Path) -> None:
    names = [file.name for file in corpus(folder).find()]
    other = folder.rename(folder.with_name("elsewhere"))
    assert [file.name for file in corpus(other).find()] == names
    assert sorted(names) == sorted(f"part{i % 3}/file{i}.txt" for i in range(30))
    assert names != sorted(names)


def test_folder_pattern_and_other_file_systems_hold_the_same_text(folder: Path) -> None:
    memory = fsspec.filesystem("memory")
    memory.put(str(folder), "/texts", recursive=True)
    try:
        texts = [
            read_tensors(one.prepare()).notes["sha256"]
            for one in (
                corpus(folder),
                corpus(folder / "**" / "*.txt"),
                Corpus(url="memory://texts", exclude=("skipped",), cache=str(folder.parent / "m")),
            )
        ]
    finally:
        memory.rm("/texts", recursive=True)
    assert len(set(texts)) == 1


def test_a_single_file_is_a_corpus_with_a_heldout_part(tmp_path: Path) -> None:
    path = tmp_path / "one.txt"
    path.write_bytes(bytes(range(100)))
    cache = Corpus(url=str(path), heldout=0.1, cache=str(tmp_path)).prepare()
    heldout, train = Windows(cache, "heldout", 16), Windows(cache, "train", 16)
    assert heldout[0].tolist() == list(range(10))
    assert torch.cat([train[i][1:] for i in range(len(train))]).tolist() == list(range(11, 100))


def test_without_a_heldout_part_all_text_is_trained(tmp_path: Path) -> None:
    path = tmp_path / "one.txt"
    path.write_bytes(bytes(range(100)))
    cache = Corpus(url=str(path), heldout=0.0, cache=str(tmp_path)).prepare()
    assert len(Windows(cache, "heldout", 16)) == 0
    assert sum(len(window) - 1 for window in windows(cache, "train", 16)) == 99


def windows(cache: Path, part: str, block: int) -> list[torch.Tensor]:
    dataset = Windows(cache, part, block)
    return [dataset[i] for i in range(len(dataset))]


def test_no_window_crosses_from_one_file_into_the_next(folder: Path) -> None:
    cache = corpus(folder).prepare()
    for part in ("train", "heldout"):
        assert all(len(window.unique()) == 1 for window in windows(cache, part, 16))


def test_text_is_bounded_and_the_bound_changes_the_cache_file(folder: Path) -> None:
    small, large = corpus(folder, max_bytes=500).prepare(), corpus(folder).prepare()
    assert small != large
    first, whole = (read_tensors(path).tensors["text"] for path in (small, large))
    assert len(first) == 500
    assert torch.equal(whole[:500], first)


def test_cache_is_made_once_and_again_where_a_file_changed(folder: Path) -> None:
    path = corpus(folder).prepare()
    made = path.stat().st_mtime_ns
    assert corpus(folder).prepare() == path
    assert path.stat().st_mtime_ns == made
    (folder / "part0" / "file0.txt").write_bytes(b"a" * 10)
    assert corpus(folder).prepare() != path


def test_standard_library_is_read_without_what_was_installed_into_it(tmp_path: Path) -> None:
    library = Corpus(exclude=("site-packages", "test"), max_bytes=200_000, cache=str(tmp_path))
    names = [file.name for file in library.find()]
    assert "json/decoder.py" in names
    assert not any("site-packages" in name for name in names)
    assert len(read_tensors(library.prepare()).tensors["text"]) == 200_000


def test_cache_folder_is_the_users_own_where_none_is_named(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    assert corpus(folder, cache=None).prepare().parent == tmp_path / "home" / "elastic-trainer"
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    assert (tmp_path / "tmp") in corpus(folder, cache=None).prepare().parents


def test_what_cannot_be_is_one_clear_line(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"^args.url: .*nothing.*: found no file"):
        corpus(folder / "nothing*").find()
    with pytest.raises(JobError, match=r"^args.url: nosuch://x: cannot be listed"):
        Corpus(url="nosuch://x").find()
    with pytest.raises(JobError, match=r"^args.max_bytes: found 3, expected at least 64$"):
        Corpus(max_bytes=3)
    with pytest.raises(JobError, match=r"^args.heldout: found 1.0"):
        Corpus(heldout=1.0)
    (tmp_path / "file").touch()
    with pytest.raises(JobError, match=r"^args.cache: .*name another folder$"):
        corpus(folder, cache=str(tmp_path / "file")).prepare()
    one = tmp_path / "one.txt"
    one.write_text("x")
    with pytest.raises(JobError, match="found 1 bytes of text"):
        Corpus(url=str(one), cache=str(tmp_path)).prepare()


def test_secrets_of_the_file_system_are_not_in_the_repr() -> None:
    assert "hidden" not in repr(Corpus(storage_options={"secret": "hidden"}))


def test_a_pickled_dataset_carries_no_text(folder: Path) -> None:
    dataset = Windows(corpus(folder).prepare(), "train", 16)
    pickled = pickle.dumps(dataset)
    assert len(pickled) < 1000
    assert torch.equal(pickle.loads(pickled)[3], dataset[3])  # noqa: S301 - our own bytes


def test_a_spawned_loader_worker_reads_the_same_windows(folder: Path) -> None:
    dataset = Windows(corpus(folder).prepare(), "train", 16)
    loader = DataLoader(
        dataset, batch_size=None, num_workers=1, multiprocessing_context="spawn", timeout=120
    )
    found = [window.tolist() for window in loader]
    assert found == [dataset[i].tolist() for i in range(len(dataset))]


@given(lengths=st.lists(st.integers(0, 50), max_size=20), block=st.integers(1, 20))
def test_every_byte_but_the_first_of_a_document_is_predicted_once(
    lengths: list[int], block: int
) -> None:
    borders = torch.tensor([0, *lengths]).cumsum(0)
    starts, counts = cut(borders[:-1], borders[1:], block)
    predicted = [
        start + 1 + i
        for start, count in zip(starts.tolist(), counts.tolist(), strict=True)
        for i in range(count)
    ]
    wanted = [at for a, b in itertools.pairwise(borders) for at in range(a + 1, b)]
    assert predicted == wanted
    assert all(1 <= count <= block for count in counts.tolist())
