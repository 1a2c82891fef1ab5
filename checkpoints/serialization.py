"""A state tree, split into tensors and JSON, and put together again.

Promises: what `split` takes, `join` gives back exactly (types, order of keys, every bit of a
number); everything else is refused with the path of its key. Nothing that is read runs code. The
bytes of the tensors are the business of `tensorfile`, whose functions are found here too.

torch is imported only where tensors are touched: what merely checks files does without it.
"""

from __future__ import annotations

import json
import math
import struct
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeGuard

from checkpoints.canonical import JSON, LARGEST, MOST_VALUES, count_values, parse
from checkpoints.errors import DamagedError, UnsupportedStateError
from checkpoints.tensorfile import (
    ALIGNMENT,
    METADATA,
    Header,
    TensorSpec,
    byte_view,
    decode,
    decode_header,
    encode,
    encode_header,
    header_bytes,
    is_utf8,
    new_tensor,
    tensor_view,
    unsupported,
)

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "ALIGNMENT",
    "JSON",
    "MAX_STATE_BYTES",
    "METADATA",
    "Header",
    "TensorSpec",
    "byte_view",
    "decode",
    "decode_header",
    "decode_state",
    "encode",
    "encode_header",
    "encode_index",
    "encode_state",
    "header_bytes",
    "join",
    "new_tensor",
    "split",
    "tensor_view",
]

Factory: TypeAlias = Callable[[], object] | None

MAX_STATE_BYTES: Final = 256 << 20
MAX_LEVELS: Final = 60
"""Of the JSON, below the bound of what `parse` reads; a tuple takes two, a key that is no text three."""
_TAG, _VALUE = "$", "v"

_FACTORIES: dict[str, Factory] = {
    "None": None,
    "bool": bool,
    "dict": dict,
    "float": float,
    "int": int,
    "list": list,
    "str": str,
    "tuple": tuple,
}
_TUPLES: Final = {"builtins.tuple": "tuple", "torch.Size": "Size"}
"""By full name, so that who has no torch.Size needs no torch."""
_DICTS: dict[str, type[dict[Any, Any]]] = {
    "dict": dict,
    "OrderedDict": OrderedDict,
    "Counter": Counter,
}


def split(tree: object, *, where: str = "") -> tuple[dict[str, Tensor], JSON]:
    """Part a state into its tensors, by name, and a JSON skeleton that says where each belongs.

    Args:
        tree: Nested dict, list, tuple, OrderedDict, Counter, defaultdict, numbers, text, tensors.
        where: The name of the tree, for messages.

    Raises:
        UnsupportedStateError: For anything else; names the path of the key.
    """
    splitter = _Splitter(where)
    skeleton = splitter.split(tree, (), 1)
    return splitter.tensors, skeleton


