"""Messages between a trainer and its node's writer: JSON with a length before it, and descriptors.

A connection is a Unix stream socket in a private folder; the path of the folder may be longer than a
socket's address, since it is gone through by its descriptor. Any thread may send; one receives.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import struct
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from checkpoints.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

__all__ = ["Connection", "LostError", "Message", "connect", "listen", "pair"]

Message: TypeAlias = dict[str, Any]

_LENGTH: Final = struct.Struct("<I")
_LARGEST: Final = 64 << 20
_MOST_DESCRIPTORS: Final = 16
_SEND_S: Final = 5.0


class LostError(CheckpointError):
    """Raised when the other side is gone, does not take anything, or makes no sense."""


class Connection:
    """One end of a connection."""

    def __init__(self, sock: socket.socket) -> None:
        """Take a connected socket."""
        self._socket = sock
        self._sending = threading.Lock()
        self._bytes = bytearray()
        self._descriptors: deque[int] = deque()
        self._messages: deque[tuple[Message, list[int]]] = deque()
        self.heard_at = time.monotonic()
        """When the other side last said something."""
        sock.settimeout(_SEND_S)

    def fileno(self) -> int:
        """For select."""
        return self._socket.fileno()

    def send(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        """Send a message; the descriptors stay ours, the other side gets its own.

        Raises:
            LostError: The other side is gone, or took nothing for 5 s.
        """
        data = json.dumps({**message, "descriptors": len(descriptors)}).encode()
        frame = memoryview(_LENGTH.pack(len(data)) + data)
        try:
            with self._sending:
                sent = socket.send_fds(self._socket, [frame], list(descriptors))
                if sent < frame.nbytes:
                    self._socket.sendall(frame[sent:])
        except (OSError, ValueError) as error:
            raise LostError(f"connection: the other side is gone ({error})") from error

    def receive(self, timeout_s: float | None = None) -> tuple[Message, list[int]] | None:
        """The next message with its descriptors, which are ours; None where none came in time.

        Raises:
            LostError: The other side is gone.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._messages:
            left = None if deadline is None else deadline - time.monotonic()
            try:
                ready = select.select(
                    [self._socket], [], [], None if left is None else max(left, 0)
                )
                if not ready[0]:
                    return None
                data, found, _, _ = socket.recv_fds(self._socket, 1 << 16, _MOST_DESCRIPTORS)
            except (OSError, ValueError) as error:
                raise LostError(f"connection: the other side is gone ({error})") from error
            self._descriptors.extend(found)
            if not data:
                raise LostError("connection: the other side is gone")
            self._bytes += data
            self.heard_at = time.monotonic()
            self._messages.extend(self._parse())
        return self._messages.popleft()

    def _parse(self) -> Iterator[tuple[Message, list[int]]]:
        while len(self._bytes) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._bytes)
            if length > _LARGEST:
                raise LostError(f"connection: found a message of {length} bytes")
            if len(self._bytes) < _LENGTH.size + length:
                return
            data = bytes(self._bytes[_LENGTH.size : _LENGTH.size + length])
            del self._bytes[: _LENGTH.size + length]
            message = json.loads(data)
            count = int(message.pop("descriptors"))
            yield message, [self._descriptors.popleft() for _ in range(count)]

    def close(self) -> None:
        """Hang up."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        while self._descriptors:
            os.close(self._descriptors.popleft())


def pair() -> tuple[Connection, socket.socket]:
    """Two ends: ours, and the socket to be given to a child."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    return Connection(ours), theirs


def listen(folder: Path, name: str) -> socket.socket:
    """A socket in a folder that others can connect to; a dead one of that name is replaced."""
    (folder / name).unlink(missing_ok=True)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with _short(folder) as short:
        sock.bind(f"{short}/{name}")
    (folder / name).chmod(0o600)
    sock.listen(8)
    return sock


def connect(folder: Path, name: str, timeout_s: float) -> Connection | None:
    """A connection to whoever listens there; None where nobody does."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(timeout_s)
    try:
        with _short(folder) as short:
            sock.connect(f"{short}/{name}")
    except OSError:
        sock.close()
        return None
    return Connection(sock)


@contextlib.contextmanager
def _short(folder: Path) -> Iterator[str]:
    """The folder under a short path: an address of a socket has room for 107 bytes."""
    fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)
