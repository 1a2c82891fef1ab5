"""The terms of a rendezvous: how many nodes, and how long each wait is. Read from `--rdzv_conf`. Does not import torch.

The names are torchrun's own, so that a command line serves c10d and this back end alike. A name that neither knows is an
error, where torchrun's own back ends pass it by in silence.
"""

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from elastic.errors import ConfigError

__all__ = ["Terms", "read_terms"]

_DEFAULTS: Final[Mapping[str, float]] = {
    "join_timeout": 600.0,
    "last_call_timeout": 1.0,
    "keep_alive_interval": 1.0,
    "keep_alive_max_attempt": 3.0,
    "close_timeout": 5.0,
    "orphan_timeout": 1800.0,
}
_NOT_OURS: Final = frozenset(
    {"heartbeat_timeout", "read_timeout", "is_host", "store_type", "timeout", "rank"}
)
"""Of torchrun's other back ends, some of them always given: they change nothing here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Terms:
    """What an agent was told on its command line."""

    min_nodes: int
    max_nodes: int
    join_s: float = _DEFAULTS["join_timeout"]
    """A node that is in no world for so long gives up."""
    last_call_s: float = _DEFAULTS["last_call_timeout"]
    """How long a first round, or a world that could grow, waits for more nodes after the last one came."""
    beat_s: float = _DEFAULTS["keep_alive_interval"]
    """How often the leader writes its record on the store: one request each time."""
    dead_s: float = _DEFAULTS["keep_alive_interval"] * _DEFAULTS["keep_alive_max_attempt"]
    """A node that is silent for so long is taken for dead, and a leader for gone."""
    close_s: float = _DEFAULTS["close_timeout"]
    """How long the end may take."""
    orphan_s: float = _DEFAULTS["orphan_timeout"]
    """How long a world goes on that reaches neither a leader nor the store."""


def read_terms(min_nodes: int, max_nodes: int, conf: Mapping[str, object]) -> Terms:
    """Read the terms.

    Raises:
        ConfigError: Raised when a name is unknown or a value impossible.
    """
    for name in conf:
        if name not in _DEFAULTS and name not in _NOT_OURS:
            near = difflib.get_close_matches(name, _DEFAULTS, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(
                f"rdzv_conf: found {name!r}, expected one of {', '.join(_DEFAULTS)}{hint}"
            )
    found = {name: _seconds(name, conf.get(name, default)) for name, default in _DEFAULTS.items()}
    attempts = found["keep_alive_max_attempt"]
    if attempts < 2:
        raise ConfigError(
            f"rdzv_conf: keep_alive_max_attempt: found {attempts:g}, expected at least 2: one late beat is no death"
        )
    return Terms(
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        join_s=found["join_timeout"],
        last_call_s=found["last_call_timeout"],
        beat_s=found["keep_alive_interval"],
        dead_s=found["keep_alive_interval"] * attempts,
        close_s=found["close_timeout"],
        orphan_s=found["orphan_timeout"],
    )


def _seconds(name: str, value: object) -> float:
    try:
        found = float(str(value))
    except ValueError:
        found = math.nan
    if not (math.isfinite(found) and found >= 0) or (name == "keep_alive_interval" and found < 0.1):
        least = "0.1 or more" if name == "keep_alive_interval" else "0 or more"
        raise ConfigError(f"rdzv_conf: {name}: found {value!r}, expected a number, {least}")
    return found
