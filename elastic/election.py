"""Who leads: one small record on the store, changed by compare and set alone, and what an agent does about it.

The record names the leader of a launch and where its agent listens; the leader's beat is a number in it that changes. An
agent that finds no leader, a leader that left, or one that is dead tries to put itself there, with the next epoch; of
any number that try, one wins. Death is judged by the observer's own monotonic clock: a beat that has not changed for
`dead_s` while the agent did not answer. No clock is compared with another host's.

Guarantees: at most one agent leads an epoch, and a leader whose beat was not confirmed for `dead_s` has stepped down
before anybody else can have taken over; a closed record ends its own launch alone. This room decides; `elastic.ballot`
reads and writes, `elastic.member` acts. Does not import torch.
"""

import dataclasses
import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Final

__all__ = [
    "Candidate",
    "Evidence",
    "Leader",
    "Record",
    "Step",
    "Watch",
    "judge",
    "must_abdicate",
    "new_record",
]

_FORMAT: Final = 1
_MOST_FORMER: Final = 256
FRESH_BEATS: Final = 6
"""A complaint that is older, by the leader's own beats, does not count any more."""
STAND_BACK_S: Final = 30.0
"""How long an agent that gave way, since others could not reach it, does not lead again."""
TAKE_OVER_S: Final = 10.0
"""How often an agent may take a leadership because its agent's port is closed: more would be a fault of its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Leader:
    """Who leads, and where its agent listens."""

    id: str
    addresses: tuple[str, ...]
    port: int
    place: str
    """Its host's mark: an address of one's own leads to it only from there."""
    name: str
    """Host and pid, for people."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """What lies on the store."""

    launch: str
    """One launch, from its first agent to the end; a closed one is followed by another."""
    token: str = field(repr=False)
    epoch: int
    leader: Leader | None
    """None where the last one left."""
    beat: int = 0
    world: tuple[int, int] | None = None
    """The newest world: the epoch and the round that it was formed in."""
    members: tuple[str, ...] = ()
    """The agents of that world, by rank."""
    former: tuple[str, ...] = ()
    """Agents of the launch's worlds before that are not in it; some may be cut off, and want to come back."""
    complaints: Mapping[str, int] = field(default_factory=dict)
    """Agents that cannot reach the leader, and the beat at which they said so."""
    gone: str = ""
    """The agent that led before and left or gave way."""
    closed: bool = False

    def to_json(self) -> bytes:
        """The bytes for the store, never the same twice: a writer has to know its own."""
        fields = {"format": _FORMAT, **dataclasses.asdict(self), "salt": secrets.token_hex(8)}
        return json.dumps(fields).encode()

    @classmethod
    def from_json(cls, data: bytes) -> "Record":
        """Read one.

        Raises:
            ValueError: Raised when the bytes are no such record.
        """
        try:
            found = json.loads(data)
            if found["format"] != _FORMAT:
                raise ValueError(f"found format {found['format']!r}, expected {_FORMAT}")
            leader = found["leader"]
            return cls(
                launch=str(found["launch"]),
                token=str(found["token"]),
                epoch=int(found["epoch"]),
                leader=None if leader is None else _leader(leader),
                beat=int(found["beat"]),
                world=None if found["world"] is None else _world(found["world"]),
                members=tuple(map(str, found["members"])),
                former=tuple(map(str, found.get("former", ()))),
                complaints={str(key): int(value) for key, value in found["complaints"].items()},
                gone=str(found["gone"]),
                closed=bool(found["closed"]),
            )
        except (KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"found no record of a rendezvous ({error!r})") from error

    def beaten(self, **changes: Any) -> "Record":
        """The same leader's next."""
        return dataclasses.replace(self, beat=self.beat + 1, **changes)

    def formed(self, world: tuple[int, int], members: tuple[str, ...]) -> "Record":
        """The same leader's next, with a new world."""
        known = dict.fromkeys((*self.former, *self.members))
        former = tuple(name for name in known if name not in members)[-_MOST_FORMER:]
        return self.beaten(world=world, members=members, former=former)

    def taken(self, leader: Leader) -> "Record":
        """The record of the next epoch."""
        return dataclasses.replace(
            self, epoch=self.epoch + 1, leader=leader, beat=0, complaints={}, gone=""
        )


