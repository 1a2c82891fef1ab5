"""What a user wrote in a YAML file or as `key.sub=value`, each value with its place, not yet of any type.

YAML's own reading of scalars is not used: in YAML 1.1, as PyYAML has it, `1e-4` is a text, `010` is 8 and `no` is false. The rule here,
in files and overrides alike:

* A number is decimal: `010` is 10, `1_000` is 1000, `1e-4` is 0.0001. `0x1f`, `0o17` and `0b11` are read as Python does, `.inf` and
  `.nan` as YAML does. Where a whole number is wanted, `1e1` and `10.0` are 10, and `1.5` is refused.
* Where a text is wanted, what is written is the text: `no`, `on`, `010`. Where yes or no is wanted: true, false, yes, no, on, off.
* Where anything goes (`args`, `storage_options`): a number is a number, `true` and `false` are booleans, `null`, `~` and nothing at
  all are None, and all else is text, `no` and `on` too. Keys are text.
* What stands in quotes is text, nothing else.

Reads no file by itself and imports no torch.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import yaml

from elastic.errors import ConfigError

__all__ = [
    "Fields",
    "Items",
    "Scalar",
    "Written",
    "boolean",
    "free_value",
    "number",
    "override",
    "read_yaml",
    "whole",
]

_DIGITS = r"\d(?:_?\d)*"
_WHOLE = re.compile(rf"[+-]?{_DIGITS}", re.ASCII)
_BASED = re.compile(r"[+-]?0(?:x[\da-fA-F_]+|o[0-7_]+|b[01_]+)", re.ASCII)
_NUMBER = re.compile(rf"[+-]?(?:{_DIGITS}\.?(?:{_DIGITS})?|\.{_DIGITS})(?:[eE][+-]?\d+)?", re.ASCII)
_SPECIAL = {".inf": math.inf, "+.inf": math.inf, "-.inf": -math.inf, ".nan": math.nan}
_NULLS = frozenset({"", "~", "null", "Null", "NULL"})
_OVERRIDE = re.compile(r"(?:--)?([A-Za-z_][\w-]*(?:\.[\w-]+)*)=(.*)", re.DOTALL)
_TEXT_TAG = "tag:yaml.org,2002:str"
_CORE_TAGS = "tag:yaml.org,2002:"


@dataclass(frozen=True, slots=True)
class Scalar:
    """One value as it was typed."""

    text: str
    plain: bool
    """Not in quotes."""
    place: str

    @property
    def is_null(self) -> bool:
        """Whether it says: nothing."""
        return self.plain and self.text in _NULLS

    def __str__(self) -> str:
        if self.is_null:
            return "nothing"
        if not self.plain:
            return f"the text {self.text!r}"
        # An error is one line, whatever was typed.
        return self.text if self.text.isprintable() else repr(self.text)


@dataclass(frozen=True, slots=True)
class Items:
    """A list."""

    items: "tuple[Written, ...]"
    place: str

    def __str__(self) -> str:
        # Never the content: it may hold credentials.
        return "a list"


@dataclass(frozen=True, slots=True)
class Fields:
    """A mapping, in the order of writing; each value's place is its key's."""

    fields: "dict[str, Written]"
    place: str

    def __str__(self) -> str:
        return "a mapping"


Written = Scalar | Items | Fields


class _Loader(yaml.SafeLoader):
    """YAML's nodes, of which an explicit text (`!!str 010`) is as good as a quoted one."""

    def compose_scalar_node(self, anchor: Any) -> yaml.ScalarNode:
        event = self.peek_event()  # type: ignore[no-untyped-call] # (PyYAML's stubs)
        node: yaml.ScalarNode = super().compose_scalar_node(anchor)
        if event.tag in {_TEXT_TAG, "!"}:
            node.style = '"'
        elif event.tag is not None:
            problem = f"found the tag {event.tag}, expected none"
            raise yaml.composer.ComposerError(None, None, problem, event.start_mark)
        return node


def whole(text: str) -> int | None:
    """The whole number that a text means; None where it means none."""
    if _WHOLE.fullmatch(text):
        return int(text)
    if _BASED.fullmatch(text):
        try:
            return int(text, 0)
        except ValueError:  # an underscore that Python does not take, as in 0x_
            return None
    if _NUMBER.fullmatch(text) and math.isfinite(float(text)):
        exact = Decimal(text)
        return int(exact) if exact == exact.to_integral_value() else None
    return None


def number(text: str) -> float | None:
    """The number that a text means; None where it means none."""
    if _NUMBER.fullmatch(text):
        return float(text)
    if _BASED.fullmatch(text):
        based = whole(text)
        return None if based is None else float(based)
    return _SPECIAL.get(text.lower())


def boolean(text: str) -> bool | None:
    """The yes or no that a text means; None where it means neither."""
    low = text.lower()
    if low in {"true", "yes", "on"}:
        return True
    return False if low in {"false", "no", "off"} else None


def free_value(written: Written) -> object:
    """A value of which no type is declared, read by the rule above."""
    match written:
        case Fields(fields=fields):
            return {key: free_value(value) for key, value in fields.items()}
        case Items(items=items):
            return [free_value(item) for item in items]
        case Scalar(text=text, plain=plain):
            return _free_scalar(text) if plain else text


