"""Who is in this world: the ranks find each other, are told by name, and get a store that no dead generation has touched.

Rank 0 makes a TCPStore of its own on a free port and publishes its address in every channel there is: the store that
the launcher gave, and the run's URL where the world spans nodes or nothing was given. The others look the address up,
and then all shake hands on that store:

    rank r   hello/r := (my nonce, my hello);  welcome names my nonce -> ack/<session>/r := nonce;  go/<session> -> done
    rank 0   all hellos there -> a new session, welcome to all by name; all acks equal the present hellos -> go

Guarantees: all ranks that return have the same session and hellos, and each was alive after all of them had come; a
rank that is replaced meanwhile makes rank 0 begin anew, and the older process leaves; an address of a dead generation, a
stranger's port or a world of another size is passed by; every wait ends in one line that says who is missing. The main
thread never waits inside native code, so a signal is handled at once. A world of one touches no network.
"""

import json
import logging
import os
import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from torch._C._distributed_c10d import HashStore
from torch._C._distributed_c10d import Store as KeyStore

from checkpoints.layout import meeting_name
from checkpoints.store import Store, open_store
from elastic.bounded import run_bounded
from elastic.channels import (
    Address,
    Channel,
    GivenStore,
    Record,
    UrlChannel,
    connect,
    host_store,
    own_addresses,
)
from elastic.errors import MeetingError, StartError
from elastic.ranks import Place

__all__ = ["Meeting", "meet"]

logger = logging.getLogger(__name__)

Hello = dict[str, Any]
_Found = tuple[Record, KeyStore]
"""An address, and its store, reached."""

DEFAULT_TIMEOUT_S: Final = 90.0  # who comes later costs one more restart
_FIRST_POLL_S: Final = 0.002
_POLL_S: Final = 0.03
_GLANCE_S: Final = 0.5
"""How often a rank that is shaking hands looks for a newer address."""
_URL_AFTER_S: Final = 2.0
"""How long the given store may be silent before the URL, which costs a request, is asked too."""
_REFUSED_AGAIN_S: Final = 1.0
_SILENT_AGAIN_S: Final = 10.0
"""When an address that was left for another one may be tried again."""
_GRACE_S: Final = 5.0
_PORT_HINTS: Final = {
    "torchrun": "start torchrun again, or give it another --master_port",
    "hand": "whoever starts the ranks sets another MASTER_PORT, the same for all",
}
_ID: Final = "id"
_WELCOME: Final = "welcome"


@dataclass(kw_only=True)
class Meeting:
    """A world that has met. The store lives until `close`; on rank 0 it is the server for all."""

    session: str
    """Unique to this world and known to all its ranks: the prefix of its keys, the suffix of its files."""
    hellos: list[Hello]
    """What each rank told, by rank."""
    kv: KeyStore | None
    """Rank 0's own store, for this world alone."""
    held: list[object] = field(default_factory=list, repr=False)

    def close(self) -> None:
        """Let go of the stores; on rank 0 only after the others have left."""
        self.kv = None
        self.held.clear()


