import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpoints.errors import OptionError
from checkpoints.options import CheckpointOptions, Interval, TierOptions, parse_duration


@pytest.mark.parametrize(
    ("value", "seconds"),
    [("30 s", 30), ("30s", 30), (30, 30), (1.5, 1.5), ("10 min", 600), ("2 h", 7200), ("2 hours", 7200),
     ("1 minute", 60), ("1.5 h", 5400), (" 90 sec ", 90), ("45", 45), ("1 d", 86400), ("10 MIN", 600)],
)  # fmt: skip
def test_durations_are_seconds(value: object, seconds: float) -> None:
    assert parse_duration(value) == seconds


@pytest.mark.parametrize(
    "value", ["", "ten min", "10 steps", "-5 s", "0 s", 0, -1, True, None, float("nan"), float("inf"), "1e400 h", "9" * 400, [1], "5 m"]
)  # fmt: skip
def test_what_is_no_duration_is_refused_with_the_value(value: object) -> None:
    with pytest.raises(OptionError, match=r"^found .*expected a duration such as"):
        parse_duration(value)


@pytest.mark.parametrize(
    ("value", "kind", "count", "text"),
    [
        (7, "steps", 7, "7 steps"),
        ("500", "steps", 500, "500 steps"),
        ("500 steps", "steps", 500, "500 steps"),
        ("1step", "steps", 1, "1 step"),
        ("1 epoch", "epochs", 1, "1 epoch"),
        ("3epochs", "epochs", 3, "3 epochs"),
        ("10 min", "seconds", 600, "10 min"),
        ("90 s", "seconds", 90, "90 s"),
        ("2h", "seconds", 7200, "2 h"),
        ("off", "off", 0, "off"),
        (" Off ", "off", 0, "off"),
        (False, "off", 0, "off"),
    ],
)
def test_intervals_are_read_and_shown(value: object, kind: str, count: float, text: str) -> None:
    interval = Interval.parse(value)
    assert (interval.kind, interval.count, str(interval)) == (kind, count, text)
    assert Interval.parse(text) == interval
    assert Interval.parse(interval) is interval
    assert interval.is_off == (kind == "off")


@pytest.mark.parametrize(
    "value", ["", "00", 0, -5, "-5 steps", "1.5 steps", "1.5", True, None, 2.0, "often", "auto", "5 m", "0 min", [], "9" * 40]
)  # fmt: skip
def test_what_is_no_interval_is_refused_with_the_value(value: object) -> None:
    with pytest.raises(OptionError, match=r"^found .*expected 500 steps, 10 min, 1 epoch or off$"):
        Interval.parse(value)


def test_auto_counts_only_where_it_is_served() -> None:
    auto = Interval.parse("auto", allow_auto=True)
    assert auto.is_auto
    assert str(auto) == "auto"
    assert Interval.parse(auto, allow_auto=True) is auto
    with pytest.raises(OptionError, match="found auto"):
        Interval.parse(auto)
    with pytest.raises(OptionError, match=r"off or auto$"):
        Interval.parse("x", allow_auto=True)


@given(st.text(max_size=20) | st.integers() | st.floats() | st.none())
def test_any_value_is_an_interval_or_refused(value: object) -> None:
    try:
        interval = Interval.parse(value)
    except OptionError:
        return
    assert interval.is_off or interval.count > 0


def test_defaults_are_those_of_the_design() -> None:
    options = CheckpointOptions(url="runs/x")
    assert str(options.every) == "1 epoch"
    assert options.keep == 3
    assert options.keep_every is None
    assert options.budget == 0.01
    assert options.max_unsaved == 7200
    assert options.tier.memory.is_auto


def test_whoever_makes_options_by_hand_may_write_text() -> None:
    options = CheckpointOptions(
        url="x",
        every="5 min",  # type: ignore[arg-type]  # that is the point
        max_unsaved="3 h",  # type: ignore[arg-type]  # that is the point
        tier=TierOptions(memory="1 step"),  # type: ignore[arg-type]  # that is the point
    )
    assert options.every == Interval("seconds", 300)
    assert options.max_unsaved == 10800
    assert options.tier.memory == Interval("steps", 1)


@pytest.mark.parametrize(
    ("key", "value"),
    [("url", ""), ("url", " "), ("url", 5), ("every", "often"), ("keep", 0), ("keep", True), ("keep", "3"),
     ("keep_every", 0), ("budget", 0), ("budget", 1.5), ("max_unsaved", "soon"), ("part_bytes", 10), ("split_bytes", 10)],
)  # fmt: skip
def test_an_impossible_option_is_refused_by_its_key(key: str, value: object) -> None:
    given_options = {"url": "x", key: value}
    with pytest.raises(OptionError, match=f"^{key}: found .*, expected "):
        CheckpointOptions(**given_options)  # type: ignore[arg-type]  # wrong on purpose
