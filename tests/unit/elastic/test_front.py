"""The package's front: what users import from it, and that it costs nothing before it is asked for."""

import subprocess
import sys
from pathlib import Path

import pytest

import elastic

ROOT = Path(__file__).parents[3]


def test_public_names_are_there() -> None:
    assert set(elastic.__all__) <= set(dir(elastic))
    for name in elastic.__all__:
        assert getattr(elastic, name).__name__ == name


def test_what_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'elastic' has no attribute 'Jobs'"):
        _ = elastic.Jobs


@pytest.mark.parametrize(
    "names", ["", "StartError, ExitCode", "config, options, ranks, errors, agent, monitor, hook"]
)
def test_what_needs_no_torch_does_not_load_it(names: str) -> None:
    line = f"from elastic import {names}" if names else "import elastic"
    code = f"import sys; {line}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
