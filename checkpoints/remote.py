"""The trainer's side of the writer: found or started, given snapshots, asked what became of them.

Promises: a snapshot that was offered stays untouched until the writer gives it back; a writer that dies
is replaced, and what it held is offered again; one that is silent is left alone, and so is the memory that
it may still read. Called by one thread; another one listens.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import re
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from checkpoints import snapshots
from checkpoints.errors import CheckpointError, DamagedError
from checkpoints.messages import Connection, LostError, Message, connect, pair
from checkpoints.processes import this_process
from checkpoints.segments import Segment

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from checkpoints.buffers import Buffers, Slot
    from checkpoints.layout import AgentId
    from checkpoints.snapshots import Snapshot

__all__ = ["RemoteWriter"]

logger = logging.getLogger(__name__)

SILENT_S: Final = 5.0
"""A writer that says nothing for so long is left alone."""
_ROOT: Final = Path(__file__).resolve().parent.parent
_START: Final = "import sys; sys.path[:0] = sys.argv[1].split(':'); from checkpoints.service import main; sys.exit(main(sys.argv[2:]))"
_SOCKET: Final = re.compile(r"writer-(\d+)\.sock", re.ASCII)
_MOST_STARTS: Final = 5
"""Of writers that die without a commit: after so many within a minute the trainer writes by itself."""


class RemoteWriter:
    """The writer of this node, for one trainer at a time."""

    def __init__(
        self,
        folder: Path,
        agent: AgentId,
        buffers: Buffers,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Find the writer that a trainer before this one left, or start one.

        Args:
            folder: A private folder of this node, the same for all trainers under the agent.
            agent: The process with which node memory and writer come to their end.
            buffers: Whose slots are offered; the ones that the writer still has are taken over.
            clock: A monotonic clock.

        Raises:
            LostError: No writer could be started.
        """
        self._folder, self._agent, self._buffers, self._clock = folder, agent, buffers, clock
        self._lent: dict[int, Snapshot | None] = {}
        self._options: dict[int, Message] = {}
        self._sent: set[int] = set()
        self._slots: dict[int, Slot] = {}
        self._settings: Message | None = None
        self._results: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._starts: list[float] = []
        self._child: int | None = None
        self._asked_at: float | None = None
        self._is_lost = False
        self.was_adopted = False
        """Whether the writer is one that another trainer left."""
        self._connection = self._find() or self._start()
        self._listen()

    # ------------------------------------------------------------------------------------- finding
    def _numbers(self) -> list[int]:
        names = (_SOCKET.fullmatch(path.name) for path in self._folder.iterdir())
        return sorted(int(match[1]) for match in names if match)

    def _find(self) -> Connection | None:
        """The writer of a trainer that is dead; None where there is none that answers."""
        for number in self._numbers():
            name = f"writer-{number}.sock"
            connection = connect(self._folder, name, SILENT_S)
            if connection is None:
                continue
            try:
                if self._greet(connection):
                    self.was_adopted = True
                    return connection
            except LostError:
                logger.info("the writer %s does not answer; this trainer makes its own", name)
            connection.close()
        return None

    def _greet(self, connection: Connection) -> bool:
        """Say who we are; False where the writer belongs to a trainer that lives."""
        me = this_process()
        connection.send({"op": "hello", "pid": me.pid, "start": me.start})
        heard = connection.receive(SILENT_S)
        if heard is None:
            raise LostError("the writer is silent")
        message, descriptors = heard
        if message["op"] != "welcome":
            return False
        for told, fd in zip(message["slots"], descriptors, strict=True):
            path = None if told["path"] is None else Path(told["path"])
            self._take_over(Segment.of(fd, path), int(told["slot"]), lent=bool(told["lent"]))
        return True

    def _take_over(self, memory: Segment, number: int, *, lent: bool) -> None:
        slot = self._buffers.take_over(memory, number)
        self._slots[number] = slot
        self._sent.add(number)
        if lent:
            snapshot = None
            with contextlib.suppress(DamagedError):
                snapshot = snapshots.read(memory.view(), slot)
            if snapshot is not None:
                slot.hold(snapshot)
            self._lent[number] = snapshot

    def _start(self) -> Connection:
        now = self._clock()
        self._starts = [at for at in self._starts if now - at < 60] + [now]
        if len(self._starts) > _MOST_STARTS:
            raise LostError(f"the writer died {_MOST_STARTS} times within a minute")
        number = max(self._numbers(), default=0) + 1
        ours, theirs = pair()
        try:
            self._child = _spawn(self._folder, number, self._agent, theirs.fileno())
        except OSError as error:
            raise LostError(f"the writer could not be started: {error}") from error
        finally:
            theirs.close()
        self._greet_first(ours)
        return ours

    def _greet_first(self, connection: Connection) -> None:
        me = this_process()
        connection.send({"op": "hello", "pid": me.pid, "start": me.start})
        # A machine that is busy starting W workers may need a while.
        try:
            heard = connection.receive(12 * SILENT_S)
        except LostError:
            heard = None
        if heard is None or heard[0]["op"] != "welcome":
            raise LostError(f"the writer did not start; see {self._folder / 'writer.log'}")

    def _listen(self) -> None:
        connection = self._connection
        thread = threading.Thread(
            target=self._hear, args=(connection,), name="writer's word", daemon=True
        )
        thread.start()

    def _hear(self, connection: Connection) -> None:
        try:
            while True:
                heard = connection.receive()
                if heard is not None:
                    self._note(heard[0])
        except LostError:
            with self._changed:
                if connection is self._connection:
                    self._is_lost = True
                self._changed.notify_all()

    def _note(self, message: Message) -> None:
        with self._changed:
            self._asked_at = None
            if message["op"] == "free":
                snapshot = self._lent.pop(int(message["slot"]), None)
                if snapshot is not None:
                    snapshot.release()
            elif message["op"] != "pong":
                if message["op"] == "committed":
                    self._starts.clear()  # it does its work: its death will be somebody else's doing
                self._results.put(message)
            self._changed.notify_all()

    # ------------------------------------------------------------------------------------- working
    def open(self, settings: Mapping[str, Any]) -> None:
        """Say where to write and for which generation: see `publishing.Publisher`."""
        self._settings = {"op": "open", **settings}
        self._say(self._settings)

    def offer(self, snapshot: Snapshot, *, protect: Sequence[str] = (), keep: bool = False) -> None:
        """Have a snapshot made durable; it belongs to the writer until it gives it back.

        Raises:
            LostError: There is no writer any more, and none could be started.
        """
        slot = snapshot.slot
        from checkpoints.buffers import Slot

        if not isinstance(slot, Slot) or not slot.is_shared:
            raise CheckpointError(f"snapshot {snapshot.name}: is not in shared memory")
        with self._changed:
            self._slots[slot.number] = slot
            self._lent[slot.number] = snapshot
            self._options[slot.number] = {"protect": list(protect), "keep": keep}
        self._send_offer(slot)

    def _send_offer(self, slot: Slot) -> None:
        if slot.number not in self._sent:
            path = None if slot.memory.path is None else str(slot.memory.path)
            message = {"op": "slot", "slot": slot.number, "path": path}
            if not self._say(message, [slot.memory.fd]):
                return
            self._sent.add(slot.number)
        self._say({"op": "offer", "slot": slot.number, **self._options[slot.number]})

    def _say(self, message: Message, descriptors: Sequence[int] = ()) -> bool:
        """Send; False where the writer had to be replaced, and so has been told anew."""
        try:
            self._connection.send(message, descriptors)
        except LostError:
            self._replace()
            return False
        return True

    def _replace(self) -> None:
        """Start another writer and offer it what the one before it held."""
        with self._changed:
            self._is_lost = False
            self._asked_at = None
        self._connection.close()
        self._reap()
        logger.warning("the writer is gone; another one takes its place")
        self._connection = self._start()
        self._listen()
        self._sent.clear()
        if self._settings is not None:
            self._connection.send(self._settings)
        with self._changed:
            held = [number for number, snapshot in self._lent.items() if snapshot is not None]
            self._lent = {number: self._lent[number] for number in held}
        for number in sorted(held, key=self._order):
            self._options.setdefault(number, {"protect": [], "keep": False})
            self._send_offer(self._slots[number])

    def _order(self, number: int) -> tuple[int, int]:
        snapshot = self._lent[number]
        return (0, 0) if snapshot is None else (snapshot.name.generation, snapshot.name.step)

    def look(self) -> list[Message]:
        """What the writer has said since the last look; replaces it where it is gone. Often.

        Raises:
            LostError: It is gone, and none could be started.
        """
        if self._is_lost:
            self._replace()
        elif self._lent and self._clock() - self._connection.heard_at > SILENT_S / 2:
            self._ask()
        told: list[Message] = []
        with contextlib.suppress(queue.Empty):
            while True:
                told.append(self._results.get_nowait())
        return told

    def _ask(self) -> None:
        """Ask a quiet writer whether it is there; leave it alone where it is not."""
        if self._asked_at is None:
            self._asked_at = self._clock()
            self._say({"op": "ping"})
        elif self._clock() - self._asked_at > SILENT_S:
            logger.warning(
                "the writer has been silent for %g s; this trainer makes its own", SILENT_S
            )
            # It may wake up and read on: what it reads must never change.
            for number in self._lent:
                self._buffers.abandon(self._slots[number])
            self._replace()

    def newest_held(self) -> Snapshot | None:
        """Of the snapshots that were offered and are not settled the newest."""
        with self._changed:
            held = [snapshot for snapshot in self._lent.values() if snapshot is not None]
        return max(held, key=lambda snapshot: snapshot.name, default=None)

    @property
    def is_busy(self) -> bool:
        """Whether something that was offered is not settled yet."""
        return bool(self._lent)

    def wait(self, timeout_s: float) -> bool:
        """Wait until all that was offered is settled; False where that takes longer."""
        deadline = self._clock() + timeout_s
        with self._changed:
            while self._lent and not self._is_lost:
                left = deadline - self._clock()
                if left <= 0:
                    return False
                self._changed.wait(min(left, 0.5))
        return not self._lent

    def await_turn(self, timeout_s: float) -> bool:
        """Wait until nothing waits behind what is being written; False where that takes longer."""
        deadline = self._clock() + timeout_s
        with self._changed:
            while len(self._lent) > 1 and not self._is_lost:
                left = deadline - self._clock()
                if left <= 0:
                    return False
                self._changed.wait(left)
        return True

    def finish(self, *, timeout_s: float = 10.0) -> None:
        """The run is over: the writer clears the node's memory and ends. Wait for that a little."""
        with contextlib.suppress(LostError):
            self._connection.send({"op": "finish", "unlink": True})
        self._connection.close()
        deadline = self._clock() + timeout_s
        while not self._reap() and self._clock() < deadline:
            time.sleep(0.01)

    def _reap(self) -> bool:
        """Let a child that has ended go; True where there is none left."""
        if self._child is not None:
            try:
                if os.waitpid(self._child, os.WNOHANG)[0] == 0:
                    return False
            except ChildProcessError:
                pass  # somebody waits for all children of this process
            self._child = None
        return True

    def leave(self) -> None:
        """Let the next trainer have the writer."""
        self._connection.close()


