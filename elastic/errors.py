"""The errors of the runner, and the exit code that each one ends a run with.

    Exception
     └ ElasticError                        1  anything that a restart may cure
        ├ StartError                       2  the config, the job or the start is wrong
        │  └ ConfigError (ValueError)      2  a setting is unknown, of the wrong type or impossible
        ├ MeetingError                     1  the ranks of this generation did not find each other
        ├ CollectiveError (ConnectionError) 1  a peer left in the middle of a collective
        ├ ReplicaError                     1  a rank holds another state than the others
        ├ AttentionError                  76  a person must look
        ├ PreemptedError                  75  told to leave; the state is saved
        ├ PeersLeftError                   1  others were told to leave; the state is saved
        └ OverruledError                  77  a newer generation owns this run

The text of an error is one line: what, found, expected, way out. Imports nothing, so that an error can be told before torch is loaded.
"""

from enum import IntEnum
from typing import ClassVar

__all__ = [
    "AttentionError",
    "CollectiveError",
    "ConfigError",
    "ElasticError",
    "ExitCode",
    "MeetingError",
    "OverruledError",
    "PeersLeftError",
    "PreemptedError",
    "ReplicaError",
    "StartError",
]


class ExitCode(IntEnum):
    """What the exit code of a run says to the one who started it."""

    DONE = 0
    """The run is complete, or was already."""
    RETRY = 1
    """Anything that a restart may cure."""
    WRONG = 2
    """The config, the job or the start is wrong: starting again will not help."""
    PREEMPTED = 75
    """Told to leave, state saved: start me again."""
    ATTENTION = 76
    """A person must look before the run is started again."""
    SUPERSEDED = 77
    """A newer generation owns the run."""


class ElasticError(Exception):
    """Raised when the runner cannot go on; base of all its errors."""

    code: ClassVar[ExitCode] = ExitCode.RETRY
    """The exit code of a worker that ends with this error."""


class StartError(ElasticError):
    """Raised when a run cannot start and starting it again would not help."""

    code = ExitCode.WRONG


class ConfigError(StartError, ValueError):
    """Raised when a setting is unknown, missing, of the wrong type or impossible; names the key."""


class MeetingError(ElasticError):
    """Raised when the ranks of a generation did not find each other in time."""


class CollectiveError(ElasticError, ConnectionError):
    """Raised when a collective fails because a peer is gone; never the cause of a fault itself."""


class ReplicaError(ElasticError):
    """Raised when a rank holds another state than the others; names it."""


class AttentionError(ElasticError):
    """Raised when going on would waste work until a person has looked."""

    code = ExitCode.ATTENTION


class PreemptedError(ElasticError):
    """Raised when this worker was told to leave, after the state was saved."""

    code = ExitCode.PREEMPTED


class PeersLeftError(ElasticError):
    """Raised when others were told to leave, after the state was saved: no fault of anybody."""


class OverruledError(ElasticError):
    """Raised when a newer generation has claimed the run."""

    code = ExitCode.SUPERSEDED
