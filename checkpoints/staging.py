"""Which file each part of a state goes to: planned once, and again only where the state has changed.

Promises: the weights open with safetensors alone, under exactly their names; what is neither tensor nor
JSON is refused with the name of its key. Copies nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from checkpoints import frozen
from checkpoints.canonical import dump, plain
from checkpoints.errors import DamagedError, OptionError, UnsupportedStateError
from checkpoints.layout import RUN_ID_LIMIT, Manifest
from checkpoints.serialization import (
    Header,
    encode_header,
    encode_index,
    encode_state,
    split,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from checkpoints.canonical import JSON
    from checkpoints.layout import CheckpointName

STATE: Final = "state.json"
MODEL: Final = "model"
STATE_FORMAT: Final = 1
LARGEST_INFO: Final = 1 << 20
"""A quarter of what a manifest may have when it is created: the rest is for the sums."""
_KEY: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,99}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """One file of tensors: its first bytes, where each tensor lies, and the tensors themselves."""

    start: bytes
    header: Header
    tensors: Mapping[str, Tensor]
    shape: tuple[object, ...]
    """Names, types and shapes: where they are the same, so is the header."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tables:
    """All files of a state."""

    files: Mapping[str, Table]
    texts: Mapping[str, bytes]
    keys: Mapping[str, str]
    """Of which key of the state each file of tensors is."""

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each file, texts last: theirs may change from save to save."""
        sizes = {name: table.header.file_bytes for name, table in self.files.items()}
        return sizes | {name: len(text) for name, text in self.texts.items()}

    def views(
        self, memory: memoryview, places: Mapping[str, tuple[int, int]]
    ) -> dict[tuple[str, str], memoryview]:
        """The bytes of each tensor, by key and name, in memory where each file has its place."""
        found = {}
        for file, table in self.files.items():
            for spec in table.header.tensors:
                start = places[file][0] + spec.offset
                found[self.keys[file], spec.name] = memory[start : start + spec.size_bytes]
        return found


def plan_files(
    tree: Mapping[str, object],
    split_bytes: int,
    before: Tables | None,
    seen: Mapping[str, frozenset[str]] | None = None,
) -> Tables:
    """The files of a state; headers that fit are taken from the plan before.

    Args:
        tree: The state.
        split_bytes: Files of tensors are split so that none is larger, where tensors allow it.
        before: The plan of the snapshot before.
        seen: By key, the tensors that were seen not to change; they get files of their own.

    Raises:
        UnsupportedStateError: Something in the state is neither tensor nor JSON.
    """
    tensors, texts, keys = _plan(tree, split_bytes, seen or {})
    files: dict[str, Table] = {}
    for name, table in tensors.items():
        shape = tuple((key, t.dtype, t.shape, t.layout) for key, t in table.items())
        known = None if before is None else before.files.get(name)
        if known is not None and known.shape == shape:
            start, header = known.start, known.header
        else:
            start, header = encode_header(table)
        files[name] = Table(start=start, header=header, tensors=table, shape=shape)
    return Tables(files=files, texts=texts, keys=keys)


def check_info(info: Mapping[str, JSON], name: CheckpointName, run_id: str) -> dict[str, JSON]:
    """The info as it will be read back: it stands in the manifest, so it has to be small, plain JSON.

    Raises:
        UnsupportedStateError: It is not.
        OptionError: `run_id` is none that is read back.
    """
    if not 0 < len(run_id) <= RUN_ID_LIMIT:
        found = f"{len(run_id)} characters" if run_id else "nothing"
        raise OptionError(f"run_id: found {found}, expected 1 to {RUN_ID_LIMIT} characters")
    tensors, _ = split(dict(info), where="info")
    if tensors:
        raise UnsupportedStateError(f"info.{next(iter(tensors))}: found a tensor, expected JSON")
    manifest = Manifest(name=name, parent=None, run_id=run_id, files=(), info=_object(plain(info)))
    if (size := len(dump(manifest.info))) > LARGEST_INFO:
        raise UnsupportedStateError(
            f"info: found {size} bytes, expected at most {LARGEST_INFO}; keep large data in the state"
        )
    try:
        return dict(Manifest.from_json(manifest.to_json(), name.manifest).info)
    except DamagedError as error:  # numbers or a depth that nobody reads back
        raise UnsupportedStateError(f"info: {error}") from error


def _object(value: JSON) -> dict[str, JSON]:
    return value if isinstance(value, dict) else {}


def _plan(
    tree: Mapping[str, object], split_bytes: int, seen: Mapping[str, frozenset[str]]
) -> tuple[dict[str, dict[str, Tensor]], dict[str, bytes], dict[str, str]]:
    """Which tensors go to which file, the JSON files beside them, and of which key each file is."""
    tables: dict[str, dict[str, Tensor]] = {}
    texts: dict[str, bytes] = {}
    skeletons: dict[str, JSON] = {}
    names: dict[str, JSON] = {}
    keys: dict[str, str] = {}
    for key, state in tree.items():
        if not isinstance(key, str) or not _KEY.fullmatch(key):
            raise UnsupportedStateError(
                f"{key!r}: found a key that makes no file name, expected letters, digits, _ and -"
            )
        tensors, skeletons[key] = split(state, where=key)
        if key == MODEL:
            _check_model(state, tensors)
        if not tensors and key != MODEL:
            continue
        files = _divide(key, tensors, split_bytes, seen.get(key, frozenset()))
        if files.keys() & tables.keys():
            raise UnsupportedStateError(f"{key!r}: found a second file of the name {key}")
        tables.update(files)
        keys.update(dict.fromkeys(files, key))
        names[key] = list(files)
        if len(files) > 1:
            texts[f"{key}.safetensors.index.json"] = encode_index(files)
    state_document: dict[str, JSON] = {
        "format": STATE_FORMAT,
        "files": names,
        "state": skeletons,
    }
    texts[STATE] = encode_state(state_document)
    return tables, texts, keys


def _check_model(state: object, tensors: Mapping[str, Tensor]) -> None:
    """The weights open with safetensors alone, under exactly their names: so no trees in them."""
    if not isinstance(state, dict):
        raise UnsupportedStateError(
            f"{MODEL}: found {type(state).__name__}, expected a dict of name and tensor"
        )
    for name, value in state.items():
        if tensors.get(name) is not value:
            raise UnsupportedStateError(
                f"{MODEL}.{name}: found {type(value).__name__}, expected a tensor under a plain name"
            )


def _divide(
    key: str, tensors: Mapping[str, Tensor], split_bytes: int, seen: frozenset[str]
) -> dict[str, dict[str, Tensor]]:
    """The tensors of a key in files of at most `split_bytes` (a larger tensor has its own).

    What seems frozen is not mixed with the rest: a file in which nothing changed is not sent again.
    """
    groups: list[dict[str, Tensor]] = []
    for some in frozen.part(tensors, seen):
        if some or not groups:
            groups.append({})
        filled = 0
        for name, tensor in some.items():
            size = tensor.numel() * tensor.element_size()
            if groups[-1] and filled + size > split_bytes:
                groups.append({})
                filled = 0
            groups[-1][name] = tensor
            filled += size
    if len(groups) == 1:
        return {f"{key}.safetensors": groups[0]}
    return {
        f"{key}-{number:05d}-of-{len(groups):05d}.safetensors": group
        for number, group in enumerate(groups, 1)
    }