def _spawn(folder: Path, number: int, agent: AgentId, descriptor: int) -> int:
    """Start the writer's process, in a session of its own; returns its pid."""
    # Not -I: the folders come as an argument. The writer needs no site and none of its .pth files.
    command = [sys.executable, "-S", "-E", "-c", _START, _search_path(), str(folder), str(number)]
    command += [json.dumps(asdict(agent)), str(descriptor)]
    log = str(folder / "writer.log")
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    os.set_inheritable(descriptor, True)
    # Never subprocess: it would wait for a child that is meant to outlive us, and warn if it cannot.
    return os.posix_spawn(
        sys.executable,
        command,
        os.environ,
        file_actions=[
            *_close_inherited(descriptor),
            (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, log, flags, 0o600),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
        setsid=True,
    )


def _close_inherited(kept: int) -> list[tuple[int, int]]:
    """What closes every descriptor that a child would inherit but must not hold open.

    The sockets of collectives are such: a peer would take this process for alive while the writer is.
    """
    found = []
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208  # names alone
        fd = int(name)
        with contextlib.suppress(OSError):
            if fd > 2 and fd != kept and os.get_inheritable(fd):
                found.append((os.POSIX_SPAWN_CLOSE, fd))
    return found


def _search_path() -> str:
    """Where the writer finds the project and the packages that it needs."""
    folders = [str(_ROOT), *(entry for entry in sys.path if entry and Path(entry).is_dir())]
    return ":".join(dict.fromkeys(os.path.abspath(folder) for folder in folders))  # noqa: PTH100
