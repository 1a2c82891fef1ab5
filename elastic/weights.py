"""The weights of a model under their plain names: collected, loaded, compared, read from files.

Promises: names are those of the unwrapped model, whatever wraps it or a part of it (decided by what
the modules are, never by the text of a name, so that an honest child called `module` keeps its
name); a strict load takes all or nothing, and says which tensor differs first and how many more;
a foreign file is read without running anything in it. What may be missing is the caller's decision.
"""

import hashlib
import sys
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from checkpoints.tensorfile import byte_view
from elastic.errors import StartError
from elastic.foreign import match_names, read_weights

__all__ = [
    "LoadReport",
    "load_model",
    "match_names",
    "model_fingerprint",
    "model_state",
    "model_tensors",
    "parameter_names",
    "plain_names",
    "read_weights",
    "unwrap",
    "weights_sha256",
]


_KNOWN_NAMES: weakref.WeakKeyDictionary[nn.Module, dict[str, str]] = weakref.WeakKeyDictionary()
"""Worked out once for each model: a snapshot asks for them at every step."""


# ------------------------------------------------------------------------------------- plain names
def unwrap(module: nn.Module) -> nn.Module:
    """The model itself, out of DistributedDataParallel, DataParallel and torch.compile in any order."""
    while (child := _wrapped_child(module)) is not None:
        module = getattr(module, child)
    return module


def plain_names(module: nn.Module) -> dict[str, str]:
    """Plain name -> name in `module.state_dict()`, in the order of the latter.

    Raises:
        StartError: Two entries have the same name once wrappers are left out.
    """
    return _plain_names(module, module.state_dict())


def _plain_names(module: nn.Module, state: Iterable[str]) -> dict[str, str]:
    names: dict[str, str] = {}
    for actual in state:
        plain = _plain_name(module, actual)
        if plain in names:
            raise StartError(
                f"model: found {names[plain]!r} and {actual!r}, which are both {plain!r} without"
                " wrappers, expected one tensor for each name; wrap a part of the model only once"
            )
        names[plain] = actual
    return names


def parameter_names(module: nn.Module) -> dict[Tensor, str]:
    """Parameter -> its plain name; of tied parameters the first."""
    return {param: _plain_name(module, name) for name, param in module.named_parameters()}


def _wrapped_child(module: nn.Module) -> str | None:
    """Name of the child that this module merely wraps, or None where it is no wrapper."""
    if isinstance(module, DistributedDataParallel | DataParallel):
        return "module"
    # Only what has compiled a model has this module; importing it would cost a second.
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    if compiler is not None and isinstance(module, compiler.OptimizedModule):
        return "_orig_mod"
    return None


def _plain_name(root: nn.Module, actual: str) -> str:
    """The name without the parts that lead from a wrapper to what it wraps."""
    known = _KNOWN_NAMES.setdefault(root, {})
    if actual not in known:
        # Wrapping a part later gives its tensors other names, so that what is known stays right.
        known[actual] = _without_wrappers(root, actual)
    return known[actual]


def _without_wrappers(root: nn.Module, actual: str) -> str:
    kept: list[str] = []
    here: nn.Module | None = root
    for part in actual.split("."):
        if here is None or part != _wrapped_child(here):
            kept.append(part)
        child = getattr(here, part, None)
        here = child if isinstance(child, nn.Module) else None
    return ".".join(kept)


# ------------------------------------------------------------------------------- collect and compare
def model_state(module: nn.Module) -> tuple[dict[str, Tensor], dict[str, object]]:
    """The model's state by plain name: its tensors, and what else it holds (`get_extra_state`).

    Tensors are live: they share memory with the model. Frozen parameters come as such: a checkpoint keeps
    them in a file of their own, sent only once.
    """
    state = module.state_dict(keep_vars=True)
    tensors: dict[str, Tensor] = {}
    extra: dict[str, object] = {}
    for plain, actual in _plain_names(module, state).items():
        value = state[actual]
        if isinstance(value, Tensor):
            tensors[plain] = value if _is_frozen(value) else value.detach()
        else:
            extra[plain] = value
    return tensors, extra


def model_tensors(module: nn.Module) -> dict[str, Tensor]:
    """The tensors of `model_state`."""
    return model_state(module)[0]


def _is_frozen(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) and not tensor.requires_grad


def model_fingerprint(module: nn.Module) -> list[list[object]]:
    """Name, dtype and shape of each tensor, in order of name: what a run's model must keep."""
    tensors = sorted(model_tensors(module).items())
    return [[name, _dtype(tensor), list(tensor.shape)] for name, tensor in tensors]


