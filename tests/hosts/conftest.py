"""Fixtures of the tests on several hosts."""

from tests.support.hosts import bridge_s3, hosts

__all__ = ["bridge_s3", "hosts"]
