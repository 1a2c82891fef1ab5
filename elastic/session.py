"""One connection to the leader, from the greeting to its end: beats go out, orders come in.

Guarantees: a leader that is silent for `dead_s` is given up, and looked up on the store before that, so that its beat's
silence counts from then; an order is done at once and in the order in which it came. Does not import torch.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Final

from elastic.hub import world_id
from elastic.link import Link, Start
from elastic.probing import unreached
from elastic.roster import PROBE_S
from elastic.wire import Line

__all__ = ["Session"]

logger = logging.getLogger(__name__)

_PING_S: Final = 0.5
_SUSPECT_S: Final = 1.0
"""A leader that is silent for so long is looked up on the store, beside waiting for it."""


@dataclass(kw_only=True)
class Session:
    """An agent's connection, on which the leader has said welcome."""

    me: str
    token: str = field(repr=False)
    link: Link
    line: Line
    leader: str
    """Its name, for people."""
    address: str
    """Where the leader's stores are reached from here."""
    dead_s: float
    glance: Callable[[], Awaitable[None]]
    """Looks at the leader's beat on the store."""
    _heard: float = field(default_factory=time.monotonic)
    _tasks: set["asyncio.Task[None]"] = field(default_factory=set)

    async def attend(self) -> float | None:
        """Stay until the connection ends; return since when the leader is silent, or None where it ended otherwise.

        Raises:
            ConnectionError: Raised when the leader's agent has closed the connection.
        """
        link, line = self.link, self.line
        if link.is_ready:
            # The agent may have come to the rendezvous while the hello was on its way.
            line.send({"op": "ready"})
        if link.is_closing or link.is_leaving:
            line.send({"op": "close" if link.is_closing else "leave"})
        link.trouble = f"waiting for nodes: the leader {self.leader} has fewer than it needs"
        orders = asyncio.create_task(self._obey())
        looking: asyncio.Task[None] | None = None
        try:
            while not orders.done():
                line.send({"op": "ping"})
                await asyncio.wait([orders], timeout=_PING_S)
                silent_s = time.monotonic() - self._heard
                if silent_s > self.dead_s:
                    told = "rendezvous: the leader %s has been silent for %.1f s"
                    logger.warning(told, self.leader, silent_s)
                    return self._heard
                if silent_s > _SUSPECT_S and (looking is None or looking.done()):
                    looking = asyncio.create_task(self._look())
            orders.result()
            return None
        finally:
            for task in (orders, looking, *self._tasks):
                if task is not None:
                    task.cancel()

    async def _look(self) -> None:
        await self.glance()

    async def _obey(self) -> None:
        """Do what the leader says, until it says that this connection is over."""
        while True:
            message = await self.line.receive()
            self._heard = time.monotonic()
            match message.get("op"):
                case "go":
                    self._go(message)
                case "recall":
                    logger.warning("rendezvous: the workers restart: %s", message.get("reason"))
                    self.link.recall(is_broken=bool(message.get("broken")))
                case "probe":
                    task = asyncio.create_task(self._probe(message))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
                case "left":
                    self.link.leave()
                    return
                case "closed":
                    self.link.close(f"the launch has ended ({message.get('reason')})")
                    return
                case "moved":
                    return

    def _go(self, message: dict[str, Any]) -> None:
        world = world_id(message["world"])
        assert world is not None
        rank, size, port = (int(message[key]) for key in ("rank", "size", "port"))
        self.link.start(Start(world=world, rank=rank, size=size, address=self.address, port=port))

    async def _probe(self, message: dict[str, Any]) -> None:
        """Try to reach others, and report whom it could not."""
        failed = await unreached(message["peers"], token=self.token, me=self.me, limit_s=PROBE_S)
        self.line.send({"op": "probed", "turn": message["turn"], "failed": failed})