def _free_scalar(text: str) -> object:
    if text in _NULLS:
        return None
    if text in {"true", "True", "TRUE", "false", "False", "FALSE"}:
        return text.lower() == "true"
    # 1e1 is a number with a fraction in principle, so a job gets a float for it; 10 stays whole.
    looks_whole = _WHOLE.fullmatch(text) or _BASED.fullmatch(text)
    found = whole(text) if looks_whole else number(text)
    return text if found is None else found


def read_yaml(text: str, name: str) -> Fields:
    """Read a file's text; name stands in places and errors.

    Raises:
        ConfigError: it is no YAML, or not a mapping of settings.
    """
    node = _compose(text, name)
    if node is None:
        return Fields({}, name)
    written = _written(node, name, None, ())
    if isinstance(written, Scalar) and written.is_null:
        return Fields({}, name)
    if not isinstance(written, Fields):
        raise ConfigError(
            f"settings: found {written}, expected a mapping of settings ({written.place})"
        )
    return Fields(written.fields, name)


def override(fields: Fields, argument: str) -> None:
    """Put `key.sub=value` into what was read; the last one wins.

    Raises:
        ConfigError: the argument has no such form, or goes through something that is no mapping.
    """
    match = _OVERRIDE.fullmatch(argument)
    if match is None:
        raise ConfigError(f"command line: found {argument!r}, expected key.sub=value")
    *sections, last = match[1].split(".")
    at = fields
    for section in sections:
        inner = at.fields.get(section)
        if inner is None or (isinstance(inner, Scalar) and inner.is_null):
            inner = at.fields[section] = Fields({}, "command line")
        if not isinstance(inner, Fields):
            raise ConfigError(
                f"{match[1]}: {section} is {inner}, expected a mapping ({inner.place})"
            )
        at = inner
    at.fields[last] = _argument_value(match[1], match[2])


def _argument_value(key: str, text: str) -> Written:
    place = "command line"
    if not text.lstrip().startswith(("[", "{", '"', "'")):
        # As it stands, not as YAML: `#`, `: `, `@` and `*` mean themselves here.
        return Scalar(text, plain=True, place=place)
    try:
        node = _compose(text, key)
    except ConfigError as error:
        raise ConfigError(f"{key}: found brackets or quotes that are no YAML ({place})") from error
    return Scalar("", plain=True, place=place) if node is None else _written(node, key, place, ())


def _compose(text: str, name: str) -> yaml.Node | None:
    try:
        return yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = name if mark is None else f"{name}:{mark.line + 1}"
        raise ConfigError(
            f"settings: not YAML: {error.problem or error.context} ({place})"
        ) from error
    except yaml.YAMLError as error:
        problem = str(error).splitlines()[0]
        raise ConfigError(f"settings: not YAML: {problem} ({name})") from error


def _written(node: yaml.Node, name: str, place: str | None, above: tuple[int, ...]) -> Written:
    """Turn a node into a value; place where it is given stands for all, else each gets its line."""
    here = place or f"{name}:{node.start_mark.line + 1}"
    if id(node) in above:
        raise ConfigError(f"settings: found a value that holds itself, expected an end ({here})")
    above = (*above, id(node))
    if isinstance(node, yaml.ScalarNode):
        return Scalar(node.value, plain=node.style is None, place=here)
    if isinstance(node, yaml.SequenceNode) and node.tag.startswith(_CORE_TAGS):
        return Items(tuple(_written(item, name, place, above) for item in node.value), here)
    if not isinstance(node, yaml.MappingNode) or not node.tag.startswith(_CORE_TAGS):
        raise ConfigError(f"settings: found the tag {node.tag}, expected none ({here})")
    fields: dict[str, Written] = {}
    for key, value in _pairs(node, here, ()):
        at = place or f"{name}:{key.start_mark.line + 1}"
        if key.value in fields:
            raise ConfigError(f"{key.value}: found twice, expected once ({at})")
        fields[key.value] = _at(_written(value, name, place, above), at)
    return Fields(fields, here)


def _at(written: Written, place: str) -> Written:
    """The value at its key's place, not at the line on which its own text begins."""
    match written:
        case Scalar(text=text, plain=plain):
            return Scalar(text, plain, place)
        case Items(items=items):
            return Items(items, place)
        case Fields(fields=fields):
            return Fields(fields, place)


def _pairs(
    node: yaml.MappingNode, place: str, above: tuple[yaml.Node, ...]
) -> Iterator[tuple[yaml.ScalarNode, yaml.Node]]:
    """The pairs of a mapping; those merged by `<<` come first and only where not written anew."""
    own = {key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)}
    merged: dict[str, tuple[yaml.ScalarNode, yaml.Node]] = {}
    for key, value in node.value:
        if not isinstance(key, yaml.ScalarNode):
            raise ConfigError(f"settings: found a key that is no text, expected a name ({place})")
        if key.value != "<<":
            continue
        for source in value.value if isinstance(value, yaml.SequenceNode) else [value]:
            if not isinstance(source, yaml.MappingNode) or source in (*above, node):
                raise ConfigError(f"<<: found no mapping to merge, expected one ({place})")
            for pair in _pairs(source, place, (*above, node)):
                if pair[0].value not in own:
                    merged.setdefault(pair[0].value, pair)
    yield from merged.values()
    yield from ((key, value) for key, value in node.value if key.value != "<<")
