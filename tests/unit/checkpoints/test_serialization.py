"""What is split is joined exactly; what is encoded is what safetensors reads; nothing is trusted."""

import json
import math
import pickle
import random
import struct
import tracemalloc
import warnings
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save

from checkpoints import tensorfile
from checkpoints.copier import keep
from checkpoints.errors import DamagedError, UnsupportedStateError
from checkpoints.serialization import (
    ALIGNMENT,
    JSON,
    decode,
    decode_header,
    decode_state,
    encode,
    encode_state,
    header_bytes,
    join,
    split,
)
from tests.support.states import same

DTYPES = [getattr(torch, name) for name, _ in tensorfile.DTYPES.values()]


def filled(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """A tensor of random bits (of 0 and 1 where it is bool), so with NaNs and infinities."""
    size = torch.empty(0, dtype=dtype).element_size()
    generator = torch.Generator().manual_seed(size)
    high = 2 if dtype is torch.bool else 256
    bits = torch.randint(0, high, (*shape, size), generator=generator, dtype=torch.uint8)
    return bits.view(dtype).view(shape)


def whole(tensors: dict[str, torch.Tensor]) -> bytes:
    header, views = encode(tensors)
    return b"".join([header, *views])


def through_bytes(tree: object) -> object:
    """Split, write, read, join: what a checkpoint does."""
    tensors, skeleton = split(tree)
    document = decode_state(encode_state({"tree": skeleton}))
    return join(document["tree"], decode(whole(tensors)))


# ---------------------------------------------------------------------------- files of safetensors
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_safetensors_reads_every_type_bit_for_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = {
        "weights": filled(dtype, 3, 5),
        "scalar": filled(dtype, 1).reshape(()),
        "empty": torch.empty((0, 7), dtype=dtype),
        "transposed": filled(dtype, 4, 6).t(),
        "strided": filled(dtype, 9, 4)[::2, 1:3],
    }
    path = tmp_path / "t.safetensors"
    path.write_bytes(whole(tensors))
    loaded = load_file(path)
    with safe_open(path, "pt") as file:
        opened = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
        assert file.metadata() == {"format": "pt"}
    for found in (loaded, opened, decode(path.read_bytes())):
        assert found.keys() == tensors.keys()
        assert all(same(found[name], tensors[name].contiguous()) for name in tensors)


def test_files_of_safetensors_itself_are_read() -> None:
    tensors = {f"{i}": filled(dtype, 3, i + 1) for i, dtype in enumerate(DTYPES)}
    found = decode(save(tensors, metadata={"any": "thing"}))
    assert all(same(found[name], tensors[name]) for name in tensors)


def test_data_starts_at_a_multiple_of_4096_and_tensors_are_aligned_to_their_elements() -> None:
    tensors = {f"layer.{i}": filled(dtype, 3) for i, dtype in enumerate(reversed(DTYPES * 20))}
    header = decode_header(whole(tensors), len(whole(tensors)))
    assert header.size_bytes % ALIGNMENT == 0
    assert all(s.offset % tensorfile.DTYPES[s.dtype][1] == 0 for s in header.tensors)


def test_tied_tensors_are_both_written() -> None:
    shared = filled(torch.float32, 4, 4)
    tensors, skeleton = split({"embedding": shared, "head": shared})
    found = decode(whole(tensors))
    assert found.keys() == {"embedding", "head"}
    assert same(join(skeleton, found), {"embedding": shared, "head": shared})


def test_parameters_and_lazy_views_are_written_as_plain_values(tmp_path: Path) -> None:
    base = torch.randn(3, dtype=torch.complex64)
    negative = base.conj().imag  # a view with the negative bit
    tensors = {"p": torch.nn.Parameter(torch.ones(2)), "c": base.conj(), "n": negative}
    path = tmp_path / "t.safetensors"
    path.write_bytes(whole(tensors))
    found = load_file(path)
    assert torch.equal(found["c"], base.conj().resolve_conj())
    assert torch.equal(found["n"], -base.imag)
    assert torch.equal(found["p"], torch.ones(2))


def test_contiguous_tensors_are_not_copied_for_encoding() -> None:
    tensor = torch.zeros(8)
    _, views = encode({"a": tensor})
    tensor.fill_(1.0)
    assert bytes(views[0]) == struct.pack("<8f", *[1.0] * 8)


def test_a_file_without_tensors_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "e.safetensors").write_bytes(whole({}))
    assert load_file(tmp_path / "e.safetensors") == {}
    assert decode(whole({})) == {}


