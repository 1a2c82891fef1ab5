"""Weights under their plain names: wrappers, strict loads, fingerprints."""

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.nn.parallel import DataParallel, DistributedDataParallel

from checkpoints.tensorfile import decode, encode
from elastic.errors import StartError
from elastic.weights import (
    load_model,
    model_fingerprint,
    model_state,
    model_tensors,
    parameter_names,
    plain_names,
    unwrap,
    weights_sha256,
)

# torch's own, where it imports its compiler
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")


@pytest.fixture(scope="module", autouse=True)
def _group() -> Iterator[None]:
    """A process group of one, which DistributedDataParallel asks for."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Inner(nn.Module):
    """A model whose child is honestly called `module`."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 3)
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.module(x))  # type: ignore[no-any-return]


class Outer(nn.Module):
    """A model with a part that may be wrapped by itself."""

    def __init__(self, wrap: Callable[[nn.Module], nn.Module] = lambda part: part) -> None:
        super().__init__()
        self.backbone = wrap(Inner())
        self.head = nn.Sequential(nn.Linear(3, 2), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x))  # type: ignore[no-any-return]


class Tied(nn.Module):
    """Two names for one tensor."""

    def __init__(self, *, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.out = nn.Linear(3, 5, bias=False)
        if tied:
            self.out.weight = self.embed.weight


def ddp(module: nn.Module) -> nn.Module:
    return DistributedDataParallel(module)


def compiled(module: nn.Module) -> nn.Module:
    wrapped = torch.compile(module)
    assert isinstance(wrapped, nn.Module)
    return wrapped


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": lambda module: module,
    "ddp": ddp,
    "compile": compiled,
    "data parallel": DataParallel,
    "ddp over compile": lambda module: ddp(compiled(module)),
    "compile over ddp": lambda module: compiled(ddp(module)),
    "compile over ddp over compile": lambda module: compiled(ddp(compiled(module))),
}


# --------------------------------------------------------------------------------------------- names
@pytest.mark.parametrize("kind", WRAPPERS)
def test_c42_names_are_those_of_the_unwrapped_model(kind: str) -> None:
    model = Outer()
    wrapped = WRAPPERS[kind](model)
    assert list(model_tensors(wrapped)) == list(model.state_dict())
    assert list(plain_names(wrapped).values()) == list(wrapped.state_dict())
    assert unwrap(wrapped) is model
    assert set(parameter_names(wrapped).values()) == {name for name, _ in model.named_parameters()}


@pytest.mark.parametrize("kind", WRAPPERS)
def test_c42_a_wrapper_in_the_middle_of_a_name_is_left_out(kind: str) -> None:
    plain = list(Outer().state_dict())
    assert "backbone.module.weight" in plain  # the honest child
    for whole in WRAPPERS.values():
        wrapped = whole(Outer(WRAPPERS[kind]))
        assert list(model_tensors(wrapped)) == plain


@pytest.mark.parametrize("kind", WRAPPERS)
def test_c42_saved_under_wrappers_and_loaded_by_a_plain_process(kind: str) -> None:
    model = Outer()
    header, views = encode(model_tensors(WRAPPERS[kind](model)))
    read = decode(header + b"".join(views))
    fresh = Outer()
    result = fresh.load_state_dict(read, strict=True)
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    assert weights_sha256(model_tensors(fresh)) == weights_sha256(model_tensors(model))


@pytest.mark.parametrize("kind", WRAPPERS)
def test_plain_weights_load_into_a_wrapped_model(kind: str) -> None:
    source, target = Outer(), Outer(WRAPPERS[kind])
    report = load_model(WRAPPERS[kind](target), model_tensors(source))
    assert report.complete
    assert len(report.loaded) == len(source.state_dict())
    assert weights_sha256(model_tensors(target)) == weights_sha256(model_tensors(source))


def test_two_entries_with_one_plain_name_are_refused() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = compiled(nn.Linear(1, 1))
            self.register_buffer("other", torch.ones(1))

        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            return {"part.weight": torch.ones(1), **super().state_dict(*args, **kwargs)}

    with pytest.raises(
        StartError, match=r"^model: found 'part.weight' and 'part._orig_mod.weight'"
    ):
        plain_names(Both())


def test_tensors_are_live() -> None:
    model = Outer()
    tensors = model_tensors(model)
    with torch.no_grad():
        model.head[0].weight.fill_(7)  # type: ignore[operator]
    assert tensors["head.0.weight"].eq(7).all()
    assert not any(tensor.requires_grad for tensor in tensors.values())


# ---------------------------------------------------------------------------------------------- load
def test_c44_a_widened_layer_is_refused_with_both_shapes() -> None:
    source, target = nn.Sequential(nn.Linear(4, 8)), nn.Sequential(nn.Linear(4, 16))
    before = weights_sha256(model_tensors(target))
    with pytest.raises(StartError) as caught:
        load_model(target, model_tensors(source))
    assert str(caught.value).startswith(
        "model: tensor '0.weight': found float32 [8, 4] in the checkpoint, expected float32 [16, 4],"
        " and 1 more differ;"
    )
    assert "\n" not in str(caught.value)
    assert weights_sha256(model_tensors(target)) == before


