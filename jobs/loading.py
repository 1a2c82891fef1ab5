"""Load a job: from `package.module:Class` or `path/to/file.py:Class` and its arguments to a Job.

Promises: what is wrong with the spec, the class or its arguments is one line, told before anything
is built; an exception that the user's own code raises passes through untouched, with its traceback.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import sys
import types
import typing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from jobs.errors import JobError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from types import ModuleType

    from jobs.job import Job

__all__ = ["JobError", "load_job"]

_NUMBERS: Final[Mapping[Any, str]] = {int: "an integer", float: "a number", bool: "true or false"}


def load_job(spec: str, args: Mapping[str, Any] | None = None) -> Job:
    """Import the class that `spec` names and build it with `args`.

    Raises:
        JobError: No such file, module, class, method or argument, or the class is not a Job.
    """
    place, colon, name = spec.rpartition(":")
    if not colon or not place or not name.isidentifier():
        raise JobError(
            f"job: found {spec!r}, expected package.module:Class or path/to/file.py:Class"
        )
    from_file = place.endswith(".py") or "/" in place
    module = _import_file(place, spec) if from_file else _import_module(place, name, spec)
    job_class = _find_class(module, name, spec)
    _check_methods(job_class, spec)
    _check_arguments(job_class, dict(args or {}), spec)
    return job_class(**(args or {}))


def _import_file(place: str, spec: str) -> ModuleType:
    """Import a file by its stem, its folder at the end of sys.path.

    A made-up module name would be simpler, but loader workers that are spawned import the class
    again by its module's name, and would not find it.
    """
    path = Path(place).expanduser().resolve()
    if not path.is_file():
        raise JobError(f"job: {spec}: no file {path}{_nearest_file(path)}")
    if path.suffix != ".py" or not path.stem.isidentifier():
        raise JobError(
            f"job: {spec}: found the file name {path.name!r}, expected a .py file that Python can import"
        )
    _append_to_path(path.parent)
    _append_to_path(Path.cwd())
    known = sys.modules.get(path.stem)
    module = known if known is not None else _import(path.stem)
    found = getattr(module, "__file__", None)
    if found is None or Path(found).resolve() != path:
        raise JobError(
            f"job: {spec}: the name {path.stem!r} is taken by {found or 'a built-in module'}; "
            "give the file another name"
        )
    return module


def _import_module(place: str, name: str, spec: str) -> ModuleType:
    """Import a dotted module, the working directory at the end of sys.path."""
    _append_to_path(Path.cwd())
    try:
        return _import(place)
    except ModuleNotFoundError as error:
        # A missing import inside the user's module is the user's error, with its own traceback.
        if error.name is None or not (place == error.name or place.startswith(f"{error.name}.")):
            raise
        raise JobError(_module_missing(place, name, error.name, spec)) from None


def _import(name: str) -> ModuleType:
    """Import a module; files that were written a moment ago are seen."""
    importlib.invalidate_caches()
    return importlib.import_module(name)


def _module_missing(place: str, name: str, missing: str, spec: str) -> str:
    """Say what is missing, and which folder has the package's name."""
    package, _, rest = place.partition(".")
    file_form = f"{place.replace('.', '/')}.py:{name}"
    if missing == package:
        return f"job: {spec}: no package {package!r} on the path; for a file say {file_form}"
    parent = sys.modules.get(missing.rpartition(".")[0])
    folders = [str(Path(folder)) for folder in getattr(parent, "__path__", [])]
    if not folders:
        return f"job: {spec}: {missing.rpartition('.')[0]!r} is a module, not a package of modules"
    modules = [path.stem for folder in folders for path in Path(folder).glob("*.py")]
    return (
        f"job: {spec}: no module {rest!r} in {package!r}, which is {', '.join(folders)}"
        f"{_nearest(missing.rpartition('.')[2], modules)}; for a file of your own say {file_form}"
    )


