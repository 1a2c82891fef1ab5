"""What makes two starts the same run: the identity in run.json, and what ranks must agree on.

Pure but for the probing of a dataset, which reads a few of its items. A difference is told by naming
the key, what was there and what is found, so that nobody trains on another dataset, model or order
than the run began with.
"""

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from datetime import date, time, timedelta
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from pathlib import PurePath
from typing import Any, Final
from uuid import UUID

import torch
from torch import Tensor
from torch.utils.data import Dataset

from elastic.errors import StartError
from elastic.seeding import kept_random_state, mix, seed_all

__all__ = ["compare_identity", "compare_ranks", "fingerprint_dataset"]

_PROBES: Final = 8
_PROBE_KEY: Final = 0x5EED
_BY_TEXT: Final = (complex, range, Enum, PurePath, date, time, timedelta, Decimal, Fraction, UUID)
"""What its text tells exactly, the same in every process."""


def fingerprint_dataset(dataset: Dataset[Any], n: int, own: str | None) -> dict[str, Any]:
    """Length and either the job's own fingerprint or hashes of a few items, spread evenly.

    Items are read with fixed random seeds, so that augmentation does not change the hash; an item that
    differs all the same when it is read twice (a generator of its own) tells nothing and is not compared.
    """
    if own is not None:
        return {"length": n, "fingerprint": own}
    with kept_random_state():
        probes = {str(index): _probe(dataset, index) for index in _probe_indices(n)}
    return {"length": n, "items": probes}


def _probe(dataset: Dataset[Any], index: int) -> str:
    digests = []
    for _ in range(2):
        seed_all(mix(_PROBE_KEY, index))
        digests.append(_digest(dataset[index]).hex()[:16])
    return digests[0] if digests[0] == digests[1] else "random"


def _probe_indices(n: int) -> list[int]:
    return sorted({(n - 1) * k // (_PROBES - 1) for k in range(_PROBES)})


def _feed(update: Any, value: Any) -> None:
    """Hash what can be told exactly; of anything else the type alone."""
    update(type(value).__name__.encode())
    if isinstance(value, Tensor):
        update(f"{value.dtype}{tuple(value.shape)}".encode())
        plain = value.detach().cpu().to_dense().resolve_conj().contiguous()
        update(bytes(plain.flatten().view(torch.uint8).numpy() if plain.numel() else b""))
    elif getattr(getattr(value, "dtype", None), "hasobject", False):
        # The bytes of such an array are addresses.
        _feed(update, value.tolist())
    elif hasattr(value, "tobytes"):
        update(
            f"{getattr(value, 'dtype', '')}{getattr(value, 'shape', getattr(value, 'size', ''))}".encode()
        )
        update(value.tobytes())
    elif isinstance(value, bool | int | str | bytes | None):
        update(repr(value).encode())
    elif isinstance(value, float):
        update(struct.pack("<d", value))
    elif isinstance(value, _BY_TEXT):
        update(str(value).encode())
    else:
        _feed_parts(update, value)


def _feed_parts(update: Any, value: Any) -> None:
    """Hash what a container or a dataclass holds."""
    if isinstance(value, Mapping):
        update(str(len(value)).encode())
        for key in sorted(value, key=str):
            update(repr(key).encode() if isinstance(key, str | int) else str(key).encode())
            _feed(update, value[key])
    elif isinstance(value, tuple | list):
        update(str(len(value)).encode())
        for item in value:
            _feed(update, item)
    elif isinstance(value, set | frozenset):
        update(str(len(value)).encode())
        for digest in sorted(_digest(item) for item in value):  # their order is the process' own
            update(digest)
    elif is_dataclass(value) and not isinstance(value, type):
        for part in fields(value):
            if part.compare:
                update(part.name.encode())
                _feed(update, getattr(value, part.name))


def _digest(value: Any) -> bytes:
    digest = hashlib.sha256()
    _feed(digest.update, value)
    return digest.digest()


def compare_ranks(told: Sequence[Mapping[str, Any]]) -> None:
    """Check that all ranks see the same dataset, model and sampling; `told` is by rank.

    Raises:
        StartError: Two ranks differ; names the ranks and what differs.
    """
    first = told[0]
    for rank, other in enumerate(told[1:], start=1):
        if other["dataset"] != first["dataset"]:
            what = _dataset_difference(first["dataset"], other["dataset"])
            raise StartError(
                f"dataset: ranks 0 and {rank} see different data, {what}; make the job's dataset() "
                "the same on every rank (sort file lists, seed shuffles), or give the job a fingerprint()"
            )
        if other["model"] != first["model"]:
            what = _model_difference(first["model"], other["model"])
            raise StartError(f"model: ranks 0 and {rank} built different models, {what}")
        if other.get("sampling") != first.get("sampling"):
            what = f"{first.get('sampling')} and {other.get('sampling')}"
            raise StartError(
                f"sampling: ranks 0 and {rank} want different draws, {what}; make the job's sampling() "
                "the same on every rank"
            )


def compare_identity(
    saved: Mapping[str, Any], present: Mapping[str, Any], accept: Sequence[str]
) -> list[str]:
    """Check this start against run.json; returns a note for each accepted difference.

    Raises:
        StartError: A difference that `run.accept` does not name; names key, old and new.
    """
    notes = []
    for key in sorted({*saved, *present}):
        old, new = saved.get(key), present.get(key)
        if old == new:
            continue
        if key == "dataset":
            what = _dataset_difference(old, new)
        elif key == "model":
            what = _model_difference(old, new)
        else:
            what = f"it was {old!r}, this start has {new!r}"
        if key in accept and key != "model":
            notes.append(f"{key}: {what} (accepted by run.accept)")
            continue
        way_out = (
            "start a new checkpoint.url, with checkpoint.init_from to begin from part of the weights"
            if key == "model"
            else f"restore it, take a new checkpoint.url, or say run.accept=[{key}]"
        )
        raise StartError(f"{key}: this run is another one, {what}; {way_out}")
    return notes


def _dataset_difference(old: Any, new: Any) -> str:
    if not isinstance(old, Mapping) or not isinstance(new, Mapping):
        return f"{old} and {new}"
    if old.get("length") != new.get("length"):
        return f"its length is {old.get('length')} and {new.get('length')}"
    if "fingerprint" in old or "fingerprint" in new:
        return f"its fingerprint is {old.get('fingerprint')!r} and {new.get('fingerprint')!r}"
    before, after = old.get("items", {}), new.get("items", {})
    for index in sorted({*before, *after}, key=int):
        if before.get(index) != after.get(index):
            return f"the content of item {index} differs"
    return "its record differs"


def _model_difference(old: Any, new: Any) -> str:
    before = {name: (dtype, tuple(shape)) for name, dtype, shape in old}
    after = {name: (dtype, tuple(shape)) for name, dtype, shape in new}
    wrong = [
        n
        for n in (*before, *(n for n in after if n not in before))
        if before.get(n) != after.get(n)
    ]
    if not wrong:
        return "its tensors come in another order"
    name = wrong[0]
    more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
    return f"tensor {name} is {_told(before.get(name))} and {_told(after.get(name))}{more}"


def _told(tensor: tuple[str, tuple[int, ...]] | None) -> str:
    return "missing" if tensor is None else f"{tensor[0]} of shape {tuple(tensor[1])}"
