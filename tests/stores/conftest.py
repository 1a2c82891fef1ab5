"""Fixtures of the store tests."""

from collections.abc import Iterator

import pytest

from tests.support.fault_proxy import FaultProxy
from tests.support.object_stores import S3Server, s3_server
from tests.support.other_stores import azure_server, gcs_server, mini_server, sftp_server

__all__ = ["azure_server", "gcs_server", "mini_server", "proxy", "s3_server", "sftp_server"]


@pytest.fixture
def proxy(s3_server: S3Server) -> Iterator[FaultProxy]:
    """A proxy before the S3 server, without faults yet."""
    with FaultProxy(s3_server.port) as running:
        yield running