def test_names_of_any_letters_return() -> None:
    tensors = {name: torch.ones(1) for name in ("", "ä.ö", "a b", '"', "\u2028", "\x00", "🙂")}
    assert decode(whole(tensors)).keys() == tensors.keys()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_is_refused_by_name() -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    with pytest.raises(
        UnsupportedStateError, match=r"^job\.odd: found a nested tensor, expected a"
    ):
        split({"odd": keep(nested, frozenset())}, where="job")


def test_a_shape_comes_back_as_a_shape() -> None:
    tree = {"shape": torch.Size([2, 0, 3]), "scalar": torch.Size([]), "plain": (2, 3)}
    assert same(through_bytes(tree), tree)
    wrongs: list[list[JSON]] = [[True], ["2"], [2.0], [[2]]]
    for wrong in wrongs:
        with pytest.raises(DamagedError):
            join({"$": "Size", "v": wrong}, {})


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(2, 2).to_sparse(),
        torch.ones(2, device="meta"),
        torch.ones(2, dtype=torch.complex128),
        torch.nn.UninitializedParameter(),
    ],
    ids=["sparse", "meta", "complex128", "lazy"],
)
def test_a_tensor_that_safetensors_cannot_hold_is_refused_by_name(tensor: torch.Tensor) -> None:
    state = {"odd": [keep(tensor, frozenset())]}  # keeping it for the copy passes it on
    with pytest.raises(UnsupportedStateError, match=r"^job\.odd\.0: found an? .*expected a dense"):
        split(state, where="job")
    with pytest.raises(UnsupportedStateError, match=r"^'w': found an? "):
        encode({"w": tensor})


# ------------------------------------------------------------------------------ hostile headers
def file_of(table: object, data: bytes = b"") -> bytes:
    text = table if isinstance(table, bytes) else json.dumps(table).encode()
    return struct.pack("<Q", len(text)) + text + data


