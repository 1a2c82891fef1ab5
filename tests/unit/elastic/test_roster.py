"""The rules of a rendezvous, without sockets: by table, and by whatever hypothesis can think of."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.roster import Confirm, Go, Node, Phase, Probe, Recall, Roster, probe_plan, to_leave_out


@dataclass
class Agents:
    """Agents that do as the roster says; links between some of them are cut."""

    low: int = 1
    high: int = 3
    now: float = 100.0
    cut: set[frozenset[str]] = field(default_factory=set)
    ready: set[str] = field(default_factory=set)
    running: dict[str, tuple[int, int]] = field(default_factory=dict)
    worlds: list[tuple[str, ...]] = field(default_factory=list)
    recalls: list[str] = field(default_factory=list)
    broken: list[bool] = field(default_factory=list)
    """Of each recall: whether somebody is gone without a word."""
    stubborn: set[str] = field(default_factory=set)
    """Agents whose workers take long to stop."""

    def __post_init__(self) -> None:
        self.roster = Roster(
            leader="a", epoch=1, min_nodes=self.low, max_nodes=self.high, last_call_s=1.0
        )

    def join(self, *names: str) -> None:
        for name in names:
            self.now += 0.01
            world = self.running.get(name)
            self.roster.joined(
                Node(id=name, name=name, world=world, is_ready=world is None), self.now
            )
            if world is None:
                self.ready.add(name)
            self.act()

    def die(self, name: str) -> None:
        self.ready.discard(name)
        self.running.pop(name, None)
        self.roster.lost(name, "died")
        self.act()

    def come(self, name: str) -> None:
        """An agent's workers have stopped."""
        self.running.pop(name, None)
        self.ready.add(name)
        self.roster.ready(name, self.now)

    def after(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now = min(self.now + 0.1, end)
            self.act()

    def act(self) -> None:
        for _ in range(100):
            actions = self.roster.advance(self.now)
            if not actions:
                return
            for action in actions:
                self.do(action)

    def do(self, action: object) -> None:
        match action:
            case Recall(id=name):
                self.recalls.append(name)
                self.broken.append(action.is_broken)
                if name not in self.stubborn:
                    self.come(name)
            case Probe(id=name, turn=turn, peers=peers):
                failed = [peer for peer in peers if frozenset((name, peer)) in self.cut]
                self.roster.reported(name, turn, failed, self.now)
            case Confirm():
                for go in self.roster.confirmed():
                    assert isinstance(go, Go)
                    assert len(set(go.members)) == len(go.members)
                    assert self.low <= len(go.members) <= self.high
                    assert set(go.members) <= self.ready, "an agent that is not there is in a world"
                    self.worlds.append(go.members)
                    self.ready -= set(go.members)
                    self.running |= dict.fromkeys(go.members, go.world)


def test_full_world_starts_at_once_and_a_smaller_one_after_the_last_call() -> None:
    full = Agents()
    full.join("a", "b", "c")
    assert full.worlds == [("a", "b", "c")]
    small = Agents()
    small.join("a", "b")
    small.after(0.9)
    assert small.worlds == []
    small.after(0.3)
    assert small.worlds == [("a", "b")]


def test_world_waits_for_its_least() -> None:
    agents = Agents(low=2)
    agents.join("a")
    agents.after(20)
    assert agents.worlds == []
    agents.join("b")
    agents.after(1.2)
    assert agents.worlds == [("a", "b")]


@pytest.mark.parametrize("dead", ["a", "b", "c"])
def test_loss_recalls_the_others_who_go_on_in_their_order_at_once(dead: str) -> None:
    agents = Agents()
    agents.join("c", "a", "b")
    agents.die(dead)
    left = tuple(name for name in "cab" if name != dead)
    assert agents.worlds[-1] == left
    assert sorted(agents.recalls) == sorted(left)
    assert all(agents.broken)


def test_new_round_waits_for_workers_that_are_slow_to_stop() -> None:
    agents = Agents(stubborn={"b"})
    agents.join("a", "b", "c")
    agents.die("c")
    agents.after(10)
    assert len(agents.worlds) == 1
    agents.come("b")
    agents.act()
    assert agents.worlds[-1] == ("a", "b")


def test_newcomers_are_gathered_while_the_world_runs_and_come_last() -> None:
    agents = Agents(high=4)
    agents.join("b", "a")
    agents.after(1.2)
    agents.join("c")
    agents.after(0.5)
    agents.join("d")
    assert agents.worlds[-1] == ("b", "a", "c", "d")
    assert len(agents.worlds) == 2


def test_newcomer_that_cannot_reach_all_disturbs_nobody_until_it_can() -> None:
    agents = Agents(cut={frozenset("cb")})
    agents.join("a", "b")
    agents.after(1.2)
    agents.join("c")
    agents.after(60)
    assert (len(agents.worlds), agents.recalls) == (1, [])
    agents.cut.clear()
    agents.after(4)
    assert agents.worlds[-1] == ("a", "b", "c")


def test_spare_agent_waits_without_a_word_and_takes_the_place_of_a_dead_one() -> None:
    agents = Agents()
    agents.join("a", "b", "c", "d")
    agents.after(30)
    assert (len(agents.worlds), agents.recalls) == (1, [])
    agents.die("b")
    assert agents.worlds[-1] == ("a", "c", "d")


def test_two_that_cannot_reach_each_other_are_not_in_one_world_and_the_rest_is_left_alone() -> None:
    agents = Agents()
    agents.join("a", "b", "c")
    agents.cut.add(frozenset("bc"))
    agents.come("b")
    agents.act()
    assert agents.worlds[-1] == ("a", "b")
    count = len(agents.worlds)
    agents.after(120)
    assert len(agents.worlds) == count


def test_falsely_dead_agent_that_trains_on_is_recalled_when_it_is_back() -> None:
    agents = Agents()
    agents.join("a", "b", "c")
    old = agents.running["c"]
    agents.die("c")
    agents.running["c"] = old
    agents.join("c")
    agents.after(3)
    assert agents.recalls.count("c") == 1
    assert agents.worlds[-1] == ("a", "b", "c")


def taken_over(agents: Agents, gone: set[str]) -> Roster:
    """The roster of a new leader, "b"."""
    before = agents.roster
    fresh = Roster(
        leader="b", epoch=2, min_nodes=1, max_nodes=3, last_call_s=1.0, world=before.world, members=before.members
    )  # fmt: skip
    agents.roster = Roster.after(fresh, gone, agents.now + 3)
    return agents.roster


def test_new_leader_whose_world_is_whole_leaves_it_alone() -> None:
    agents = Agents()
    agents.join("a", "b", "c")
    taken_over(agents, set())
    agents.join("b")
    agents.after(1)
    agents.join("c", "a")
    agents.after(30)
    assert (len(agents.worlds), agents.recalls) == (1, [])
    assert agents.roster.phase is Phase.RUNNING


def test_new_leader_forms_a_world_of_those_that_come_back() -> None:
    agents = Agents()
    agents.join("a", "b", "c")
    agents.running.pop("a")
    taken_over(agents, {"a"})
    agents.join("b")
    agents.after(1)
    assert len(agents.worlds) == 1  # c has two more seconds
    agents.join("c")
    assert agents.worlds[-1] == ("b", "c")


def test_new_leader_does_not_wait_for_ever() -> None:
    agents = Agents()
    agents.join("a", "b", "c")
    for name in "ac":
        agents.running.pop(name)
    taken_over(agents, {"a"})
    agents.join("b")
    agents.after(2.9)
    assert len(agents.worlds) == 1
    agents.after(0.3)
    assert agents.worlds[-1] == ("b",)


def test_agent_that_has_finished_holds_nobody_up_and_does_not_end_the_others() -> None:
    agents = Agents(stubborn={"a"})
    agents.join("a", "b", "c")
    agents.roster.finishing("a")
    agents.come("b")  # its worker failed at the very end
    agents.act()
    assert agents.worlds[-1] == ("b", "c")
    assert not agents.roster.close("a")
    assert agents.roster.close("b")


def test_only_an_agent_of_the_newest_world_ends_the_launch() -> None:
    agents = Agents()
    agents.join("a", "b", "c", "d")
    assert not agents.roster.close("d")
    assert agents.roster.close("c")
    assert agents.roster.advance(agents.now) == []


def test_loss_while_the_store_is_asked_starts_no_world_with_the_dead() -> None:
    roster = Roster(leader="a", epoch=1, min_nodes=1, max_nodes=2, last_call_s=1.0)
    for name in "ab":
        roster.joined(Node(id=name, name=name, is_ready=True), 0.0)
    probes = [action for action in roster.advance(0.0) if isinstance(action, Probe)]
    for probe in probes:
        roster.reported(probe.id, probe.turn, [], 0.0)
    assert [type(action) for action in roster.advance(0.1)] == [Confirm]
    roster.lost("b", "died")
    assert roster.confirmed() == []
    assert roster.phase is Phase.GATHERING


def test_silent_prober_is_left_out() -> None:
    roster = Roster(leader="a", epoch=1, min_nodes=1, max_nodes=3, last_call_s=1.0)
    for name in "abc":
        roster.joined(Node(id=name, name=name, is_ready=True), 0.0)
    for probe in roster.advance(0.0):
        if isinstance(probe, Probe) and probe.id != "b":
            roster.reported(probe.id, probe.turn, [], 0.0)
    assert roster.advance(1.0) == []
    assert roster.advance(2.1) == [Confirm(1, ("a", "c"))]


@pytest.mark.parametrize(
    ("failed", "out"),
    [
        ({}, ""),
        ({"b": "c"}, "c"),
        ({"c": "b", "d": "b"}, "b"),
        ({"b": "a"}, "b"),  # never the leader on a tie
        ({"b": "ac", "d": "a"}, "bd"),
        ({"b": "a", "c": "a", "d": "a"}, "a"),
    ],
)
def test_who_is_left_out(failed: dict[str, str], out: str) -> None:
    pairs = {name: frozenset(others) for name, others in failed.items()}
    assert to_leave_out("abcd", pairs, "a") == frozenset(out)


@given(st.integers(1, 100))
def test_probe_plan_reaches_everybody_and_stays_small(size: int) -> None:
    names = [str(number) for number in range(size)]
    plan = probe_plan(names)
    assert all(name not in peers for name, peers in plan.items())
    reached = {peer for peers in plan.values() for peer in peers}
    assert reached == (set(names) if size > 1 else set())
    assert sum(map(len, plan.values())) <= max(16 * 15, 8 * size)


@settings(max_examples=300, deadline=None)
@given(
    st.integers(1, 4),
    st.lists(st.tuples(st.sampled_from(["join", "die", "come", "wait", "cut", "heal"]), st.sampled_from("bcde"),
                       st.sampled_from("abcde")), max_size=40),
)  # fmt: skip
def test_whatever_happens_a_world_forms_of_all_that_reach_each_other(
    low: int, events: list[tuple[str, str, str]]
) -> None:
    agents = Agents(low=low, high=4)
    agents.join("a")
    for kind, one, other in events:
        if kind == "join" and one not in agents.roster.nodes:
            agents.join(one)
        elif kind == "die":
            agents.die(one)
        elif kind == "come" and one in agents.running:
            agents.come(one)
            agents.act()
        elif kind == "cut" and one != other:
            agents.cut.add(frozenset((one, other)))
        elif kind == "heal":
            agents.cut.discard(frozenset((one, other)))
        else:
            agents.after(1.5)
    agents.cut.clear()
    agents.after(130)  # the longest that anybody is left out, and what follows
    here = set(agents.roster.nodes)
    if len(here) < low:
        assert not (set(agents.running) & here) or set(agents.worlds[-1]) <= here
        return
    assert len(set(agents.running) & here) == min(len(here), 4)
    assert len({agents.running[name] for name in here & set(agents.running)}) == 1


def test_only_who_goes_without_a_word_breaks_a_world() -> None:
    agents = Agents(low=1, high=4)
    agents.join("a", "b", "c")
    agents.after(2)
    agents.roster.lost("c", "leaves", in_order=True)
    agents.act()
    assert (sorted(agents.recalls), agents.broken) == (["a", "b"], [False, False])
    agents.join("d")
    agents.after(3)
    assert agents.broken[2:] == [False, False]  # a and b, for the newcomer
    agents.die("d")
    assert agents.broken[4:] == [True, True]


def test_who_runs_a_world_that_others_have_left_waits_in_vain() -> None:
    """A leader that was cut off has formed a world alone, and given way: its record names that one."""
    roster = Roster(
        leader="b", epoch=2, min_nodes=1, max_nodes=3, last_call_s=1.0, world=(1, 2), members=("a",)
    )
    roster = Roster.after(roster, {"a"}, 103.0)
    roster.joined(Node(id="b", name="b", world=(1, 1)), 100.0)
    (recall,) = [one for one in roster.advance(100.1) if isinstance(one, Recall)]
    assert (recall.id, recall.is_broken) == ("b", True)
