import pytest

from elastic.errors import ConfigError
from elastic.terms import Terms, read_terms


def test_defaults_notice_a_death_within_seconds() -> None:
    terms = read_terms(1, 4, {"timeout": 900, "rank": 0})
    assert terms == Terms(min_nodes=1, max_nodes=4)
    assert (terms.dead_s, terms.last_call_s) == (3.0, 1.0)


def test_torchruns_own_names_are_read() -> None:
    conf = {
        "keep_alive_interval": "5", "keep_alive_max_attempt": "4", "last_call_timeout": "0.5", "join_timeout": "60",
        "read_timeout": "7", "is_host": "true",
    }  # fmt: skip
    terms = read_terms(2, 3, conf)
    assert (terms.beat_s, terms.dead_s, terms.last_call_s, terms.join_s) == (5, 20, 0.5, 60)


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("last_cal_timeout", "1", "did you mean last_call_timeout?"),
        ("keep_alive_interval", "0", "expected a number, 0.1 or more"),
        ("join_timeout", "soon", "found 'soon'"),
        ("join_timeout", "-1", "0 or more"),
        ("join_timeout", "nan", "found 'nan'"),
        ("keep_alive_max_attempt", "1", "expected at least 2"),
    ],
)
def test_wrong_setting_is_one_line_that_names_it(name: str, value: str, text: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read_terms(1, 2, {name: value})
    assert name in str(raised.value)
    assert text in str(raised.value)
    assert "\n" not in str(raised.value)