F32: dict[str, Any] = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
HOSTILE = {
    "empty file": b"",
    "pickle": pickle.dumps({"a": 1}),
    "header longer than the file": struct.pack("<Q", 2**63) + b"{}",
    "header of 90 MB in a small file": struct.pack("<Q", 90_000_000) + b"{}",
    "no JSON": file_of(b"\x80\x04abc"),
    "no UTF-8": file_of(b'{"\xff":1}'),
    "a list": file_of([]),
    "deep": file_of(b"[" * 100_000),
    "deep objects": file_of(b'{"a":' * 100_000),
    "NaN": file_of(b'{"a":NaN}'),
    "name twice": file_of(b'{"a":%b,"a":%b}' % ((json.dumps(F32).encode(),) * 2), b"8bytes.."),
    "unknown type": file_of({"a": F32 | {"dtype": "F31"}}, b"8bytes.."),
    "type that is a list": file_of({"a": F32 | {"dtype": ["F32"]}}, b"8bytes.."),
    "further key": file_of({"a": F32 | {"code": "x"}}, b"8bytes.."),
    "missing key": file_of({"a": {"dtype": "F32", "shape": [2]}}, b"8bytes.."),
    "negative size": file_of({"a": F32 | {"shape": [-2]}}, b"8bytes.."),
    "size that is true": file_of({"a": F32 | {"shape": [True, 2]}}, b"8bytes.."),
    "huge shape": file_of({"a": F32 | {"shape": [2**40, 2**40]}}, b"8bytes.."),
    "huge empty shape": file_of({"a": F32 | {"shape": [0, 2**62, 8], "data_offsets": [0, 0]}}),
    "number of a million digits": file_of(b'{"a":{"dtype":"F32","shape":[%b]}}' % (b"9" * 10**6)),
    "too many dimensions": file_of({"a": F32 | {"shape": [1] * 1000 + [2]}}, b"8bytes.."),
    "hole": file_of({"a": F32 | {"data_offsets": [4, 12]}}, b"12 bytes...."),
    "overlap": file_of({"a": F32, "b": F32}, b"8bytes.."),
    "backwards": file_of({"a": F32 | {"data_offsets": [8, 0]}}, b"8bytes.."),
    "beyond the end": file_of({"a": F32}, b"4by."),
    "bytes left over": file_of({"a": F32}, b"8bytes..+"),
    "metadata of numbers": file_of({"__metadata__": {"a": 1}}),
    "metadata that is none": file_of({"__metadata__": []}),
    "entry that is none": file_of({"a": [1]}, b"8bytes.."),
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_header_is_damage_and_costs_no_memory(data: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(DamagedError, match=r"^m\.safetensors: "):
            decode(data, where="m.safetensors")
        assert tracemalloc.get_traced_memory()[1] < 40 * len(data) + 1_000_000
    finally:
        tracemalloc.stop()


def test_the_length_of_the_header_is_known_from_eight_bytes() -> None:
    data = whole({"a": torch.ones(3)})
    assert header_bytes(data[:8], len(data)) == ALIGNMENT
    with pytest.raises(DamagedError, match="ends within its header"):
        decode_header(data[:100], len(data))


GOOD = whole({"a": filled(torch.float32, 5), "b": filled(torch.int8, 3), "c": torch.ones(())})


@given(st.binary(max_size=300))
def test_random_bytes_are_damage(data: bytes) -> None:
    with pytest.raises(DamagedError):
        decode(data)


@settings(max_examples=300)
@given(st.data())
def test_a_changed_file_is_damage_or_another_valid_file(data: st.DataObject) -> None:
    changed = bytearray(GOOD)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, 220))  # where the header says something
        changed[at] = data.draw(st.integers(0, 255))
    size = data.draw(st.sampled_from([len(GOOD), len(GOOD), 0, 8, 4096, len(GOOD) - 1]))
    try:
        found = decode(bytes(changed[:size]))
    except DamagedError:
        return
    assert sum(t.numel() * t.element_size() for t in found.values()) <= len(GOOD)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**65), 2**65) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([*tensorfile.DTYPES]) | json_values,
        "shape": st.lists(st.integers(-1, 2**63), max_size=4) | json_values,
        "data_offsets": st.lists(st.integers(0, 2**64), min_size=2, max_size=2) | json_values,
    }
)


@given(
    st.dictionaries(st.text(max_size=4), entries | json_values, max_size=3), st.binary(max_size=40)
)
def test_any_table_is_read_or_refused_within_the_bounds_of_the_file(
    table: dict[str, object], tail: bytes
) -> None:
    data = file_of(table, tail)
    try:
        found = decode(data)
    except DamagedError:
        return
    assert sum(t.numel() * t.element_size() for t in found.values()) <= len(data)


# ------------------------------------------------------------------------------------- state trees
STATES: dict[str, object] = {
    "keys that are numbers": {0: "a", -1: "b", 2**70: "c", True: "d", None: "e", 1.5: "f"},
    "keys that are tuples": {(1, "a", (2.5, None)): [1]},
    "keys that look like ours": {"$": "tuple", "v": [1, 2]},
    "one key that looks like ours": {"$": 1},
    "order of keys": {"b": 1, "a": 2, "c": {"z": 1, "y": 2}},
    "tuples": ((), (1,), [(2, [3])]),
    "numbers": [
        0.1,
        -0.0,
        0.0,
        1e308,
        5e-324,
        1e22,
        2**53 + 1,
        -(2**63),
        2**63,
        2**64,
        -1,
        10**5000,
    ],
    "no numbers": [
        math.nan,
        -math.nan,
        math.inf,
        -math.inf,
        struct.unpack(">d", b"\x7f\xf8" + b"\x01" * 6)[0],
    ],
    "texts": ["", "ä🙂", "\ud83d\ude00", "\udcff", "\x00", "a\u2028b", {"\udcff": 1}],
    "booleans and none": [True, False, None, 1, 0, 1.0],
    "counters": Counter({5: 2, 3: 0, "x": -1}),
    "ordered": OrderedDict([("b", 1), ("a", OrderedDict([(2, torch.ones(1))]))]),
    "defaults": defaultdict(dict, {0: {"step": torch.tensor(3.0)}}),
    "defaults of no factory": defaultdict(None, {"a": 1}),
    "tensors": {"a": [torch.ones(2), (torch.zeros(()), 5)], 3: torch.ones(1, dtype=torch.bfloat16)},
    "a tensor alone": torch.arange(3),
    "names that meet": {"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}, "a.b#2": torch.ones(2)},
    "a reserved name": {"__metadata__": torch.ones(1)},
    "nothing": None,
    "empty": {"a": {}, "b": [], "c": (), "d": OrderedDict(), "e": Counter()},
}


@pytest.mark.parametrize("tree", STATES.values(), ids=STATES)
def test_what_is_split_is_joined_exactly(tree: object) -> None:
    assert same(through_bytes(tree), tree)


def test_states_of_torch_return_exactly() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 5, 5])
    model(torch.randn(8, 3)).sum().backward()
    optimizer.step()
    schedule.step()
    tree = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "schedule": schedule.state_dict(),
        "random": random.Random(3).getstate(),
    }
    assert same(through_bytes(tree), tree)


