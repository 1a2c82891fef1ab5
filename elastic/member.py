"""An agent's side of the rendezvous: a thread that keeps it connected to whoever leads, or leads itself.

It reads the record, connects to the leader, and holds that one connection; where there is no leader it tries to become
one. While all is well it asks nothing of the store. Guarantees: the main thread never waits for the network here; an
agent whose leader is gone leaves its workers alone until a new leader says otherwise; whatever happens to the store or to
others, the thread goes on trying, and only a launch that was closed, or a store that never let it in, ends it.
Does not import torch.
"""

import asyncio
import contextlib
import dataclasses
import logging
import random
import secrets
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

from checkpoints.errors import CheckpointError, PermanentStoreError
from elastic.addresses import host_mark
from elastic.ballot import Ballot
from elastic.election import (
    STAND_BACK_S,
    TAKE_OVER_S,
    Candidate,
    Evidence,
    Leader,
    Record,
    Step,
    Watch,
    judge,
    new_record,
)
from elastic.hub import Hub
from elastic.link import Link
from elastic.session import Session
from elastic.terms import Terms
from elastic.wire import GREET_S, Line, Reached, connect_any, listen, welcome

__all__ = ["Member"]

logger = logging.getLogger(__name__)

_BREATH_S: Final = 0.05
"""Between a connection that ended and the next look at the store: not to hammer on it, whatever goes wrong."""
_CONNECT_S: Final = 1.2
_LOOK_S: Final = 0.4
_COMPLAIN_S: Final = 2.0
_READ_S: Final = 5.0
_MOST_STRANGERS: Final = 1024
"""Connections that have not proved the token yet."""