def meet(
    place: Place,
    hello: Mapping[str, Any],
    *,
    channel: Store | None,
    init_method: str | None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> Meeting:
    """Meet the other ranks of this world. Collective: every rank calls this, in its main thread.

    Args:
        place: This worker's place in its world.
        hello: What this rank tells all others; JSON.
        channel: The store at the run's URL.
        init_method: None, "env://", "tcp://HOST:PORT" or "file:///PATH".
        timeout_s: When those who have not come are missing.

    Raises:
        MeetingError: Raised when ranks are missing, or a newer process has this rank.
        StartError: Raised when there is no way to meet, or the port to meet at is taken.
    """
    me = secrets.token_hex(8)
    if place.world_size == 1:
        return Meeting(session=f"{me}.1", hellos=[dict(hello)], kv=HashStore())
    # torch asks the name server about every address that it connects to, 127.0.0.1 too (measured; 16 ranks at once lost
    # some answers): ask again after 1 s, not 5.
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:5")
    channels = _channels(place, channel, init_method)
    kind = _Host if place.rank == 0 else _Guest
    party = kind(place, dict(hello), channels, me, time.monotonic() + timeout_s, timeout_s)
    try:
        # A store whose server is stopped or cut off never answers a question that it was asked.
        return run_bounded(party.meet, timeout_s + _GRACE_S)
    except TimeoutError as error:
        raise MeetingError(
            f"meeting: a store fell silent and did not answer rank {place.rank} of {place.world_size} within"
            f" {timeout_s:.0f} s ({party.looked_at()})"
        ) from error


# ------------------------------------------------------------------------------------------- where to look
def _channels(place: Place, url: Store | None, init_method: str | None) -> list[Channel]:
    """List where this world may leave its address, the cheapest first."""
    method = urlsplit(init_method or "env://")
    address, served = place.address, place.agent_store
    if method.scheme == "tcp":
        address, served = _tcp_address(init_method or ""), False
    name = meeting_name(re.sub(r"[^A-Za-z0-9_-]+", "-", place.group).strip("-")[:100] or "world")
    by_url: list[Channel] = []
    if method.scheme == "file":
        path = unquote(method.netloc + method.path).rstrip("/")
        by_url.append(UrlChannel(open_store(f"{path}.meeting"), name))
    elif url is not None:
        by_url.append(UrlChannel(url, name))
    if address is None:
        if not by_url:
            raise StartError(
                f"meeting: found {place.world_size} ranks but neither MASTER_ADDR and MASTER_PORT nor a URL, expected"
                " one of them; set MASTER_ADDR and MASTER_PORT, or init_method=file:///a/shared/path"
            )
        return by_url
    given = GivenStore(
        address,
        place.group,
        serve=place.rank == 0 and not served,
        may_give_way=bool(by_url) and place.launcher == "torchrun",
        hint=_PORT_HINTS.get(place.launcher, _PORT_HINTS["hand"]),
    )
    return [given, *by_url]


def _tcp_address(init_method: str) -> Address:
    parts = urlsplit(init_method)
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or not port:
        raise StartError(f"init_method: found {init_method}, expected tcp://HOST:PORT")
    return host, port


class _Party:
    """What both sides of the handshake know."""

    def __init__(
        self,
        place: Place,
        hello: Hello,
        channels: list[Channel],
        me: str,
        deadline: float,
        timeout_s: float,
    ) -> None:
        self.place = place
        self.hello = hello
        self.channels = channels
        self.me = me
        self.deadline = deadline
        self.timeout_s = timeout_s
        self.mine = json.dumps({"nonce": me, "hello": hello})
        self._pause_s = _FIRST_POLL_S
        self._answered = time.monotonic()
        self._later: dict[str, float] = {}
        """Nonces of addresses that are not to be tried now, and when they are again."""

    def is_late(self) -> bool:
        return time.monotonic() > self.deadline

    def replaced(self) -> MeetingError:
        return MeetingError(
            f"meeting: a newer process has rank {self.place.rank}; this one, the older, leaves"
        )

    def looked_at(self) -> str:
        return "; ".join(f"{channel}: {channel.trouble or 'reached'}" for channel in self.channels)

    def rest(self) -> None:
        """Wait before the next look; longer each time, until something has come."""
        time.sleep(self._pause_s * max(1.0, self.place.world_size / 64))  # many share one server
        self._pause_s = min(1.2 * self._pause_s, _POLL_S)

    def hurry(self) -> None:
        """Something has come, and the answer to it will not be long."""
        self._pause_s = _FIRST_POLL_S


class _Host(_Party):
    """Rank 0's side."""

    def meet(self) -> Meeting:
        size = self.place.world_size
        kv = host_store()
        kv.set(_ID, self.me)
        kv.set("hello/0", self.mine)
        record = self._record(kv.port)
        told = self._publish(record, set())
        others = [f"hello/{rank}" for rank in range(1, size)]
        present: list[str] = []
        session = ""
        glance = time.monotonic() + _GLANCE_S
        while not self.is_late():
            if kv.check(others):
                found = [json.loads(text) for text in kv.multi_get(["hello/0", *others])]
                nonces = [one["nonce"] for one in found]
                if nonces != present:
                    # Whoever is new has not seen the session before, and whoever was replaced never acks this one.
                    self.hurry()
                    present, session = nonces, f"{self.me}.{secrets.token_hex(4)}"
                    hellos = [one["hello"] for one in found]
                    kv.set(
                        _WELCOME,
                        json.dumps({"session": session, "nonces": nonces, "hellos": hellos}),
                    )
                elif self._all_acked(kv, session, present):
                    kv.set(f"go/{session}", "1")
                    return Meeting(
                        session=session,
                        hellos=[one["hello"] for one in found],
                        kv=kv,
                        held=[self.channels],
                    )
            if time.monotonic() > glance:
                self._look_around(record, told)
                told = self._publish(record, told)
                glance = time.monotonic() + _GLANCE_S
            self.rest()
        raise MeetingError(self._who_is_missing(kv, session))

    def _record(self, port: int) -> Record:
        place = self.place
        one_node = place.nodes == 1 or place.local_world_size == place.world_size
        given = place.address[0] if place.address and not place.agent_store else None
        return Record(
            addresses=own_addresses(one_node=one_node, given=given),
            port=port,
            world_size=place.world_size,
            nonce=self.me,
            group=place.group,
        )

    def _publish(self, record: Record, told: set[int]) -> set[int]:
        """Publish wherever it has not been yet; the URL only where the given store may not do."""
        for number, channel in enumerate(self.channels):
            first = number == 0
            needed = first or self.place.nodes != 1 or 0 not in told
            if number not in told and needed and channel.publish(record):
                told.add(number)
        return told

    def _look_around(self, record: Record, told: set[int]) -> None:
        """Leave if another process has published as rank 0 since."""
        if told:  # at the first alone: another launch on this URL is no newer self
            found = self.channels[min(told)].read()
            if found is not None and found.nonce != record.nonce and found.group == record.group:
                raise self.replaced()

    @staticmethod
    def _all_acked(kv: KeyStore, session: str, nonces: list[str]) -> bool:
        keys = [f"ack/{session}/{rank}" for rank in range(1, len(nonces))]
        return kv.check(keys) and [ack.decode() for ack in kv.multi_get(keys)] == nonces[1:]

    def _who_is_missing(self, kv: KeyStore, session: str) -> str:
        ranks = range(1, self.place.world_size)
        absent = [rank for rank in ranks if not kv.check([f"hello/{rank}"])]
        if absent:
            return (
                f"meeting: found {self.place.world_size - len(absent)} of {self.place.world_size} ranks after"
                f" {self.timeout_s:.0f} s, missing {_list(absent)}; see their nodes' logs ({self.looked_at()})"
            )
        silent = [rank for rank in ranks if not kv.check([f"ack/{session}/{rank}"])]
        return f"meeting: {_list(silent)} came but fell silent within {self.timeout_s:.0f} s; see their nodes' logs"


class _Guest(_Party):
    """The side of every other rank."""

    def meet(self) -> Meeting:
        found: _Found | None = None
        while not self.is_late():
            found = found or self._find()
            if found is None:
                self.rest()
                continue
            record, kv = found
            try:
                outcome = self._shake(kv, record.nonce)
            except RuntimeError as error:
                # Rank 0 died: its successor publishes a new address, or the launcher starts us all again.
                logger.debug("rank 0's store is gone: %s", error)
                found = None
                self._later[record.nonce] = time.monotonic() + _REFUSED_AGAIN_S
                continue
            if isinstance(outcome, Meeting):
                return outcome
            found = outcome
            self._later[record.nonce] = time.monotonic() + _SILENT_AGAIN_S
        raise MeetingError(
            f"meeting: rank 0 of {self.place.world_size} did not answer rank {self.place.rank} within"
            f" {self.timeout_s:.0f} s; see its node's log ({self.looked_at()})"
        )

    def _find(self, *, other_than: str = "") -> _Found | None:
        """Look for an address worth trying, and reach it."""
        now = time.monotonic()
        for channel in self.channels:
            patient = len(self.channels) > 1 and isinstance(channel, UrlChannel)
            if patient and now < self._answered + _URL_AFTER_S:
                continue
            record = channel.read()
            if (
                record is None
                or record.nonce == other_than
                or (record.world_size, record.group) != (self.place.world_size, self.place.group)
                or self._later.get(record.nonce, 0.0) > now
            ):
                continue
            kv = self._reach(record)
            if kv is not None:
                return record, kv
            self._later[record.nonce] = time.monotonic() + _REFUSED_AGAIN_S
        return None

    def _reach(self, record: Record) -> KeyStore | None:
        """Connect to rank 0's store; a stranger on that port does not know the nonce."""
        for address in record.addresses:
            if self.is_late():
                break
            kv, _ = connect((address, record.port))
            try:
                if kv is not None and kv.check([_ID]) and kv.get(_ID).decode() == record.nonce:
                    return kv
            except RuntimeError as error:
                logger.debug("%s:%d is not rank 0's store: %s", address, record.port, error)
        return None

    def _shake(self, kv: KeyStore, nonce: str) -> Meeting | _Found | None:
        """Shake hands on rank 0's store; returns another address where one has turned up meanwhile."""
        rank = self.place.rank
        key = f"hello/{rank}"
        kv.set(key, self.mine)
        self.hurry()
        session = ""
        hellos: list[Hello] = []
        self._answered = time.monotonic()
        glance = self._answered + _GLANCE_S
        while not self.is_late():
            if json.loads(kv.get(key))["nonce"] != self.me:
                raise self.replaced()
            if kv.check([_WELCOME]):
                welcome = json.loads(kv.get(_WELCOME))
                if welcome["nonces"][rank] == self.me and welcome["session"] != session:
                    self.hurry()
                    session, hellos = welcome["session"], welcome["hellos"]
                    kv.set(f"ack/{session}/{rank}", self.me)
            if session and kv.check([f"go/{session}"]):
                return Meeting(session=session, hellos=hellos, kv=kv)
            if time.monotonic() > glance:
                glance = time.monotonic() + _GLANCE_S
                other = self._find(other_than=nonce)
                if other is not None:
                    return other
            self.rest()
        return None


def _list(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