def test_c41_low_bits_and_types_of_optimizer_state_return() -> None:
    tree = {
        0: {"exp_avg": torch.tensor([0.1234567]), "exp_avg_sq": torch.tensor([0.0001234567])},
        1: {"exp_avg": torch.tensor([0.1234567]).bfloat16(), "step": torch.tensor(3.0)},
    }
    assert same(through_bytes(tree), tree)


scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=True, allow_infinity=True)
    | st.text(st.characters(), max_size=6)
)
keys = scalars | st.tuples(st.integers(), st.text(max_size=3))
trees = st.recursive(
    scalars | st.builds(lambda n: torch.full((n,), float(n)), st.integers(0, 3)),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys, inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=3).map(OrderedDict)
        | st.dictionaries(keys, inner, max_size=3).map(lambda d: defaultdict(list, d))
    ),
    max_leaves=20,
)


@given(trees)
def test_every_tree_returns_exactly(tree: object) -> None:
    assert same(through_bytes(tree), tree)


class Color(IntEnum):
    RED = 1


class Point(NamedTuple):
    x: int


class Text(str):
    __slots__ = ()


def deep(levels: int) -> object:
    tree: object = 1
    for _ in range(levels):
        tree = [tree]
    return tree


def endless() -> object:
    tree: list[object] = []
    tree.append(tree)
    return tree


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "function": (lambda: {"sampler_fn": len}, r"job\.sampler_fn: found builtin_function_or_method"),
    "lambda": (lambda: {"f": [lambda: 1]}, r"job\.f\.0: found function, expected a tensor or JSON"),
    "array": (lambda: {"a": np.ones(2)}, r"job\.a: found numpy\.ndarray"),
    "array of objects": (lambda: {"a": np.array([{}])}, r"job\.a: found numpy\.ndarray"),
    "scalar of numpy": (lambda: {"a": np.float64(1)}, r"job\.a: found numpy\.float64"),
    "integer of numpy": (lambda: {"a": np.int64(1)}, r"job\.a: found numpy\.int64"),
    "bytes": (lambda: {"a": b"1"}, r"job\.a: found bytes"),
    "set": (lambda: {"a": {1}}, r"job\.a: found set"),
    "complex": (lambda: {"a": 1j}, r"job\.a: found complex"),
    "enum": (lambda: {"a": Color.RED}, r"job\.a: found .*Color"),
    "named tuple": (lambda: {"a": Point(1)}, r"job\.a: found .*Point"),
    "text of another type": (lambda: {"a": Text("x")}, r"job\.a: found .*Text"),
    "factory": (lambda: {"a": defaultdict(lambda: 1)}, r"job\.a: found a defaultdict of a factory"),
    "key": (lambda: {"a": {b"k": 1}}, r"job\.a\.b'k': found a key of bytes"),
    "key in a tuple": (lambda: {"a": {(1, b"k"): 1}}, r"job\.a\.b'k': found a key of bytes"),
    "type": (lambda: {"a": int}, r"job\.a: found type"),
    "deep": (lambda: deep(100), r"job\.0\.0\.0\.0: found 60 levels"),
    "endless": (endless, r"job\.0\.0\.0\.0: found 60 levels"),
}


