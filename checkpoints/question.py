"""What a command is asked, and how it answers: for people or as JSON, never with a credential.

`URL@latest`, `URL@best`, `URL@1200` and `URL@000007-000000001200` name one checkpoint.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from checkpoints import reader
from checkpoints.catalog import Catalog, Inventory, split_address
from checkpoints.errors import CheckpointError, DamagedError, NoCheckpointError, OptionError
from checkpoints.layout import RUN
from checkpoints.policy import newest_first
from checkpoints.redaction import is_secret_name
from checkpoints.staging import STATE
from checkpoints.store import open_store
from checkpoints.terminal import put_out

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Mapping, Sequence

    from checkpoints.layout import CheckpointName, Manifest


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """What is asked: about which checkpoints, and how the answer should look."""

    catalog: Catalog
    which: str | None
    as_json: bool
    now_s: float
    options: Mapping[str, object] = field(default_factory=dict)
    """Of the file system."""
    arguments: argparse.Namespace | None = None
    """What else was asked for."""

    @property
    def url(self) -> str:
        """The URL without credentials."""
        return self.catalog.store.display_url

    def names(self, found: Inventory) -> list[CheckpointName]:
        """The checkpoints that are meant, newest first.

        Raises:
            NoCheckpointError: The one that is asked for is not there, or nothing at all is.
        """
        if self.which is not None:
            return [self.catalog.resolve(self.which)]
        self.must_exist(found)
        return newest_first(found.committed)

    def must_exist(self, found: Inventory) -> None:
        """Refuse a URL where there is nothing: it is a typo.

        Raises:
            NoCheckpointError: Neither run nor checkpoint is there.
        """
        if not found.files and not self.catalog.store.exists(RUN):
            raise NoCheckpointError(f"{self.url}: no run and no checkpoint is there")

    def whole_run(self, command: str) -> None:
        """Refuse the name of one checkpoint where a whole run is meant.

        Raises:
            OptionError: One checkpoint is named.
        """
        if self.which is not None:
            raise OptionError(
                f"{self.url}@{self.which}: found one checkpoint, but {command} is of a whole run"
            )

    def answer(self, value: object, lines: Sequence[str]) -> None:
        """Print the one or the other.

        Raises:
            BrokenPipeError, CheckpointError: See `terminal.put_out`.
        """
        text = json.dumps(value, indent=2) if self.as_json else "\n".join(map(shown, lines))
        put_out(f"{text}\n")


def shown(line: str) -> str:
    """A line as a terminal may get it: what came from a store could hold commands for it."""
    return "".join(letter if letter.isprintable() else "?" for letter in line)


def ask(
    address: str, options: Mapping[str, object], arguments: argparse.Namespace, now_s: float
) -> Question:
    """The question about an address.

    Raises:
        PermanentStoreError: Nothing serves such a URL.
    """
    url, which = split_address(address)
    return Question(
        catalog=Catalog(open_store(url, options)),
        which=which,
        as_json=arguments.json,
        now_s=now_s,
        options=options,
        arguments=arguments,
    )


def read_options(texts: Sequence[str], flag: str = "--option") -> dict[str, object]:
    """The options of a file system, each `key=value`.

    Raises:
        OptionError: One is not of that form.
    """
    options: dict[str, object] = {}
    for text in texts:
        key, value = read_option(text, flag)
        known = options.get(key)
        both = isinstance(known, dict) and isinstance(value, dict)
        options[key] = {**known, **value} if both else value  # type: ignore[dict-item]  # both are dicts
    return options


def read_option(text: str, flag: str = "--option") -> tuple[str, object]:
    """`key=value`: the value is JSON where it can be, but never where it is a credential."""
    key, equals, raw = text.partition("=")
    if not key or not equals:
        raise OptionError(f"{flag}: found {key!r}, expected key=value")
    value: object = raw
    if not is_secret_name(key):
        try:
            value = json.loads(raw)
        except ValueError:
            value = raw
    outer, *inner = key.split(".")
    for name in reversed(inner):
        value = {name: value}
    return outer, value


def problems_of(
    catalog: Catalog, manifest: Manifest, tell: Callable[[int], None] | None = None
) -> list[str]:
    """Read every byte of a checkpoint; all damage, not the first alone."""
    problems = []
    for entry in manifest.files:
        try:
            reader.verify_file(catalog.store, manifest, entry, tell)
        except DamagedError as error:
            problems.append(str(error))
    if not any(entry.name == STATE for entry in manifest.files):
        problems.append(f"checkpoint {manifest.name}: {STATE}: is not in the manifest")
    if not problems:
        try:
            reader.check_fit(catalog.store, manifest)
        except DamagedError as error:
            problems.append(str(error))
    return problems


def manifest_problem(catalog: Catalog, name: CheckpointName) -> str:
    """What is wrong with a manifest that could not be read a moment ago."""
    try:
        catalog.manifest(name)
    except CheckpointError as error:
        return str(error)
    return f"checkpoint {name}: its manifest could not be read a moment ago"
