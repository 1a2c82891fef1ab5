"""Cases that take minutes more and show what others of their kind show already: only `-m soak` tries them."""

from typing import Any

import pytest


def soaked(*cases: Any) -> list[Any]:
    """Mark parameters as those of long runs; a tuple holds the values of one case."""
    marks = pytest.mark.soak
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=marks) for case in cases
    ]
