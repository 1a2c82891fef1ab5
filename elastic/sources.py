"""The files that a process's code came from, and whether they are still the same.

A file is taken for unchanged while its size and time of change are. Nothing is read. Does not import torch.
"""

import os
from collections.abc import Iterable, Mapping
from types import ModuleType

__all__ = ["Stamps", "changed_file", "files_of", "stamps_of"]

Stamps = dict[str, tuple[int, int] | None]
"""Of each file: its size and time of change; None where it was not there."""


def files_of(modules: Mapping[str, ModuleType]) -> list[str]:
    """List the files that loaded modules came from."""
    # A module may be anything that somebody put there.
    found = (getattr(module, "__file__", None) for module in list(modules.values()))
    return list(dict.fromkeys(name for name in found if isinstance(name, str) and name))


def stamps_of(files: Iterable[str]) -> Stamps:
    """Note how files are now."""
    return {name: _stamp(name) for name in files}


def changed_file(stamps: Stamps) -> str | None:
    """Return a file that is not as it was noted, None where all are."""
    return next((name for name, stamp in stamps.items() if _stamp(name) != stamp), None)


def _stamp(name: str) -> tuple[int, int] | None:
    try:
        found = os.stat(name)  # noqa: PTH116 - for a thousand files at each start
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns
