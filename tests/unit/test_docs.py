"""Docs stay true to the code: every config key is told, every told key exists, every example parses."""

import dataclasses
import re
import shutil
import subprocess
import textwrap
import typing
from collections.abc import Iterator
from pathlib import Path
from types import UnionType

import pytest
import yaml

from elastic.options import Settings

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
CONFIGURATION = ROOT / "docs" / "configuration.md"
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


def keys(options: type, prefix: str = "") -> Iterator[str]:
    """Every key of a settings dataclass, those of its sections with a dot."""
    hints = typing.get_type_hints(options)
    for field in dataclasses.fields(options):
        hint = hints[field.name]
        section = next((h for h in (hint, *members(hint)) if is_section(h)), None)
        if section is None:
            yield prefix + field.name
        else:
            yield from keys(section, f"{prefix}{field.name}.")


def members(hint: object) -> tuple[object, ...]:
    """The members of a union."""
    return typing.get_args(hint) if isinstance(hint, UnionType) else ()


def is_section(hint: object) -> typing.TypeGuard[type]:
    """Whether a field holds a section; an Interval is a value, told by its name."""
    return dataclasses.is_dataclass(hint) and getattr(hint, "__name__", "").endswith("Options")


def blocks(page: Path, *languages: str) -> list[str]:
    """The fenced blocks of some languages."""
    found = FENCE.findall(page.read_text(encoding="utf-8"))
    return [text for language, text in found if language in languages]


def test_every_key_of_the_code_is_in_the_docs() -> None:
    told = set(re.findall(r"`([\w.]+)(?:[:=][^`]*)?`", CONFIGURATION.read_text(encoding="utf-8")))
    assert set(keys(Settings)) - told == set()


def test_every_key_of_the_docs_is_in_the_code() -> None:
    text = CONFIGURATION.read_text(encoding="utf-8")
    rows = set(re.findall(r"^\| `([\w.]+)`", text, re.MULTILINE))
    sections = "train|loader|eval|checkpoint|audit|run"
    named = set(re.findall(rf"`((?:{sections})\.[\w.]+)(?:[:=][^`]*)?`", text))
    assert (rows | named) - set(keys(Settings)) - {"run.json"} == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_examples_parse(page: Path) -> None:
    for text in blocks(page, "python"):
        compile(textwrap.dedent(text), str(page), "exec")
    for text in blocks(page, "yaml"):
        yaml.safe_load(text)
    bash = shutil.which("bash")
    assert bash is not None
    for text in blocks(page, "sh"):
        subprocess.run([bash, "-n"], input=text, text=True, check=True)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = LINK.findall(page.read_text(encoding="utf-8"))
    dead = [x for x in links if "://" not in x and not (page.parent / x).exists()]
    assert dead == []


@pytest.mark.parametrize("name", ["train", "test"])
def test_the_readme_has_the_commands_that_ci_runs(name: str) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    command = re.search(rf"^<!-- command: {name} -->\n```sh\n(.+)\n```$", text, re.MULTILINE)
    assert command is not None
    assert "\n" not in command[1]
    assert f"readme_command {name}" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")
