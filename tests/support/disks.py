"""A small file system of its own, to be filled."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.tools import missing, need_tool


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder that holds 16 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.getuid() != 0:
        missing("mounting a small file system needs root")
    mount = [need_tool("mount"), "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(folder)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        missing("this machine does not let root mount a tmpfs")
    try:
        yield folder
    finally:
        subprocess.run([need_tool("umount"), "-l", str(folder)], check=True)