def _append_to_path(folder: Path) -> None:
    """Make a folder importable, behind everything that is importable already."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def _find_class(module: ModuleType, name: str, spec: str) -> type[Job]:
    """Look the class up and check that it is a Job."""
    from jobs.job import Job  # here, so that a missing file does not cost the import of torch

    where = getattr(module, "__file__", None) or module.__name__
    found = getattr(module, name, None)
    if found is None:
        classes = [
            key
            for key, value in vars(module).items()
            if isinstance(value, type) and issubclass(value, Job) and value is not Job
        ]
        listed = f"; its jobs are {', '.join(sorted(classes))}" if classes else "; it holds no job"
        raise JobError(
            f"job: {spec}: no class {name!r} in {where}{_nearest(name, classes) or listed}"
        )
    if not (isinstance(found, type) and issubclass(found, Job)):
        kind = "class" if isinstance(found, type) else type(found).__name__
        raise JobError(
            f"job: {spec}: {name} is a {kind} that is not a Job; write `class {name}(Job)` "
            "with `from elastic import Job`"
        )
    return found


def _check_methods(job_class: type[Job], spec: str) -> None:
    """Refuse a class that lacks a method, with all that it lacks."""
    from jobs.job import Job

    missing = sorted(getattr(job_class, "__abstractmethods__", ()))
    if job_class.loss is Job.loss and job_class.losses is Job.losses:
        missing.append("loss")
    if missing:
        written = [key for key in vars(job_class) if key not in vars(Job)]
        hints = [
            f" ({near[0]!r} is close to {name!r})"
            for name in missing
            if (near := difflib.get_close_matches(name, written, n=1))
        ]
        lacks = ", ".join(f"{name}()" for name in missing)
        raise JobError(f"job: {spec}: {job_class.__name__} lacks {lacks}{''.join(hints)}")


def _check_arguments(job_class: type[Job], args: dict[str, Any], spec: str) -> None:
    """Refuse arguments that the constructor does not know, or lacks."""
    parameters = list(inspect.signature(job_class).parameters.values())
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    known = [parameter.name for parameter in parameters if parameter.kind in by_name]
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
    for name in args:
        if name not in known and not takes_any:
            listed = f"; it knows {', '.join(known)}" if known else "; it takes no arguments"
            raise JobError(
                f"args.{name}: {job_class.__name__} ({spec}) has no such argument"
                f"{_nearest(name, known) or listed}"
            )
    missing = [
        parameter.name
        for parameter in parameters
        if parameter.kind in by_name
        and parameter.default is inspect.Parameter.empty
        and parameter.name not in args
    ]
    if missing:
        raise JobError(
            f"args.{missing[0]}: not set, but {job_class.__name__} ({spec}) needs "
            f"{', '.join(missing)}; add it under args"
        )
    _check_numbers(job_class, args, spec)


def _check_numbers(job_class: type[Job], args: Mapping[str, Any], spec: str) -> None:
    """Refuse text and the like for what the constructor says is a number."""
    try:
        hints = typing.get_type_hints(job_class.__init__)
    except Exception:  # noqa: BLE001  # annotations may name anything; they are only a help here
        return
    for name, value in args.items():
        hint = hints.get(name)
        is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
        kinds = set(typing.get_args(hint) if is_union else (hint,)) - {type(None)}
        if kinds and kinds <= _NUMBERS.keys() and isinstance(value, str | list | tuple | dict):
            expected = " or ".join(sorted(_NUMBERS[kind] for kind in kinds))
            raise JobError(
                f"args.{name}: found {value!r:.80}, expected {expected} for {job_class.__name__} ({spec})"
            )


def _nearest(name: str, known: Iterable[str]) -> str:
    """The nearest known name as a question, or nothing."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _nearest_file(path: Path) -> str:
    """The nearest Python file beside a missing one, or what is wrong with the folder."""
    if not path.parent.is_dir():
        return f" (there is no folder {path.parent})"
    return _nearest(path.name, (beside.name for beside in path.parent.glob("*.py")))
