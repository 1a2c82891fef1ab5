"""The rendezvous of `torchrun --rdzv_backend=fsspec --rdzv_endpoint=URL`: survives the loss of any node, without a service.

The endpoint is a folder that all nodes see, or anything that the checkpoints can go to, e.g. s3://bucket/run/rdzv. What
stands behind it: a small record there names one of the agents (elastic.election), which keeps the others together over
TCP (elastic.hub, elastic.member). This room is the handler that torchrun wants. Each world gets a TCPStore of its own,
served by the leader's agent, which no world before has touched.
"""

import contextlib
import logging
import os
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Final, TypeVar

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from checkpoints.errors import CheckpointError
from elastic.addresses import own_addresses
from elastic.agent import agent_of, node_folder
from elastic.ballot import Ballot
from elastic.bounded import run_bounded
from elastic.channels import connect, host_store
from elastic.errors import MeetingError, StartError
from elastic.link import ClosedError, Start
from elastic.member import Member
from elastic.terms import read_terms

__all__ = ["FsspecHandler", "create"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

_NAME: Final = "fsspec"
_KEPT_STORES: Final = 3
"""Workers of the last world may still ask theirs."""
_ASK_S: Final = 5.0
"""How long a question to the world's store may take: its leader may be cut off."""
_POLL_S: Final = 0.02


def create(
    params: RendezvousParameters, options: Mapping[str, object] | None = None
) -> RendezvousHandler:
    """Make the handler of this agent; it looks for the others at once.

    Args:
        params: What torchrun was given.
        options: Arguments of the endpoint's fsspec file system.

    Raises:
        RendezvousConnectionError: Raised when nothing serves the endpoint.
        ConfigError: Raised when a setting is wrong.
    """
    return FsspecHandler(params, options)


class FsspecHandler(RendezvousHandler):
    """torchrun's side: each method is called by the agent's main thread."""

    def __init__(
        self, params: RendezvousParameters, options: Mapping[str, object] | None = None
    ) -> None:
        if not params.endpoint:
            raise RendezvousConnectionError(
                "rdzv_endpoint: found none, expected a folder that all nodes see, or a URL such as s3://bucket/run/rdzv"
            )
        self._run_id = params.run_id
        self._terms = read_terms(params.min_nodes, params.max_nodes, params.config)
        try:
            ballot = Ballot(params.endpoint, params.run_id, options)
        except CheckpointError as error:
            raise RendezvousConnectionError(str(error)) from error
        addresses = own_addresses(one_node=False, given=None)
        if params.local_addr:
            addresses = tuple(dict.fromkeys([params.local_addr, *addresses]))
        name = f"{socket.gethostname()} (pid {os.getpid()})"
        self._stores: deque[TCPStore] = deque(maxlen=_KEPT_STORES)
        self._member = Member(ballot, self._terms, addresses, name, self._serve_store)
        with contextlib.suppress(OSError, StartError):  # the workers will say so, who need it more
            self._member.link.folder = str(node_folder(agent_of(os.getpid())))
        self._member.begin()
        self._is_in_world = False
        _at_signals(self._leave_at)

    async def _serve_store(self) -> int:
        """Serve a store for a round; in the rendezvous thread, a few milliseconds."""
        store = host_store()
        self._stores.append(store)
        return int(store.port)

    def get_backend(self) -> str:
        """Return the name under which torchrun knows it."""
        return _NAME

    @property
    def use_agent_store(self) -> bool:
        """Say that the workers' store is an agent's: it is the same for all, and lives while that agent does."""
        return True

    def get_run_id(self) -> str:
        """Return the id that keeps runs at one endpoint apart."""
        return self._run_id

    def num_nodes_waiting(self) -> int:
        """Tell, above 0, that a new world forms: a node was lost, or left, or came."""
        return self._member.link.waiting

    def is_closed(self) -> bool:
        """Tell whether the launch has ended."""
        return self._member.link.is_over

    def set_closed(self) -> None:
        """End the launch for all."""
        self._member.close()

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for the next world.

        Raises:
            RendezvousClosedError: Raised when the launch has ended.
            RendezvousConnectionError: Raised when this agent was never let in to the store.
            RendezvousTimeoutError: Raised when no world formed with this node in time.
        """
        deadline = time.monotonic() + self._terms.join_s
        self._is_in_world = False
        while True:
            self._member.ask()
            try:
                start = self._member.link.wait_for_start(deadline - time.monotonic())
            except ClosedError as error:
                raise RendezvousClosedError(f"rendezvous {self._run_id}: {error}") from error
            except MeetingError as error:
                raise RendezvousConnectionError(f"rendezvous {self._run_id}: {error}") from error
            except TimeoutError as error:
                raise RendezvousTimeoutError(f"rendezvous {self._run_id}: {error}") from error
            store, trouble = connect((start.address, start.port))
            if store is not None:
                break
            # The leader has died since: back to the others, who notice it too.
            logger.warning("rendezvous: the store of this world is gone (%s)", trouble)
        self._is_in_world = True
        return RendezvousInfo(
            _AgentStore(PrefixStore("agent", store), self._member, start),
            start.rank,
            start.size,
            RendezvousStoreInfo(start.address, start.port),
        )

    def shutdown(self) -> bool:
        """End the launch if this agent was in its newest world; else only leave."""
        if self._is_in_world:
            self._member.close()
        else:
            self._member.leave()
        return self._member.link.is_over or self._member.link.wait_until_left(self._terms.close_s)

    def _leave_at(self, number: int) -> None:
        if number in {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}:
            self._member.leave()


class _AgentStore(Store):
    """The world's store as torchrun's agent uses it: to number the workers, and to wait for the others at the end.

    torchrun would wait for minutes for an agent that has died in between, and then end. Here a world that is doomed gets
    made-up answers: the agent starts workers, finds at its next look that a new world forms, and joins that.
    """

    def __init__(self, store: Store, member: Member, start: Start) -> None:
        super().__init__()
        self._store = store
        self._member = member
        self._start = start
        self._mine = b""
        self._timeout = timedelta(seconds=300)

    @property
    def timeout(self) -> timedelta:
        """The longest wait."""
        return self._timeout

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the longest wait."""
        self._timeout = timeout

    def set(self, key: str, value: str) -> None:
        """Set a key; torchrun gives bytes too."""
        if "role_info/" in key:
            self._mine = value.encode() if isinstance(value, str) else value
        self._ask(lambda: self._store.set(key, value), None)

    def add(self, key: str, amount: int) -> int:
        """Add to a counter."""
        if "terminal_state" in key:
            self._member.finish()
        return self._ask(lambda: self._store.add(key, amount), 0)

    def check(self, keys: Sequence[str]) -> bool:
        """Tell whether all keys are there."""
        return self._ask(lambda: self._store.check(list(keys)), False)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait for keys; in Python code, so that signals are handled. A doomed world's come at once."""
        deadline = time.monotonic() + (timeout or self._timeout).total_seconds()
        while not self._is_doomed() and not self.check(keys):
            if time.monotonic() > deadline:
                raise RuntimeError(f"wait timeout after {self._timeout}: keys {', '.join(keys)}")
            time.sleep(_POLL_S)

    def get(self, key: str) -> bytes:
        """Wait for a key and return its value."""
        self.wait([key])
        return self._ask(lambda: self._store.get(key), self._made_up(key))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Wait for keys and return their values."""
        return [self.get(key) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[Any]) -> None:
        """Set keys."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        """Whether several keys go at once."""
        return True

    def _is_doomed(self) -> bool:
        return self._member.link.is_doomed(self._start.world)

    def _ask(self, question: Callable[[], T], otherwise: T) -> T:
        """Ask the store; one that is gone or silent dooms the world, which this agent then leaves."""
        if self._is_doomed():
            return otherwise
        try:
            return run_bounded(question, _ASK_S)
        except (RuntimeError, TimeoutError) as error:
            logger.warning(
                "rendezvous: the store of this world is gone (%s)", str(error).splitlines()[0]
            )
            self._member.link.recall()
            return otherwise

    def _made_up(self, key: str) -> bytes:
        """What a doomed world's store would say: nodes like this one, so that the numbers fit together."""
        if "assigned_ranks/" in key:
            return b"[%d, %d, %d, %d]" % (
                self._start.rank,
                self._start.size,
                self._start.rank,
                self._start.size,
            )
        return self._mine


def _at_signals(heard: Callable[[int], None]) -> None:
    """Hear of each signal that Python handles, at once and beside the handler that torchrun sets later.

    torchrun says nothing to its rendezvous when it is told to end: the others would learn of it only when it is gone.
    """
    ours, pythons = socket.socketpair()
    pythons.setblocking(False)

    def listen() -> None:
        with contextlib.suppress(OSError):
            while data := ours.recv(16):
                for number in data:
                    heard(number)

    try:
        signal.set_wakeup_fd(pythons.fileno(), warn_on_full_buffer=False)
    except (
        ValueError
    ):  # not the main thread: torchrun is used from a program, which ends it in its own way
        return
    pythons.detach()
    threading.Thread(target=listen, name="rendezvous-signals", daemon=True).start()