class _Splitter:
    """One walk over a tree; collects the tensors that it meets."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.tensors: dict[str, Tensor] = {}

    def refusal(self, path: tuple[str, ...], found: str, expected: str) -> UnsupportedStateError:
        name = ".".join((self.where, *path) if self.where else path) or "state"
        message = f"{name}: found {found}, expected {expected}; leave it out or turn it into one"
        return UnsupportedStateError(message)

    def split(self, value: object, path: tuple[str, ...], level: int) -> JSON:
        if level > MAX_LEVELS:
            raise self.refusal(
                path[:4], f"{MAX_LEVELS} levels and more below it", "a flatter state"
            )
        if value is None or type(value) in (bool, int, float, str):
            return _encode_scalar(value)
        if type(value) is list:
            return [self.split(item, (*path, str(i)), level + 1) for i, item in enumerate(value)]
        if isinstance(value, tuple) and (tag := _TUPLES.get(_full_name(type(value)))):
            items = [self.split(item, (*path, str(i)), level + 2) for i, item in enumerate(value)]
            return _tagged(tag, items)
        if isinstance(value, dict):
            return self._split_dict(value, path, level)
        if _is_tensor(value):
            return _tagged("tensor", self._add(value, path))
        raise self.refusal(path, _describe(value), "a tensor or JSON")

    def _split_dict(self, value: dict[object, object], path: tuple[str, ...], level: int) -> JSON:
        if type(value) is dict and all(map(_is_plain_key, value)):
            return {
                str(key): self.split(item, (*path, str(key)), level + 1)
                for key, item in value.items()
            }
        below = level + (5 if type(value) is defaultdict else 3)
        pairs: list[JSON] = [
            [self._split_key(key, path, below), self.split(item, (*path, str(key)), below)]
            for key, item in value.items()
        ]
        for tag, kind in _DICTS.items():
            if type(value) is kind:
                return _tagged(tag, pairs)
        if type(value) is defaultdict:
            for name, factory in _FACTORIES.items():
                if value.default_factory is factory:
                    return _tagged("defaultdict", [name, _tagged("dict", pairs)])
            raise self.refusal(
                path, "a defaultdict of a factory of its own", "one of a builtin type"
            )
        raise self.refusal(path, _describe(value), "a plain dict")

    def _split_key(self, key: object, path: tuple[str, ...], level: int) -> JSON:
        if key is None or type(key) in (bool, int, float, str):
            return _encode_scalar(key)
        if type(key) is tuple and level < MAX_LEVELS:
            return _tagged("tuple", [self._split_key(item, path, level + 2) for item in key])
        raise self.refusal(
            (*path, repr(key)[:40]), f"a key of {_describe(key)}", "text or a number"
        )

    def _add(self, tensor: Tensor, path: tuple[str, ...]) -> str:
        fault = unsupported(tensor)
        if fault is not None:
            raise self.refusal(path, fault, "a dense tensor of a type that safetensors has")
        stem = ".".join(path).encode("utf-8", "replace").decode() or "value"
        name, number = stem, 1
        while name in self.tensors or name == METADATA:  # {"a.b": t, "a": {"b": t}}
            number += 1
            name = f"{stem}#{number}"
        self.tensors[name] = tensor
        return name


def join(skeleton: JSON, tensors: Mapping[str, Tensor | None], *, where: str = "state") -> object:
    """Put a tree together again: the inverse of `split`.

    Raises:
        DamagedError: The skeleton is none, or it and the tensors do not belong together.
    """
    joiner = _Joiner(where, tensors)
    tree = joiner.join(skeleton, 0)
    unused = next((name for name in tensors if name not in joiner.used), None)
    if unused is not None:
        raise DamagedError(f"{where}: tensor {unused!r} has no place in the state")
    return tree


class _Joiner:
    """One walk over a skeleton; notes the tensors that it uses."""

    def __init__(self, where: str, tensors: Mapping[str, Tensor | None]) -> None:
        self.where = where
        self.tensors = tensors
        self.used: set[str] = set()

    def damage(self, found: object) -> DamagedError:
        return DamagedError(f"{self.where}: found {str(found)[:80]!r}, expected a saved state")

    def join(self, value: JSON, depth: int) -> object:
        if depth > MAX_LEVELS:
            raise self.damage("too deep a tree")
        if isinstance(value, list):
            return [self.join(item, depth + 1) for item in value]
        if not isinstance(value, dict):
            if isinstance(value, float) and not math.isfinite(value):
                raise self.damage(value)
            return value
        if _TAG not in value:
            return {key: self.join(item, depth + 1) for key, item in value.items()}
        tag = value[_TAG]
        if value.keys() != {_TAG, _VALUE} or not isinstance(tag, str):
            raise self.damage(value)
        return self._join_tagged(tag, value[_VALUE], depth + 1)

    def _join_tagged(self, tag: str, inner: JSON, depth: int) -> object:
        if tag == "tensor":
            if not isinstance(inner, str) or inner not in self.tensors:
                raise DamagedError(f"{self.where}: tensor {str(inner)[:80]!r} is missing")
            self.used.add(inner)
            return self.tensors[inner]
        if tag in ("int", "float", "str"):
            return self._join_scalar(tag, inner)
        if not isinstance(inner, list):
            raise self.damage(inner)
        if tag in _TUPLES.values():
            return self._join_tuple(tag, inner, depth)
        if tag == "defaultdict":
            if len(inner) != 2 or not isinstance(inner[0], str) or inner[0] not in _FACTORIES:
                raise self.damage(inner)
            plain = self.join(inner[1], depth + 1)
            if not isinstance(plain, dict):
                raise self.damage(plain)
            factory: Factory = _FACTORIES[inner[0]]
            return defaultdict(factory, plain)
        if tag not in _DICTS:
            raise self.damage(tag)
        tree = _DICTS[tag]()
        for key, item in self._join_pairs(inner, depth + 1).items():
            tree[key] = item  # one by one: a Counter of pairs would count them
        return tree

    def _join_tuple(self, tag: str, inner: list[JSON], depth: int) -> object:
        if tag == "tuple":
            return tuple(self.join(item, depth + 1) for item in inner)
        if not all(type(item) is int for item in inner):
            raise self.damage(inner)
        import torch

        return torch.Size(inner)  # type: ignore[arg-type]  # each was looked at

    def _join_scalar(self, tag: str, inner: JSON) -> object:
        if not isinstance(inner, str):
            raise self.damage(inner)
        try:
            if tag == "int":
                return int(inner, 16)
            if tag == "float":
                return float(struct.unpack(">d", bytes.fromhex(inner))[0])
            return bytes.fromhex(inner).decode("utf-8", "surrogatepass")
        except (ValueError, struct.error):
            raise self.damage(inner) from None

    def _join_pairs(self, inner: list[JSON], depth: int) -> dict[object, object]:
        pairs: dict[object, object] = {}
        for pair in inner:
            if not isinstance(pair, list) or len(pair) != 2:
                raise self.damage(pair)
            key = self._join_key(pair[0], depth + 1)
            if key in pairs:
                raise self.damage(pair[0])
            pairs[key] = self.join(pair[1], depth + 1)
        return pairs

    def _join_key(self, value: JSON, depth: int) -> object:
        """A key: a scalar, or a tuple of keys; nothing else is ever written as one."""
        if not isinstance(value, dict | list):
            return self.join(value, depth)
        tag = value.get(_TAG) if isinstance(value, dict) else None
        if tag in ("int", "float", "str"):
            return self.join(value, depth)
        inner = value.get(_VALUE) if isinstance(value, dict) and tag == "tuple" else None
        if not isinstance(inner, list) or depth > MAX_LEVELS or len(value) != 2:
            raise self.damage(value)
        return tuple(self._join_key(item, depth + 2) for item in inner)


def _tagged(tag: str, value: JSON) -> dict[str, JSON]:
    return {_TAG: tag, _VALUE: value}


def _encode_scalar(value: object) -> JSON:
    if isinstance(value, str):
        if is_utf8(value):
            return value
        return _tagged("str", value.encode("utf-8", "surrogatepass").hex())
    if isinstance(value, float):
        return value if math.isfinite(value) else _tagged("float", struct.pack(">d", value).hex())
    if isinstance(value, int) and abs(value) > LARGEST:
        return _tagged("int", hex(value))
    return value if isinstance(value, int) else None


def _is_plain_key(key: object) -> bool:
    return type(key) is str and key != _TAG and is_utf8(key)


def _full_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _is_tensor(value: object) -> TypeGuard[Tensor]:
    import torch

    return isinstance(value, torch.Tensor)


def _describe(value: object) -> str:
    return _full_name(type(value)).removeprefix("builtins.")[:80]


def encode_state(document: dict[str, JSON]) -> bytes:
    """The bytes of state.json. Keys keep their order: a dict's order is part of the state.

    Raises:
        UnsupportedStateError: It is larger than what is read back.
    """
    data = json.dumps(document, allow_nan=False, separators=(",", ":")).encode("ascii")
    if len(data) > MAX_STATE_BYTES:
        raise UnsupportedStateError(
            f"state.json: found {len(data)} bytes, expected at most {MAX_STATE_BYTES};"
            " keep large data in tensors"
        )
    if (count := count_values(data)) > MOST_VALUES:
        raise UnsupportedStateError(
            f"state.json: found up to {count} values, expected at most {MOST_VALUES};"
            " keep large data in tensors"
        )
    return data


def decode_state(data: bytes, *, where: str = "state.json") -> dict[str, JSON]:
    """The document in the bytes of a state.json.

    Raises:
        DamagedError: They are no JSON object of the kind that is written here.
    """
    return parse(data, where, limit_bytes=MAX_STATE_BYTES, error=DamagedError)


def encode_index(files: Mapping[str, Mapping[str, Tensor]]) -> bytes:
    """The index of tensors that are split over several files, as Hugging Face writes it."""
    sizes = [t.numel() * t.element_size() for tensors in files.values() for t in tensors.values()]
    weights = {name: file for file, tensors in files.items() for name in tensors}
    index = {"metadata": {"total_size": sum(sizes)}, "weight_map": weights}
    return json.dumps(index, indent=2).encode("ascii")
