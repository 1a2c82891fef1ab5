"""The warm process of a node: it has imported what workers import, and forks them for the stubs of torchrun.

Started by a worker after its first step (`elastic.warming`), asked by stubs (`elastic.relay`). Guarantees: one for
each agent; it ends with its agent, and its workers with it; it computes nothing and holds no thread, device or
connection, or it is given up, so that a fork is sound; a worker gets arguments, environment, folder, streams, limits
and random state as if it had been started by itself; code that has changed on disk since is never run. Needs Linux.
"""

import contextlib
import ctypes
import fcntl
import gc
import os
import select
import signal
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

from checkpoints.processes import process_start, stat_of
from elastic.beats import write_status
from elastic.forked import BROKEN, Order, become_worker
from elastic.preloading import Imported, preload
from elastic.relay import ACCEPTED, ENDED, GO, REFUSED, RELAYED, SOCKET, peer_of, unpack
from elastic.sources import changed_file
from elastic.warming import LINK, LOCK, LOG, STEPPED, UNFIT, Plan, is_of_a_start
from elastic.watching import STUB

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_NAME: Final = 15
_TALK_S: Final = 1.0
"""How long one stub may keep the others waiting."""
_LOOK_S: Final = 0.25
"""How often it is looked whether a stub has been stopped."""
_FOR_WORKERS: Final = (
    signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2
)  # fmt: skip
"""Overheard: a scheduler signals every process of a job, and workers that are to save would end with this one."""
_CHECKED_FOR_S: Final = 0.5
_MOST_IDLE_STARTS: Final = 2
"""After so many generations in a row of which no worker came to a step, forking itself may be what is wrong."""


@dataclass(kw_only=True)
class Hosted:
    """A worker and the stub that it was forked for."""

    stub: socket.socket
    stub_pid: int
    link: int
    """Where it tells that it has come to work; -1 once that is known."""
    pid: int
    generation: str
    word: bytes = b""
    """What it has told."""
    ending: bool = False
    stopped: bool = False


