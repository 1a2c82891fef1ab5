"""Marks tests by their folder; leaves benches and soaks, also those marked singly, out of a run that did not ask for them."""

import signal
from pathlib import Path

import pytest

FOLDER_MARKS = ("unit", "e2e", "stores", "hosts", "slurm", "bench", "soak", "gpu")
ONLY_WHEN_ASKED = ("bench", "soak")
TESTS = Path(__file__).parent


def pytest_configure() -> None:
    """Heed what a shell has its background jobs ignore: whatever a test starts would ignore it, too."""
    for number, handler in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGQUIT, signal.SIG_DFL),
        (signal.SIGHUP, signal.SIG_DFL),
    ):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


def folder_mark(path: Path) -> str | None:
    """Return the mark that a test file carries: the name of its folder under tests/."""
    if not path.is_relative_to(TESTS):
        return None
    first = next(iter(path.relative_to(TESTS).parts), None)
    return first if first in FOLDER_MARKS else None


def asked_for(mark: str, arguments: list[str], expression: str) -> bool:
    """Tell whether the command line names a mark (`-m soak`) or its folder (`tests/soak`)."""
    named = (Path(argument.partition("::")[0]).absolute() for argument in arguments)
    return mark in expression or any(folder_mark(path) == mark for path in named)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Set the folder's mark on each test; deselect what only runs when asked for."""
    expression = str(config.getoption("markexpr"))
    left_out = {mark for mark in ONLY_WHEN_ASKED if not asked_for(mark, config.args, expression)}
    kept: list[pytest.Item] = []
    dropped: list[pytest.Item] = []
    for item in items:
        mark = folder_mark(item.path)
        if mark is not None:
            item.add_marker(mark)
        marked = any(item.get_closest_marker(name) is not None for name in left_out)
        (dropped if marked else kept).append(item)
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = kept


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs a GPU where there is none."""
    if item.get_closest_marker("gpu") is not None:
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs CUDA: torch.cuda.is_available() is False")
