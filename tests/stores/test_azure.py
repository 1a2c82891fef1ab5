import pytest

from checkpoints.store import open_store
from tests.stores.contract import CompareAndSetContract, Opener
from tests.support.other_stores import AzureServer


class TestAzureStore(CompareAndSetContract):
    large_bytes = 48 << 20
    race_rounds = 5

    @pytest.fixture
    def open_one(self, azure_server: AzureServer) -> Opener:
        url = azure_server.url()
        return lambda: open_store(url, azure_server.options())