@pytest.mark.parametrize(("make", "message"), REFUSED.values(), ids=REFUSED)
def test_c52_what_is_neither_tensor_nor_json_is_refused_by_the_path_of_its_key(
    make: Callable[[], object], message: str
) -> None:
    with pytest.raises(UnsupportedStateError, match=f"^{message}"):
        split(make(), where="job")


def test_a_state_as_deep_as_is_taken_is_read_back() -> None:
    for tree in (deep(59), {1: {2: {3: {4: deep(40)}}}}):
        assert same(through_bytes(tree), tree)


SKELETONS: dict[str, JSON] = {
    "unknown mark": {"$": "object", "v": []},
    "mark without value": {"$": "tuple"},
    "mark that is no text": {"$": 1, "v": []},
    "further key": {"$": "tuple", "v": [], "w": 1},
    "tuple of no list": {"$": "tuple", "v": "ab"},
    "unknown factory": {"$": "defaultdict", "v": ["os.system", {"$": "dict", "v": []}]},
    "factory of no dict": {"$": "defaultdict", "v": ["int", [1]]},
    "key that is a list": {"$": "dict", "v": [[[1], 2]]},
    "key twice": {"$": "dict", "v": [[1, 2], [1, 3]]},
    "pair of three": {"$": "dict", "v": [[1, 2, 3]]},
    "no float": {"$": "float", "v": "zz"},
    "short float": {"$": "float", "v": "00"},
    "no int": {"$": "int", "v": "0xzz"},
    "no text": {"$": "str", "v": "ff"},
    "number as text": {"$": "int", "v": 5},
    "missing tensor": {"$": "tensor", "v": "b"},
    "tensor of no name": {"$": "tensor", "v": ["a"]},
    "infinite": float("inf"),
    "tensor left over": [1],
}


@pytest.mark.parametrize("skeleton", SKELETONS.values(), ids=SKELETONS)
def test_a_hostile_skeleton_is_damage(skeleton: JSON) -> None:
    with pytest.raises(DamagedError, match=r"^state\.json"):
        join(skeleton, {"a": torch.ones(1)}, where="state.json")


@pytest.mark.parametrize(
    "data",
    [b"", b"[]", b"{", b'{"a":1,"a":2}', b'{"a":NaN}', b"\xff", pickle.dumps({}), b"[" * 10**6],
)
def test_a_state_file_that_is_none_is_damage(data: bytes) -> None:
    with pytest.raises(DamagedError, match=r"^state\.json: "):
        decode_state(data)


def test_a_state_that_could_not_be_read_back_is_refused_when_it_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("checkpoints.serialization.MAX_STATE_BYTES", 100)
    with pytest.raises(UnsupportedStateError, match=r"^state\.json: found 1\d\d bytes"):
        encode_state({"a": "x" * 100})


@pytest.mark.parametrize(
    "key",
    [
        {"$": "tensor", "v": "w"},
        {"$": "tuple", "v": [{"$": "tensor", "v": "w"}]},
        {"$": "tuple", "v": [1], "w": 2},
        {"$": "Size", "v": [1]},
        {"$": "dict", "v": []},
        [1],
        {"a": 1},
    ],
)
def test_what_is_never_written_as_a_key_is_damage_with_and_without_its_tensors(key: JSON) -> None:
    skeleton: JSON = {"$": "dict", "v": [[key, 1]]}
    tensors: list[dict[str, torch.Tensor | None]] = [{"w": torch.ones(1)}, {"w": None}]
    for mine in tensors:
        with pytest.raises(DamagedError, match="expected a saved state"):
            join(skeleton, mine)


def test_a_name_that_no_file_can_hold_is_damage() -> None:
    entry = {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}
    header = json.dumps({"\ud800": entry}).encode()
    data = len(header).to_bytes(8, "little") + header + b"x"
    with pytest.raises(DamagedError, match="no text that a file can hold"):
        decode_header(data, len(data))


def test_a_quantized_tensor_is_refused_by_what_it_is() -> None:
    with warnings.catch_warnings(action="ignore"):  # deprecated, and still about
        tensor = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    with pytest.raises(UnsupportedStateError, match=r"a quantized tensor of torch\.qint8"):
        split({"w": tensor})