def weights_sha256(tensors: Mapping[str, Tensor]) -> str:
    """The fingerprint of a model's values, as `summary.json` tells it.

    SHA-256 over, for each name in sorted order (by code point): the name in UTF-8, NUL, the dtype
    as torch names it without `torch.` (`float32`, `bfloat16`), NUL, the sizes in decimal joined by
    commas (nothing for a scalar), NUL, the elements in row-major order, little-endian.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        shape = ",".join(map(str, tensor.shape))
        digest.update(f"{name}\0{_dtype(tensor)}\0{shape}\0".encode())
        digest.update(byte_view(tensor))
    return digest.hexdigest()


# ---------------------------------------------------------------------------------------------- load
@dataclass(frozen=True, kw_only=True, slots=True)
class LoadReport:
    """What a load did; all names are plain names, sorted."""

    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    """The model has it, the source has not: it keeps its value."""
    unexpected: tuple[str, ...]
    """The source has it, the model has not."""
    mismatched: tuple[str, ...]
    """Both have it, in different shapes (a strict load: or types): `name: found …, expected …`."""
    split: tuple[str, ...] = ()
    """The model ties them to another tensor, which has another value in the source."""

    @property
    def complete(self) -> bool:
        """Whether source and model had the same tensors."""
        return not (self.missing or self.unexpected or self.mismatched or self.split)

    def lines(self) -> list[str]:
        """What was not loaded, one line for each kind, for people."""
        kinds = {
            "not in the source, keeps its initial value": self.missing,
            "in the source only, left out": self.unexpected,
            "of another shape, keeps its initial value": self.mismatched,
            "another value than what the model ties it to, left out": self.split,
        }
        return [f"{kind}: {', '.join(names)}" for kind, names in kinds.items() if names]


def load_model(
    module: nn.Module,
    tensors: Mapping[str, Tensor],
    strict: bool = True,
    *,
    extra: Mapping[str, object] | None = None,
) -> LoadReport:
    """Copy tensors with plain names into a model, wrapped or not.

    Of tied weights one name is enough, as in files that leave the copies out.

    Args:
        module: The model; its tensors keep their place, device and type.
        tensors: By plain name.
        strict: All or nothing: names, shapes and types must be the model's. Otherwise what fits by
            name and shape is taken, cast where types differ, and the caller judges the report.
        extra: The second part of `model_state`.

    Raises:
        StartError: A strict load found a difference; names the first tensor, with both shapes.
    """
    names = plain_names(module)
    state = module.state_dict()
    own = {plain: value for plain in names if isinstance(value := state[names[plain]], Tensor)}
    siblings = _tied(own)
    fits, differs = [], {}
    for name, target in own.items():
        if name not in tensors:
            if not any(sibling in tensors for sibling in siblings.get(name, ())):
                differs[name] = ("no such tensor", _describe(target))
        elif tensors[name].shape == target.shape and (
            not strict or tensors[name].dtype == target.dtype
        ):
            fits.append(name)
        else:
            differs[name] = (_describe(tensors[name]), _describe(target))
    unexpected = sorted(set(tensors) - set(own))
    if strict:
        differs |= {name: (_describe(tensors[name]), "no such tensor") for name in unexpected}
        _refuse(differs)
    split = _split_ties(siblings, {name: tensors[name] for name in fits})
    if strict and split:
        name, first = next(iter(split.items()))
        raise StartError(
            f"model: tensors {first!r} and {name!r}: found two values in the checkpoint, expected"
            " one, for the model ties them; the model is not the run's: start a new URL"
        )
    fits = [name for name in fits if name not in split]
    chosen: dict[str, object] = {names[name]: tensors[name] for name in fits}
    chosen |= {names[name]: value for name, value in (extra or {}).items() if name in names}
    module.load_state_dict(chosen, strict=False)
    return LoadReport(
        loaded=tuple(sorted(fits)),
        missing=tuple(sorted(name for name in differs if name not in tensors)),
        unexpected=tuple(unexpected),
        mismatched=tuple(
            f"{name}: found {found}, expected {expected}"
            for name, (found, expected) in sorted(differs.items())
            if name in tensors and name in own
        ),
        split=tuple(f"{name}: that of {first} is taken" for name, first in split.items()),
    )


def _refuse(differs: Mapping[str, tuple[str, str]]) -> None:
    if not differs:
        return
    name, (found, expected) = next(iter(differs.items()))
    more = f", and {len(differs) - 1} more differ" if len(differs) > 1 else ""
    raise StartError(
        f"model: tensor {name!r}: found {found} in the checkpoint, expected {expected}{more};"
        " the model is not the run's: start a new URL, with checkpoint.init_from for what still fits"
    )


def _tied(own: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """For each name of a tied tensor, all its names (itself too)."""
    places: dict[tuple[object, ...], list[str]] = {}
    for name, tensor in own.items():
        if tensor.numel() and not tensor.is_meta:
            place = (tensor.device, tensor.dtype, tensor.data_ptr(), tensor.shape, tensor.stride())
            places.setdefault(place, []).append(name)
    return {name: tied for tied in places.values() if len(tied) > 1 for name in tied}


def _split_ties(siblings: Mapping[str, list[str]], tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Names of tied tensors whose value is another than that of the first of their names, which is given.

    Loaded one after the other, the last of two values would win in silence.
    """
    found = {}
    for name in (name for name in siblings if name in tensors):
        first = next(other for other in siblings[name] if other in tensors)
        if byte_view(tensors[name]) != byte_view(tensors[first]):
            found[name] = first
    return found


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _describe(tensor: Tensor) -> str:
    return f"{_dtype(tensor)} {list(tensor.shape)}"
