import hashlib
import os

import pytest

from checkpoints.store import open_store
from tests.stores.contract import CompareAndSetContract, Opener
from tests.support.other_stores import GcsServer
from tests.support.resumable import Uploads, resumable_server

DATA = os.urandom(40 << 20)


class TestGcsStore(CompareAndSetContract):
    large_bytes = 48 << 20
    race_rounds = 5

    @pytest.fixture
    def open_one(self, gcs_server: GcsServer) -> Opener:
        url = gcs_server.url()
        return lambda: open_store(url, gcs_server.options())


def upload_to(server: Uploads) -> None:
    options = {"token": "anon", "project": "t", "endpoint_url": server.endpoint}
    store = open_store("gs://bucket/run", options, retry_s=30)
    store.put("large", DATA)
    store.close()
    assert hashlib.sha256(server.objects["made"]).digest() == hashlib.sha256(DATA).digest()


def test_c34_a_server_that_takes_some_of_a_part_gets_the_rest_from_that_byte_on() -> None:
    with resumable_server() as server:
        server.most = [300_000, 262_144, 16 << 20, 1]
        upload_to(server)
        assert server.spans[1].startswith("bytes 300000-")


def test_c34_a_part_taken_in_half_before_the_connection_broke_is_not_sent_twice() -> None:
    with resumable_server() as server:
        server.most, server.reset = [1_000_000, 16 << 20], [True, True]
        upload_to(server)
        assert server.spans[1].startswith("bytes */")
        assert server.spans[2].startswith("bytes 1000000-")


def test_c34_an_object_whose_bytes_were_shifted_is_taken_away_and_sent_anew() -> None:
    with resumable_server() as server:
        server.shift = True
        upload_to(server)
