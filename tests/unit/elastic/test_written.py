"""What a YAML file or an override says, before it has a type: C49's rule for numbers and texts."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.errors import ConfigError
from elastic.written import (
    Fields,
    Scalar,
    boolean,
    free_value,
    number,
    override,
    read_yaml,
    whole,
)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("010", 10),
        ("1e1", 10),
        ("1_000", 1000),
        ("10.0", 10),
        ("-3", -3),
        ("+3", 3),
        ("0x1f", 31),
        ("0o17", 15),
        ("0b11", 3),
        ("1e22", 10**22),
        ("1.5", None),
        ("1e-4", None),
        ("1e999", None),
        ("0x_", None),
        ("1:30", None),
        ("1__0", None),
        ("_1", None),
        ("no", None),
        ("", None),
        ("٣", None),
        (".inf", None),
    ],
)
def test_c49_a_whole_number_is_decimal_in_any_notation(text: str, found: int | None) -> None:
    assert whole(text) == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("1e-4", 0.0001),
        ("1e0", 1.0),
        ("1e-2", 0.01),
        ("010", 10.0),
        ("1_000", 1000.0),
        (".5", 0.5),
        ("5.", 5.0),
        ("-1E+3", -1000.0),
        ("0x10", 16.0),
        (".inf", math.inf),
        ("-.INF", -math.inf),
        ("0x_", None),
        ("inf", None),
        ("1e", None),
        (".", None),
        ("no", None),
    ],
)
def test_c49_a_number_is_what_it_looks_like(text: str, found: float | None) -> None:
    assert number(text) == found


def test_not_a_number_can_be_written() -> None:
    assert math.isnan(number(".nan") or 0)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_every_float_that_python_prints_is_read_exactly(value: float) -> None:
    assert number(repr(value)) == value


@given(st.integers())
def test_every_whole_number_that_python_prints_is_read_exactly(value: int) -> None:
    assert whole(str(value)) == value
    assert whole(f"{value:_}") == value


@pytest.mark.parametrize(
    ("text", "found"),
    [("yes", True), ("On", True), ("TRUE", True), ("no", False), ("off", False), ("1", None)],
)
def test_c49_yes_and_no(text: str, found: bool | None) -> None:
    assert boolean(text) is found


def test_c49_free_values_keep_texts_and_read_numbers() -> None:
    text = """
    lr: 1e-4
    country: no
    switch: on
    octal: 010
    thousand: 1_000
    ten: 1e1
    quoted: "010"
    single: 'no'
    tagged: !!str 1e-4
    real: true
    nothing: ~
    empty:
    date: 2024-01-01
    time: 1:30
    list: [1, 1e-3, off, {a: 0x10}]
    block: |
      no
    """
    values = free_value(read_yaml(text, "f.yaml"))
    assert values == {
        "lr": 0.0001,
        "country": "no",
        "switch": "on",
        "octal": 10,
        "thousand": 1000,
        "ten": 10.0,
        "quoted": "010",
        "single": "no",
        "tagged": "1e-4",
        "real": True,
        "nothing": None,
        "empty": None,
        "date": "2024-01-01",
        "time": "1:30",
        "list": [1, 0.001, "off", {"a": 16}],
        "block": "no\n",
    }
    assert isinstance(values, dict)
    assert isinstance(values["ten"], float)


@pytest.mark.parametrize("value", ["no", "on", "1e-4", "010", "1_000", "", "true", "1e1"])
def test_c49_an_override_is_read_as_the_file_is(value: str) -> None:
    fields = Fields({}, "command line")
    override(fields, f"args.x={value}")
    assert free_value(fields) == {"args": free_value(read_yaml(f"x: {value}", "f.yaml"))}


@pytest.mark.parametrize("value", ["a: b", "a # b", "@x", "*x", "%x", "s3://u:p@h/a?b=c", "-"])
def test_an_override_means_itself_where_yaml_would_read_more_into_it(value: str) -> None:
    fields = Fields({}, "command line")
    override(fields, f"--x={value}")
    assert free_value(fields) == {"x": value}


def test_an_override_takes_lists_mappings_and_quotes() -> None:
    fields = read_yaml("a: 1\nb: {c: 1, d: 2}", "f.yaml")
    for argument in ("a=[1, 2e0, 'no']", "b.c={x: 1}", 'q="5"', "b.e=5", "n.m=1", "n.m=2"):
        override(fields, argument)
    assert free_value(fields) == {
        "a": [1, 2.0, "no"],
        "b": {"c": {"x": 1}, "d": 2, "e": 5},
        "q": "5",
        "n": {"m": 2},
    }


@pytest.mark.parametrize(
    ("argument", "text"),
    [
        ("novalue", "command line: found 'novalue', expected key.sub=value"),
        ("a.b=1", "a.b: a is 5, expected a mapping (f.yaml:1)"),
        ("x=[1, 2", "x: found brackets or quotes that are no YAML (command line)"),
    ],
)
def test_an_override_that_cannot_be_meant_is_one_line(argument: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        override(read_yaml("a: 5", "f.yaml"), argument)
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1", "settings: not YAML: expected ',' or ']', but got '<stream end>' (f.yaml:1)"),
        (
            "a:\n\t- 1",
            "settings: not YAML: found character '\\t' that cannot start any token (f.yaml:2)",
        ),
        (
            "a: \x00",
            "settings: not YAML: unacceptable character #x0000: special characters are not allowed (f.yaml)",
        ),
        ("a: 1\n---\nb: 2", "settings: not YAML: but found another document (f.yaml:2)"),
        ("- 1", "settings: found a list, expected a mapping of settings (f.yaml:1)"),
        ("5", "settings: found 5, expected a mapping of settings (f.yaml:1)"),
        ("a: 1\nb: 2\na: 3", "a: found twice, expected once (f.yaml:3)"),
        ("a: !thing 1", "settings: not YAML: found the tag !thing, expected none (f.yaml:1)"),
        (
            "a: !!python/name:os.system",
            "settings: not YAML: found the tag tag:yaml.org,2002:python/name:os.system, expected none (f.yaml:1)",
        ),
        ("a: !x {b: 1}", "settings: found the tag !x, expected none (f.yaml:1)"),
        ("? [1, 2]\n: 3", "settings: found a key that is no text, expected a name (f.yaml:1)"),
        ("a: &a [*a]", "settings: found a value that holds itself, expected an end (f.yaml:1)"),
        ("a: &a {<<: *a}", "<<: found no mapping to merge, expected one (f.yaml:1)"),
        ("<<: 5", "<<: found no mapping to merge, expected one (f.yaml:1)"),
    ],
)
def test_a_file_that_cannot_be_read_is_one_line_with_its_place(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_yaml(text, "f.yaml")
    assert str(caught.value) == message


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n", "~"])
def test_an_empty_file_is_no_settings(text: str) -> None:
    assert read_yaml(text, "f.yaml").fields == {}


def test_anchors_and_merges_work_and_what_is_written_wins() -> None:
    text = "base: &b {x: 1, y: 2}\nother: &o {y: 3, z: 4}\na:\n  y: 9\n  <<: [*b, *o]\nc: *b"
    assert free_value(read_yaml(text, "f.yaml")) == {
        "base": {"x": 1, "y": 2},
        "other": {"y": 3, "z": 4},
        "a": {"x": 1, "z": 4, "y": 9},
        "c": {"x": 1, "y": 2},
    }


def test_a_value_has_the_place_of_its_key() -> None:
    fields = read_yaml("a:\n\n  b:\n    - 1\n  c: 2\n", "f.yaml")
    assert fields.fields["a"].place == "f.yaml:1"
    inner = fields.fields["a"]
    assert isinstance(inner, Fields)
    assert [inner.fields["b"].place, inner.fields["c"].place] == ["f.yaml:3", "f.yaml:5"]


def test_contents_that_may_be_secret_are_not_shown() -> None:
    fields = read_yaml("a: {secret: xyz}\nb: [xyz]", "f.yaml")
    assert [str(value) for value in fields.fields.values()] == ["a mapping", "a list"]
    assert str(Scalar("5", plain=False, place="")) == "the text '5'"
    assert str(Scalar("a\nb", plain=True, place="")) == "'a\\nb'"
