"""A tiny reader and writer of safetensors files, for the data of the shipped jobs.

Promises: nothing in a file can run code; a file that is cut or strange is one clear line; a written
file is there whole or not at all. Only what the jobs need is known: bytes and 64-bit integers.
"""

from __future__ import annotations

import json
import math
import os
import struct
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from jobs.errors import JobError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

MAX_HEADER_BYTES = 1 << 16
_DTYPES = {"U8": torch.uint8, "I64": torch.int64}


class TensorFile(NamedTuple):
    """What a file holds: its tensors, and the texts that were written beside them."""

    tensors: dict[str, Tensor]
    notes: dict[str, str]


def read_tensors(path: Path) -> TensorFile:
    """Map a file into memory and view its tensors there; pages are read when they are used.

    Raises:
        JobError: The file is missing or is no such file.
    """
    try:
        size = path.stat().st_size
        data = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or "it cannot be mapped"
        raise JobError(f"{path}: cannot be read ({reason}); install or make it again") from error
    try:
        header_bytes = _header_bytes(bytes(data[:8].tolist()))
        base = 8 + header_bytes
        header: dict[str, Any] = json.loads(bytes(data[8:base].tolist()))
        notes = {str(key): str(text) for key, text in header.pop("__metadata__", {}).items()}
        tensors = {name: _view(data[base:], entry) for name, entry in header.items()}
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise JobError(f"{path}: not a whole safetensors file ({error})") from error
    return TensorFile(tensors, notes)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], notes: Mapping[str, str]) -> None:
    """Write a file beside its place and then rename it, so that readers see it whole."""
    header: dict[str, object] = {"__metadata__": dict(notes)}
    names = {dtype: name for name, dtype in _DTYPES.items()}
    start = 0
    # Wide elements first: each tensor then begins where its elements can be aligned.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    for name, tensor in ordered:
        stop = start + tensor.nbytes
        shape = list(tensor.shape)
        header[name] = {"dtype": names[tensor.dtype], "shape": shape, "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for _, tensor in ordered:
                tensor.contiguous().numpy().tofile(file)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _header_bytes(start: bytes) -> int:
    """Read the length of the header; one that cannot be is a ValueError."""
    size: int = struct.unpack("<Q", start)[0]
    if size > MAX_HEADER_BYTES:
        raise ValueError(f"found a header of {size} bytes, expected at most {MAX_HEADER_BYTES}")
    return size


def _view(data: Tensor, entry: Mapping[str, Any]) -> Tensor:
    """View one tensor's bytes; whatever does not fit is a ValueError."""
    dtype = _DTYPES.get(entry["dtype"])
    start, stop = entry["data_offsets"]
    shape = [int(length) for length in entry["shape"]]
    fits = dtype is not None and 0 <= start <= stop <= len(data)
    if dtype is None or not fits or math.prod(shape) * dtype.itemsize != stop - start:
        raise ValueError(f"found {dict(entry)} with {len(data)} bytes of data")
    return data[start:stop].view(dtype).view(shape)
