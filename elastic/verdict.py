"""What the workers of a node ended with, for the launcher that stands over them: torchrun tells nobody.

Each worker leaves its exit code in the private folder of its agent, and takes what the one before it left there away when
it begins. So what lies there is of the newest workers. Does not import torch.
"""

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from elastic.errors import ExitCode

__all__ = ["UNSAVED", "clear_verdict", "judge", "read_verdicts", "write_verdict"]

UNSAVED: Final = "told to end before there was anything new to save"
"""A worker's word that its launcher has to pass on: it comes at a moment at which the worker can write no line."""
_NAME: Final = "verdict-"
_FINAL: Final = (ExitCode.SUPERSEDED, ExitCode.WRONG, ExitCode.ATTENTION)
"""What no other worker's end outweighs, the strongest first."""


def write_verdict(folder: Path, local_rank: int, code: int) -> None:
    """Leave this worker's exit code; without it the launcher takes it for a fault that a restart may cure."""
    path = folder / f"{_NAME}{local_rank}"
    fresh = path.with_suffix(".new")
    with contextlib.suppress(OSError):
        fresh.write_text(str(int(code)), encoding="ascii")
        fresh.replace(path)


def clear_verdict(folder: Path, local_rank: int) -> None:
    """Take away what the worker before this one left."""
    with contextlib.suppress(OSError):
        (folder / f"{_NAME}{local_rank}").unlink(missing_ok=True)


def read_verdicts(folder: Path) -> list[int]:
    """Return the exit codes that lie there."""
    codes = []
    for path in sorted(folder.glob(f"{_NAME}*")):
        with contextlib.suppress(OSError, ValueError):
            codes.append(int(path.read_text(encoding="ascii")))
    return codes


def judge(codes: Iterable[int]) -> ExitCode:
    """Make one exit code of those of a node's workers."""
    found = set(codes)
    for code in _FINAL:
        if code in found:
            return code
    if found == {ExitCode.DONE}:
        return ExitCode.DONE
    if ExitCode.PREEMPTED in found and found <= {ExitCode.DONE, ExitCode.PREEMPTED}:
        return ExitCode.PREEMPTED
    return ExitCode.RETRY
