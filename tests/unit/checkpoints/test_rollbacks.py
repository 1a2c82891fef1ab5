"""What a rollback leaves behind: no reader takes it, retention clears it away, later claims remember it."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from checkpoints.errors import NoCheckpointError, RecordError
from checkpoints.generations import claim, read_rollbacks
from checkpoints.layout import AgentId, CheckpointName, Claim, Rollback, claim_name
from checkpoints.manager import CheckpointManager
from checkpoints.rollbacks import in_a_row, is_left_behind, positions
from checkpoints.store import Store, open_store


def name(generation: int, step: int) -> CheckpointName:
    return CheckpointName(generation=generation, step=step)


BACK = Rollback(generation=3, to=name(1, 4), skip=((0, 20), (1, 0)))


@pytest.mark.parametrize(
    ("at", "behind"),
    [
        (name(1, 4), False),
        (name(1, 2), False),
        (name(1, 5), True),
        (name(2, 1), True),
        (name(3, 1), False),
        (name(4, 9), False),
    ],
)
def test_what_older_generations_committed_beyond_it_is_left_behind(
    at: CheckpointName, behind: bool
) -> None:
    assert is_left_behind(at, [BACK]) is behind


NAMES = st.builds(name, st.integers(1, 6), st.integers(0, 6))


@given(st.lists(st.builds(Rollback, generation=st.integers(1, 7), to=NAMES), max_size=4), NAMES)
def test_a_further_rollback_brings_nothing_back(
    rollbacks: list[Rollback], at: CheckpointName
) -> None:
    for count in range(len(rollbacks)):
        if is_left_behind(at, rollbacks[:count]):
            assert is_left_behind(at, rollbacks)


def test_skipped_positions_of_all_rollbacks_count() -> None:
    other = Rollback(generation=4, to=name(1, 4), skip=((2, 4),))
    assert positions([BACK, other]) == {(0, 20), (1, 0), (2, 4)}
    assert in_a_row([BACK, other], name(1, 4)) == 2
    assert in_a_row([BACK, other], name(3, 5)) == 0


def made(generation: int, *rollbacks: Rollback) -> Claim:
    return Claim(
        generation=generation,
        run_id="r",
        launch="l",
        agents=(AgentId(host="h", boot_id="b", pid=1, start=1),),
        world_size=1,
        nodes=1,
        hosts=("h",),
        rollbacks=rollbacks,
    )


def test_claim_tells_its_own_rollback_and_carries_the_others_on() -> None:
    own = made(3, BACK)
    text = own.to_json()
    assert b'"rollback_to":"000001-000000000004"' in text
    assert b'"skip":[[0,20],[1,0]]' in text
    assert Claim.from_json(text, claim_name(3)) == own
    later = made(4, BACK)
    assert later.rollback is None
    assert b'"rollback_to":null' in later.to_json()
    assert Claim.from_json(later.to_json(), claim_name(4)).rollbacks == (BACK,)


def test_claim_of_an_earlier_version_has_no_rollbacks() -> None:
    text = made(3).to_json().replace(b'"rollbacks":[],', b"")
    assert b"rollbacks" not in text
    assert Claim.from_json(text, claim_name(3)).rollbacks == ()


@pytest.mark.parametrize(
    ("was", "now"),
    [
        (b'"to":"000001-000000000004"', b'"to":"1-4"'),
        (b'"to":"000001-000000000004"', b'"at":"000001-000000000004"'),
        (b'"skip":[[0,20],[1,0]],"to"', b'"skip":[[0]],"to"'),
        (b'"generation":3,"skip"', b'"generation":0,"skip"'),
    ],
)
def test_what_is_no_rollback_is_refused(was: bytes, now: bytes) -> None:
    text = made(3, BACK).to_json()
    broken = text.replace(was, now)
    assert broken != text
    with pytest.raises(RecordError):
        Claim.from_json(broken, claim_name(3))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path))


def commit(store: Store, *names: CheckpointName, keep: int = 100) -> CheckpointManager:
    manager = CheckpointManager(store, keep=keep)
    for one in names:
        tree = {"model": {"w": torch.full((1,), float(one.step))}}
        manager.commit(manager.stage(tree, name=one, parent=None, run_id="r", info={}))
    return manager


def go_back(store: Store, to: CheckpointName) -> int:
    def make(generation: int, launch: str) -> Claim:
        earlier = read_rollbacks(store)
        own = Rollback(generation=generation, to=to)
        return Claim(
            generation=generation, run_id="r", launch=launch, agents=(), world_size=1, nodes=1,
            hosts=(), rollbacks=(*earlier, own),
        )  # fmt: skip

    return claim(store, agents=(), make=make).generation


def test_readers_leave_out_what_a_rollback_left_behind(store: Store) -> None:
    manager = commit(store, name(1, 1), name(1, 2), name(1, 3), name(2, 4))
    assert manager.latest() == name(2, 4)
    generation = go_back(store, name(1, 2))
    assert generation == 3
    for reader in (manager, CheckpointManager(store)):
        assert reader.names() == [name(1, 2), name(1, 1)]
        assert reader.latest() == name(1, 2)
        assert reader.resolve("latest") == name(1, 2)
        found = reader.restore_newest()
        assert found is not None
        assert found[0].name == name(1, 2)
        with pytest.raises(NoCheckpointError):
            reader.resolve("4")
        # By its full name a person can still look at it.
        assert reader.resolve(str(name(2, 4))) == name(2, 4)


def test_retention_does_not_count_what_was_left_behind_and_clears_it_away(store: Store) -> None:
    manager = commit(store, *(name(1, step) for step in range(1, 7)), keep=3)
    assert manager.names() == [name(1, 6), name(1, 5), name(1, 4)]
    go_back(store, name(1, 4))
    assert manager.names() == [name(1, 4)]
    commit(store, name(2, 5), keep=3)
    assert manager.names() == [name(2, 5), name(1, 4)]
    assert store.children("checkpoints") == [str(name(1, 4)), str(name(2, 5))]


def test_second_rollback_adds_to_the_first(store: Store) -> None:
    manager = commit(store, name(1, 1), name(1, 2), name(1, 3))
    go_back(store, name(1, 2))
    commit(store, name(3, 3))
    go_back(store, name(1, 1))
    assert manager.names() == [name(1, 1)]
    assert [one.to for one in read_rollbacks(store)] == [name(1, 2), name(1, 1)]


def test_newest_claim_that_cannot_be_read_hides_no_rollback_before_it(store: Store) -> None:
    manager = commit(store, name(1, 1), name(1, 2))
    go_back(store, name(1, 1))
    store.put(claim_name(4), b"{")
    assert manager.names() == [name(1, 1)]
