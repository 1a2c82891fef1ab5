"""Who is in the next world: the rules of a rendezvous as a state machine, without sockets, clocks or stores.

Its leader feeds it what happens, with the time; `advance` returns what to do. A world goes through these phases:

    GATHERING   the agents come to the rendezvous; those of a world that broke are told to stop their workers
    PROBING     those that are to be in it try to reach each other
    CONFIRMING  the leader writes it to the store: no world forms without the store's word
    RUNNING     it trains

Guarantees: a world has from min to max agents, all of which reached each other just before; agents that stay keep their
order, newcomers come last; a newcomer disturbs a world that trains only when it reaches all of it and there is room; an
agent that cannot reach the others is left out for longer and longer. Does not import torch.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final

__all__ = [
    "Action",
    "Confirm",
    "Go",
    "Node",
    "Phase",
    "Probe",
    "Recall",
    "Roster",
    "WorldId",
    "to_leave_out",
]

PROBE_S: Final = 1.5
"""How long a probe may take, all peers at once."""
PROBE_AGAIN_S: Final = 2.0
FIRST_BAN_S: Final = 2.0
LONGEST_BAN_S: Final = 60.0
_ALL_TO_ALL: Final = 16
"""Up to so many agents each probes all others; beyond, its neighbours in the ring."""
_NEIGHBOURS: Final = 8

WorldId = tuple[int, int]
"""Epoch and round: of two worlds the greater is the newer."""


class Phase(Enum):
    """Where a world is."""

    GATHERING = auto()
    PROBING = auto()
    CONFIRMING = auto()
    RUNNING = auto()


@dataclass(kw_only=True, slots=True)
class Node:
    """A connected agent."""

    id: str
    name: str
    world: WorldId | None = None
    """The world that its workers belong to."""
    is_ready: bool = False
    """It waits in the rendezvous, without workers."""
    is_finishing: bool = False
    """Its workers are done, and it waits for the others' end."""
    arrived: float = 0.0
    passed: bool = False
    """As a newcomer it has reached all of the running world."""
    probe_at: float = 0.0
    told: bool = False
    """It was told to come to the rendezvous."""


@dataclass(frozen=True, slots=True)
class Recall:
    """Tell an agent to stop its workers and come."""

    id: str
    reason: str
    is_broken: bool = False
    """Whether somebody of its world is gone without a word, so that its workers may wait in vain."""


@dataclass(frozen=True, slots=True)
class Probe:
    """Let an agent try to reach others, and report whom it could not."""

    id: str
    turn: int
    peers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Confirm:
    """Write the world to the store, and call `confirmed`."""

    round: int
    members: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Go:
    """Start the world."""

    world: WorldId
    members: tuple[str, ...]


Action = Recall | Probe | Confirm | Go


