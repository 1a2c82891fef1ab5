import inspect
import pickle

import pytest

from checkpoints import errors


def all_errors() -> list[type[errors.CheckpointError]]:
    found = (value for _, value in inspect.getmembers(errors, inspect.isclass))
    return [value for value in found if issubclass(value, errors.CheckpointError)]


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (errors.TransientStoreError, OSError),
        (errors.StoreFullError, OSError),
        (errors.PermanentStoreError, OSError),
        (errors.ObjectMissingError, FileNotFoundError),
        (errors.NoCheckpointError, FileNotFoundError),
        (errors.DamagedError, ValueError),
        (errors.RecordError, ValueError),
        (errors.OptionError, ValueError),
        (errors.UnsupportedStateError, TypeError),
    ],
)
def test_each_error_is_the_builtin_that_a_caller_would_catch(
    error: type[errors.CheckpointError], builtin: type[Exception]
) -> None:
    with pytest.raises(builtin, match=r"^what it says$"):
        raise error("what it says")
    assert issubclass(error, errors.CheckpointError)


def test_the_fence_tells_both_generations_also_in_another_process() -> None:
    error = errors.SupersededError("over", generation=3, newest=5)
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301  # our own bytes
    assert (str(copy), copy.generation, copy.newest) == ("over", 3, 5)


def test_every_error_is_drawn_in_the_docstring_and_says_when_it_is_raised() -> None:
    for error in all_errors():
        if error.__name__.startswith("_") or error is errors.CheckpointError:
            continue
        assert errors.__doc__ is not None
        assert error.__name__ in errors.__doc__
        assert error.__doc__ is not None
        assert error.__doc__.startswith("Raised when")
