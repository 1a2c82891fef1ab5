"""What agents say to each other: one JSON object a line, over TCP connections on which both sides have proved the token.

    server   {"challenge": c}
    client   {"id": i, "for": purpose, "challenge": d, "proof": HMAC(token, client, c, d, i)}
    server   {"id": j, "proof": HMAC(token, server, c, d, j)}

Guarantees: the token itself never crosses the network, so a stranger on a dead leader's port learns nothing; whoever does
not prove it is told nothing and cut off within `GREET_S`; a line has a bounded length. What follows the greeting is
neither encrypted nor signed: the network between the agents is trusted as far as that of gloo and of torch's stores is.
Does not import torch.
"""

import asyncio
import contextlib
import hmac
import json
import secrets
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

__all__ = [
    "GREET_S",
    "Line",
    "Reached",
    "StrangerError",
    "Unreached",
    "connect_any",
    "greet",
    "listen",
    "welcome",
]

GREET_S: Final = 2.0
"""How long the other side may take to prove the token."""
NEXT_ADDRESS_S: Final = 0.15
"""How long an address may be silent before the next one is tried beside it."""
_LONGEST: Final = 1 << 18
"""A world of 64 nodes with all their addresses fits some ten times."""
_NONCE_BYTES: Final = 16

Message = dict[str, Any]


class StrangerError(ConnectionError):
    """Raised when the other side of a connection does not prove the token."""


class Line:
    """One connection, after the greeting."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        peer = writer.get_extra_info("peername")
        self.peer: str = peer[0] if peer else "nobody"
        """The other side's address."""

    def send(self, message: Mapping[str, Any]) -> None:
        """Queue a message; a connection that is gone swallows it, and `receive` tells."""
        if not self._writer.is_closing():
            self._writer.write(json.dumps(message, separators=(",", ":")).encode() + b"\n")

    async def receive(self) -> Message:
        """Return the next message.

        Raises:
            ConnectionError: Raised when the connection is closed, or what came is no message.
        """
        try:
            data = await self._reader.readuntil(b"\n")
            message = json.loads(data)
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError) as error:
            raise ConnectionError(f"the connection to {self.peer} ended") from error
        if not isinstance(message, dict):
            raise ConnectionError(
                f"found {type(message).__name__} from {self.peer}, expected an object"
            )
        return message

    async def drain(self) -> None:
        """Wait until what was sent is on its way."""
        with contextlib.suppress(ConnectionError):
            await self._writer.drain()

    def close(self) -> None:
        """Close the connection; what was queued before is still sent where the other side takes it."""
        self._writer.close()

    def drop(self) -> None:
        """Close the connection at once."""
        self._writer.transport.abort()


# ------------------------------------------------------------------------------------------- greeting
def _proof(token: str, side: str, challenges: tuple[str, str], name: str) -> str:
    said = "\0".join((side, *challenges, name))
    return hmac.new(token.encode(), said.encode(), "sha256").hexdigest()


def _text(message: Message, key: str) -> str:
    value = message.get(key)
    if not isinstance(value, str):
        raise StrangerError(f"found no {key} in a greeting")
    return value


async def greet(line: Line, token: str, me: str, purpose: str) -> str:
    """Prove the token to a server and have it prove it; return the server's id. Client's side.

    Raises:
        StrangerError: Raised when the other side does not know the token.
        ConnectionError: Raised when the connection ends.
    """
    theirs = _text(await line.receive(), "challenge")
    mine = secrets.token_hex(_NONCE_BYTES)
    proof = _proof(token, "client", (theirs, mine), f"{me}/{purpose}")
    line.send({"id": me, "for": purpose, "challenge": mine, "proof": proof})
    answer = await line.receive()
    name = _text(answer, "id")
    if not hmac.compare_digest(
        _proof(token, "server", (theirs, mine), name), _text(answer, "proof")
    ):
        raise StrangerError(f"{line.peer} does not know the token of this rendezvous")
    return name


async def welcome(line: Line, token: str, me: str) -> tuple[str, str]:
    """Have a client prove the token, and prove it; return the client's id and purpose. Server's side.

    Raises:
        StrangerError: Raised when the other side does not know the token.
        ConnectionError: Raised when the connection ends.
    """
    mine = secrets.token_hex(_NONCE_BYTES)
    line.send({"challenge": mine})
    answer = await line.receive()
    name, purpose, theirs = (_text(answer, key) for key in ("id", "for", "challenge"))
    known = _proof(token, "client", (mine, theirs), f"{name}/{purpose}")
    if not token or not hmac.compare_digest(known, _text(answer, "proof")):
        raise StrangerError(f"{line.peer} does not know the token of this rendezvous")
    line.send({"id": me, "proof": _proof(token, "server", (mine, theirs), me)})
    return name, purpose


# ------------------------------------------------------------------------------------------- connecting
def listen(port: int = 0) -> socket.socket:
    """Open a listening socket on all interfaces; port 0 picks a free one."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(
            ("::", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=512
        )
    return socket.create_server(("0.0.0.0", port), backlog=512)  # noqa: S104 - the other nodes are to come


@dataclass(frozen=True, slots=True)
class Reached:
    """A connection to the one that was looked for."""

    line: Line
    address: str


@dataclass(frozen=True, slots=True)
class Unreached:
    """Why there is none."""

    refused: tuple[str, ...]
    """Addresses whose host answered that nobody listens there."""
    trouble: str


async def connect_any(
    addresses: Sequence[str],
    port: int,
    *,
    token: str,
    me: str,
    them: str,
    purpose: str,
    limit_s: float,
) -> Reached | Unreached:
    """Connect to an agent under whichever of its addresses answers first, and see that it is the one."""
    refused: list[str] = []
    troubles: list[str] = []

    async def attempt(address: str) -> Reached | None:
        line: Line | None = None
        try:
            line = Line(*await asyncio.open_connection(address, port, limit=_LONGEST))
            found = await greet(line, token, me, purpose)
            if found == them:
                reached = Reached(line, address)
                line = None
                return reached
            troubles.append(f"{address}: another agent is there")
        except ConnectionRefusedError:
            refused.append(address)
            troubles.append(f"{address}: refused")
        except OSError as error:
            troubles.append(f"{address}: {error.strerror or error}")
        finally:
            if line is not None:
                line.drop()
        return None

    tasks: list[asyncio.Task[Reached | None]] = []
    won: Reached | None = None
    deadline = asyncio.get_running_loop().time() + limit_s
    try:
        for address in addresses:
            tasks.append(asyncio.create_task(attempt(address)))
            last = address == addresses[-1]
            won = await _first(tasks, deadline, None if last else NEXT_ADDRESS_S)
            if won is not None:
                return won
        if any(not task.done() for task in tasks):
            troubles.append(f"no answer within {limit_s:.1f} s")
    finally:
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            # Two addresses may have answered: the first is in use.
            if isinstance(result, Reached) and result is not won:
                result.line.drop()
    return Unreached(tuple(refused), "; ".join(troubles) or "no address")


async def _first(
    tasks: Sequence["asyncio.Task[Reached | None]"], deadline: float, limit_s: float | None
) -> Reached | None:
    """Wait until one of them has got through, all have failed, or it is time for the next address."""
    clock = asyncio.get_running_loop().time
    until = deadline if limit_s is None else min(deadline, clock() + limit_s)
    while True:
        for task in tasks:
            if task.done() and (found := task.result()) is not None:
                return found
        left = [task for task in tasks if not task.done()]
        if not left or clock() >= until:
            return None
        await asyncio.wait(left, timeout=until - clock(), return_when=asyncio.FIRST_COMPLETED)
