"""Reads YAML and `key.sub=value` into frozen dataclasses, and tells in one line what is wrong with them.

Generic: it follows the annotations of the dataclasses and knows no section's meaning. What a number, a text or a yes is stands in
`elastic.written`, in short: numbers are decimal (`010` is 10, `1e-4` is 0.0001, `1e1` is 10 where a whole number is wanted), text
stays text (`no`, `on`), nothing is coerced but a whole number to one with a fraction. Every error is a ConfigError of one line that
names the key, what was found, what is expected, and the file and line. Imports no torch, nor does anything that it imports.
"""

import ast
import dataclasses
import difflib
import inspect
import os
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from checkpoints.errors import OptionError
from checkpoints.options import Interval, Limit, parse_duration, parse_limit
from checkpoints.redaction import redact_options, redact_url
from elastic.errors import ConfigError
from elastic.options import Settings
from elastic.written import (
    Fields,
    Items,
    Scalar,
    Written,
    boolean,
    free_value,
    number,
    override,
    read_yaml,
    whole,
)

__all__ = [
    "Arguments",
    "Setting",
    "describe_settings",
    "list_settings",
    "parse_arguments",
    "read_section",
    "read_settings",
    "settings_json",
]

_Section = TypeVar("_Section")
_DEFAULT_JOB = "jobs/digits.yaml"
_USAGE = """\
usage: run.py [JOB] [key=value ...]

JOB is a YAML file, path/to/file.py:Class, or package.module:Class; without one, {default} is trained.
Settings, in the YAML file or as key=value (or --key=value), with their defaults:
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Arguments:
    """A command line, taken apart but not yet understood."""

    job: str | None = None
    overrides: tuple[str, ...] = ()
    help: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One key as `--help` and the docs show it."""

    key: str
    expected: str
    default: str | None
    """None where it must be given."""
    doc: str
    hidden: bool


def parse_arguments(argv: Sequence[str]) -> Arguments:
    """Take a command line apart: at most one JOB, any number of `key=value`, `--help`.

    `--local-rank` of the older launcher is dropped; the environment says the same.

    Raises:
        ConfigError: an option is not known, or there is a second JOB.
    """
    job: str | None = None
    overrides: list[str] = []
    asks = False
    rest = iter(argv)
    for argument in rest:
        if argument in {"-h", "--help"}:
            asks = True
        elif argument in {"--local-rank", "--local_rank"}:
            next(rest, None)
        elif argument.startswith(("--local-rank=", "--local_rank=")):
            continue
        elif "=" in argument and "/" not in argument.partition("=")[0]:
            overrides.append(argument)
        elif argument.startswith("-"):
            raise ConfigError(
                f"command line: found {argument} without a value, expected {argument}=value"
            )
        elif job is not None:
            raise ConfigError(
                f"command line: found a second job {argument!r} after {job!r}, expected one"
            )
        else:
            job = argument
    return Arguments(job=job, overrides=tuple(overrides), help=asks)


def read_settings(arguments: Arguments, *, root: Path) -> Settings:
    """Read the settings that a command line asks for; root is the folder that holds `jobs/`.

    Raises:
        ConfigError: anything about them is wrong.
    """
    given = any(argument.lstrip("-").startswith("job=") for argument in arguments.overrides)
    job = arguments.job or (None if given else _DEFAULT_JOB)
    fields, folder = Fields({}, "command line"), None
    if job is not None and job.endswith((".yaml", ".yml")):
        path = _find(job, root)
        fields, folder = read_yaml(_read_text(path, job), job), path.parent
    elif job is not None:
        if ":" not in job:
            expected = "a YAML file, path/to/file.py:Class or package.module:Class"
            raise ConfigError(f"JOB: found {job!r}, expected {expected}")
        fields.fields["job"] = Scalar(job, plain=False, place="command line")
    for argument in arguments.overrides:
        override(fields, argument)
    settings = read_section(Settings, fields)
    return dataclasses.replace(settings, job=_beside(settings.job, folder))


