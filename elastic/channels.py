"""Where rank 0 leaves its address for the others: the launcher's store, an object at a URL; and how to reach it.

A channel holds one record, the newest. Guarantees: reading never waits for a record that is not there; a channel that
is dead, silent or holds nonsense is an empty one, with the trouble in words; nothing blocks longer than a probe.
"""

import json
import logging
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Final, Protocol

from torch._C._distributed_c10d import Store as KeyStore
from torch._C._distributed_c10d import TCPStore

from checkpoints.errors import CheckpointError
from checkpoints.store import Store
from elastic.addresses import own_addresses
from elastic.bounded import run_bounded
from elastic.errors import StartError

__all__ = [
    "Address",
    "Channel",
    "GivenStore",
    "Record",
    "UrlChannel",
    "connect",
    "host_store",
    "own_addresses",
]

logger = logging.getLogger(__name__)

Address = tuple[str, int]

_PROBE_S: Final = 0.7
_CLIENT_S: Final = 8.0
_STORE_TIMEOUT: Final = timedelta(seconds=300)
_TAKEN_FOR_S: Final = 5.0
"""How long a taken port is waited for: a worker of the last start may still be leaving."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """What rank 0 publishes."""

    addresses: tuple[str, ...]
    port: int
    world_size: int
    nonce: str
    group: str

    def to_json(self) -> bytes:
        """Return the record as an object's bytes."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, data: bytes) -> "Record | None":
        """Read what to_json gave; None for anything else."""
        try:
            found = json.loads(data)
            record = cls(
                addresses=tuple(map(str, found["addresses"])), port=int(found["port"]),
                world_size=int(found["world_size"]), nonce=str(found["nonce"]), group=str(found["group"]),
            )  # fmt: skip
        except (ValueError, TypeError, KeyError, RecursionError):
            return None
        return record if 0 < record.port < 65536 else None


class Channel(Protocol):
    """A place for one record."""

    trouble: str
    """Why it could not be used, in words; empty when all is well."""

    def publish(self, record: Record) -> bool:
        """Replace the record; False (and a trouble) if that failed."""

    def read(self) -> Record | None:
        """Return the record, None if there is none or the channel cannot be read. Never waits for one."""

    def __str__(self) -> str:
        """Name the place."""


class GivenStore:
    """The store at MASTER_ADDR:MASTER_PORT, served by the agent or by rank 0's worker.

    Attributes:
        trouble: Why it could not be used.
        answered: Whether it has ever been reached.
    """

    def __init__(
        self, address: Address, group: str, *, serve: bool, may_give_way: bool, hint: str
    ) -> None:
        """Name the store; serve it if this is rank 0 and no agent does.

        Raises:
            StartError: Raised when its port is taken and there is no other way to meet.
        """
        self._address = address
        self._key = f"elastic-meeting/{group}"
        self._store: KeyStore | None = None
        self._not_before = 0.0
        self.trouble = "not tried yet"
        self.answered = False
        if serve:
            self._serve(may_give_way=may_give_way, hint=hint)

    def _serve(self, *, may_give_way: bool, hint: str) -> None:
        host, port = self._address
        deadline = time.monotonic() + _TAKEN_FOR_S
        while True:
            try:
                self._store = host_store(port)
            except OSError as error:
                if time.monotonic() < deadline:
                    time.sleep(0.1)
                    continue
                self.trouble = (
                    f"port {port} of {host} is taken by another process ({error.strerror}), expected it free for rank 0;"
                    f" {hint}"
                )
                if not may_give_way:
                    raise StartError(f"MASTER_PORT: {self.trouble}") from error
                logger.warning("%s; meeting at the run's URL", self.trouble)
                self._not_before = float("inf")
            return

    def _reach(self) -> KeyStore | None:
        """Return the connected store; at most one try a second."""
        if self._store is None and time.monotonic() >= self._not_before:
            self._store, self.trouble = connect(self._address)
            self._not_before = time.monotonic() + 1.0
        self.answered = self.answered or self._store is not None
        return self._store

    def publish(self, record: Record) -> bool:
        """Replace the record."""
        store = self._reach()
        if store is None:
            return False
        try:
            store.set(self._key, record.to_json().decode())
        except RuntimeError as error:
            self._lose(error)
            return False
        return True

    def read(self) -> Record | None:
        """Return the record; asks first and fetches then, so that it never waits for one."""
        store = self._reach()
        if store is None:
            return None
        try:
            return Record.from_json(store.get(self._key)) if store.check([self._key]) else None
        except RuntimeError as error:
            self._lose(error)
            return None

    def _lose(self, error: RuntimeError) -> None:
        self._store = None
        self.trouble = _first_line(error)

    def __str__(self) -> str:
        return f"{self._address[0]}:{self._address[1]}"


