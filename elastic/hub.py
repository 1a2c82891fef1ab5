"""The leader's side: every agent holds one connection to it, and joins, beats and rounds go over that.

The hub feeds the roster with what the connections tell, does what the roster says, and keeps the record on the store: a
beat, and the store's word before a world forms. Guarantees: a silent agent is given up after `dead_s`; a hub whose beat
was not confirmed for `dead_s` (since before the last one that was, was sent) has stopped; so has one whose record
somebody else has taken, and one that fewer agents reach than cannot. What it stops for is told to the agents, whose
worlds go on until another leader says otherwise. Runs in the agent's event loop. Does not import torch.
"""

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Final

from checkpoints.errors import CheckpointError
from elastic.ballot import Ballot
from elastic.election import Record, must_abdicate
from elastic.roster import Confirm, Go, Node, Phase, Probe, Recall, Roster, WorldId
from elastic.terms import Terms
from elastic.wire import Line

__all__ = ["Ended", "Hub", "world_id"]

logger = logging.getLogger(__name__)

_TICK_S: Final = 0.1
_CLOSING_S: Final = 0.5
"""How long the closing leader stays, so that the others have read what it served."""

StoreMaker = Callable[[], Awaitable[int]]
"""Serves a fresh store for a round and returns its port."""


@dataclass(frozen=True, slots=True)
class Ended:
    """Why a hub stopped."""

    reason: str
    closed: bool = False
    gave_way: bool = False
    """Others could not reach this agent, and one of them is to lead."""


@dataclass(kw_only=True, slots=True)
class _Peer:
    line: Line
    addresses: tuple[str, ...]
    port: int
    heard: float = field(default_factory=time.monotonic)


