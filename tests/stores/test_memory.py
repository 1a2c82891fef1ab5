from pathlib import Path

import pytest

from checkpoints.backend_fsspec import FsspecBackend
from checkpoints.errors import PermanentStoreError
from checkpoints.layout import new_token
from checkpoints.store import Store, open_store
from tests.stores.contract import CompareAndSetContract, Opener, StoreContract


class TestMemoryStore(CompareAndSetContract):
    @pytest.fixture
    def open_one(self) -> Opener:
        url = f"memory://test-{new_token()}/run"
        return lambda: open_store(url)

    def test_files_cannot_grow_here(self, store: Store) -> None:
        assert not store.can_append
        with pytest.raises(PermanentStoreError, match="cannot grow"):
            store.append("x", b"1")


class TestPlainFileSystem(StoreContract):
    """Any fsspec file system with folders and rename, here fsspec's own local one."""

    @pytest.fixture
    def open_one(self, tmp_path: Path) -> Opener:
        url = f"file://{tmp_path}/some/run"
        return lambda: Store(url, FsspecBackend(url, {"auto_mkdir": False}))

    def test_compare_and_set_is_refused(self, store: Store) -> None:
        assert store.put_if("leader", b"one", None)
        with pytest.raises(PermanentStoreError, match="cannot compare and set"):
            store.put_if("leader", b"two", "0" * 32)
