import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpoints.errors import ObjectMissingError, PartedError, RecordError, SupersededError
from checkpoints.generations import (
    Standing,
    check_fence,
    claim,
    decide_claim,
    lineage,
    newest_generation,
    read_claim,
    read_claims,
    read_started,
    write_started,
)
from checkpoints.journal import Journal
from checkpoints.layout import (
    AgentId,
    CheckpointName,
    Claim,
    Source,
    Started,
    claim_name,
    new_token,
)
from checkpoints.store import Store, open_store


@pytest.fixture(params=["local", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return open_store(str(tmp_path) if request.param == "local" else f"memory://{new_token()}/run")


def agent(number: int) -> AgentId:
    return AgentId(host=f"host{number}", boot_id="boot", pid=100 + number, start=number)


A, B, C, D = map(agent, range(4))


def made(generation: int, launch: str, agents: Sequence[AgentId]) -> Claim:
    return Claim(generation=generation, run_id="run", launch=launch, agents=tuple(agents), world_size=1, nodes=1, hosts=("h",))  # fmt: skip


def making(*agents: AgentId) -> Callable[[int, str], Claim]:
    return lambda generation, launch: made(generation, launch, agents)


# ---------------------------------------------------------------------------------------- deciding
@pytest.mark.parametrize(
    ("claims", "agents", "standing", "launch"),
    [
        ([], [A], Standing.FREE, None),
        # A restart of the same agents, in whole or in part, or with a new one beside them.
        ([(1, "x", [A, B])], [A, B], Standing.CURRENT, "x"),
        ([(1, "x", [A, B])], [A], Standing.CURRENT, "x"),
        ([(1, "x", [A])], [A, C], Standing.CURRENT, "x"),
        # Another launch on the URL: it is free to claim, whoever is at work.
        ([(1, "x", [A])], [C], Standing.FREE, None),
        # ... and then the older one has to end, however often it restarts, and for good.
        ([(1, "x", [A]), (2, "y", [C])], [A], Standing.SUPERSEDED, "x"),
        ([(1, "x", [A]), (2, "x", [A]), (3, "y", [C])], [A, B], Standing.SUPERSEDED, "x"),
        ([(1, "x", [A]), (2, "y", [C])], [C], Standing.CURRENT, "y"),
        ([(1, "x", [A]), (2, "y", [C]), (3, "z", [D])], [C], Standing.SUPERSEDED, "y"),
        # A partition: the launch went on without these agents; they may come back with the others.
        ([(1, "x", [A, B]), (2, "x", [B])], [A], Standing.PARTED, "x"),
        ([(1, "x", [A, B]), (2, "x", [B])], [A, B], Standing.CURRENT, "x"),
        ([(1, "x", [A, B]), (2, "x", [B])], [B], Standing.CURRENT, "x"),
        # The launch is that of the newest claim which names one of the agents.
        ([(1, "x", [A]), (2, "y", [B])], [A, B], Standing.CURRENT, "y"),
    ],
    ids=[str(number) for number in range(13)],
)
def test_who_may_claim(
    claims: list[tuple[int, str, list[AgentId]]],
    agents: list[AgentId],
    standing: Standing,
    launch: str | None,
) -> None:
    decision = decide_claim([made(*one) for one in reversed(claims)], agents)
    assert decision.standing is standing
    assert decision.launch == launch
    assert decision.superseded == (standing is Standing.SUPERSEDED)
    assert decision.parted == (standing is Standing.PARTED)
    assert decision.newest == len(claims)


def test_the_same_pid_after_a_reboot_or_on_another_host_is_another_agent() -> None:
    claims = [made(1, "x", [A])]
    for other in (
        AgentId(host=A.host, boot_id="later", pid=A.pid, start=A.start),
        AgentId(host=A.host, boot_id=A.boot_id, pid=A.pid, start=A.start + 1),
        AgentId(host="pod-2", boot_id=A.boot_id, pid=A.pid, start=A.start),
    ):
        assert decide_claim(claims, [other]).standing is Standing.FREE


@given(
    st.lists(
        st.tuples(st.sampled_from("xyz"), st.sets(st.sampled_from([A, B, C, D]), min_size=1)),
        max_size=8,
    ),
    st.sets(st.sampled_from([A, B, C, D]), min_size=1),
)
def test_of_any_history_exactly_the_newest_claims_agents_are_current(
    history: list[tuple[str, set[AgentId]]], agents: set[AgentId]
) -> None:
    claims = [made(n, launch, sorted(own)) for n, (launch, own) in enumerate(history, 1)]
    decision = decide_claim(claims, agents)
    named = [one for one in claims if agents & set(one.agents)]
    assert (decision.standing is Standing.FREE) == (not named)
    assert (decision.standing is Standing.CURRENT) == bool(named and named[-1] is claims[-1])
    assert decision.mine == (named[-1].generation if named else 0)


# ------------------------------------------------------------------------------------------ claims
def test_generations_rise_from_1_within_a_launch(store: Store) -> None:
    assert newest_generation(store) == 0
    first = claim(store, agents=[A, B], make=making(A, B))
    second = claim(store, agents=[B], make=making(B))
    assert (first.generation, second.generation) == (1, 2)
    assert first.launch == second.launch
    assert newest_generation(store) == 2
    assert read_claims(store) == [first, second]
    assert read_claim(store, 2) == second


def test_a_new_launch_takes_over_and_the_older_one_finds_itself_superseded(store: Store) -> None:
    old = claim(store, agents=[A], make=making(A))
    check_fence(store, old)
    new = claim(store, agents=[C], make=making(C))
    assert new.launch != old.launch
    check_fence(store, new)
    with pytest.raises(
        SupersededError, match=r"generation 1 is superseded: .*generation 2"
    ) as caught:
        check_fence(store, old)
    assert (caught.value.generation, caught.value.newest) == (1, 2)
    with pytest.raises(SupersededError):
        claim(store, agents=[A], make=making(A))
    assert newest_generation(store) == 2


def test_an_old_primary_of_the_same_launch_is_parted_at_the_fence(store: Store) -> None:
    old = claim(store, agents=[A, B], make=making(A, B))
    claim(store, agents=[B], make=making(B))
    with pytest.raises(PartedError, match="back to the rendezvous"):
        check_fence(store, old)


def test_the_number_is_above_all_that_were_ever_used(store: Store) -> None:
    store.put(CheckpointName(41, 5).manifest, b"the claims were deleted by hand")
    store.put("checkpoints/notes", b"not a checkpoint")
    assert claim(store, agents=[A], make=making(A)).generation == 42
    assert claim(store, agents=[A], make=making(A)).generation == 43


def test_c29_generation_1000000_comes_after_999999(store: Store) -> None:
    for generation in (9, 999_999, 1_000_000):
        store.put(claim_name(generation), made(generation, "x", [A]).to_json())
    assert newest_generation(store) == 1_000_000
    assert [one.generation for one in read_claims(store)] == [9, 999_999, 1_000_000]
    assert claim(store, agents=[A], make=making(A)).generation == 1_000_001


def test_racing_claims_get_numbers_of_their_own(store: Store) -> None:
    gate = threading.Barrier(6)
    found: list[Claim] = []

    def race() -> None:
        gate.wait()
        found.append(claim(store, agents=[A], make=making(A)))

    threads = [threading.Thread(target=race) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(one.generation for one in found) == [1, 2, 3, 4, 5, 6]


def test_after_a_lost_race_the_decision_is_made_again(store: Store) -> None:
    claim(store, agents=[A], make=making(A))

    def late(generation: int, launch: str) -> Claim:
        # Between the decision and the try another launch takes the number.
        if newest_generation(store) < generation:
            claim(store, agents=[C], make=making(C))
        return made(generation, launch, [A])

    with pytest.raises(SupersededError):
        claim(store, agents=[A], make=late)


class Clock:
    """Time that passes only while somebody sleeps; something may happen meanwhile."""

    def __init__(self, happens: Callable[[float], None] = lambda _: None) -> None:
        self.now = 0.0
        self.happens = happens

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.happens(self.now)


def parted(store: Store) -> None:
    claim(store, agents=[A, B], make=making(A, B))
    claim(store, agents=[B], make=making(B))


def test_a_parted_world_claims_once_the_newest_generation_is_silent(store: Store) -> None:
    parted(store)
    clock = Clock()
    got = claim(store, agents=[A], make=making(A), quiet_s=60, clock=clock, sleep=clock.sleep)
    assert got.generation == 3
    assert got.launch == read_claim(store, 1).launch
    assert 60 <= clock.now < 61


@pytest.mark.parametrize("sign", ["journal", "audit", "checkpoint", "claim"])
def test_a_parted_world_goes_back_when_the_newest_generation_is_at_work(
    store: Store, sign: str
) -> None:
    parted(store)
    journal = Journal(store, 2)

    def work(now: float) -> None:
        if now < 30:
            return
        if sign == "journal":
            journal.event("step")
        elif sign == "audit":
            journal.audit({"step": 1})
        elif sign == "checkpoint":
            store.put(CheckpointName(2, 5).file("model.safetensors"), b"1")
        else:
            store.put(claim_name(3), made(3, read_claim(store, 2).launch, [B]).to_json())
        journal.flush()

    clock = Clock(work)
    with pytest.raises(PartedError) as caught:
        claim(store, agents=[A], make=making(A), quiet_s=60, clock=clock, sleep=clock.sleep)
    assert (caught.value.generation, caught.value.newest) == (1, 2)
    assert clock.now < 40
    journal.close()


def test_a_restart_reads_one_claim_however_many_there_were(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    for generation in range(1, 51):
        store.put(claim_name(generation), made(generation, "x", [A]).to_json())
    # Only the newest can be read at all: the older ones are folders.
    for generation in range(1, 50):
        store.delete(claim_name(generation))
        (tmp_path / claim_name(generation)).mkdir()
    assert claim(store, agents=[A], make=making(A)).generation == 51


def test_a_claim_that_cannot_be_read_keeps_its_number_and_stops_nobody(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    first = claim(store, agents=[A], make=making(A))
    store.put(claim_name(2), b'{"format": 1, "tor')
    with caplog.at_level(logging.WARNING):
        got = claim(store, agents=[A], make=making(A))
    assert (got.generation, got.launch) == (3, first.launch)
    assert "generation 2 is left out" in caplog.text
    with pytest.raises(RecordError, match=r"generations/000002\.json: not a JSON record"):
        read_claim(store, 2)
    with pytest.raises(ObjectMissingError):
        read_claim(store, 9)


def test_a_newer_claim_that_cannot_be_read_fences_all_the_same(store: Store) -> None:
    mine = claim(store, agents=[A], make=making(A))
    store.put(claim_name(2), b"torn")
    with pytest.raises(SupersededError):
        check_fence(store, mine)


# ----------------------------------------------------------------------------------------- lineage
def started(
    generation: int, parent: str | None, start_step: int, source: Source = "store"
) -> Started:
    return Started(
        generation=generation, parent=parent, source=source, start_step=start_step, position=(0, 0)
    )


def test_started_is_written_once_and_read_back_in_order(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    records = [started(10, None, 0, "fresh"), started(9, None, 0, "fresh")]
    for record in records:
        write_started(store, record)
        write_started(store, record)  # a retry of the same write is no second writer
    with pytest.raises(RecordError, match="already written by another process"):
        write_started(store, started(9, None, 5))
    store.put("generations/000011.started.json", b"torn")
    store.put(claim_name(9), b"a claim is no started record")
    with caplog.at_level(logging.WARNING):
        assert read_started(store) == records[::-1]
    assert "000011.started.json" in caplog.text


def test_lineage_leads_back_from_the_final_state() -> None:
    records = [
        started(1, None, 0, "fresh"),
        started(2, "000001-000000000010", 10),
        started(3, "000001-000000000010", 10),  # generation 2 died without a commit
        started(5, "000003-000000000025", 25, "memory"),
    ]
    found = lineage(records, CheckpointName(5, 40))
    assert [(s.generation, s.start_step, s.end_step, s.parent, s.source) for s in found] == [
        (1, 0, 10, None, "fresh"),
        (3, 10, 25, "000001-000000000010", "store"),
        (5, 25, 40, "000003-000000000025", "memory"),
    ]


def test_lineage_that_does_not_hold_together_is_refused() -> None:
    with pytest.raises(RecordError, match="generation 7 has no started record"):
        lineage([], CheckpointName(7, 1))
    loop = [started(2, "000002-000000000005", 5)]
    with pytest.raises(RecordError, match="expected a later step and an older parent"):
        lineage(loop, CheckpointName(2, 9))
    with pytest.raises(RecordError, match="after a start at step 5"):
        lineage([started(1, None, 5)], CheckpointName(1, 3))