def test_c44_a_renamed_parameter_is_refused() -> None:
    source = {"old": torch.ones(2), "same": torch.ones(1)}
    target = nn.ParameterDict({"new": torch.zeros(2), "same": torch.zeros(1)})
    with pytest.raises(
        StartError,
        match=r"^model: tensor 'new': found no such tensor in the checkpoint, expected float32 \[2\],"
        r" and 1 more differ",
    ):
        load_model(target, source)


def test_c44_a_removed_parameter_is_refused() -> None:
    target = nn.ParameterDict({"same": torch.zeros(1)})
    with pytest.raises(
        StartError,
        match=r"^model: tensor 'old': found float32 \[2\] in the checkpoint, expected no such tensor;",
    ):
        load_model(target, {"old": torch.ones(2), "same": torch.ones(1)})


def test_another_type_is_refused_by_a_strict_load_and_cast_by_the_other() -> None:
    target = nn.ParameterDict({"w": torch.zeros(2, dtype=torch.bfloat16)})
    source = {"w": torch.full((2,), 0.5)}
    with pytest.raises(StartError, match=r"found float32 \[2\] .*, expected bfloat16 \[2\]"):
        load_model(target, source)
    assert load_model(target, source, strict=False).complete
    assert target["w"].tolist() == [0.5, 0.5]


def test_a_lenient_load_reports_what_was_not_loaded() -> None:
    target = nn.ParameterDict({"a": torch.zeros(2), "b": torch.zeros(2), "c": torch.zeros(2)})
    source = {"a": torch.ones(2), "b": torch.ones(3), "z": torch.ones(1)}
    report = load_model(target, source, strict=False)
    assert report.loaded == ("a",)
    assert report.missing == ("c",)
    assert report.unexpected == ("z",)
    assert report.mismatched == ("b: found float32 [3], expected float32 [2]",)
    assert not report.complete
    assert report.lines() == [
        "not in the source, keeps its initial value: c",
        "in the source only, left out: z",
        "of another shape, keeps its initial value: b: found float32 [3], expected float32 [2]",
    ]
    assert (target["a"].sum(), target["b"].sum(), target["c"].sum()) == (2, 0, 0)


def test_tied_weights_are_saved_under_both_names_and_load_from_one() -> None:
    model = Tied()
    assert list(model_tensors(model)) == ["embed.weight", "out.weight"]
    assert parameter_names(model) == {model.embed.weight: "embed.weight"}
    for name in ("embed.weight", "out.weight"):
        fresh = Tied()
        report = load_model(fresh, {name: model.embed.weight.detach()})
        assert report.complete
        assert torch.equal(fresh.out.weight, model.embed.weight)
    assert load_model(Tied(), model_tensors(model)).complete


def test_two_values_for_a_tied_weight_are_refused() -> None:
    source = model_tensors(Tied(tied=False))
    with pytest.raises(
        StartError, match=r"^model: tensors 'embed.weight' and 'out.weight': found two"
    ):
        load_model(Tied(), source)


def test_of_two_values_for_a_tied_weight_the_first_is_taken_and_told_where_what_fits_is_taken() -> (
    None
):
    source, target = model_tensors(Tied(tied=False)), Tied()
    report = load_model(target, source, strict=False)
    assert torch.equal(target.out.weight, source["embed.weight"])
    assert not report.complete
    assert report.lines() == [
        "another value than what the model ties it to, left out: out.weight: that of embed.weight is taken"
    ]


def test_state_that_is_no_tensor_is_kept_apart() -> None:
    class Counting(nn.Linear):
        count = 0

        def get_extra_state(self) -> object:
            return {"count": self.count}

        def set_extra_state(self, state: dict[str, int]) -> None:
            self.count = state["count"]

    part, loaded = Counting(1, 1), Counting(1, 1)
    model, fresh = nn.Sequential(part), nn.Sequential(loaded)
    part.count = 3
    assert list(model_tensors(model)) == ["0.weight", "0.bias"]
    load_model(fresh, model_tensors(model), extra=model_state(model)[1])
    assert loaded.count == 3


# -------------------------------------------------------------------------------------- fingerprints
def test_fingerprint_tells_name_type_and_shape_in_order_of_name() -> None:
    model = nn.ParameterDict({"b": torch.ones(2, 1, dtype=torch.bfloat16), "a": torch.tensor(1.0)})
    assert model_fingerprint(model) == [["a", "float32", []], ["b", "bfloat16", [2, 1]]]


def test_weights_sha256_is_that_of_name_type_shape_and_little_endian_bytes() -> None:
    tensors = {
        "w.b": torch.tensor([[1.0, -2.0]]),
        "w.a": torch.tensor([1.0, 0.5], dtype=torch.bfloat16),
        "n": torch.tensor(258),
        "empty": torch.ones(0, 3),
    }
    expected = hashlib.sha256(
        b"empty\0float32\x000,3\0"
        b"n\0int64\0\0\x02\x01\0\0\0\0\0\0"
        b"w.a\0bfloat16\x002\0\x80\x3f\x00\x3f"
        b"w.b\0float32\x001,2\0\0\0\x80\x3f\0\0\0\xc0"
    ).hexdigest()
    assert weights_sha256(tensors) == expected


def test_weights_sha256_does_not_depend_on_strides() -> None:
    tensor = torch.randn(3, 4)
    assert weights_sha256({"w": tensor.t().contiguous().t()}) == weights_sha256({"w": tensor})
