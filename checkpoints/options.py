"""Intervals, durations, and the type of the `checkpoint` section.

All that is impossible is refused when the object is made, by an OptionError that begins with the key's
last name. Pure: no I/O.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Final, Literal, Self

from checkpoints.errors import OptionError

Duration = Annotated[float, "duration"]
Limit = Annotated[float, "limit"]
"""A duration, or 0 for `off`."""
"""Seconds, written as `30`, `30 s`, `10 min` or `2 h`."""

_SECONDS: Final[Mapping[str, float]] = {
    **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), 1.0),
    **dict.fromkeys(("min", "mins", "minute", "minutes"), 60.0),
    **dict.fromkeys(("h", "hour", "hours"), 3600.0),
    **dict.fromkeys(("d", "day", "days"), 86400.0),
}
_AMOUNT: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", re.ASCII)
_LONGEST_S: Final = 10 * 365 * 86400.0


def parse_duration(value: object) -> float:
    """Seconds from `"10 min"`, `"2 h"`, `"30 s"` or a bare number of seconds.

    Raises:
        OptionError: It is no duration, or not above 0 and below ten years.
    """
    seconds = math.nan
    if isinstance(value, int | float) and not isinstance(value, bool):
        seconds = float(value)
    elif isinstance(value, str) and (match := _AMOUNT.fullmatch(value)):
        seconds = float(match[1]) * _SECONDS.get(match[2].lower() or "s", math.nan)
    if not 0 < seconds <= _LONGEST_S:
        raise OptionError(f"found {value!r}, expected a duration such as 30 s, 10 min or 2 h")
    return seconds


def parse_limit(value: object) -> float | None:
    """As parse_duration; 0 for `off`, None for None.

    Raises:
        OptionError: It is neither, or not above 0 and below ten years.
    """
    if value is None:
        return None
    is_off = isinstance(value, str) and value.strip().lower() == "off"
    if is_off or value is False or value == 0:
        return 0.0
    try:
        return parse_duration(value)
    except OptionError as error:
        raise OptionError(f"{error}, or off") from None


@dataclass(frozen=True, slots=True)
class Interval:
    """How often something is due: `500 steps`, `10 min`, `1 epoch`, `off`, or `auto`."""

    kind: Literal["steps", "seconds", "epochs", "off", "auto"]
    count: float = 0
    """Whole for steps and epochs; 0 for off and auto."""

    def __str__(self) -> str:
        match self.kind:
            case "off" | "auto":
                return self.kind
            case "seconds":
                unit, size = next(
                    (unit, size)
                    for unit, size in (("h", 3600), ("min", 60), ("s", 1))
                    if size == 1 or self.count % size == 0
                )
                return f"{self.count / size:g} {unit}"
            case _:
                return f"{self.count:g} {self.kind if self.count != 1 else self.kind[:-1]}"

    @property
    def is_off(self) -> bool:
        """Whether it is never due."""
        return self.kind == "off"

    @property
    def is_auto(self) -> bool:
        """Whether it is measured, not given."""
        return self.kind == "auto"

    @classmethod
    def parse(cls, value: object, *, allow_auto: bool = False) -> Self:
        """Read an interval; a bare whole number means steps, and YAML's false means off.

        Raises:
            OptionError: It is no interval, or `auto` where that is not served.
        """
        expected = "expected 500 steps, 10 min, 1 epoch or off" + (" or auto" if allow_auto else "")
        if isinstance(value, cls):
            if value.is_auto and not allow_auto:
                raise OptionError(f"found auto, {expected}")
            return value
        if value is False:
            return cls("off")
        text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
        if isinstance(text, str):
            word = text.strip().lower()
            if word == "off":
                return cls("off")
            if word == "auto" and allow_auto:
                return cls("auto")
            match = _AMOUNT.fullmatch(text)
            found = cls._counted(match[1], match[2].lower()) if match else None
            if found is not None:
                return found
        raise OptionError(f"found {value!r}, {expected}")

    @classmethod
    def _counted(cls, amount: str, unit: str) -> Self | None:
        if unit in {"", "step", "steps", "epoch", "epochs"}:
            kind: Literal["steps", "epochs"] = "epochs" if unit.startswith("epoch") else "steps"
            whole = amount.isdigit() and 0 < int(amount) <= 10**15
            return cls(kind, int(amount)) if whole else None
        seconds = float(amount) * _SECONDS.get(unit, math.nan)
        return cls("seconds", seconds) if 0 < seconds <= _LONGEST_S else None


@dataclass(frozen=True, kw_only=True, slots=True)
class TierOptions:
    """Where snapshots are kept besides the store."""

    memory: Interval = Interval("auto")
    """How often this node's memory gets a snapshot: auto, off or an interval."""

    def __post_init__(self) -> None:
        _interval(self, "memory", allow_auto=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointOptions:
    """The `checkpoint` section: where checkpoints go, how often, and how many stay."""

    url: str
    """The run's URL: a folder, or anything fsspec knows, e.g. s3://bucket/run-42."""
    every: Interval = Interval("epochs", 1)
    """How often a checkpoint is made: 500 steps, 10 min, 1 epoch or off."""
    keep: int = 3
    """How many of the newest checkpoints stay."""
    keep_every: int | None = None
    """Of every so many steps one checkpoint stays for ever: the first at or after their multiple."""
    storage_options: Mapping[str, object] = field(default_factory=dict)
    """Arguments of the fsspec file system, e.g. endpoint_url; credentials are shown nowhere."""
    init_from: str | None = None
    """Weights to begin with, at the first generation only: a file, a checkpoint, or URL@best."""
    budget: float = 0.01
    """The share of time that checkpoints may cost where `every` is auto."""
    max_unsaved: Duration = 7200.0
    """The run ends when nothing could be saved for this long."""
    tier: TierOptions = field(default_factory=TierOptions)
    """Other places for snapshots."""
    part_bytes: int = 64 << 20
    """Files are checksummed and read in parts of at most this size."""
    split_bytes: int = 5_000_000_000
    """Files larger than this are split."""

    def __post_init__(self) -> None:
        if not isinstance(self.url, str) or not self.url.strip():
            raise OptionError(f"url: found {self.url!r}, expected a folder or a URL")
        _interval(self, "every", allow_auto=True)
        _at_least(self, "keep", 1)
        if self.keep_every is not None:
            _at_least(self, "keep_every", 1)
        _at_least(self, "part_bytes", 1 << 16)
        _at_least(self, "split_bytes", self.part_bytes)
        if not 0 < self.budget <= 1:
            raise OptionError(f"budget: found {self.budget!r}, expected more than 0, at most 1")
        try:
            object.__setattr__(self, "max_unsaved", parse_duration(self.max_unsaved))
        except OptionError as error:
            raise OptionError(f"max_unsaved: {error}") from None


def _at_least(options: object, key: str, low: int) -> None:
    value = getattr(options, key)
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise OptionError(f"{key}: found {value!r}, expected a whole number of at least {low}")


def _interval(options: object, key: str, *, allow_auto: bool) -> None:
    """Whoever makes options by hand may write an interval as text."""
    try:
        value = Interval.parse(getattr(options, key), allow_auto=allow_auto)
    except OptionError as error:
        raise OptionError(f"{key}: {error}") from None
    object.__setattr__(options, key, value)
