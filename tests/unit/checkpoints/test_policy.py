import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpoints.layout import CheckpointName, FileEntry, Manifest
from checkpoints.options import Interval
from checkpoints.policy import (
    expendable,
    is_due,
    newest,
    newest_first,
    referred_files,
    retained,
)

N = CheckpointName
names = st.builds(N, st.integers(1, 12), st.integers(0, 60))


def test_c29_newest_is_decided_by_numbers() -> None:
    first = [N(1, step) for step in (9, 10, 99, 100, 999, 1000)]
    assert newest(first) == N(1, 1000)
    second = [*first, N(2, 998)]
    assert newest(second) == N(2, 998)
    third = [*second, N(9, 5), N(10, 1)]
    assert newest(third) == N(10, 1)
    assert newest_first(third)[:3] == [N(10, 1), N(9, 5), N(2, 998)]


def test_c29_keep_2_keeps_the_two_greatest_by_that_order() -> None:
    first = [N(1, step) for step in (9, 10, 99, 100, 999, 1000)]
    assert retained(first, keep=2) == {N(1, 999), N(1, 1000)}
    second = [*first, N(2, 998), N(9, 7), N(10, 3)]
    assert retained(second, keep=2) == {N(9, 7), N(10, 3)}


def test_c29_numbers_beyond_the_padding_stay_numbers() -> None:
    assert newest([N(999_999, 1), N(1_000_000, 1)]) == N(1_000_000, 1)
    assert newest([N(1, 999_999_999_999), N(1, 10**12)]) == N(1, 10**12)


def test_c30_the_new_line_after_a_rollback_is_kept() -> None:
    # To step 700 with keep 3, the newer than 300 deleted by hand, then on to 500.
    left = [N(1, 300)]
    assert retained([*left, N(2, 400)], keep=3) == {N(1, 300), N(2, 400)}
    assert retained([*left, N(2, 400), N(2, 500)], keep=3) == {N(1, 300), N(2, 400), N(2, 500)}
    # Also where the older line was not deleted: the newer generation wins.
    line = [N(1, step) for step in (300, 500, 600, 700)]
    assert retained([*line, N(2, 400), N(2, 500)], keep=2) == {N(2, 400), N(2, 500)}


def test_c30_with_keep_1_the_last_good_one_survives_whatever_failed() -> None:
    assert retained([N(1, 10)], keep=1) == {N(1, 10)}
    assert expendable([N(1, 10)], keep=1, protected={N(1, 10)}) == []


def test_c30_the_state_that_the_running_generation_began_from_is_protected() -> None:
    found = [N(1, 10), N(2, 20), N(2, 30)]
    assert expendable(found, keep=1, protected={N(1, 10)}) == [N(2, 20)]
    # What is protected but not there is not invented.
    assert retained(found, keep=1, protected={N(7, 7)}) == {N(2, 30)}


def test_one_checkpoint_of_every_so_many_steps_stays() -> None:
    found = [N(1, step) for step in range(50, 1001, 50)]
    stay = retained(found, keep=2, keep_every=300)
    assert stay == {N(1, 300), N(1, 600), N(1, 900), N(1, 950), N(1, 1000)}


def test_where_no_step_is_a_multiple_the_first_after_it_stays() -> None:
    found = [N(1, step) for step in (130, 260, 390, 520, 650, 780)]
    assert retained(found, keep=1, keep_every=250) == {N(1, 260), N(1, 520), N(1, 780)}


def test_deleting_in_between_does_not_change_what_stays() -> None:
    seen: set[CheckpointName] = set()
    for step in range(7, 400, 7):
        seen.add(N(1 + step // 100, step))
        seen = retained(seen, keep=2, keep_every=50)
    assert {name.step for name in seen} == {56, 105, 154, 203, 252, 301, 350, 392, 399}


def test_what_a_later_generation_left_behind_is_not_kept_for_ever() -> None:
    # Generation 2 went back below 400: generation 1's 410 is not on the way to the final state.
    found = [N(1, 200), N(1, 410), N(2, 390), N(2, 420), N(2, 500)]
    assert retained(found, keep=1, keep_every=200) == {N(1, 200), N(2, 420), N(2, 500)}


@given(
    st.sets(names, max_size=30),
    st.integers(1, 5),
    st.none() | st.integers(1, 20),
    st.sets(names, max_size=4),
)
def test_what_stays_and_what_goes_are_the_whole_and_the_newest_always_stays(
    found: set[CheckpointName], keep: int, keep_every: int | None, protected: set[CheckpointName]
) -> None:
    stay = retained(found, keep=keep, keep_every=keep_every, protected=protected)
    go = expendable(found, keep=keep, keep_every=keep_every, protected=protected)
    assert stay | set(go) == found
    assert not stay & set(go)
    assert go == sorted(go)
    assert not set(go) & protected
    assert set(newest_first(found)[:keep]) <= stay
    if found:
        assert newest(found) == max(found)


def test_newest_leaves_out_what_is_excluded() -> None:
    assert newest([N(1, 1), N(1, 2)], exclude=[N(1, 2)]) == N(1, 1)
    assert newest([N(1, 1)], exclude={N(1, 1)}) is None
    assert newest([]) is None


def test_files_are_referred_to_in_their_first_owners_folder() -> None:
    shared = FileEntry(name="frozen", size_bytes=0, parts=(), owner=N(1, 5))
    own = FileEntry(name="model", size_bytes=0, parts=())
    manifest = Manifest(name=N(2, 9), parent=N(1, 5), run_id="r", files=(shared, own))
    assert referred_files([manifest]) == {
        N(2, 9).manifest,
        N(1, 5).file("frozen"),
        N(2, 9).file("model"),
    }


@pytest.mark.parametrize(
    ("interval", "step", "elapsed_s", "epochs_done", "due"),
    [
        ("500 steps", 500, 0, None, True),
        ("500 steps", 1000, 0, 2, True),
        ("500 steps", 750, 1e9, 2, False),
        ("500 steps", 0, 0, None, False),
        ("10 min", 1, 600, None, True),
        ("10 min", 1, 599, 5, False),
        ("1 epoch", 77, 0, 1, True),
        ("1 epoch", 77, 1e9, None, False),
        ("2 epochs", 77, 0, 3, False),
        ("2 epochs", 77, 0, 4, True),
        ("off", 500, 1e9, 4, False),
        ("auto", 500, 1e9, 4, False),
    ],
)  # fmt: skip
def test_when_something_is_due(
    interval: str, step: int, elapsed_s: float, epochs_done: int | None, due: bool
) -> None:
    parsed = Interval.parse(interval, allow_auto=True)
    assert is_due(parsed, step=step, elapsed_s=elapsed_s, epochs_done=epochs_done) is due