def read_section(cls: type[_Section], fields: Fields, prefix: str = "") -> _Section:
    """Make a dataclass of what was written, section by section.

    Raises:
        ConfigError: a key is unknown or missing, a value is of the wrong type or impossible.
    """
    known = _hints(cls)
    for key, written in fields.fields.items():
        if key not in known:
            raise ConfigError(
                f"{prefix}{key}: unknown key, {_nearest(cls, key, prefix)} ({written.place})"
            )
    values: dict[str, object] = {}
    for field in dataclasses.fields(cls):  # type: ignore[arg-type] # (mypy has no type for "a dataclass")
        found = fields.fields.get(field.name)
        section = dataclasses.is_dataclass(known[field.name])
        if found is not None:
            values[field.name] = _value(known[field.name], found, f"{prefix}{field.name}")
        elif section and _is_required(field):
            # So that what is named as missing is the key inside, not the section.
            values[field.name] = read_section(
                known[field.name], Fields({}, fields.place), f"{prefix}{field.name}."
            )
        elif _is_required(field):
            expected = _expected(known[field.name])
            raise ConfigError(
                f"{prefix}{field.name}: missing, expected {expected} ({fields.place})"
            )
    try:
        return cls(**values)
    except (ConfigError, OptionError) as error:
        key, _, problem = str(error).partition(": ")
        raise ConfigError(f"{prefix}{key}: {problem} ({_place(fields, key)})") from error


def settings_json(settings: object) -> dict[str, object]:
    """A section, or all settings, as JSON without credentials: what may be shown and written down."""
    fields = dataclasses.fields(settings)  # type: ignore[arg-type] # (as above)
    return {field.name: _json(getattr(settings, field.name)) for field in fields}


def list_settings() -> list[Setting]:
    """Every key that may be written, in the order of the sections, hidden ones too."""
    return [
        Setting(
            key=key,
            expected=_expected(_hints(cls)[field.name]),
            default=None if _is_required(field) else _default(field),
            doc=_field_docs(cls).get(field.name, ""),
            hidden=bool(field.metadata.get("hidden")),
        )
        for key, cls, field in _walk(Settings)
    ]


def describe_settings() -> str:
    """The text of `--help`, made from the dataclasses and the texts under their fields."""
    lines = [_USAGE.format(default=_DEFAULT_JOB)]
    for setting in list_settings():
        if not setting.hidden:
            default = "must be given" if setting.default is None else f"default {setting.default}"
            lines.append(f"  {setting.key}: {setting.expected}; {default}")
            lines.append(
                textwrap.fill(setting.doc, 98, initial_indent=" " * 6, subsequent_indent=" " * 6)
            )
    return "\n".join(lines)


def _value(hint: Any, written: Written, key: str) -> object:
    """What was written, as the annotation wants it."""
    inner = _without_none(hint)
    null = isinstance(written, Scalar) and written.is_null
    if null and inner is not hint:
        return None
    origin = typing.get_origin(inner)
    if dataclasses.is_dataclass(inner) and inner is not Interval:
        # `train:` with nothing under it, all of it commented out, is an empty section.
        section = Fields({}, written.place) if null else written
        if isinstance(section, Fields):
            return read_section(inner, section, f"{key}.")  # type: ignore[arg-type] # (is_dataclass)
    elif isinstance(origin, type) and issubclass(origin, Mapping):
        if null or isinstance(written, Fields):
            return {} if null else free_value(written)
    elif origin is tuple:
        items = written.items if isinstance(written, Items) else (written,)
        if not null and not isinstance(written, Fields):
            return tuple(_value(typing.get_args(inner)[0], item, key) for item in items)
    elif isinstance(written, Scalar) and not null:
        found = _scalar(inner, written, key)
        if found is not None:
            return found
    raise ConfigError(f"{key}: found {written}, expected {_expected(hint)} ({written.place})")


def _scalar(hint: Any, written: Scalar, key: str) -> object:
    """One value; None where it cannot be what the annotation wants."""
    text, plain = written.text, written.plain
    if hint is str:
        return text
    if hint is Interval:
        # Its owner reads it, and knows whether `auto` is served. A bare false is YAML's `off`.
        if plain and boolean(text) is False:
            return False
        return text if whole(text) is None else whole(text)
    if typing.get_origin(hint) is Literal:
        choices = typing.get_args(hint)
        off = plain and "off" in choices and boolean(text) is False
        return text if text in choices else ("off" if off else None)
    if typing.get_origin(hint) is Annotated:
        parse = parse_limit if hint is Limit else parse_duration
        value = False if parse is parse_limit and plain and boolean(text) is False else number(text)
        try:
            return parse(text if value is None else value)
        except OptionError as error:
            raise ConfigError(f"{key}: {error} ({written.place})") from error
    readers = {int: whole, float: number, bool: boolean}
    return readers[hint](text) if plain else None


