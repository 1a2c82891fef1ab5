"""Which tests run when: marks by folder, benches and soaks only when asked for."""

from pathlib import Path

import pytest

from tests import conftest

TESTS = Path(conftest.__file__).parent


def test_the_folder_gives_the_mark() -> None:
    assert conftest.folder_mark(TESTS / "e2e" / "test_kill.py") == "e2e"
    assert conftest.folder_mark(TESTS / "unit" / "elastic" / "test_sampler.py") == "unit"
    assert conftest.folder_mark(TESTS / "test_other.py") is None


@pytest.mark.parametrize(
    ("arguments", "expression", "asked"),
    [
        ([], "", False),
        (["tests"], "", False),
        (["tests/unit"], "", False),
        ([], "soak", True),
        ([str(TESTS / "soak")], "", True),
        ([str(TESTS / "soak" / "test_kills.py") + "::test_one"], "", True),
    ],
)
def test_soaks_run_only_when_asked_for(arguments: list[str], expression: str, asked: bool) -> None:
    assert conftest.asked_for("soak", arguments, expression) is asked