class Hub:
    """One epoch of this agent's leadership."""

    def __init__(
        self, record: Record, tag: str, sent: float, ballot: Ballot, terms: Terms, make_store: StoreMaker,
        *, gone: frozenset[str],
    ) -> None:  # fmt: skip
        """Lead by a record that was just written, at a time before which it had not been sent.

        Args:
            record: The record, which names this agent.
            tag: Its tag on the store.
            sent: When the request that wrote it began.
            ballot: Where it lies.
            terms: This agent's terms.
            make_store: Serves a store for a round.
            gone: Agents of the world before that are known not to come.
        """
        assert record.leader is not None
        self.me = record.leader.id
        self._record = record
        self._tag: str | None = tag
        self._confirmed_at = sent
        self._ballot = ballot
        self._terms = terms
        self._make_store = make_store
        self._peers: dict[str, _Peer] = {}
        self._wanted: asyncio.Event = asyncio.Event()
        self._confirm: Confirm | None = None
        self._leaving = ""
        self._ended: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()
        roster = Roster(
            leader=self.me, epoch=record.epoch, min_nodes=terms.min_nodes, max_nodes=terms.max_nodes,
            last_call_s=terms.last_call_s, world=record.world, members=record.members,
        )  # fmt: skip
        self._roster = Roster.after(roster, gone, time.monotonic() + terms.dead_s)

    @property
    def epoch(self) -> int:
        """The epoch that it leads."""
        return self._record.epoch

    async def lead(self) -> Ended:
        """Lead until there is a reason not to, which is returned; all connections are closed then."""
        tasks = [asyncio.create_task(self._beat()), asyncio.create_task(self._tick())]
        try:
            ended = await self._ended
            for peer in self._peers.values():
                peer.line.send(
                    {"op": "closed" if ended.closed else "moved", "reason": ended.reason}
                )
            if ended.closed:
                await self._let_go()
            return ended
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for peer in self._peers.values():
                peer.line.close()
            self._peers.clear()

    def _end(self, ended: Ended) -> None:
        if not self._ended.done():
            self._ended.set_result(ended)

    async def _let_go(self) -> None:
        deadline = time.monotonic() + _CLOSING_S
        while self._peers.keys() - {self.me} and time.monotonic() < deadline:
            await asyncio.sleep(0.02)

    # --------------------------------------------------------------------------------- connections
    async def serve(self, line: Line, name: str) -> None:
        """Serve one agent's connection, from its hello to its end."""
        try:
            hello = await line.receive()
        except ConnectionError:
            return  # it has come by another of our addresses
        try:
            node, peer = _read_hello(name, hello, line)
        except (KeyError, TypeError, ValueError) as error:
            logger.warning("rendezvous: %s said no hello that is understood (%r)", line.peer, error)
            return
        if self._ended.done():
            line.send({"op": "moved", "reason": "no leader any more"})
            return
        old = self._peers.get(name)
        if old is not None:
            old.line.drop()
            self._roster.lost(name, "connected anew")
        self._peers[name] = peer
        self._roster.joined(node, time.monotonic())
        line.send({"op": "welcome", "epoch": self.epoch, "dead_s": self._terms.dead_s})
        self._act()
        with contextlib.suppress(ConnectionError):
            while not self._ended.done():
                message = await line.receive()
                peer.heard = time.monotonic()
                self._hear(name, node, line, message)
        if self._peers.get(name) is peer:
            self._lose(name, "closed its connection: its agent has ended")

    def _hear(self, name: str, node: Node, line: Line, message: dict[str, Any]) -> None:
        now = time.monotonic()
        match message.get("op"):
            case "ping":
                line.send({"op": "pong"})
                return
            case "ready":
                self._roster.ready(name, now)
            case "finishing":
                self._roster.finishing(name)
            case "probed":
                failed, turn = message.get("failed", ()), message.get("turn", 0)
                self._roster.reported(name, turn, map(str, failed), now)
            case "leave":
                self._leave(name)
            case "close":
                if self._roster.close(name):
                    self._leaving = f"ended by {node.name}"
                    self._wanted.set()
                else:
                    self._leave(name)
            case other:
                logger.debug("rendezvous: %s said %r", node.name, other)
        self._act()

    def _leave(self, name: str) -> None:
        """An agent goes in order; the leader's own hands the lead on first."""
        if name == self.me:
            self._leaving = "the leader leaves"
            self._wanted.set()
        else:
            # It stays connected until its workers have stopped; nobody waits for that.
            self._roster.lost(name, "leaves", in_order=True)
            logger.warning("rendezvous: a node leaves; %d stay", len(self._roster.nodes))
            self._peers.pop(name).line.send({"op": "left"})

    def _lose(self, name: str, reason: str) -> None:
        node = self._roster.nodes.get(name)
        peer = self._peers.pop(name, None)
        if peer is not None:
            peer.line.drop()
        if node is not None and not self._roster.is_closed and not self._ended.done():
            logger.warning("rendezvous: node %s %s", node.name, reason)
            self._roster.lost(name, reason)
            self._act()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            now = time.monotonic()
            for name, peer in list(self._peers.items()):
                if now - peer.heard > self._terms.dead_s:
                    self._lose(
                        name, f"has been silent for {now - peer.heard:.1f} s: taken for dead"
                    )
            self._act()

    # --------------------------------------------------------------------------------- acting
    def _act(self) -> None:
        """Do what the roster says."""
        for action in self._roster.advance(time.monotonic()):
            match action:
                case Recall():
                    self._send(action.id, {
                        "op": "recall", "reason": action.reason, "broken": action.is_broken,
                    })  # fmt: skip
                case Probe():
                    self._send(action.id, self._probe_message(action))
                case Confirm():
                    self._confirm = action
                    self._wanted.set()
                case _:
                    raise AssertionError(action)

    def _send(self, name: str, message: dict[str, Any]) -> None:
        if name in self._peers:
            self._peers[name].line.send(message)

    def _probe_message(self, probe: Probe) -> dict[str, Any]:
        peers = [
            {"id": name, "addresses": self._peers[name].addresses, "port": self._peers[name].port}
            for name in probe.peers
            if name in self._peers
        ]
        return {"op": "probe", "turn": probe.turn, "peers": peers}

    async def _start(self) -> None:
        """Serve a store for the world that was confirmed, and start it."""
        port = await self._make_store()
        for action in self._roster.confirmed():
            if isinstance(action, Go):
                for rank, name in enumerate(action.members):
                    self._send(name, {
                        "op": "go", "world": action.world, "rank": rank, "size": len(action.members), "port": port,
                    })  # fmt: skip
        self._act()

    # --------------------------------------------------------------------------------- the record
    async def _beat(self) -> None:
        """Write the record each `beat_s`, or when there is something to write."""
        try:
            while not self._ended.done():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._wanted.wait(), self._terms.beat_s)
                self._wanted.clear()
                await self._write_next()
        except CheckpointError as error:
            self._end(Ended(f"the leader's beat cannot be written ({error})"))
        except Exception as error:  # the top of a task: whatever it is, this leader must not go on
            logger.exception("rendezvous: the leader ends")
            self._end(Ended(f"the leader failed: {error!r}"))

    async def _write_next(self) -> None:
        """Write the record until that has worked, somebody else has it, or its time is over."""
        while not self._ended.done():
            confirm = self._confirm if self._roster.phase is Phase.CONFIRMING else None
            record = self._next(confirm)
            sent = time.monotonic()
            left_s = self._confirmed_at + self._terms.dead_s - sent
            if left_s <= 0:
                self._end(Ended(f"its beat has not reached the store for {self._terms.dead_s:g} s"))
                return
            try:
                tag = await self._ballot.write(record, self._tag, left_s)
            except CheckpointError as error:
                logger.info("rendezvous: a beat failed: %s", error)
                await self._look_again()
                continue
            if tag is None:
                await self._look_again()
                continue
            self._record, self._tag, self._confirmed_at = record, tag, sent
            await self._written(record, confirm)
            return

    def _next(self, confirm: Confirm | None) -> Record:
        if confirm is None:
            record = self._record.beaten()
        else:
            record = self._record.formed((self.epoch, confirm.round), confirm.members)
        changes: dict[str, Any] = {}
        if self._roster.is_closed:
            changes["closed"] = True
        elif self._leaving or must_abdicate(self._record, set(self._peers)):
            changes |= {"leader": None, "gone": self.me}
        return dataclasses.replace(record, **changes)

    async def _written(self, record: Record, confirm: Confirm | None) -> None:
        if record.closed:
            self._end(Ended(self._leaving or "ended", closed=True))
        elif record.leader is None:
            why = self._leaving or "more nodes cannot reach this leader than can"
            logger.warning("rendezvous: %s; another one is elected", why)
            self._end(Ended(why, gave_way=not self._leaving))
        elif confirm is not None and confirm is self._confirm:
            self._confirm = None
            await self._start()

    async def _look_again(self) -> None:
        """See what lies on the store after a write that lost or failed: our own, a complaint, or another leader."""
        left_s = self._confirmed_at + self._terms.dead_s - time.monotonic()
        try:
            found = await self._ballot.read(max(left_s, 0.1))
        except CheckpointError:
            await asyncio.sleep(min(0.2, max(left_s, 0.0)))
            return
        if found is None:
            self._tag = None  # somebody has removed it: put there anew
            return
        record, tag = found
        if record.closed or (record.launch, record.epoch) != (
            self._record.launch,
            self._record.epoch,
        ):
            who = record.leader.name if record.leader else "nobody"
            self._end(
                Ended(
                    f"{who} leads by now",
                    closed=record.closed and record.launch == self._record.launch,
                )
            )
            return
        if record.complaints != self._record.complaints:
            count = len(record.complaints)
            nodes = "1 node" if count == 1 else f"{count} nodes"
            logger.warning("rendezvous: %s cannot reach this leader", nodes)
        beat = max(record.beat, self._record.beat)
        self._record = dataclasses.replace(self._record, beat=beat, complaints=record.complaints)
        self._tag = tag


def world_id(found: Any) -> WorldId | None:
    """Read a world's id from a message."""
    if found is None:
        return None
    epoch, number = map(int, found)
    return epoch, number


def _read_hello(name: str, hello: dict[str, Any], line: Line) -> tuple[Node, _Peer]:
    node = Node(
        id=name,
        name=str(hello["name"]),
        world=world_id(hello["world"]),
        is_ready=bool(hello["ready"]),
        is_finishing=bool(hello["finishing"]),
    )
    peer = _Peer(line=line, addresses=tuple(map(str, hello["addresses"])), port=int(hello["port"]))
    return node, peer
