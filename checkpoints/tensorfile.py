"""The bytes of a safetensors file: written so that safetensors reads them, read without trust.

Promises: data starts at a multiple of 4096, so that a file can be written from its buffer with direct
I/O. `decode_header` believes nothing: a hostile header is a `DamagedError`, it never costs more
memory than its file has bytes, and no code is ever run.

torch is imported only where tensors are touched: what merely checks files does without it.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from checkpoints.canonical import JSON, LARGEST, MOST_VALUES, count_values, parse
from checkpoints.errors import CheckpointError, DamagedError, UnsupportedStateError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from torch import Tensor

ALIGNMENT: Final = 4096
_MOST_DIMENSIONS: Final = 64
MAX_HEADER_BYTES: Final = 100_000_000  # the limit of safetensors itself
METADATA: Final = "__metadata__"

# code in the file -> (name in torch, bytes of an element)
DTYPES: dict[str, tuple[str, int]] = {
    "F64": ("float64", 8),
    "C64": ("complex64", 8),
    "I64": ("int64", 8),
    "U64": ("uint64", 8),
    "F32": ("float32", 4),
    "I32": ("int32", 4),
    "U32": ("uint32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "I16": ("int16", 2),
    "U16": ("uint16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E4M3FNUZ": ("float8_e4m3fnuz", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "F8_E5M2FNUZ": ("float8_e5m2fnuz", 1),
    "I8": ("int8", 1),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
}
_CODES = {f"torch.{name}": code for code, (name, _) in DTYPES.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """Where one tensor lies in its file; `offset` counts from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Header:
    """The table of a safetensors file, in the order of the data, which starts at `size_bytes`."""

    size_bytes: int
    file_bytes: int
    tensors: tuple[TensorSpec, ...]


def unsupported(tensor: Tensor) -> str | None:
    """Why a tensor cannot be written as it is, or None where it can."""
    import torch
    from torch.nn.parameter import is_lazy
    from torch.utils import _python_dispatch as dispatch

    kind = type(tensor).__name__
    fault = None
    if dispatch.is_traceable_wrapper_subclass(tensor):
        fault = f"a {kind}, which wraps other tensors"
    elif is_lazy(tensor):
        fault = f"a {kind}, which has no shape before its first forward"
    elif kind == "FakeTensor":
        fault = "a FakeTensor, without data"
    elif tensor.device.type == "meta":
        fault = "a tensor on the meta device, without data"
    elif tensor.is_nested:
        fault = "a nested tensor"
    elif tensor.is_quantized:
        fault = f"a quantized tensor of {tensor.dtype}"
    elif tensor.layout is not torch.strided:
        fault = f"a tensor of layout {tensor.layout}"
    elif str(tensor.dtype) not in _CODES:
        fault = f"a tensor of {tensor.dtype}"
    return fault


def encode_header(tensors: Mapping[str, Tensor]) -> tuple[bytes, Header]:
    """The first bytes of the file of these tensors, padded to 4096, and the place of each.

    Data is packed without holes, wide elements first, so that each tensor is aligned to its own.

    Raises:
        UnsupportedStateError: A tensor or a name that safetensors cannot hold.
    """
    rows: list[tuple[str, str, tuple[int, ...], int]] = []
    for name, tensor in tensors.items():
        fault = unsupported(tensor)
        if fault is not None or name == METADATA or not is_utf8(name):
            found = fault or "a reserved name or one that is no UTF-8"
            raise UnsupportedStateError(f"{name!r}: found {found}, expected what safetensors has")
        size_bytes = tensor.numel() * tensor.element_size()
        rows.append((name, _CODES[str(tensor.dtype)], tuple(tensor.shape), size_bytes))
    return encode_rows(rows)


