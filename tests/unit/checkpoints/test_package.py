import subprocess
import sys

import pytest

import checkpoints


def test_every_public_name_is_there_once_and_is_the_rooms_own() -> None:
    names = list(checkpoints.__all__)
    assert len(set(names)) == len(names)
    for name in names:
        assert getattr(checkpoints, name).__name__ == name
        assert name in dir(checkpoints)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        _ = checkpoints.Nothing


@pytest.mark.parametrize(
    "room", ["errors", "layout", "options", "policy", "store", "journal", "generations"]
)
def test_a_start_without_tensors_does_not_pay_for_torch(room: str) -> None:
    code = (
        f"import sys, checkpoints.{room}; checkpoints.OptionError\n"
        "print({'torch', 'fsspec', 's3fs', 'numpy'} & set(sys.modules))"
    )
    run = [sys.executable, "-c", code]
    assert subprocess.run(run, capture_output=True, text=True, check=True).stdout == "set()\n"
