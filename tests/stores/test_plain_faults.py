"""C28 on a plain file system: it fails at one file of a checkpoint, in each way that one can."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem

from checkpoints.errors import CheckpointError
from checkpoints.manager import CheckpointManager
from checkpoints.store import open_store
from tests.support.saving_worker import is_whole, save

SIZE = 9 << 20  # larger than what is written in one go


class _Broken:
    """A file that fails on one call, or takes less than it is given and says nothing."""

    def __init__(self, file: Any, how: str) -> None:
        self._file, self._how = file, how

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(self, data: Any) -> int:
        if self._how == "write":
            raise OSError(22, "the disk says no")
        view = memoryview(data).cast("B")
        self._file.write(view[:-1] if self._how == "short" else view)
        return view.nbytes

    def close(self) -> None:
        self._file.close()
        if self._how == "close":
            raise OSError(22, "the disk says no, late")


class Moody(LocalFileSystem):  # type: ignore[misc]  # fsspec is untyped
    """Real files, except for the one file that is written when the count is down."""

    protocol = "moody"
    how = ""
    countdown: Iterator[int] = iter(())

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return super()._strip_protocol(str(path).removeprefix("moody://"))

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        file = super()._open(path, mode, **kwargs)
        if "r" in mode or next(Moody.countdown, 0) != 1:
            return file
        return _Broken(file, Moody.how)


fsspec.register_implementation("moody", Moody, clobber=True)


@pytest.mark.parametrize("how", ["write", "close", "short"])
def test_c28_no_manifest_is_published_for_data_that_is_not_there(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = CheckpointManager(open_store(f"moody://{tmp_path}/run", retry_s=0))
    save(manager, 1, size=SIZE)
    monkeypatch.setattr(Moody, "how", how)
    monkeypatch.setattr(Moody, "countdown", itertools.chain([0, 1], itertools.repeat(0)))
    with pytest.raises(CheckpointError, match="safetensors"):
        save(manager, 2, size=SIZE)
    assert [name.step for name in manager.names()] == [1]
    assert not [name for name in manager.store.list() if name.endswith("2/manifest.json")]
    assert is_whole(manager, manager.names()[0])
    assert not list(tmp_path.rglob(".tmp-*"))
    save(manager, 3, size=SIZE)
    assert [name.step for name in manager.names()] == [3, 1]