class Member:
    """This agent, among the others."""

    def __init__(
        self, ballot: Ballot, terms: Terms, addresses: Sequence[str], name: str,
        make_store: Callable[[], Awaitable[int]],
    ) -> None:  # fmt: skip
        """Prepare; nothing happens before `begin`.

        Args:
            ballot: Where the record lies.
            terms: This agent's terms.
            addresses: Where others may reach it, the likeliest first.
            name: Host and pid, for people.
            make_store: Serves a store for a round, where this agent leads.
        """
        self.id = secrets.token_hex(8)
        self.link = Link()
        self.ballot = ballot
        self.launch: str | None = None
        self._terms = terms
        self._addresses = tuple(addresses)
        self._name = name
        self._make_store = make_store
        self._place = host_mark()
        self._socket = listen()
        self._port: int = self._socket.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        self._token = ""
        self._line: Line | None = None
        self._hub: Hub | None = None
        self._leading: asyncio.Task[None] | None = None
        self._campaigning = False
        self._watch = Watch()
        self._met: set[tuple[str, str]] = set()
        """Leaders and the addresses under which they were reached."""
        self._may_take_at = 0.0
        self._may_lead_at = 0.0
        self._complained_at = 0.0
        self._silent_since: float | None = None
        """Since when the leader has not been reached."""
        self._alone_since = time.monotonic()
        self._strangers = 0
        self._thread = threading.Thread(target=self._run, name="rendezvous", daemon=True)

    # --------------------------------------------------------------------------------- main thread
    def begin(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def is_leading(self) -> bool:
        """Whether this agent leads."""
        return self._hub is not None

    def ask(self) -> None:
        """Want to be in the next world."""
        self.link.ask()
        self._tell({"op": "ready"})

    def finish(self) -> None:
        """Say that the workers are done."""
        self.link.is_finishing = True
        self._tell({"op": "finishing"})

    def leave(self) -> None:
        """Go, and let the others go on. Any thread."""
        self.link.is_leaving = True
        self._tell({"op": "leave"})

    def close(self) -> None:
        """End the launch for all, where this agent is part of the newest world; else leave."""
        self.link.is_closing = True
        self._tell({"op": "close"})

    def _tell(self, message: dict[str, Any]) -> None:
        def tell() -> None:
            if self._line is not None:
                self._line.send(message)

        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(tell)

    # --------------------------------------------------------------------------------- the thread
    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._live())
        except Exception as error:  # the top of the thread: the main thread has to know
            logger.exception("rendezvous: the thread ended")
            self.link.fail(f"the rendezvous failed: {error!r}")

    async def _live(self) -> None:
        server = await asyncio.start_server(self._accept, sock=self._socket, backlog=1024)
        async with server:
            await self._seek()
            if self._leading is not None:
                await self._leading
            # What is left of a closed launch is answered until the process ends.
            await asyncio.Event().wait()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = Line(reader, writer)
        if self._strangers >= _MOST_STRANGERS:
            line.drop()
            return
        self._strangers += 1
        try:
            name, purpose = await asyncio.wait_for(welcome(line, self._token, self.id), GREET_S)
        except (OSError, TimeoutError) as error:
            logger.debug("rendezvous: %s", error)
            line.drop()
            return
        finally:
            self._strangers -= 1
        try:
            if purpose == "join":
                await self._let_in(line, name)
        finally:
            line.close()

    async def _let_in(self, line: Line, name: str) -> None:
        deadline = time.monotonic() + _CONNECT_S
        while self._hub is None and self._campaigning and time.monotonic() < deadline:
            await asyncio.sleep(0.01)  # the store has our record, its answer is on the way
        if self._hub is None:
            line.send({"op": "moved", "reason": f"{self._name} does not lead"})
        else:
            await self._hub.serve(line, name)

    # --------------------------------------------------------------------------------- finding the leader
    async def _seek(self) -> None:
        """Be connected to the leader, whoever it is, until the launch is over."""
        evidence = Evidence.UNTRIED
        tried: tuple[str, int] | None = None
        while not self.link.is_over and not self.link.has_left:
            try:
                found = await self.ballot.read(_READ_S)
            except CheckpointError as error:
                self._store_failed(error)
                await asyncio.sleep(_LOOK_S)
                continue
            record, tag = found or (None, None)
            if record is not None:
                self._token = record.token
                if tried != (record.launch, record.epoch):
                    tried, evidence = (record.launch, record.epoch), Evidence.UNTRIED
                    self._silent_since = None
            step = self._judge(record, evidence)
            if step is Step.CONNECT:
                assert record is not None
                evidence = await self._session(record)
                if evidence is Evidence.SILENT and self._silent_since is None:
                    self._silent_since = time.monotonic()
                await asyncio.sleep(_BREATH_S)
            elif step in {Step.BEGIN, Step.TAKE} and self.link.is_leaving:
                self.link.leave()
            elif step in {Step.BEGIN, Step.TAKE}:
                await self._campaign(record, tag, evidence)
            elif step in {Step.CLOSED, Step.OVERRULED}:
                self.link.close(_why_over(step, record))
            else:
                if record is None:
                    self.link.trouble = f"{self.ballot}: the record of this rendezvous is gone"
                elif step is Step.COMPLAIN:
                    await self._complain(record, tag)
                await asyncio.sleep(_LOOK_S * random.uniform(0.7, 1.3))  # noqa: S311 - only so that not all ask at once
                evidence = Evidence.UNTRIED
            self._check_orphan()

    def _judge(self, record: Record | None, evidence: Evidence) -> Step:
        now = time.monotonic()
        same_s = 0.0 if record is None else self._watch.look(record, now)
        leading = self._hub.epoch if self._hub is not None else None
        if record is not None and record.epoch == leading and not record.closed:
            return Step.CONNECT
        silent_s = 0.0 if self._silent_since is None else now - self._silent_since
        # One try that failed is no reason to disturb the leader: its host may be busy with all who come at once.
        beating = self._watch.is_beating and silent_s >= self._terms.dead_s
        me = Candidate(
            id=self.id,
            launch=self.launch,
            may_take_at=self._may_take_at,
            may_lead_at=self._may_lead_at,
        )
        return judge(
            record, me, evidence, same_s=same_s, beating=beating, dead_s=self._terms.dead_s, now=now
        )

    def _store_failed(self, error: CheckpointError) -> None:
        self.link.trouble = str(error)
        if self.launch is None and isinstance(error, PermanentStoreError):
            self.link.fail(str(error))
        self._check_orphan()

    def _check_orphan(self) -> None:
        """Stop workers that have had neither a leader nor the store for long: others may have gone on without them."""
        if self._line is not None or self.link.world is None or self.link.waiting:
            return
        if time.monotonic() - self._alone_since > self._terms.orphan_s:
            logger.warning(
                "rendezvous: no leader for %g s: the workers are stopped", self._terms.orphan_s
            )
            self.link.recall()

    # --------------------------------------------------------------------------------- one connection
    async def _session(self, record: Record) -> Evidence:
        """Connect to the leader and stay; return what its end, or its failing, tells of that leader."""
        leader = record.leader
        assert leader is not None
        reached = await connect_any(
            self._ways(leader), leader.port, token=record.token, me=self.id, them=leader.id, purpose="join",
            limit_s=_CONNECT_S,
        )  # fmt: skip
        if not isinstance(reached, Reached):
            self.link.trouble = f"the leader {leader.name} cannot be reached ({reached.trouble})"
            known = leader.place == self._place or any(
                (leader.id, address) in self._met for address in reached.refused
            )
            return Evidence.REFUSED if reached.refused and known else Evidence.SILENT
        line = reached.line
        try:
            line.send(self._hello())
            answer = await asyncio.wait_for(line.receive(), _CONNECT_S)
            if answer.get("op") != "welcome":
                return Evidence.NOT_LEADING
            self._met.add((leader.id, reached.address))
            self._silent_since = None
            self.launch = record.launch
            self._line = line
            session = Session(
                me=self.id, token=record.token, link=self.link, line=line, leader=leader.name, glance=self._glance,
                address=self._addresses[0] if leader.id == self.id else reached.address, dead_s=self._terms.dead_s,
            )  # fmt: skip
            self._silent_since = await session.attend()
        except (OSError, TimeoutError):
            # Its agent has closed the connection, and may have ended or not: look at the record again.
            return Evidence.UNTRIED
        else:
            return Evidence.UNTRIED if self._silent_since is None else Evidence.SILENT
        finally:
            self._line = None
            self._alone_since = time.monotonic()
            line.close()

    def _ways(self, leader: Leader) -> tuple[str, ...]:
        """The leader's addresses that lead to it from here: the same one may be another host's, or this one's."""
        if leader.id == self.id:
            return ("127.0.0.1",)
        if leader.place == self._place:
            return leader.addresses
        ours = {*self._addresses, "::1"}
        ways = tuple(a for a in leader.addresses if a not in ours and not a.startswith("127."))
        return ways or leader.addresses

    def _hello(self) -> dict[str, Any]:
        link = self.link
        return {
            "name": self._name, "addresses": self._addresses, "port": self._port, "world": link.world,
            "ready": link.is_ready, "finishing": link.is_finishing,
        }  # fmt: skip

    async def _glance(self) -> None:
        """Look whether the leader's beat goes on, so that its silence counts from now."""
        with contextlib.suppress(CheckpointError):
            found = await self.ballot.read(_READ_S)
            if found is not None:
                self._watch.look(found[0], time.monotonic())
        await asyncio.sleep(_LOOK_S)

    # --------------------------------------------------------------------------------- leading
    async def _campaign(self, record: Record | None, tag: str | None, evidence: Evidence) -> None:
        """Try to become the leader; whoever wins, the record tells it at the next look."""
        me = Leader(
            id=self.id,
            addresses=self._addresses,
            port=self._port,
            place=self._place,
            name=self._name,
        )
        gone: frozenset[str] = frozenset()
        if record is None or record.closed:
            wanted = new_record(me, record)
        else:
            wanted = record.taken(me)
            before = record.gone if record.leader is None else record.leader.id
            if before != self.id and evidence is not Evidence.NOT_LEADING:
                gone = frozenset({before})
        self._token = wanted.token
        self._campaigning = True
        try:
            sent = time.monotonic()
            won = await self.ballot.write(wanted, tag, self._terms.dead_s)
        except CheckpointError as error:
            self.link.trouble = str(error)
            await asyncio.sleep(_LOOK_S)
            return
        finally:
            self._campaigning = False
        if won is None:
            return
        if evidence in {Evidence.REFUSED, Evidence.NOT_LEADING}:
            self._may_take_at = time.monotonic() + TAKE_OVER_S
        logger.warning("rendezvous: %s leads epoch %d", self._name, wanted.epoch)
        self.launch = wanted.launch
        if self._leading is not None:
            await self._leading
        self._hub = Hub(wanted, won, sent, self.ballot, self._terms, self._make_store, gone=gone)
        self._leading = asyncio.create_task(self._lead(self._hub))

    async def _lead(self, hub: Hub) -> None:
        ended = await hub.lead()
        self._hub = None
        if not ended.closed:
            told = "rendezvous: %s does not lead any more: %s"
            logger.warning(told, self._name, ended.reason)
        else:
            self.link.close(f"the launch has ended ({ended.reason})")
        if ended.gave_way:
            self._may_lead_at = time.monotonic() + STAND_BACK_S
            # The others train on without this node, and could not claim beside a world that still writes.
            self.link.recall()
        if self.link.is_leaving:
            self.link.leave()

    async def _complain(self, record: Record, tag: str | None) -> None:
        """Note on the record that this agent cannot reach a leader that lives."""
        now = time.monotonic()
        # Each is a write that may get into the way of the leader's own.
        if now < self._complained_at + _COMPLAIN_S + 0.1 * len(record.members):
            return
        self._complained_at = now
        name = "nobody" if record.leader is None else record.leader.name
        trouble = self.link.trouble or f"the leader {name} does not answer"
        logger.warning("rendezvous: %s, though it lives: this node may be cut off", trouble)
        complaints = {**record.complaints, self.id: record.beat}
        with contextlib.suppress(CheckpointError):
            await self.ballot.write(
                dataclasses.replace(record, complaints=complaints), tag, _READ_S
            )


def _why_over(step: Step, record: Record | None) -> str:
    if step is Step.CLOSED:
        return "the launch has ended; start the same command again to go on"
    name = record.leader.name if record and record.leader else "another node"
    return f"a newer launch, led by {name}, has this rendezvous; give this one another --rdzv_id"
