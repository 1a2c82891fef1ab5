"""The counters of a run, and which evaluation is the best."""

import math
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpoints.errors import RecordError
from checkpoints.serialization import join, split
from elastic.progress import Best, Progress

Mode = Literal["min", "max"]


def judge(
    progress: Progress, value: float, *, mode: Mode = "min", keep_best: int = 1, save: bool = True
) -> bool:
    """One more step, its evaluation, and the checkpoint that it asks for."""
    progress.count_step(4, skipped=False)
    better = progress.judge({"score": value}, monitor="score", mode=mode, keep_best=keep_best)
    if save and keep_best and progress.best_unsaved:
        progress.name_checkpoint(f"000001-{progress.step:012d}")
    return better


def test_steps_and_epochs_are_counted_as_the_design_words_them() -> None:
    progress = Progress()
    for size, skipped in [(4, False), (4, True), (2, False)]:
        progress.count_step(size, skipped=skipped)
    assert (progress.step, progress.epoch, progress.position) == (3, 0, 10)
    assert (progress.samples, progress.skipped_steps) == (10, 1)
    progress.end_epoch()
    assert (progress.step, progress.epoch, progress.position) == (3, 1, 0)
    assert progress.samples == 10


def test_c43_best_and_patience_of_an_undisturbed_run() -> None:
    progress = Progress()
    bad = []
    for score in (5.0, 3.0, 4.0, 4.0, 4.0):
        judge(progress, score)
        bad.append(progress.bad_evaluations)
    assert bad == [0, 0, 1, 2, 3]
    best = Best(metric="score", value=3.0, step=2, checkpoint="000001-000000000002")
    assert progress.best == best


def test_c43_nothing_is_forgotten_where_the_run_dies_after_each_evaluation() -> None:
    progress = Progress()
    for score in (5.0, 3.0, 4.0, 4.0, 4.0):
        judge(progress, score)
        tensors, skeleton = split(progress.to_tree())
        tree = join(skeleton, tensors)
        assert isinstance(tree, dict)
        progress = Progress.from_tree(tree)
    assert progress.bad_evaluations == 3
    assert progress.best is not None
    assert (progress.best.value, progress.best.step) == (3.0, 2)


def test_greater_is_better_where_the_mode_is_max() -> None:
    progress = Progress()
    assert [judge(progress, v, mode="max") for v in (0.1, 0.3, 0.2, 0.4)] == [
        True,
        True,
        False,
        True,
    ]
    assert progress.best is not None
    assert (progress.best.value, progress.best.step) == (0.4, 4)


def test_equal_is_not_better() -> None:
    progress = Progress()
    assert [judge(progress, 3.0), judge(progress, 3.0)] == [True, False]
    assert progress.best is not None
    assert progress.best.step == 1


def test_nan_is_never_better_and_counts_as_a_bad_evaluation() -> None:
    progress = Progress()
    assert not judge(progress, math.nan)
    assert (progress.best, progress.bad_evaluations) == (None, 1)
    assert judge(progress, 7.0)
    assert not judge(progress, math.nan)
    assert progress.bad_evaluations == 1
    assert progress.best is not None
    assert progress.best.value == 7.0
    assert math.isnan(progress.metrics["score"])


def test_without_a_monitor_there_is_no_best() -> None:
    progress = Progress(evaluation_due=True)
    assert not progress.judge({"loss": 1.0}, monitor=None, mode="min", keep_best=1)
    assert progress == Progress(metrics={"loss": 1.0})


def test_each_of_the_best_is_saved_not_the_very_best_alone() -> None:
    progress = Progress()
    for score in (5.0, 3.0, 4.0, 6.0):
        judge(progress, score, keep_best=2)
    assert [(b.value, b.checkpoint) for b in progress.bests] == [
        (3.0, "000001-000000000002"),
        (4.0, "000001-000000000003"),
    ]
    assert progress.protected(2) == ["000001-000000000002", "000001-000000000003"]
    assert progress.protected(1) == ["000001-000000000002"]


def test_best_that_could_not_be_saved_does_not_let_the_saved_one_go() -> None:
    progress = Progress()
    judge(progress, 5.0)
    judge(progress, 3.0, save=False)
    assert progress.best is not None
    assert (progress.best.step, progress.best.checkpoint) == (2, None)
    assert progress.protected(1) == ["000001-000000000001"]
    judge(progress, 2.0)
    assert progress.protected(1) == ["000001-000000000003"]
    judge(progress, 9.0)
    assert [best.step for best in progress.bests] == [3]


def test_name_of_a_failed_save_is_taken_back() -> None:
    progress = Progress()
    judge(progress, 5.0)
    progress.name_checkpoint(None)
    assert progress.best == Best(metric="score", value=5.0, step=1)
    assert progress.best_unsaved


def test_checkpoint_of_a_later_step_does_not_hold_the_best() -> None:
    progress = Progress()
    judge(progress, 5.0, save=False)
    progress.count_step(4, skipped=False)
    assert not progress.best_unsaved
    progress.name_checkpoint("000001-000000000002")
    assert progress.protected(1) == []


def test_no_checkpoint_is_kept_for_its_score_where_keep_best_is_0() -> None:
    progress = Progress()
    judge(progress, 5.0, keep_best=0)
    judge(progress, 4.0, keep_best=0)
    assert [best.value for best in progress.bests] == [4.0]
    assert progress.protected(0) == []


@given(
    st.lists(st.one_of(st.integers(0, 9).map(float), st.just(math.nan)), max_size=12),
    st.integers(0, 4),
    st.sampled_from(["min", "max"]),
)
def test_protected_are_the_best_of_all(scores: list[float], keep_best: int, mode: Mode) -> None:
    progress = Progress()
    for score in scores:
        judge(progress, score, keep_best=keep_best, mode=mode)
    sign = 1 if mode == "min" else -1
    ranked = sorted((sign * v, s) for s, v in enumerate(scores, 1) if not math.isnan(v))
    expected = [f"000001-{step:012d}" for _, step in ranked[:keep_best]]
    assert progress.protected(keep_best) == expected
    assert (progress.best and progress.best.step) == (ranked[0][1] if ranked else None)


def test_tree_of_another_version_is_refused_naming_the_keys() -> None:
    tree = Progress().to_tree()
    del tree["samples"]
    with pytest.raises(RecordError) as found:
        Progress.from_tree({**tree, "tokens": 3})
    assert str(found.value) == "progress: found other keys than this version's (samples, tokens)"