def _leader(found: Mapping[str, Any]) -> Leader:
    return Leader(
        id=str(found["id"]),
        addresses=tuple(map(str, found["addresses"])),
        port=int(found["port"]),
        place=str(found["place"]),
        name=str(found["name"]),
    )


def _world(found: Any) -> tuple[int, int]:
    epoch, number = map(int, found)
    return epoch, number


def new_record(leader: Leader, before: Record | None) -> Record:
    """The first record of a launch; epochs go on rising, so that an old leader can never be taken for a new one."""
    epoch = 1 if before is None else before.epoch + 1
    return Record(
        launch=secrets.token_hex(8), token=secrets.token_hex(16), epoch=epoch, leader=leader
    )


# ------------------------------------------------------------------------------------------- watching
class Watch:
    """How long a leader's beat has not changed, by this agent's own clock."""

    def __init__(self) -> None:
        self._seen: tuple[str, int, int] | None = None
        self._since = 0.0
        self._changed = False

    def look(self, record: Record, now: float) -> float:
        """Note a record that was read now; return for how long its beat has been the same."""
        seen = (record.launch, record.epoch, record.beat)
        if self._seen != seen:
            same_leader = self._seen is not None and self._seen[:2] == seen[:2]
            self._changed = same_leader
            self._seen, self._since = seen, now
        return now - self._since

    @property
    def is_beating(self) -> bool:
        """Whether the beat was seen to change under the same leader."""
        return self._changed


# ------------------------------------------------------------------------------------------- deciding
class Evidence(Enum):
    """What an agent knows of the leader that the record names."""

    UNTRIED = auto()
    REFUSED = auto()
    """Nobody listens any more where it was connected before: its agent is gone."""
    NOT_LEADING = auto()
    """Its agent answers that it does not lead."""
    SILENT = auto()
    """It cannot be reached, and that may be anybody's fault."""


class Step(Enum):
    """What an agent does next."""

    CONNECT = auto()
    BEGIN = auto()
    """Put a new launch there."""
    TAKE = auto()
    """Put itself there as the next epoch's leader."""
    WAIT = auto()
    COMPLAIN = auto()
    CLOSED = auto()
    OVERRULED = auto()
    """Another launch has the record."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """The agent that decides."""

    id: str
    launch: str | None
    """The launch that it belongs to, once it knows."""
    may_take_at: float = 0.0
    """Before that it takes no leadership for a closed port."""
    may_lead_at: float = 0.0
    """Before that it leads at no price: it has given way."""


def judge(
    record: Record | None,
    me: Candidate,
    evidence: Evidence,
    *,
    same_s: float,
    beating: bool,
    dead_s: float,
    now: float,
) -> Step:
    """Decide what to do about the record, given what is known of its leader."""
    if record is None or record.closed or me.launch not in {None, record.launch}:
        return _at_an_end(record, me)
    if record.leader is None:
        return Step.TAKE if now >= me.may_lead_at else Step.WAIT
    if record.leader.id != me.id and evidence is Evidence.UNTRIED:
        return Step.CONNECT
    closed_port = evidence in {Evidence.REFUSED, Evidence.NOT_LEADING} and now >= me.may_take_at
    if record.leader.id == me.id or (now >= me.may_lead_at and (closed_port or same_s >= dead_s)):
        return Step.TAKE
    return Step.COMPLAIN if evidence is Evidence.SILENT and beating else Step.WAIT


def _at_an_end(record: Record | None, me: Candidate) -> Step:
    """Decide where there is no launch, an ended one, or another one than this agent's."""
    if me.launch is None:
        return Step.BEGIN
    if record is None:
        # A leader that lives puts it back. Where the store itself is away, as an unmounted folder is, nobody must begin.
        return Step.WAIT
    return Step.CLOSED if record.launch == me.launch else Step.OVERRULED


def must_abdicate(record: Record, connected: set[str]) -> bool:
    """Tell whether more agents cannot reach this leader than can: then one of them should lead.

    Once a world has formed only its agents count and those of worlds before, which have reached a leader once: outsiders never
    disturb one that trains. A leader that was cut off may form a world of those that are left, and gives way all the same.
    """
    fresh = {
        name
        for name, beat in record.complaints.items()
        if record.beat - beat <= FRESH_BEATS and name not in connected
    }
    reaching = connected
    if record.members:
        fresh &= {*record.members, *record.former}
        reaching = connected & set(record.members)
    return len(fresh) > max(len(reaching), 1)
