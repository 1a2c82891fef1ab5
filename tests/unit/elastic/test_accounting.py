"""The accounting of samples finds what is missing, doubled, strange or told wrongly, and nothing else."""

import random
from typing import Any

from checkpoints.generations import Stretch
from elastic.accounting import Account, account, differences, problems

Line = dict[str, Any]


def stretch(generation: int, start: int, end: int) -> Stretch:
    return Stretch(
        generation=generation, start_step=start, end_step=end, parent=None, source="store"
    )


def lines(
    first: int, last: int, *, generation: int = 1, ranks: int = 2, n: int = 10, batch: int = 4
) -> list[Line]:
    """The audit of steps of a run of n samples, its order reversed in odd epochs."""
    each = -(-n // batch)
    found = []
    for step in range(first, last + 1):
        epoch, within = divmod(step - 1, each)
        order = list(range(n))[:: -1 if epoch % 2 else 1]
        used = order[within * batch : (within + 1) * batch]
        found += [
            {"generation": generation, "epoch": epoch, "step": step, "rank": rank, "indices": used[rank::ranks]}
            for rank in range(ranks)
        ]  # fmt: skip
    return found


def undisturbed() -> Account:
    return account([stretch(1, 0, 6)], lines(1, 6))


def told(found: Account) -> list[str]:
    return problems(found, length=10, epochs=2, whole=True) + differences(found, undisturbed())


def test_a_lineage_of_several_generations_and_worlds_is_accounted_for() -> None:
    history = [
        *lines(1, 4),  # of which step 4 was lost
        *lines(4, 5, generation=3, ranks=3),
        *lines(4, 6, generation=2),  # left behind as a whole
        *lines(6, 6, generation=4, ranks=1),
    ]
    random.Random(1).shuffle(history)
    chain = [stretch(1, 0, 3), stretch(3, 3, 5), stretch(4, 5, 6)]
    assert told(account(chain, history)) == []


def test_a_missing_sample_is_found() -> None:
    history = lines(1, 6)
    history[2]["indices"].remove(4)
    found = told(account([stretch(1, 0, 6)], history))
    assert found == [
        "epoch 0: 1 samples in no step: 4",
        "1 steps with other samples than undisturbed: 2",
    ]


def test_a_sample_in_two_steps_is_found() -> None:
    history = lines(1, 6)
    history[2]["indices"][0] = 0
    found = told(account([stretch(1, 0, 6)], history))
    assert "epoch 0: 1 samples in more than one step: 0" in found
    assert "epoch 0: 1 samples in no step: 4" in found


def test_missing_steps_and_ranks_are_found() -> None:
    history = [line for line in lines(1, 6) if line["step"] != 5 and line["rank"] == 0]
    found = told(account([stretch(1, 0, 6)], history))
    assert found[0] == "1 steps are not in the audit: 5"
    assert "6 steps with other samples than undisturbed: 1, 2, 3, 4, 5, …" in found


def test_a_rank_that_tells_a_step_twice_is_found() -> None:
    history = lines(1, 6)
    found = account([stretch(1, 0, 6)], [*history, history[0]])
    assert found.wrong == ("step 1: rank 0 of generation 1 told it twice",)


def test_a_sample_that_is_none_of_the_dataset_is_found() -> None:
    history = lines(1, 6)
    history[0]["indices"].append(99)
    found = told(account([stretch(1, 0, 6)], history))
    assert "epoch 0: found samples 99, expected 0 to 9" in found


def test_a_skipped_step_is_reported_and_counts_its_samples() -> None:
    skipped = {"generation": 1, "epoch": 0, "step": 2, "rank": 0, "indices": [], "skipped": True}
    found = account([stretch(1, 0, 6)], [*lines(1, 6), skipped])
    assert found.steps[2].skipped
    assert told(found) == ["1 steps skipped in one run alone: 2"]


def test_samples_that_are_drawn_may_come_again() -> None:
    history = lines(1, 6)
    history[2]["indices"][0] = 0
    found = account([stretch(1, 0, 6)], history)
    assert problems(found, length=None, epochs=2, whole=True) == []


def test_an_epoch_that_is_not_done_or_drops_its_last_step_may_leave_samples_out() -> None:
    found = account([stretch(1, 0, 5)], lines(1, 5))
    assert problems(found, length=10, epochs=1, whole=True) == []
    assert problems(found, length=10, epochs=2, whole=False) == []
    assert problems(found, length=10, epochs=2, whole=True) == [
        "epoch 1: 2 samples in no step: 0, 1"
    ]
