"""`train.stop_before`: a wall-clock limit, and when a run has to save and leave so as to end before it.

Read once at a worker's start, then counted by the clock that goes on while a machine sleeps. Guarantees: what was measured of
a step and of a checkpoint is allowed for, twice; a limit that was over before the launch began is refused. Imports no torch.
"""

import os
import re
import time
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import Final

from checkpoints.errors import OptionError
from checkpoints.layout import AgentId
from checkpoints.options import parse_duration
from elastic.errors import ConfigError, StartError

__all__ = ["SLURM_END", "Limit", "check_limit", "launch_began", "limit_of"]

SLURM_END: Final = "SLURM_JOB_END_TIME"
_SLURM: Final = "slurm"
_TIME_OF_DAY: Final = re.compile(r"([01]?\d|2[0-3]):([0-5]\d)(?::([0-5]\d))?", re.ASCII)
_EXPECTED: Final = "a duration such as 11 h, a time such as 23:30 or 2027-01-31T23:30, or slurm"
_LEAVE_S: Final = 5.0
"""For the processes' own end, after the state is saved."""
_UNKNOWN_S: Final = 10.0
"""For a checkpoint while none has been made."""
_LEAST_S: Final = 2 * _UNKNOWN_S + _LEAVE_S
_TOGETHER_S: Final = 60.0
"""Ranks whose limits lie no further apart leave together."""


class Limit:
    """The limit of this worker. Looked at by its main thread at each step's end."""

    def __init__(self, at: float, clock: Callable[[], float]) -> None:
        """Count to the moment `at` of `clock`."""
        self._at, self._clock = at, clock
        self._before: float | None = None
        self._step_s = 0.0

    @property
    def left_s(self) -> float:
        """The time that is left, less what the end itself takes."""
        return self._at - self._clock() - _LEAVE_S

    def count_step(self) -> None:
        """A step is done: the slowest of late counts."""
        now = self._clock()
        if self._before is not None:
            self._step_s = max(now - self._before, 0.9 * self._step_s)
        self._before = now

    def is_near(self, save_s: float | None, *, together: bool = False) -> bool:
        """Tell whether one more step might be one too many, where a checkpoint takes `save_s`.

        Args:
            save_s: As measured; None where that is not known.
            together: Another rank is at its limit: whoever is nearly there leaves too.
        """
        needed = 2 * (_UNKNOWN_S if save_s is None else save_s) + 2 * self._step_s
        return self.left_s < needed + (_TOGETHER_S if together else 0.0)


def check_limit(text: str) -> None:
    """Refuse what is neither a duration nor a time.

    Raises:
        ConfigError: It is not, or is so short that no step could ever be done.
    """
    duration = _duration(text)
    if duration is not None and duration <= _LEAST_S:
        raise ConfigError(
            f"stop_before: found {text!r}, expected more than {_LEAST_S:g} s, which are kept for the last checkpoint and the end"
        )
    if text.strip().lower() != _SLURM and duration is None and _time(text) is None:
        raise ConfigError(f"stop_before: found {text!r}, expected {_EXPECTED}")


def limit_of(
    text: str | None,
    *,
    by_slurm: bool,
    began: float,
    environ: Mapping[str, str],
    now: Callable[[], float] = time.time,
    clock: Callable[[], float] | None = None,
) -> Limit | None:
    """Read the limit; None where there is none.

    Args:
        text: `train.stop_before`.
        by_slurm: Slurm's end time counts too, where it is told.
        began: When the launch began, by `clock`.
        environ: Where Slurm tells the job's end.
        now: Seconds since 1970.
        clock: Seconds since the machine started.

    Raises:
        StartError: Slurm's end is asked for and not told, or the limit was over when the launch began.
    """
    clock = clock or boot_s
    offset = now() - clock()
    at: list[float] = []
    ask = text is not None and text.strip().lower() == _SLURM
    if ask or by_slurm:
        end = environ.get(SLURM_END, "")
        if end.isdigit():
            at.append(int(end) - offset)
        elif ask:
            raise StartError(
                f"train.stop_before: found slurm without {SLURM_END}, which this Slurm does not set; expected a time:"
                ' train.stop_before="$(squeue -h -j $SLURM_JOB_ID -o %e)"'
            )
    if text is not None and not ask:
        at.append(_moment(text, began, offset))
    if not at:
        return None
    if min(at) <= began:
        when = datetime.fromtimestamp(min(at) + offset).astimezone().isoformat(timespec="seconds")
        raise StartError(
            f"train.stop_before: found {text or _SLURM}, which was over at {when}, before this launch began; expected a"
            " later time"
        )
    return Limit(min(at), clock)


def _moment(text: str, began: float, offset: float) -> float:
    """The moment by the clock that a duration or a time means."""
    duration = _duration(text)
    if duration is not None:
        return began + duration
    start = datetime.fromtimestamp(began + offset).astimezone()
    found = _time(text)
    if found is None:
        raise ConfigError(f"train.stop_before: found {text!r}, expected {_EXPECTED}")
    if isinstance(found, datetime):
        return found.astimezone().timestamp() - offset
    hour, minute, second = found
    today = start.replace(hour=hour, minute=minute, second=second, microsecond=0)
    if today <= start:
        # Of the next day by the clock on the wall, also where that day has another length.
        naive = today.replace(tzinfo=None) + timedelta(days=1)
        today = naive.astimezone()
    return today.timestamp() - offset


def _duration(text: str) -> float | None:
    try:
        return parse_duration(text)
    except OptionError:
        return None


def _time(text: str) -> datetime | tuple[int, int, int] | None:
    match = _TIME_OF_DAY.fullmatch(text.strip())
    if match:
        return int(match[1]), int(match[2]), int(match[3] or 0)
    try:
        return datetime.fromisoformat(text.strip()) if "-" in text else None
    except ValueError:
        return None


def boot_s() -> float:
    """Return the seconds since the machine started, those that it slept included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def launch_began(agent: AgentId) -> float:
    """Return when an agent of this host was started, by `boot_s`."""
    return agent.start / os.sysconf("SC_CLK_TCK")
