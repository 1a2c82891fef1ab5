"""JSON in one spelling: written canonically, read strictly and within bounds.

Whatever is read here may be hostile or torn. A text that is too large, not UTF-8, not JSON, that
holds a key twice, a NaN, an infinity or an absurd number ends in the caller's error, which names the
record; never in a silent default, a deep recursion or much memory. Pure: no I/O.
"""

import json
import math
from collections.abc import Mapping
from typing import Final, NoReturn, TypeAlias

from checkpoints.errors import CheckpointError, RecordError

JSON: TypeAlias = "dict[str, JSON] | list[JSON] | str | int | float | bool | None"

LIMIT_BYTES: Final = 4 << 20
"""The largest record that is read unless the caller allows more."""
LARGEST: Final = 2**63 - 1
MOST_VALUES: Final = 8_000_000
"""A small text of empty lists would take thirty times its size; who has more numbers has tensors."""
_DEPTH: Final = 64
_SHOWN: Final = 60


def dump(value: object) -> bytes:
    """The one spelling of `value`: sorted keys, no spaces, ASCII (so that any text survives)."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def plain(value: object) -> JSON:
    """The nearest JSON to `value`, for what people read: a NaN becomes "nan", a path its text."""
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(inner) for inner in value]
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return str(value)


def parse(
    data: bytes,
    name: str,
    *,
    limit_bytes: int = LIMIT_BYTES,
    error: type[CheckpointError] = RecordError,
) -> dict[str, JSON]:
    """Read one JSON object, or raise `error` naming `name`."""
    if len(data) > limit_bytes:
        raise error(f"{name}: found {len(data)} bytes, expected at most {limit_bytes}")
    if (count := count_values(data)) > MOST_VALUES:
        raise error(f"{name}: found up to {count} values, expected at most {MOST_VALUES}")
    try:
        value = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_unique,
            parse_constant=_refuse_constant,
            parse_float=_finite,
            parse_int=_bounded,
        )
    except (ValueError, RecursionError) as problem:
        reason = "nested too deeply" if isinstance(problem, RecursionError) else str(problem)
        raise error(f"{name}: not a JSON record: {reason}") from None
    if not isinstance(value, dict):
        raise error(f"{name}: found {_shown(value)}, expected a JSON object")
    if _too_deep(value):
        raise error(f"{name}: nested too deeply, expected at most {_DEPTH} levels")
    return value


def count_values(data: bytes) -> int:
    """At least as many values as a text of JSON holds."""
    return data.count(b",") + data.count(b"[") + data.count(b"{")


def _unique(pairs: list[tuple[str, JSON]]) -> dict[str, JSON]:
    """A dict of the pairs; two values under one key would let two readers see two records."""
    found: dict[str, JSON] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"key {_shown(key)} stands there twice")
        found[key] = value
    return found


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"number {text} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"number {_shown(text)} is too large")
    return value


def _bounded(text: str) -> int:
    # Length first: turning a million digits into an int takes quadratic time.
    if len(text) > 20 or abs(value := int(text)) > LARGEST:
        raise ValueError(f"number {_shown(text)} is too large")
    return value


def _too_deep(value: JSON) -> bool:
    level: list[JSON] = [value]
    for _ in range(_DEPTH):
        inner: list[JSON] = []
        for item in level:
            if isinstance(item, dict):
                inner.extend(item.values())
            elif isinstance(item, list):
                inner.extend(item)
        if not inner:
            return False
        level = inner
    return True


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


class Fields:
    """The fields of one record, taken out by name and type; a wrong one names record and key.

    Keys that nobody asks for are left alone: a later version may add some.
    """

    def __init__(
        self, values: Mapping[str, JSON], name: str, error: type[CheckpointError] = RecordError
    ) -> None:
        self.values = values
        self._name = name
        self._error = error

    def wrong(self, key: str, expected: str) -> CheckpointError:
        """The error for a field that is missing or not what it should be."""
        found = _shown(self.values[key]) if key in self.values else "nothing"
        return self._error(f"{self._name}: {key}: found {found}, expected {expected}")

    def fail(self, text: str) -> CheckpointError:
        """The error for what no single field is to blame for."""
        return self._error(f"{self._name}: {text}")

    def version(self, known: int = 1) -> int:
        """The record's format, which has to be one that this version knows."""
        value = self.values.get("format")
        if value != known or isinstance(value, bool):
            raise self.wrong("format", f"{known} (written by a newer version?)")
        return known

    def text(self, key: str, *, limit: int = 4096, empty: bool = False) -> str:
        """A text of at most `limit` characters."""
        value = self.values.get(key)
        if not isinstance(value, str) or len(value) > limit or not (value or empty):
            raise self.wrong(key, f"a text of at most {limit} characters")
        return value

    def optional_text(self, key: str, *, limit: int = 4096) -> str | None:
        """A text, or null."""
        return None if self.values.get(key) is None else self.text(key, limit=limit)

    def whole(self, key: str, low: int = 0, high: int = LARGEST) -> int:
        """A whole number in [low, high]."""
        value = self.values.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self.wrong(key, f"a whole number from {low} to {high}")
        return value

    def mapping(self, key: str) -> dict[str, JSON]:
        """A JSON object."""
        value = self.values.get(key)
        if not isinstance(value, dict):
            raise self.wrong(key, "an object")
        return value

    def items(self, key: str, *, limit: int = 100_000) -> list[JSON]:
        """A list of at most `limit` items."""
        value = self.values.get(key)
        if not isinstance(value, list) or len(value) > limit:
            raise self.wrong(key, f"a list of at most {limit} items")
        return value

    def records(self, key: str, *, limit: int = 100_000) -> list["Fields"]:
        """A list of objects, each as fields of its own."""
        inner = []
        for number, item in enumerate(self.items(key, limit=limit)):
            if not isinstance(item, dict):
                raise self.fail(f"{key}[{number}]: found {_shown(item)}, expected an object")
            inner.append(Fields(item, f"{self._name}: {key}[{number}]", self._error))
        return inner

    def mappings(self, key: str, *, limit: int = 100_000) -> tuple[dict[str, JSON], ...]:
        """A list of objects, as they are."""
        return tuple(dict(item.values) for item in self.records(key, limit=limit))

    def texts(self, key: str, *, limit: int = 100_000) -> tuple[str, ...]:
        """A list of texts."""
        texts = []
        for item in self.items(key, limit=limit):
            if not isinstance(item, str) or len(item) > 4096:
                raise self.wrong(key, "a list of texts")
            texts.append(item)
        return tuple(texts)
