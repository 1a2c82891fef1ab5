import pytest

from checkpoints.store import open_store
from tests.stores.contract import CompareAndSetContract, Opener
from tests.support.other_stores import GcsServer


class TestGcsStore(CompareAndSetContract):
    large_bytes = 48 << 20
    race_rounds = 5

    @pytest.fixture
    def open_one(self, gcs_server: GcsServer) -> Opener:
        url = gcs_server.url()
        return lambda: open_store(url, gcs_server.options())