@dataclass(kw_only=True)
class Roster:
    """The agents of one leader."""

    leader: str
    epoch: int
    min_nodes: int
    max_nodes: int
    last_call_s: float
    round: int = 0
    members: tuple[str, ...] = ()
    """The agents of the newest world, by rank; those that are gone too."""
    expected: dict[str, float] = field(default_factory=dict)
    """Agents of the world before, which may still come to a new leader, and until when."""
    nodes: dict[str, Node] = field(default_factory=dict)
    phase: Phase = Phase.GATHERING
    world: WorldId | None = None
    is_closed: bool = False
    _bans: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Agents that could not reach the others: until when they are left out, and how long that was."""
    _turn: int = 0
    _chosen: tuple[str, ...] = ()
    _failed: dict[str, frozenset[str]] = field(default_factory=dict)
    _until: float = 0.0
    _arrival: float = 0.0
    """When the last newcomer came (to a first round) or passed (beside a running world)."""
    _why: str = ""
    _left: set[str] = field(default_factory=set)
    """Members that went in order."""

    @classmethod
    def after(cls, roster: "Roster", gone: Iterable[str], until: float) -> "Roster":
        """Go on, as a new leader, from the world before; its agents but those that are gone may come until then."""
        left_out = set(gone)
        roster.expected = {name: until for name in roster.members if name not in left_out}
        if roster.members:
            roster.phase = Phase.RUNNING
        return roster

    # --------------------------------------------------------------------------------- what happens
    def joined(self, node: Node, now: float) -> None:
        """An agent has connected; it may have been here before."""
        self.expected.pop(node.id, None)
        node.arrived = now
        node.probe_at = now
        self.nodes[node.id] = node
        if node.is_ready:
            self._arrival = now

    def ready(self, name: str, now: float) -> None:
        """An agent has come to the rendezvous."""
        node = self.nodes.get(name)
        if node is not None and not node.is_ready:
            if self.phase is Phase.RUNNING and name in self.members:
                self._why = self._why or f"{node.name} came back to the rendezvous"
            node.is_ready, node.is_finishing, node.world = True, False, None
            node.told = False
            if name not in self.members:
                node.passed, node.probe_at, self._arrival = False, now, now

    def finishing(self, name: str) -> None:
        """An agent's workers are done."""
        if name in self.nodes:
            self.nodes[name].is_finishing = True

    def lost(self, name: str, reason: str, *, in_order: bool = False) -> None:
        """An agent is gone; in order where it has said so, and its workers end together with the others."""
        node = self.nodes.pop(name, None)
        if node is not None and name in self.members:
            self._why = f"{node.name} {reason}"
            if in_order:
                self._left.add(name)

    def close(self, name: str) -> bool:
        """An agent ends the launch; tell whether it did.

        Only one of the newest world can. One whose workers are done cannot while the others form a new world: they go on.
        """
        node = self.nodes.get(name)
        if node is not None and name in self.members and node.world == self.world:
            self.is_closed = self.phase is Phase.RUNNING or not node.is_finishing
        return self.is_closed

    def reported(self, name: str, turn: int, failed: Iterable[str], now: float) -> None:
        """An agent tells whom it could not reach."""
        node = self.nodes.get(name)
        if node is None:
            return
        missing = frozenset(failed) & self.nodes.keys()
        if self.phase is Phase.PROBING and turn == self._turn and name in self._chosen:
            self._failed[name] = missing
        elif self.phase is Phase.RUNNING and name not in self.members:
            if not node.passed and not missing:
                self._arrival = now
            node.passed = not missing

    def confirmed(self) -> list[Action]:
        """The store has the world: start it, unless an agent was lost meanwhile."""
        if self.phase is not Phase.CONFIRMING:
            return []
        if any(not self._is_here(name) for name in self._chosen):
            self.phase = Phase.GATHERING
            return []
        self.phase = Phase.RUNNING
        self.members, self.world = self._chosen, (self.epoch, self.round)
        self._why = ""
        self._left.clear()
        self.expected.clear()
        for name in self.members:
            node = self.nodes[name]
            node.world, node.is_ready, node.told = self.world, False, False
            self._bans.pop(name, None)
        for name, node in self.nodes.items():
            if name not in self.members:
                node.passed = False
        return [Go(self.world, self.members)]

    # --------------------------------------------------------------------------------- what to do
    def advance(self, now: float) -> list[Action]:
        """Return what to do now. Called after each event and a few times a second."""
        if self.is_closed:
            return []
        self.expected = {name: until for name, until in self.expected.items() if until > now}
        if self.phase is Phase.RUNNING:
            return self._run(now)
        if self.phase is Phase.PROBING:
            return self._probe(now)
        if self.phase is Phase.GATHERING:
            return self._gather(now)
        return []

    def _run(self, now: float) -> list[Action]:
        broken = [name for name in self.members if not self._is_whole(name)]
        newcomers = [node for node in self.nodes.values() if self._is_newcomer(node, now)]
        passed = [node for node in newcomers if node.passed]
        room = self.max_nodes - sum(not self._is_finishing(name) for name in self.members)
        due = len(passed) >= room or now >= self._arrival + self.last_call_s
        if broken or (passed and room > 0 and due):
            names = ", ".join(node.name for node in passed)
            self._why = self._why or (f"{names} joined" if names else "the world broke")
            self.phase = Phase.GATHERING
            return self._gather(now)
        actions: list[Action] = []
        for node in newcomers:
            if not node.passed and now >= node.probe_at:
                node.probe_at = now + PROBE_AGAIN_S
                peers = tuple(name for name in self.members if name in self.nodes)
                actions.append(Probe(node.id, -1, peers))
        return actions + self._recall(outsiders_only=True)

    def _gather(self, now: float) -> list[Action]:
        actions = self._recall()
        here = [
            name for name in self.members if name in self.nodes and not self._is_finishing(name)
        ]
        awaited = [name for name in here if not self.nodes[name].is_ready]
        if awaited or any(name not in self.nodes for name in self.expected):
            return actions
        stay = [name for name in here if not self._is_banned(name, now)]
        new = sorted(
            (node for node in self.nodes.values() if node.is_ready and node.id not in self.members
             and not self._is_banned(node.id, now)),
            key=lambda node: (node.arrived, node.id),
        )  # fmt: skip
        chosen = [*stay, *(node.id for node in new)][: self.max_nodes]
        settled = bool(stay) or now >= self._arrival + self.last_call_s
        if len(chosen) < self.min_nodes or not (settled or len(chosen) == self.max_nodes):
            return actions
        self.phase = Phase.PROBING
        self._turn += 1
        self._chosen, self._failed, self._until = tuple(chosen), {}, now + PROBE_S + 0.5
        plan = probe_plan(chosen)
        if len(chosen) == 1:
            return actions + self._probe(now)
        return actions + [Probe(name, self._turn, plan[name]) for name in chosen]

    def _probe(self, now: float) -> list[Action]:
        here = [name for name in self._chosen if self._is_here(name)]
        silent = [name for name in here if name not in self._failed and len(self._chosen) > 1]
        if len(here) < len(self._chosen):
            # Somebody died meanwhile: with the others once more, at once.
            self.phase = Phase.GATHERING
            return self._gather(now)
        if silent and now < self._until:
            return []
        failed = {name: self._failed.get(name, frozenset(self._chosen)) for name in here}
        out = to_leave_out(self._chosen, failed, self.leader)
        if out:
            for name in out:
                _, before = self._bans.get(name, (0.0, FIRST_BAN_S / 2))
                ban = min(before * 2, LONGEST_BAN_S)
                self._bans[name] = (now + ban, ban)
            # Those that are left reached each other: no second probe is needed.
            self._chosen = tuple(name for name in self._chosen if name not in out)
            if len(self._chosen) < self.min_nodes:
                self.phase = Phase.GATHERING
                return []
        self.phase = Phase.CONFIRMING
        self.round += 1
        return [Confirm(self.round, self._chosen)]

    def _recall(self, *, outsiders_only: bool = False) -> list[Action]:
        """Tell all whose workers run to come; or only those that run another world than this."""
        actions: list[Action] = []
        is_broken = any(
            name not in self.nodes and name not in self.expected and name not in self._left
            for name in self.members
        )
        for node in self.nodes.values():
            mine = node.world is not None and node.world == self.world
            if node.is_ready or node.told or node.world is None or (outsiders_only and mine):
                continue
            node.told = True
            reason = self._why if mine else "another world has formed since"
            # Of another world somebody has gone over to this one, or ended.
            in_vain = is_broken or not mine
            actions.append(Recall(node.id, reason or "a new world forms", in_vain))
        return actions

    # --------------------------------------------------------------------------------- small questions
    def _is_here(self, name: str) -> bool:
        return name in self.nodes and self.nodes[name].is_ready

    def _is_finishing(self, name: str) -> bool:
        return name in self.nodes and self.nodes[name].is_finishing

    def _is_whole(self, name: str) -> bool:
        """Whether an agent of the world is at work, or may still tell so."""
        if name in self.expected:
            return True
        node = self.nodes.get(name)
        return node is not None and not node.is_ready and node.world == self.world

    def _is_banned(self, name: str, now: float) -> bool:
        return self._bans.get(name, (0.0, 0.0))[0] > now

    def _is_newcomer(self, node: Node, now: float) -> bool:
        return node.is_ready and node.id not in self.members and not self._is_banned(node.id, now)


def probe_plan(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Say who tries to reach whom: all others, or in a large world the next ones in the ring."""
    ring = list(names)
    size = len(ring)
    reach = size - 1 if size <= _ALL_TO_ALL else _NEIGHBOURS
    return {
        name: tuple(ring[(at + step) % size] for step in range(1, reach + 1))
        for at, name in enumerate(ring)
    }


def to_leave_out(
    chosen: Iterable[str], failed: Mapping[str, frozenset[str]], leader: str
) -> frozenset[str]:
    """Choose as few agents as it takes so that all others reached each other: those with the most failures first.

    Where two are equal the leader stays, and who came earlier.
    """
    left = list(chosen)
    pairs = {(one, other) for one, others in failed.items() for other in others if one != other}
    out: set[str] = set()
    while pairs:
        weight = {name: sum(name in pair for pair in pairs) for name in left}
        worst = max(left, key=lambda name: (weight[name], name != leader, left.index(name)))
        out.add(worst)
        left.remove(worst)
        pairs = {pair for pair in pairs if worst not in pair}
    return frozenset(out)
