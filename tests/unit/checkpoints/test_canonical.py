import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpoints.canonical import JSON, Fields, dump, parse, plain
from checkpoints.errors import CheckpointError, DamagedError, RecordError

numbers = st.integers(-(2**63) + 1, 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)
trees: st.SearchStrategy[JSON] = st.recursive(
    st.none() | st.booleans() | numbers | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(st.dictionaries(st.text(), trees, max_size=5))
def test_what_was_dumped_is_parsed_back_and_has_one_spelling(value: dict[str, JSON]) -> None:
    data = dump(value)
    assert parse(data, "x") == value
    assert dump(parse(data, "x")) == data


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused_by_name(data: bytes) -> None:
    refusal = ""
    try:
        assert isinstance(parse(data, "the/record"), dict)
    except RecordError as error:
        refusal = str(error)
    assert not refusal or refusal.startswith("the/record: ")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "not a JSON record"),
        (b"\xff\xfe{}", "not a JSON record"),
        (b"[1]", "expected a JSON object"),
        (b'{"a": 1, "a": 2}', "'a' stands there twice"),
        (b'{"b": {"a": 1, "a": 2}}', "'a' stands there twice"),
        (b'{"a": NaN}', "NaN is not JSON"),
        (b'{"a": -Infinity}', "-Infinity is not JSON"),
        (b'{"a": 1e999}', "too large"),
        (b'{"a": 99999999999999999999999}', "too large"),
        (b'{"a": 9223372036854775808}', "too large"),
        (b'{"a": ' + b"9" * 1_000_000 + b"}", "too large"),
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
        (b'{"a": ' + b"[" * 100 + b"]" * 100 + b"}", "nested too deeply"),
        (b'{"a": 1} x', "not a JSON record"),
        (b"\x80\x04K\x01.", "not a JSON record"),
        (b'{"a": "' + b"x" * (5 << 20) + b'"}', "expected at most"),
    ],
)
def test_a_hostile_record_is_one_clear_error(data: bytes, reason: str) -> None:
    with pytest.raises(RecordError, match=reason) as caught:
        parse(data, "the/record")
    assert str(caught.value).startswith("the/record: ")
    assert len(str(caught.value)) < 300
    assert "\n" not in str(caught.value)


def test_the_caller_chooses_the_error() -> None:
    with pytest.raises(DamagedError):
        parse(b"{", "x", error=DamagedError)


def test_plain_makes_readable_json_of_anything() -> None:
    value = {"a": math.nan, 3: (Path("x"), math.inf, -math.inf), "s": {1}, "t": True, "n": None}
    assert plain(value) == {
        "a": "nan",
        "3": ["x", "inf", "-inf"],
        "s": [1],
        "t": True,
        "n": None,
    }


def replaced(old: Fields, **values: JSON) -> Fields:
    return Fields({**old.values, **values}, "rec")


def fields(**values: JSON) -> Fields:
    return Fields(values, "rec")


@pytest.mark.parametrize(
    "wrong",
    [
        lambda f: f.text("missing"),
        lambda f: f.text("number"),
        lambda f: f.text("empty"),
        lambda f: f.text("long", limit=3),
        lambda f: f.whole("yes"),
        lambda f: f.whole("real"),
        lambda f: f.whole("number", 0, 4),
        lambda f: f.whole("number", 6),
        lambda f: f.mapping("number"),
        lambda f: f.items("number"),
        lambda f: f.items("list", limit=1),
        lambda f: f.records("list"),
        lambda f: f.texts("list"),
        lambda f: f.version(),
        lambda f: replaced(f, format=True).version(),
        lambda f: replaced(f, format=2).version(),
    ],
    ids=[str(number) for number in range(16)],
)
def test_a_field_of_the_wrong_kind_names_record_and_key(wrong: object) -> None:
    given_fields = fields(number=5, empty="", long="long", yes=True, real=1.5, list=[1, "a"])
    assert callable(wrong)
    with pytest.raises(CheckpointError, match=r"^rec: \w+(\[0\])?: found .*expected"):
        wrong(given_fields)


def test_fields_of_the_right_kind_are_taken() -> None:
    good = fields(format=1, t="x", e="", n=5, m={"a": 1}, l=["a"], r=[{"a": 1}], none=None)
    assert good.version() == 1
    assert good.text("t") == "x"
    assert good.text("e", empty=True) == ""
    assert good.optional_text("none") is None
    assert good.optional_text("t") == "x"
    assert good.whole("n", 5, 5) == 5
    assert good.mapping("m") == {"a": 1}
    assert good.texts("l") == ("a",)
    assert good.mappings("r") == ({"a": 1},)
