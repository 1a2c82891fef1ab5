"""Ports for servers and runs that stay theirs: below those that the kernel gives to outgoing connections, once among all test processes."""

import fcntl
import os
import random
import socket
import tempfile
from pathlib import Path

LOOPBACK = "127.0.0.1"
# SeaweedFS has those from 11000 to 16002 and from 21000 to 26002 (tests.support.object_stores).
_FOR_SERVERS = range(17_000, 20_900)
_FOR_RUNS = range(26_100, 32_700)
_held: list[int] = []


def free_port(*, for_server: bool = False) -> int:
    """A TCP port that nobody listens on, and that no other test process is given while this one lives."""
    folder = Path(tempfile.gettempdir()) / f"elastic-test-ports-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    ports = _FOR_SERVERS if for_server else _FOR_RUNS
    for port in random.SystemRandom().sample(ports, len(ports)):
        lock = os.open(folder / str(port), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with socket.socket() as probe:
                probe.bind((LOOPBACK, port))
        except OSError:
            os.close(lock)
            continue
        _held.append(lock)
        return port
    raise OSError(f"no free port among {ports}")