class UrlChannel:
    """An object of a store. Its requests run in threads: a store that is down does not hold up the others."""

    def __init__(self, store: Store, name: str, *, every_s: float = 0.5) -> None:
        """Name the object; it is fetched at most once per `every_s`."""
        self._store = store
        self._name = name
        self._every_s = every_s
        self._not_before = 0.0
        self._running: threading.Thread | None = None
        self._found: Record | None = None
        self._published: Record | None = None
        self.trouble = "not tried yet"

    def publish(self, record: Record) -> bool:
        """Replace the object; False until that is done."""
        if self._published != record:
            self._start(self._put, record)
        return self._published == record

    def read(self) -> Record | None:
        """Return what the last fetch found, and begin the next."""
        self._start(self._fetch)
        return self._found

    def _start(self, work: Callable[..., None], *given: Record) -> None:
        now = time.monotonic()
        if now >= self._not_before and (self._running is None or not self._running.is_alive()):
            self._not_before = now + self._every_s
            self._running = threading.Thread(target=work, args=given, name="meeting", daemon=True)
            self._running.start()

    def _put(self, record: Record) -> None:
        try:
            self._store.put(self._name, record.to_json())
        except (CheckpointError, OSError) as error:
            self.trouble = _first_line(error)
        else:
            self._published, self.trouble = record, ""

    def _fetch(self) -> None:
        try:
            self._found, self.trouble = Record.from_json(self._store.get(self._name)), ""
        except FileNotFoundError:
            self._found, self.trouble = None, "no address there"
        except (CheckpointError, OSError) as error:
            self._found, self.trouble = None, _first_line(error)

    def __str__(self) -> str:
        return f"{self._store.display_url.rstrip('/')}/{self._name}"


def host_store(port: int = 0) -> TCPStore:
    """Serve a store on all interfaces; port 0 picks a free one.

    Raises:
        OSError: Raised when the port is taken.
    """
    if socket.has_dualstack_ipv6():
        listener = socket.create_server(
            ("::", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=2048
        )
    else:
        listener = socket.create_server(("0.0.0.0", port), backlog=2048)  # noqa: S104 - the other nodes are to come
    port = int(listener.getsockname()[1])
    return TCPStore(
        "localhost",
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=_STORE_TIMEOUT,
        master_listen_fd=listener.detach(),
    )


def connect(address: Address) -> tuple[TCPStore | None, str]:
    """Connect to a store; where nobody answers, None and the reason in words."""
    try:
        # torch's own client would try until its time-out, with a page of log.
        socket.create_connection(address, timeout=_PROBE_S).close()
        # It would also wait for ever for the first word of a stranger, or of a server that is stopped.
        client = run_bounded(lambda: _client(address), _CLIENT_S + 1)
    except socket.gaierror as error:
        return None, (
            f"the name {address[0]} does not resolve on {socket.gethostname()} ({error.strerror});"
            " give torchrun on that node --local_addr=<its IP address>"
        )
    except (OSError, RuntimeError) as error:
        return None, _first_line(error)
    client.set_timeout(_STORE_TIMEOUT)
    return client, ""


def _client(address: Address) -> TCPStore:
    timeout = timedelta(seconds=_CLIENT_S)
    return TCPStore(*address, is_master=False, wait_for_workers=False, timeout=timeout)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).partition("\n")[0][:300]
