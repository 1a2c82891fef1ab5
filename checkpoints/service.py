"""The writer: one small process per node and run that makes snapshots durable beside the training.

Promises: what was offered to it is not lost with the trainer that offered it; the newest offer replaces
the one that waits, never the one under way; a snapshot of an older generation is committed only if the
newest generation's state descends from it; what fails is told at once and tried again. It ends with its
work: when the trainer says so, or when trainer and agent are gone and nothing is left to be written; the
node's named memory goes with the agent. Runs without torch; nothing of it is a child of the trainer's
session.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import select
import signal
import socket
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from checkpoints.messages import Connection, LostError, Message, listen
from checkpoints.processes import is_alive
from checkpoints.segments import Segment, segments_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from checkpoints.layout import AgentId, CheckpointName
    from checkpoints.publishing import Publisher
    from checkpoints.snapshots import Snapshot

logger = logging.getLogger(__name__)

_TICK_S: Final = 0.2
_RECONNECT_S: Final = 5.0


@dataclass(kw_only=True, slots=True)
class Offer:
    """A snapshot that a trainer wants to be durable."""

    snapshot: Snapshot
    slot: int
    protect: tuple[CheckpointName, ...]
    keep: bool
    """It waits until it is written; a newer one does not replace it."""
    publisher: Publisher
    began: float = field(default_factory=time.monotonic)


class Service:
    """The state of the writer. The main thread talks, another one writes."""

    def __init__(self, folder: Path, number: int, agent: AgentId, first: Connection) -> None:
        """Listen for the trainers of a node; the first one is there already."""
        self._folder, self._agent = folder, agent
        self._name = f"writer-{number}.sock"
        self._listener = listen(folder, self._name)
        self._connection: Connection | None = first
        self._guests: list[Connection] = []
        self._owner: tuple[int, int] | None = None
        self._left_at = 0.0
        self._slots: dict[int, Segment] = {}
        self._publisher: Publisher | None = None
        self._condition = threading.Condition()
        self._waiting: Offer | None = None
        self._current: Offer | None = None
        self._is_over = False
        self._unlink = False
        self._thread = threading.Thread(target=self._write, name="write", daemon=True)

    # ------------------------------------------------------------------------------ the main thread
    def run(self) -> None:
        """Serve until the work is done and nobody needs the writer any more."""
        self._thread.start()
        while not self._is_done():
            open_ones = [c for c in (self._connection, *self._guests) if c is not None]
            sources: list[Connection | socket.socket] = [self._listener, *open_ones]
            ready, _, _ = select.select(sources, [], [], _TICK_S)
            for source in ready:
                if source is self._listener:
                    self._accept()
                elif isinstance(source, Connection):
                    self._hear(source)
        with self._condition:
            self._is_over = True
            self._condition.notify_all()
        if self._unlink:
            for segment in self._slots.values():
                segment.unlink()
            for path in segments_of(self._agent):
                path.unlink(missing_ok=True)

    def _is_done(self) -> bool:
        with self._condition:
            at_work = self._current is not None or self._waiting is not None
        if at_work:
            return False
        agent_is_gone = not is_alive(self._agent.pid, self._agent.start)
        if self._connection is not None:
            return False
        if agent_is_gone:
            self._unlink = True
            return True
        if self._unlink:
            return True
        # A trainer may come back; else the writer stays only to clear the node's memory one day.
        waits = time.monotonic() - self._left_at < _RECONNECT_S
        named = any(segment.path is not None for segment in self._slots.values())
        return not waits and not named

    def _accept(self) -> None:
        sock, _ = self._listener.accept()
        self._guests.append(Connection(sock))

    def _hear(self, source: Connection) -> None:
        try:
            while (heard := source.receive(0)) is not None:
                self._answer(source, *heard)
        except LostError:
            self._hang_up(source)

    def _hang_up(self, source: Connection) -> None:
        source.close()
        if source in self._guests:
            self._guests.remove(source)
        if source is self._connection:
            self._connection = None
            self._left_at = time.monotonic()

    def _answer(self, source: Connection, message: Message, descriptors: list[int]) -> None:
        kind = message["op"]
        if kind == "hello":
            self._greet(source, message)
            return
        if source is not self._connection:
            raise LostError("a message before the greeting")
        if kind == "ping":
            self._tell({"op": "pong"})
        elif kind == "open":
            self._open(message)
        elif kind == "slot":
            path = None if message["path"] is None else Path(message["path"])
            self._slots[message["slot"]] = Segment.of(descriptors[0], path)
        elif kind == "drop":
            segment = self._slots.pop(message["slot"], None)
            if segment is not None:
                segment.close()
        elif kind == "offer":
            self._take(message)
        elif kind == "finish":
            self._unlink = bool(message["unlink"])

    def _greet(self, source: Connection, message: Message) -> None:
        """Welcome the trainer if the one before it is dead; else it has to find another writer."""
        comer = (int(message["pid"]), int(message["start"]))
        owner = self._owner
        if owner is not None and owner != comer and is_alive(*owner):
            source.send({"op": "busy"})
            return
        if self._connection is not None and self._connection is not source:
            self._connection.close()
        if source in self._guests:
            self._guests.remove(source)
        self._connection, self._owner = source, comer
        self._note_owner(comer)
        with self._condition:
            offers = {o.slot: o for o in (self._waiting, self._current) if o is not None}
            told = [
                {
                    "slot": number,
                    "path": None if segment.path is None else str(segment.path),
                    "lent": number in offers,
                }
                for number, segment in self._slots.items()
            ]
            fds = [segment.fd for segment in self._slots.values()]
            source.send({"op": "welcome", "pid": os.getpid(), "slots": told}, fds)

    def _note_owner(self, owner: tuple[int, int]) -> None:
        """Leave word who uses this writer, for whoever finds it silent."""
        text = json.dumps({"pid": os.getpid(), "owner": owner})
        (self._folder / f"{self._name}.owner").write_text(text, encoding="ascii")

    def _open(self, message: Message) -> None:
        from checkpoints.publishing import Publisher

        self._publisher = Publisher(message, self._note_known, self._may_wait)

    def _take(self, message: Message) -> None:
        from checkpoints import snapshots
        from checkpoints.layout import CheckpointName

        segment = self._slots[message["slot"]]
        snapshot = snapshots.read(segment.view(), _Kept())
        if snapshot is None or self._publisher is None:
            self._tell({"op": "free", "slot": message["slot"]})
            return
        offer = Offer(
            snapshot=snapshot,
            slot=message["slot"],
            protect=tuple(CheckpointName.parse(text) for text in message["protect"]),
            keep=bool(message["keep"]),
            publisher=self._publisher,
        )
        with self._condition:
            replaced, self._waiting = self._waiting, offer
            if replaced is not None and replaced.keep and not offer.keep:
                replaced, self._waiting = offer, replaced
            self._condition.notify_all()
        if replaced is not None:
            self._tell({"op": "replaced", "name": str(replaced.snapshot.name)})
            self._free(replaced)

    def _tell(self, message: Message) -> None:
        connection = self._connection
        if connection is not None:
            with contextlib.suppress(LostError):  # the main thread will notice that it is gone
                connection.send(message)

    def _free(self, offer: Offer) -> None:
        self._tell({"op": "free", "slot": offer.slot, "name": str(offer.snapshot.name)})

    # ---------------------------------------------------------------------------- the other thread
    def _write(self) -> None:
        while True:
            with self._condition:
                while self._waiting is None and not self._is_over:
                    self._condition.wait()
                if self._is_over:
                    return
                offer, self._waiting = self._waiting, None
                self._current = offer
            if offer is not None:
                self._publish(offer)
                with self._condition:
                    self._current = None  # first: a trainer that comes now is told that it is free
                self._free(offer)
            del offer

    def _publish(self, offer: Offer) -> None:
        """Try until it is committed, refused, or replaced by a newer one after a failure."""
        publisher = offer.publisher
        failing_since: float | None = None
        while True:
            outcome = publisher.publish(offer.snapshot, offer.protect)
            outcome["seconds"] = round(time.monotonic() - offer.began, 4)
            self._tell(outcome)
            if outcome["op"] != "failed" or outcome["final"]:
                return
            failing_since = failing_since or time.monotonic()
            if not self._pause(offer, publisher.pause_s, failing_since):
                return

    def _pause(self, offer: Offer, pause_s: float, failing_since: float) -> bool:
        """Wait for the next try; False where there is none."""
        until = time.monotonic() + pause_s
        while (left := until - time.monotonic()) > 0:
            with self._condition:
                self._condition.wait(min(left, _TICK_S))
            if self._waiting is not None and self._waiting.keep:
                break  # somebody waits for this one
            if self._is_over or not self._may_wait(time.monotonic() - failing_since):
                return False
        if self._waiting is not None and not offer.snapshot.is_doubtful:
            self._tell({"op": "replaced", "name": str(offer.snapshot.name)})
            return False
        return True

    def _may_wait(self, waited_s: float) -> bool:
        """Whether it is worth while to go on: for ever beside an agent, for a minute without."""
        return waited_s < 60 or is_alive(self._agent.pid, self._agent.start)

    def _note_known(self, name: CheckpointName) -> None:
        """Tell all snapshots in memory that this checkpoint is in the store."""
        from checkpoints import snapshots

        for segment in list(self._slots.values()):
            snapshots.note_known(segment.view(), name)


class _Kept:
    """The slot is given back by a message, not by this."""

    def free(self) -> None:
        """Nothing to do here."""


def main(arguments: Sequence[str]) -> int:
    """Run the writer: FOLDER NUMBER AGENT DESCRIPTOR."""
    folder, number, agent, descriptor = arguments
    for name in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(name, signal.SIG_IGN)  # they are for the training; this ends with its work
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    os.chdir("/")
    os.closerange(3, int(descriptor))  # whatever the trainer opened while it started us
    os.closerange(int(descriptor) + 1, 1 << 16)
    lock = os.open(
        Path(folder) / f"writer-{number}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
    )
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        logger.warning("another writer has the number %s", number)
        return 1
    first = Connection(socket.socket(fileno=int(descriptor)))
    Service(Path(folder), int(number), _agent(json.loads(agent)), first).run()
    return 0


def _agent(values: dict[str, Any]) -> AgentId:
    from checkpoints.layout import AgentId

    return AgentId(**values)
