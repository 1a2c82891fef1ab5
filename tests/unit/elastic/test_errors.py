"""The error tree: its codes, and the builtins that a caller would catch."""

import pytest

from elastic import errors
from elastic.errors import ElasticError, ExitCode


@pytest.mark.parametrize(
    ("name", "code", "also"),
    [
        ("ElasticError", 1, Exception),
        ("StartError", 2, ElasticError),
        ("ConfigError", 2, ValueError),
        ("MeetingError", 1, ElasticError),
        ("CollectiveError", 1, ConnectionError),
        ("AttentionError", 76, ElasticError),
        ("PreemptedError", 75, ElasticError),
        ("OverruledError", 77, ElasticError),
    ],
)
def test_each_error_has_its_exit_code_and_builtin(
    name: str, code: int, also: type[Exception]
) -> None:
    error = getattr(errors, name)
    assert error.code == code
    assert issubclass(error, ElasticError)
    assert issubclass(error, also)
    assert error.__doc__.startswith("Raised when")


def test_the_exit_codes_are_those_of_the_docs() -> None:
    assert {code.name: int(code) for code in ExitCode} == {
        "DONE": 0,
        "RETRY": 1,
        "WRONG": 2,
        "PREEMPTED": 75,
        "ATTENTION": 76,
        "SUPERSEDED": 77,
    }


def test_every_error_is_drawn_in_the_tree_and_listed() -> None:
    for name in errors.__all__:
        if name != "ExitCode":
            assert name in str(errors.__doc__)
