"""A cgroup with a memory limit, where this machine lets us make one."""

import contextlib
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

from tests.support.tools import missing

ROOT = Path("/sys/fs/cgroup")


def _own() -> tuple[Path, str] | None:
    """The folder of our memory cgroup and the name of its limit."""
    lines = Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines()
    for number, controllers, path in (line.split(":", 2) for line in lines):
        base = ROOT / "memory" if controllers == "memory" else ROOT
        limit = "memory.limit_in_bytes" if controllers == "memory" else "memory.max"
        # A container may see its cgroup as the root, and the host's path for it.
        for folder in (base / path.lstrip("/"), base):
            if (controllers == "memory" or number == "0") and (folder / "cgroup.procs").exists():
                return folder, limit
    return None


@contextlib.contextmanager
def memory_limit(limit_bytes: int) -> Iterator[list[str]]:
    """Make a cgroup; yields the words in front of a command that is to run in it."""
    own = _own()
    if own is None:
        missing("needs a memory cgroup: /proc/self/cgroup names none that can be seen")
    parent, limit = own
    folder = parent / f"elastic-test-{secrets.token_hex(4)}"
    try:
        folder.mkdir()
        (folder / limit).write_text(str(limit_bytes))
    except OSError as error:
        with contextlib.suppress(OSError):
            folder.rmdir()
        missing(f"needs a memory cgroup of its own (root, and the memory controller): {error}")
    try:
        yield ["sh", "-c", f'echo $$ > {folder}/cgroup.procs && exec "$@"', "sh"]
    finally:
        _remove(folder)


def _remove(folder: Path) -> None:
    """Take it away once its processes are gone, which the test ends by itself."""
    deadline = time.monotonic() + 20
    while True:
        try:
            folder.rmdir()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
        else:
            return