def _expected(hint: Any) -> str:
    """The words for a type."""
    inner = _without_none(hint)
    origin = typing.get_origin(inner)
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    if inner in names:
        words = names[inner]
    elif inner is Interval:
        words = "an interval"
    elif origin is Literal:
        words = "one of " + ", ".join(typing.get_args(inner))
    elif origin is Annotated:
        words = "a duration, off" if inner is Limit else "a duration"
    elif origin is tuple:
        words = "a list of text"
    elif dataclasses.is_dataclass(inner):
        words = "a section of settings"
    else:
        words = "a mapping"
    return words if inner is hint else f"{words} or null"


def _without_none(hint: Any) -> Any:
    if typing.get_origin(hint) not in {types.UnionType, typing.Union}:
        return hint
    (inner,) = (part for part in typing.get_args(hint) if part is not types.NoneType)
    return inner


def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls, include_extras=True)


def _is_required(field: "dataclasses.Field[Any]") -> bool:
    missing = dataclasses.MISSING
    return field.default is missing and field.default_factory is missing


def _default(field: "dataclasses.Field[Any]") -> str:
    factory = field.default_factory
    value = field.default if factory is dataclasses.MISSING else factory()
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(value)}]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _walk(cls: type, prefix: str = "") -> "Iterator[tuple[str, type, dataclasses.Field[Any]]]":
    """Every key below a section, with its owner; sections themselves are left out."""
    hints = _hints(cls)
    for field in dataclasses.fields(cls):
        inner = hints[field.name]
        if dataclasses.is_dataclass(inner) and inner is not Interval:
            yield from _walk(inner, f"{prefix}{field.name}.")  # type: ignore[arg-type] # (is_dataclass)
        else:
            yield f"{prefix}{field.name}", cls, field


def _nearest(cls: type, key: str, prefix: str) -> str:
    """The way out of an unknown key: the nearest here, else one of that name elsewhere, else all."""
    shown = [field.name for field in dataclasses.fields(cls) if not field.metadata.get("hidden")]
    close = difflib.get_close_matches(key, shown, n=1)
    if close:
        return f"did you mean {prefix}{close[0]}?"
    elsewhere = {
        name.rpartition(".")[2]: name for name, _, field in _walk(Settings) if not field.metadata
    }
    close = difflib.get_close_matches(key, elsewhere, n=1)
    if close:
        return f"did you mean {elsewhere[close[0]]}?"
    return f"expected one of {', '.join(shown)}"


def _place(fields: Fields, key: str) -> str:
    """Where a dotted key was written; where not, the place of what holds it."""
    at: Written = fields
    for name in key.split("."):
        if not isinstance(at, Fields) or name not in at.fields:
            break
        at = at.fields[name]
    return at.place


def _json(value: object) -> object:
    if isinstance(value, Interval):
        return str(value)
    if dataclasses.is_dataclass(value):
        return settings_json(value)
    if isinstance(value, Mapping):
        return {key: _json(inner) for key, inner in redact_options(value).items()}
    if isinstance(value, list | tuple):
        return [_json(inner) for inner in value]
    return redact_url(value) if isinstance(value, str) else value


def _field_docs(cls: type) -> dict[str, str]:
    """The texts under a dataclass's fields."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    if not isinstance(tree, ast.ClassDef):  # pragma: no cover (a class's source is a class)
        return {}
    docs = {}
    for field, text in zip(tree.body, tree.body[1:], strict=False):
        match field, text:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(
                value=ast.Constant(value=str(doc))
            ):
                docs[name] = inspect.cleandoc(doc)
    return docs


def _find(job: str, root: Path) -> Path:
    for path in (Path(job), root / job):
        if path.is_file():
            return path
    own = ", ".join(sorted(str(path.relative_to(root)) for path in (root / "jobs").glob("*.yaml")))
    raise ConfigError(
        f"JOB: found no file {job}, expected one here or in {root} (there: {own or 'none'})"
    )


def _read_text(path: Path, name: str) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        problem = getattr(error, "strerror", None) or "it is not UTF-8"
        raise ConfigError(f"JOB: cannot read {name}: {problem}, expected a YAML file") from error


def _beside(job: str, folder: Path | None) -> str:
    """A job's file may lie beside the YAML file that names it; the one below the working directory goes first."""
    file, _, name = job.rpartition(":")
    if folder is None or not file.endswith(".py") or Path(file).exists():
        return job
    beside = folder / file
    return f"{os.path.relpath(beside)}:{name}" if beside.is_file() else job
