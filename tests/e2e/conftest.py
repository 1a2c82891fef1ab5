"""What the tests of whole runs share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cluster import Cluster


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Agents that find the project installed; all that they started ends with the test."""
    with Cluster(tmp_path) as made:
        yield made


@pytest.fixture
def bare_cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Agents that know the project only as a folder: a bare clone."""
    with Cluster(tmp_path, installed=False) as made:
        yield made
