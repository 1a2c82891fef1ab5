"""The sections' own checks: ranges, and what this version does not serve."""

import dataclasses

import pytest

from checkpoints.options import CheckpointOptions, Interval
from elastic.errors import ConfigError
from elastic.options import EvalOptions, LoaderOptions, Settings, TrainOptions


def settings(**changed: object) -> Settings:
    given: dict[str, object] = {"job": "a.py:B", "checkpoint": CheckpointOptions(url="runs/x")}
    return Settings(**(given | changed))  # type: ignore[arg-type] # (as the reader makes it)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"epochs": 0}, "epochs: found 0, expected at least 1"),
        ({"max_steps": 0}, "max_steps: found 0, expected at least 1"),
        ({"global_batch_size": -4}, "global_batch_size: found -4, expected at least 1"),
        ({"micro_batch_size": 0}, "micro_batch_size: found 0, expected at least 1"),
        ({"seed": -1}, "seed: found -1, expected 0 to 9223372036854775807"),
        ({"grad_clip": 0.0}, "grad_clip: found 0.0, expected a finite number above 0"),
        ({"grad_clip": float("nan")}, "grad_clip: found nan, expected a finite number above 0"),
        ({"threads": 0}, "threads: found 0, expected at least 1"),
        ({"step_delay": -1.0}, "step_delay: found -1.0, expected seconds, 0 or more"),
        ({"logical_shards": 0}, "logical_shards: found 0, expected at least 1"),
        (
            {"logical_shards": 65},
            "logical_shards: found 65, expected at most global_batch_size (64)",
        ),
        (
            {"reproducible": "bitwise"},
            "reproducible: found bitwise without logical_shards, expected it set: the slices of a "
            "batch whose sums have one order, 8 for instance",
        ),
        ({"ema": 1.0}, "ema: found 1.0, expected a decay from 0 up to 1, such as 0.999"),
        ({"ema": -0.1}, "ema: found -0.1, expected a decay from 0 up to 1, such as 0.999"),
    ],
)
def test_an_impossible_training_option_is_one_line(changed: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TrainOptions(**changed)  # type: ignore[arg-type] # (one at a time)
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"stop_before": "soon"}, "stop_before: found 'soon', expected a duration such as 11 h"),
        ({"stop_before": "8 s"}, "stop_before: found '8 s', expected more than 25 s"),
        ({"stop_before": "0"}, "stop_before: found '0', expected a duration such as 11 h"),
    ],
)
def test_a_limit_that_is_no_time_is_refused(changed: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TrainOptions(**changed)  # type: ignore[arg-type] # (one at a time)
    assert str(caught.value).startswith(text)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"workers": -1}, "workers: found -1, expected at least 0"),
        ({"prefetch": 0}, "prefetch: found 0, expected at least 1"),
    ],
)
def test_an_impossible_loader_option_is_one_line(changed: dict[str, int], text: str) -> None:
    with pytest.raises(ConfigError, match=f"^{text}$"):
        LoaderOptions(**changed)  # type: ignore[arg-type] # (one at a time)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"every": Interval("auto")}, "every: found auto, expected"),
        ({"batch_size": 0}, "batch_size: found 0, expected at least 1"),
        ({"keep_best": -1}, "keep_best: found -1, expected at least 0"),
        ({"patience": 0, "monitor": "x"}, "patience: found 0, expected at least 1"),
        ({"patience": 3}, "patience: found 3 without eval.monitor, expected"),
    ],
)
def test_an_impossible_evaluation_option_is_one_line(changed: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EvalOptions(**changed)  # type: ignore[arg-type] # (one at a time)
    assert str(caught.value).startswith(text)


def test_an_interval_may_be_given_as_text_by_hand() -> None:
    assert EvalOptions(every="500 steps").every == Interval("steps", 500)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"job": "digits"}, "job: found 'digits', expected file.py:Class or package.module:Class"),
        ({"init_method": "udp://x"}, "init_method: found udp://x, expected env://"),
        ({"timeout": 0.0}, "timeout: found 0.0, expected a duration"),
        ({"signals": ("SIGKILL",)}, "signals: found SIGKILL, expected names like"),
        ({"signals": ("SIGSEGV",)}, "signals: found SIGSEGV, expected names like"),
        ({"signals": ("TERM",)}, "signals: found TERM, expected names like"),
        (
            {"hang_after": -1},
            "hang_after: found -1, expected a duration such as 30 s, 10 min or 2 h, or off",
        ),
        ({"hang_after_long": "off"}, "hang_after_long: found 'off', expected a duration"),
    ],
)
def test_an_impossible_setting_is_one_line(changed: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        settings(**changed)
    assert str(caught.value).startswith(text)


def test_the_defaults_are_valid() -> None:
    made = settings(signals=("SIGTERM", "SIGUSR1"), init_method="env://")
    assert made.train.epochs == 10
    assert made.eval.every == Interval("epochs", 1)
    assert made.checkpoint.tier.memory.is_auto


def test_options_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings().job = "c.py:D"  # type: ignore[misc] # (that is what is tested)


@pytest.mark.parametrize(
    ("written", "seconds"), [(None, None), ("off", 0.0), (False, 0.0), ("3 min", 180.0), (2, 2.0)]
)
def test_hang_after_is_a_duration_or_off_or_left_to_what_is_measured(
    written: object, seconds: float | None
) -> None:
    assert settings(hang_after=written).hang_after == seconds
