import pytest

from checkpoints.store import open_store
from tests.stores.contract import Opener, StoreContract
from tests.support.other_stores import SftpServer


class TestSftpStore(StoreContract):
    large_bytes = 48 << 20
    race_rounds = 5

    @pytest.fixture
    def open_one(self, sftp_server: SftpServer) -> Opener:
        url = sftp_server.url()
        return lambda: open_store(url, sftp_server.options)