def encode_rows(rows: list[tuple[str, str, tuple[int, ...], int]]) -> tuple[bytes, Header]:
    """The same from name, type as the file has it, shape and size of each tensor; needs no torch.

    Raises:
        UnsupportedStateError: The names take more room than a header has.
    """
    rows = list(rows)
    rows.sort(key=lambda row: -DTYPES[row[1]][1])
    table: dict[str, object] = {METADATA: {"format": "pt"}}
    end = 0
    for name, dtype, shape, size_bytes in rows:
        if not _is_possible(shape, dtype):
            raise UnsupportedStateError(
                f"{name!r}: found shape {str(list(shape))[:80]}, expected at most {_MOST_DIMENSIONS}"
                f" dimensions whose product, zeros left out, is below 2**63 bytes"
            )
        offsets = [end, end + size_bytes]
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": offsets}
        end += size_bytes
    text = json.dumps(table, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    padded = -(-(8 + len(text)) // ALIGNMENT) * ALIGNMENT - 8
    if padded > MAX_HEADER_BYTES:
        raise UnsupportedStateError(
            f"{len(rows)} tensors: their names take {padded} bytes, at most {MAX_HEADER_BYTES} fit"
        )
    if (count := count_values(text)) > MOST_VALUES:
        raise UnsupportedStateError(
            f"{len(rows)} tensors: their table has up to {count} values, at most {MOST_VALUES} are read"
        )
    header = struct.pack("<Q", padded) + text.ljust(padded)
    specs, offset = [], len(header)
    for name, dtype, shape, size_bytes in rows:
        spec = TensorSpec(name=name, dtype=dtype, shape=shape, offset=offset, size_bytes=size_bytes)
        specs.append(spec)
        offset += size_bytes
    return header, Header(size_bytes=len(header), file_bytes=offset, tensors=tuple(specs))


def encode(tensors: Mapping[str, Tensor]) -> tuple[bytes, list[memoryview]]:
    """A safetensors file: its header, and the bytes of each tensor in their order.

    Contiguous tensors in host memory are not copied: write the views before the tensors change.
    """
    header, table = encode_header(tensors)
    return header, [byte_view(tensors[spec.name]) for spec in table.tensors]


def byte_view(tensor: Tensor) -> memoryview:
    """The bytes of a tensor: its own memory where it is contiguous in host memory, else a copy."""
    import torch

    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().data


def new_tensor(spec: TensorSpec) -> tuple[Tensor, memoryview]:
    """An empty tensor in host memory, and its bytes, to be read into.

    Raises:
        CheckpointError: There is not that much memory.
    """
    import torch

    try:
        tensor = torch.empty(spec.shape, dtype=getattr(torch, DTYPES[spec.dtype][0]))
    except (MemoryError, RuntimeError) as error:  # torch raises the latter
        raise CheckpointError(
            f"tensor {spec.name[:80]!r}: its {spec.size_bytes} bytes are more than this machine"
            " gives; is it the right checkpoint?"
        ) from error
    return tensor, byte_view(tensor)


def tensor_view(buffer: Tensor, spec: TensorSpec) -> Tensor:
    """The tensor that lies at its place in a file image (a tensor of bytes)."""
    import torch

    part = buffer[spec.offset : spec.offset + spec.size_bytes]
    dtype: torch.dtype = getattr(torch, DTYPES[spec.dtype][0])
    return part.view(dtype).view(spec.shape)


def decode(data: bytes, *, where: str = "file") -> dict[str, Tensor]:
    """All tensors of a safetensors file that is in memory (copied out of it).

    Raises:
        DamagedError: It is no such file, or not a whole one.
    """
    tensors: dict[str, Tensor] = {}
    for spec in decode_header(data, len(data), where=where).tensors:
        tensors[spec.name], view = new_tensor(spec)
        view[:] = memoryview(data)[spec.offset : spec.offset + spec.size_bytes]
    return tensors


def header_bytes(start: bytes, file_bytes: int, *, where: str = "file") -> int:
    """Length of the header (where the data starts), from the first 8 bytes of a file.

    Raises:
        DamagedError: No such header can be in a file of this size.
    """
    if len(start) < 8 or file_bytes < 10:
        raise DamagedError(f"{where}: found {file_bytes} bytes, expected a safetensors file")
    length = int.from_bytes(start[:8], "little")
    if length > min(MAX_HEADER_BYTES, file_bytes - 8) or length < 2:
        raise DamagedError(
            f"{where}: found a header of {length} bytes in a file of {file_bytes},"
            " expected a safetensors file"
        )
    return 8 + length


def decode_header(data: bytes, file_bytes: int, *, where: str = "file") -> Header:
    """Read the header of a safetensors file, strictly.

    Args:
        data: The file, or its start; the whole header must be in it.
        file_bytes: Size of the whole file.
        where: What the file is called in messages.

    Raises:
        DamagedError: Anything is not as the format has it, or does not fit the size of the file.
    """
    start = header_bytes(data[:8], file_bytes, where=where)
    if len(data) < start:
        raise DamagedError(f"{where}: ends within its header, at {len(data)} of {start} bytes")
    table = parse(bytes(data[8:start]), where, limit_bytes=MAX_HEADER_BYTES, error=DamagedError)
    metadata = table.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise DamagedError(f"{where}: the header's {METADATA} is no table of texts")
    specs = [_read_spec(name, entry, start, where) for name, entry in table.items()]
    specs.sort(key=lambda spec: (spec.offset, spec.size_bytes))
    end = start
    for spec in specs:
        if spec.offset != end:
            raise DamagedError(
                f"{where}: tensor {spec.name[:80]!r} starts at byte {spec.offset}, expected {end}"
            )
        end += spec.size_bytes
    if end != file_bytes:
        raise DamagedError(f"{where}: found {file_bytes} bytes, the header tells {end}")
    return Header(size_bytes=start, file_bytes=file_bytes, tensors=tuple(specs))


def _read_spec(name: str, entry: JSON, start: int, where: str) -> TensorSpec:
    def damage(found: object) -> DamagedError:
        return DamagedError(f"{where}: tensor {name[:80]!r}: impossible {str(found)[:80]}")

    if not is_utf8(name):
        raise damage("name: it is no text that a file can hold")
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise damage("entry")
    dtype = entry["dtype"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise damage(f"dtype {dtype}")
    shape = _read_sizes(entry["shape"])
    offsets = _read_sizes(entry["data_offsets"])
    if shape is None or len(shape) > _MOST_DIMENSIONS:
        raise damage(f"shape {entry['shape']}")
    if offsets is None or len(offsets) != 2 or not _is_possible(shape, dtype):
        raise damage(f"data_offsets {entry['data_offsets']} of shape {entry['shape']}")
    size_bytes = offsets[1] - offsets[0]
    if size_bytes != math.prod(shape) * DTYPES[dtype][1]:
        raise damage(f"size: {size_bytes} bytes for shape {list(shape)} of {dtype}")
    return TensorSpec(
        name=name, dtype=dtype, shape=shape, offset=start + offsets[0], size_bytes=size_bytes
    )


def _is_possible(shape: tuple[int, ...], dtype: str) -> bool:
    """Whether a reader takes a shape: of an empty tensor, too, torch multiplies the other sizes."""
    extent = math.prod(max(size, 1) for size in shape) * DTYPES[dtype][1]
    return len(shape) <= _MOST_DIMENSIONS and extent <= LARGEST


def _read_sizes(value: JSON) -> tuple[int, ...] | None:
    """A list of counts, or None where it is something else."""
    if not isinstance(value, list):
        return None
    sizes = tuple(size for size in value if type(size) is int and 0 <= size <= LARGEST)
    return sizes if len(sizes) == len(value) else None


def is_utf8(text: str) -> bool:
    """Whether a text can be written as UTF-8; a lone surrogate cannot."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
