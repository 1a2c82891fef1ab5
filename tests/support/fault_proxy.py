"""An HTTP proxy on loopback that does to requests what networks and overloaded servers do.

Each client connection carries one request: it is read whole, judged by the faults in force, sent on over
a connection of its own, and the reply is copied back until the server closes.
"""

import socket
import struct
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from types import TracebackType
from typing import BinaryIO, Self

_CLOSING = {b"connection", b"expect", b"keep-alive", b"proxy-connection"}


class Kind(Enum):
    """What happens to a request."""

    REFUSE = auto()
    """The proxy answers itself, with an error status."""
    LOSE_REPLY = auto()
    """The server does it, but the client's connection is reset instead of an answer."""
    RESET = auto()
    """The connection is reset, and the server never hears of it."""
    HANG = auto()
    """Nothing is ever answered."""
    TRUNCATE = auto()
    """The reply ends too early."""
    DELAY = auto()
    """It takes longer, by the size of what is sent if it is told so."""
    CUT = auto()
    """The connection is reset while the request's body is still being sent."""
    SHIFT = auto()
    """From some byte on the body arrives one byte early, under the same length."""


@dataclass(kw_only=True)
class Fault:
    """A fault and the requests that it hits."""

    kind: Kind
    method: str | None = None
    contains: str = ""
    """A part of the request's target."""
    headed: str = ""
    """A part of the request's headers."""
    least_bytes: int = 0
    """How long its body is at least."""
    times: int | None = None
    """How many requests it hits before it is over; None: all."""
    skip: int = 0
    """How many fitting requests pass before it begins."""
    status: int = 503
    code: str = "SlowDown"
    delay_s: float = 1.0
    delay_s_per_mb: float = 0.0
    keep_bytes: int = 0
    """How much arrives of a truncated reply, or of a body that is cut or shifted."""
    hits: int = field(default=0, init=False)

    def takes(self, method: str, target: str, head: str, length: int) -> bool:
        """Whether it hits this request; counts."""
        if self.method not in {None, method} or self.contains not in target:
            return False
        if self.headed not in head or length < self.least_bytes:
            return False
        if self.skip:
            self.skip -= 1
            return False
        if self.times is not None and self.hits >= self.times:
            return False
        self.hits += 1
        return True


class FaultProxy:
    """Stands before one port of this machine; use it in a `with`."""

    def __init__(self, upstream_port: int) -> None:
        self.faults: list[Fault] = []
        self.requests: list[tuple[str, str]] = []
        """Method and target of all requests so far."""
        self._upstream_port = upstream_port
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, name="fault proxy", daemon=True).start()

    @property
    def endpoint(self) -> str:
        """Where it answers."""
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._ended.set()
        # Closing alone does not wake the thread that waits in accept().
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while not self._ended.is_set():
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with suppress(OSError, ValueError), client, client.makefile("rb") as reader:
            head = _read_head(reader)
            if head is None:
                return
            method, target, version = head[0].decode("latin1").split(" ", 2)
            headers = dict(_split(line) for line in head[1:])
            fault = self._judge(method, target, head, int(headers.get(b"content-length", b"0")))
            if fault is not None and fault.kind is Kind.RESET:
                _reset(client)
                return
            if b"expect" in headers:
                client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
            if fault is not None and fault.kind is Kind.CUT:
                reader.read(fault.keep_bytes)
                _reset(client)
                return
            body = _read_body(reader, headers)
            if fault is not None and fault.kind is Kind.SHIFT:
                at = fault.keep_bytes
                body = body[:at] + body[at + 1 :] + body[-1:]
            kept = [line for line in head[1:] if _split(line)[0] not in _CLOSING]
            start = f"{method} {target} {version}".encode("latin1")
            lines = [start, *kept, b"Connection: close", b"", b""]
            self._answer(client, method, b"\r\n".join(lines) + body, fault)

    def _judge(self, method: str, target: str, head: list[bytes], length: int) -> Fault | None:
        text = b"\n".join(head).decode("latin1")
        with self._lock:
            self.requests.append((method, target))
            found = (fault for fault in self.faults if fault.takes(method, target, text, length))
            return next(found, None)

    def _answer(
        self, client: socket.socket, method: str, request: bytes, fault: Fault | None
    ) -> None:
        kind = fault.kind if fault is not None else None
        if fault is not None and kind is Kind.REFUSE:
            client.sendall(_refusal(fault, with_body=method != "HEAD"))
            return
        if kind is Kind.HANG:
            self._ended.wait(60)
            return
        if fault is not None and kind is Kind.DELAY:
            time.sleep(fault.delay_s + fault.delay_s_per_mb * len(request) / 1e6)
        reply = self._here(self._ask(request))
        if not reply or kind is Kind.LOSE_REPLY:
            _reset(client)
        elif fault is not None and kind is Kind.TRUNCATE:
            head, _, body = reply.partition(b"\r\n\r\n")
            client.sendall(head + b"\r\n\r\n" + body[: fault.keep_bytes])
        else:
            client.sendall(reply)

    def _here(self, reply: bytes) -> bytes:
        """The reply with addresses of the server turned into the proxy's."""
        head, edge, body = reply.partition(b"\r\n\r\n")
        ours, theirs = (f"127.0.0.1:{port}".encode() for port in (self.port, self._upstream_port))
        return head.replace(theirs, ours) + edge + body

    def _ask(self, request: bytes) -> bytes:
        """The server's whole reply; nothing where it is down."""
        pieces = []
        with (
            suppress(OSError),
            socket.create_connection(("127.0.0.1", self._upstream_port)) as server,
        ):
            server.sendall(request)
            while piece := server.recv(1 << 18):
                pieces.append(piece)
        return b"".join(pieces)


def _read_head(reader: BinaryIO) -> list[bytes] | None:
    lines = []
    while line := reader.readline(1 << 16).rstrip(b"\r\n"):
        lines.append(line)
    return lines or None


def _split(line: bytes) -> tuple[bytes, bytes]:
    name, _, value = line.partition(b":")
    return name.strip().lower(), value.strip()


def _read_body(reader: BinaryIO, headers: dict[bytes, bytes]) -> bytes:
    """The body as it came, chunks and all."""
    if headers.get(b"transfer-encoding", b"").lower() != b"chunked":
        return reader.read(int(headers.get(b"content-length", b"0")))
    pieces = []
    while True:
        line = reader.readline()
        size = int(line.split(b";")[0], 16)
        pieces += [line, reader.read(size + 2)]
        if not size:
            return b"".join(pieces)


def _refusal(fault: Fault, *, with_body: bool) -> bytes:
    text = (
        f'<?xml version="1.0"?><Error><Code>{fault.code}</Code>'
        f"<Message>{fault.code} by the fault proxy</Message></Error>"
    ).encode()
    length = len(text) if with_body else 0
    head = f"HTTP/1.1 {fault.status} X\r\nContent-Type: application/xml\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n"
    return head.encode() + (text if with_body else b"")


def _reset(client: socket.socket) -> None:
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    # The reader holds the descriptor open; shutdown sends the reset now.
    client.close()