def main(argv: list[str]) -> NoReturn:
    """Import, listen, fork; what comes back from the listening is a worker."""
    told = int(argv[0])
    with open(told, "rb", closefd=False) as file:
        file.seek(0)
        plan = Plan.from_json(file.read())
    lean = argv[2:] == ["lean"]
    lock = os.open(f"{plan.folder}/{LOCK}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os._exit(0)  # there is one already
    Path(plan.folder, SOCKET).unlink(missing_ok=True)  # of one that was killed
    os.chdir(plan.cwd)
    imported = preload(plan, lean=lean)
    if imported.unfit and not lean:
        _say(f"{imported.unfit}; once more without the job's own modules")
        os.set_inheritable(told, True)
        os.execv(sys.executable, [*_up_to(sys.orig_argv, argv[0]), argv[0], argv[1], "lean"])  # noqa: S606
    if imported.unfit:
        Path(plan.folder, UNFIT).write_text(imported.unfit, encoding="utf-8")
        _say(imported.unfit)
        os._exit(1)
    os.close(told)
    order = Server(plan, imported, lock).serve()
    become_worker(order, plan, imported)


def _up_to(command: list[str], word: str) -> list[str]:
    return command[: command.index(word)]


def _say(text: str) -> None:
    """Into the log of the agent's folder; users see what stubs and workers say."""
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {text}\n")
    sys.stderr.flush()


class Server:
    """The listening side. One thread; all of its calls are short."""

    def __init__(self, plan: Plan, imported: Imported, lock: int) -> None:
        self._plan, self._imported, self._lock = plan, imported, lock
        self._libc = ctypes.CDLL(None)
        self._hosted: list[Hosted] = []
        self._outdated = ""
        self._checked = float("-inf")
        self._changed: str | None = None
        self._idle_starts: set[str] = set()
        self._former: dict[int, Any] = {}
        gc.collect()
        gc.freeze()  # what is shared with the workers is not copied by looking through it

    def serve(self) -> Order:
        """Fork workers until the agent is gone; returns in each worker."""
        watched, listener = self._watch_agent(), self._listen()
        woken, wakes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in _FOR_WORKERS:
            self._former[number] = signal.signal(number, lambda *_: None)
        while True:
            ready = self._await(watched, woken, listener.fileno())
            if watched in ready:
                self._leave("the agent is gone")
            if woken in ready:
                os.read(woken, 4096)
            self._look_after(ready)
            if len(self._idle_starts) >= _MOST_IDLE_STARTS:
                self._outdated = f"no worker of {len(self._idle_starts)} generations came to a step"
            if listener.fileno() in ready and (order := self._answer(listener)) is not None:
                # Detached: else it would be closed twice, the second time perhaps as something else.
                order.own += [self._lock, watched, woken, wakes, listener.detach()]
                return order
            if self._outdated and not self._hosted:
                self._leave(self._outdated)

    def _watch_agent(self) -> int:
        """A descriptor that is ready once the agent has ended."""
        agent = self._plan.agent
        with contextlib.suppress(ProcessLookupError):
            watched = os.pidfd_open(agent.pid)
            if process_start(agent.pid) == agent.start:
                return watched
        os._exit(0)

    def _listen(self) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        here = os.open(self._plan.folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        listener.bind(f"/proc/self/fd/{here}/{SOCKET}")  # an address holds only 107 bytes
        os.close(here)
        Path(self._plan.folder, SOCKET).chmod(0o600)
        listener.listen(64)
        self._libc.prctl(_PR_SET_NAME, b"elastic warm", 0, 0, 0)
        return listener

    def _await(self, *others: int) -> set[int]:
        """Wait until something comes; returns the descriptors on which it has."""
        poll = select.poll()
        for number in others:
            poll.register(number, select.POLLIN)
        for worker in self._hosted:
            if not worker.ending:  # else its closed end would be ready for ever
                poll.register(worker.stub, select.POLLIN)
            if worker.link >= 0:
                poll.register(worker.link, select.POLLIN)
        return {number for number, _ in poll.poll(_LOOK_S * 1000 if self._hosted else None)}

    def _leave(self, why: str) -> NoReturn:
        """End, and by that end the workers: each is set to die with this process."""
        _say(why)
        for name in (SOCKET, LOCK, LOG):
            with contextlib.suppress(OSError):
                Path(self._plan.folder, name).unlink()
        os._exit(0)

    # --------------------------------------------------------------------------------- the workers
    def _look_after(self, ready: set[int]) -> None:
        for worker in self._hosted:
            if worker.link in ready:
                self._note_step(worker)
            if worker.stub.fileno() in ready:
                self._hear(worker)
            self._mirror_stop(worker)
        lived = [worker for worker in self._hosted if not self._has_ended(worker)]
        if len(lived) < len(self._hosted) and time.monotonic() - self._checked > _CHECKED_FOR_S:
            self._check_sources()
        self._hosted = lived

    def _note_step(self, worker: Hosted) -> None:
        """Once: it has come to work, or is gone."""
        with contextlib.suppress(BlockingIOError):  # a loader worker holds the other end too
            worker.word = os.read(worker.link, 1)
            if worker.word == STEPPED:
                self._idle_starts.clear()
        os.close(worker.link)
        worker.link = -1

    def _hear(self, worker: Hosted) -> None:
        """Pass a signal on, or end the worker of a stub that is gone."""
        try:
            numbers = worker.stub.recv(64)
        except BlockingIOError:
            return
        except OSError:
            numbers = b""
        for number in numbers:
            if number in RELAYED:
                os.kill(worker.pid, number)
        if not numbers and not worker.ending:
            worker.ending = True
            os.kill(worker.pid, signal.SIGKILL)
            _end_session(worker.pid)

    def _mirror_stop(self, worker: Hosted) -> None:
        """A stop cannot be caught and passed on by the stub."""
        fields = stat_of(worker.stub_pid)
        stopped = fields[:1] == ["T"]
        if fields and stopped != worker.stopped:
            worker.stopped = stopped
            os.kill(worker.pid, signal.SIGSTOP if stopped else signal.SIGCONT)

    def _has_ended(self, worker: Hosted, *, wait: bool = False) -> bool:
        """Reap a worker that has ended, and tell its stub how."""
        pid, status = os.waitpid(worker.pid, 0 if wait else os.WNOHANG)
        if pid == 0:
            return False
        if worker.link >= 0:
            self._note_step(worker)
        if not worker.word and os.WIFEXITED(status) and os.WEXITSTATUS(status) == 1:
            self._idle_starts.add(worker.generation)
        write_status(self._plan.folder, pid, status)
        told = ENDED + status.to_bytes(4, "little")
        if worker.word == BROKEN:
            self._outdated = self._outdated or "a forked worker could not be set up"
            told = REFUSED + self._outdated.encode()
        with contextlib.suppress(OSError):
            worker.stub.sendall(told)
        worker.stub.close()
        return True

    def _end_orphans(self) -> None:
        """Before anything new: what belongs to stubs that are gone is gone too."""
        for worker in self._hosted:
            self._hear(worker)
        self._hosted = [
            worker for worker in self._hosted if not self._has_ended(worker, wait=worker.ending)
        ]

    # --------------------------------------------------------------------------------- the stubs
    def _answer(self, listener: socket.socket) -> Order | None:
        """Talk with a stub; returns an order in a worker, None in the warm process."""
        stub, _ = listener.accept()
        stub.settimeout(_TALK_S)
        received: list[int] = []
        try:
            order = self._read(stub, received)
            self._outdated = self._outdated or self._refusal(order)
            if self._outdated:
                # It ends once the workers that it has are gone; the ordinary start makes another one.
                stub.sendall(REFUSED + self._outdated.encode())
                stub.close()
                return None
            stub.sendall(ACCEPTED)
            # Only its word tells that it still waits; without, it has started by itself.
            if stub.recv(1) == GO:
                return self._fork(order, stub)
        except (OSError, ValueError) as error:
            _say(f"a stub was turned away: {error}")
        finally:
            for number in received:
                os.close(number)
        stub.close()
        return None

    def _read(self, stub: socket.socket, received: list[int]) -> Order:
        """Read what a stub asks for.

        Raises:
            ValueError: Raised when it is not one of our agent's, or makes no sense.
        """
        pid, user = peer_of(stub)
        if user != os.getuid() or _parent(pid) != self._plan.agent.pid:
            raise ValueError(
                f"found process {pid} of user {user}, expected a child of torchrun {self._plan.agent.pid}"
            )
        data, found = b"", None
        while found is None:
            more, descriptors, _, _ = socket.recv_fds(stub, 1 << 20, 3)
            received += descriptors
            if not more:
                raise ValueError("found half a message")
            data += more
            found = unpack(data)
        if len(received) != 3:
            raise ValueError(f"found {len(received)} streams, expected 3")
        argv, cwd, environ = found
        return Order(
            argv=argv, cwd=cwd, environ=environ, streams=received, stub_pid=pid, parent=os.getpid()
        )

    def _refusal(self, order: Order) -> str:
        """Say why what is warm here is not what this worker needs; empty where it is."""
        plan = self._plan
        if (order.argv, order.cwd) != (plan.argv, plan.cwd):
            return "other arguments or another folder than before"
        # What libraries read when they were loaded has to be what they would read now.
        names = {*order.environ, *plan.environ}
        for name in sorted(name for name in names if not is_of_a_start(name)):
            if order.environ.get(name) != plan.environ.get(name):
                return f"{name} is another one than before"
        if time.monotonic() - self._checked > _CHECKED_FOR_S:
            self._check_sources()
        if self._changed is not None:
            return f"{self._changed} has changed"
        if os.getpriority(os.PRIO_PROCESS, order.stub_pid) < os.getpriority(os.PRIO_PROCESS, 0):
            return "the scheduling priority is another one than before"
        return ""

    def _check_sources(self) -> None:
        """A thousand files and more: once for all stubs of a start, while torchrun still prepares it."""
        self._changed = changed_file(self._imported.stamps)
        self._checked = time.monotonic()

    def _fork(self, order: Order, stub: socket.socket) -> Order | None:
        self._end_orphans()
        stub.setblocking(False)
        heard, link = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signals = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            pid = os.fork()
        except OSError as error:
            pid = -1
            stub.sendall(REFUSED + f"no process can be forked ({error})".encode())
        if pid == 0:
            return self._in_worker(order, stub, heard, link)
        signal.pthread_sigmask(signal.SIG_SETMASK, signals)
        os.close(link)
        if pid < 0:
            os.close(heard)
            stub.close()
            return None
        variables = ("MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
        generation = " ".join(order.environ.get(name, "") for name in variables)
        hosted = Hosted(
            stub=stub, stub_pid=order.stub_pid, link=heard, pid=pid, generation=generation
        )
        self._hosted.append(hosted)
        return None

    def _in_worker(self, order: Order, stub: socket.socket, heard: int, link: int) -> Order:
        """Right after the fork: tie it to its parent, and gather what belongs to that."""
        try:
            self._libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
            if os.getppid() != order.parent:  # it died before the call
                os._exit(1)
            for number, former in self._former.items():
                signal.signal(number, former)
            name = f"elastic rank {order.environ.get('RANK', '')}"
            self._libc.prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)
            order.own += [heard, stub.detach()]
            for worker in self._hosted:
                if worker.link >= 0:
                    order.own.append(worker.link)
                order.own.append(worker.stub.detach())
            order.environ |= {
                "ELASTIC_AGENT_PID": str(self._plan.agent.pid),
                LINK: str(link),
                STUB: str(order.stub_pid),
            }
            order.streams = [
                os.dup(number) for number in order.streams
            ]  # theirs are closed on the way
        except BaseException:  # noqa: BLE001 - it must not go on as a second warm process
            os.write(link, BROKEN)
            os._exit(1)
        return order


def _end_session(leader: int) -> None:
    """End what a worker has started, loader workers and the like, which torchrun's own signal to the group would meet.

    All but multiprocessing's tracker: it ends by itself, once it has unlinked the semaphores of those that were killed.
    """
    for entry in os.listdir("/proc"):  # noqa: PTH208 - names alone
        if entry.isdigit() and int(entry) != leader and stat_of(int(entry))[3:4] == [str(leader)]:
            with contextlib.suppress(OSError):
                if b"resource_tracker" not in Path("/proc", entry, "cmdline").read_bytes():
                    os.kill(int(entry), signal.SIGKILL)


def _parent(pid: int) -> int:
    fields = stat_of(pid)
    return int(fields[1]) if fields else -1
