"""What an agent does about the record, by table; and the record's bytes."""

import dataclasses
import itertools

import pytest

from elastic.election import (
    Candidate,
    Evidence,
    Leader,
    Record,
    Step,
    Watch,
    judge,
    must_abdicate,
    new_record,
)

LEADER = Leader(id="l", addresses=("10.0.0.1",), port=1, place="there", name="h1 (pid 1)")
ME = Leader(id="me", addresses=("10.0.0.2",), port=2, place="here", name="h2 (pid 2)")
RECORD = Record(launch="one", token="secret", epoch=3, leader=LEADER, beat=7)  # noqa: S106 - a test's


def step(
    record: Record | None,
    evidence: Evidence = Evidence.UNTRIED,
    *,
    launch: str | None = "one",
    same_s: float = 0.0,
    beating: bool = False,
    take_at: float = 0.0,
    lead_at: float = 0.0,
    me: str = "me",
) -> Step:
    """Judge at the time 100 with dead_s 3."""
    candidate = Candidate(id=me, launch=launch, may_take_at=take_at, may_lead_at=lead_at)
    return judge(record, candidate, evidence, same_s=same_s, beating=beating, dead_s=3.0, now=100.0)


CLOSED = dataclasses.replace(RECORD, closed=True)
VACANT = dataclasses.replace(RECORD, leader=None, gone="l")
OTHER = dataclasses.replace(RECORD, launch="two")


@pytest.mark.parametrize(
    ("found", "wanted"),
    [
        (step(None, launch=None), Step.BEGIN),
        (step(None), Step.WAIT),  # removed, or its folder is not mounted any more
        (step(CLOSED, launch=None), Step.BEGIN),  # a finished run is started again
        (step(CLOSED), Step.CLOSED),
        (step(dataclasses.replace(OTHER, closed=True)), Step.OVERRULED),
        (step(OTHER), Step.OVERRULED),
        (step(OTHER, launch=None), Step.CONNECT),
        (step(RECORD), Step.CONNECT),
        (step(VACANT), Step.TAKE),
        (step(VACANT, lead_at=101), Step.WAIT),
        (step(RECORD, me="l"), Step.TAKE),  # stepped down while the store was away
        (step(RECORD, Evidence.REFUSED), Step.TAKE),
        (step(RECORD, Evidence.REFUSED, take_at=101), Step.WAIT),
        (step(RECORD, Evidence.REFUSED, take_at=101, same_s=3), Step.TAKE),
        (step(RECORD, Evidence.REFUSED, lead_at=101, same_s=3), Step.WAIT),
        (step(RECORD, Evidence.NOT_LEADING), Step.TAKE),
        (step(RECORD, Evidence.SILENT), Step.WAIT),
        (step(RECORD, Evidence.SILENT, same_s=2.9), Step.WAIT),
        (step(RECORD, Evidence.SILENT, same_s=3), Step.TAKE),
        (step(RECORD, Evidence.SILENT, beating=True), Step.COMPLAIN),
        (step(RECORD, Evidence.SILENT, beating=True, same_s=3), Step.TAKE),
    ],
    ids=map(str, itertools.count()),
)
def test_what_an_agent_does(found: Step, wanted: Step) -> None:
    assert found is wanted


def test_watch_counts_by_the_beat_alone() -> None:
    watch = Watch()
    assert watch.look(RECORD, 10) == 0
    complained = dataclasses.replace(RECORD, complaints={"x": 7})
    assert watch.look(complained, 12) == 2
    assert not watch.is_beating
    assert watch.look(RECORD.beaten(), 13) == 0
    assert watch.is_beating
    assert watch.look(RECORD.taken(ME), 14) == 0
    assert not watch.is_beating  # of the new leader nothing is known yet


def complained(members: str, by: str, ago: int = 0) -> Record:
    return dataclasses.replace(
        RECORD, members=tuple(members), complaints=dict.fromkeys(by, RECORD.beat - ago)
    )


def test_former_agents_are_those_that_are_in_no_world_any_more() -> None:
    record = RECORD.formed((1, 1), ("a", "b")).formed((1, 2), ("b", "c")).formed((1, 3), ("a", "c"))
    assert (record.members, record.former) == (("a", "c"), ("b",))
    assert Record.from_json(record.to_json()).former == ("b",)


@pytest.mark.parametrize(
    ("record", "connected", "wanted"),
    [
        (complained("abl", "ab"), "l", True),
        (complained("abl", "b"), "l", False),  # a tie: the leader stays
        (complained("abl", "b"), "la", False),
        (complained("abl", "ab"), "lab", False),  # they are back
        (complained("abl", "ab", ago=7), "l", False),  # too old to count
        (complained("abl", "xyzuv"), "lab", False),  # outsiders never disturb a world
        (complained("", "xy"), "l", True),
        # A leader that was cut off has formed a world without those who cannot reach it.
        (complained("abl", "ab").formed((1, 2), ("l",)), "l", True),
        (complained("abl", "b").formed((1, 2), ("l", "a")), "la", False),
        (complained("abl", "xy").formed((1, 2), ("l",)), "l", False),
    ],
    ids=map(str, itertools.count()),
)
def test_leader_gives_way_to_more_than_it_has(record: Record, connected: str, wanted: bool) -> None:
    assert must_abdicate(record, set(connected)) is wanted


def test_record_comes_back_from_its_bytes_which_are_never_the_same_twice() -> None:
    full = dataclasses.replace(
        RECORD, world=(2, 5), members=("a", "b"), complaints={"b": 1}, gone="x"
    )
    assert Record.from_json(full.to_json()) == full
    assert Record.from_json(VACANT.to_json()) == VACANT
    assert full.to_json() != full.to_json()


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"{}", b'{"format": 2}', RECORD.to_json().replace(b'"beat"', b'"beet"')]
)
def test_bytes_that_are_no_record_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"found|Expecting"):
        Record.from_json(data)


def test_token_is_in_no_text_of_the_record() -> None:
    assert "secret" not in repr(RECORD)


def test_new_launch_has_a_new_token_and_a_higher_epoch() -> None:
    fresh = new_record(ME, CLOSED)
    assert fresh.epoch == 4
    assert fresh.token not in {"", RECORD.token}
    assert (fresh.members, fresh.world, fresh.closed) == ((), None, False)
    assert RECORD.taken(ME).token == RECORD.token
