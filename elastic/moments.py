"""What an optimizer has gathered: its state for each parameter, captured and put back bit by bit.

Promises: dtype, shape and every bit of each state tensor are what they were, whatever the type of
the parameter (torch's own `load_state_dict` casts them); state belongs to the parameter's plain
name, so that their order may change; what lay in host memory stays there. Parameter groups must
hold the same parameters; their constants are the business of `elastic.schedule`.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final, NoReturn

import torch
from torch import Tensor
from torch.optim import Optimizer

from elastic.errors import StartError

__all__ = ["capture_moments", "group_names", "match_groups", "restore_moments"]

_ALIKE: Final = (frozenset({"Adam", "AdamW"}),)
"""Classes whose moments mean the same."""
_BORN_LATER: Final = (
    ("amsgrad", "max_exp_avg_sq", "exp_avg_sq"),
    ("centered", "grad_avg", "square_avg"),
    ("momentum", "momentum_buffer", "square_avg"),
)
"""Option of a group, the state that torch's optimizers make for it with the first step alone, and a
state of the same form: it begins at zero where the option was switched on between two starts."""


def group_names(optimizer: Optimizer, names: Mapping[Tensor, str]) -> list[list[str]]:
    """The plain names of each group's parameters; what is not the model's is known by its place."""
    return [
        [names.get(param, f"group{g}.{i}") for i, param in enumerate(group["params"])]
        for g, group in enumerate(optimizer.param_groups)
    ]


def match_groups(
    saved: list[list[str]], own: list[list[str]], label: str, *, ordered: bool = False
) -> list[int]:
    """For each of the optimizer's groups the number of the saved one with the same parameters.

    Raises:
        StartError: A parameter has come, gone or moved to another group; names the first.
    """
    left = list(range(len(saved)))
    matched: list[int] = []
    for number, group in enumerate(own):
        match = next((i for i in left if set(saved[i]) == set(group)), None)
        if match is None or (ordered and saved[match] != group):
            _refuse_group(saved, own, number, label)
        left.remove(match)
        matched.append(match)
    if left:
        name = next(iter(saved[left[0]]), f"group {left[0]}, which is empty,")
        raise StartError(
            f"{label}: parameter {name}: found in a group of the checkpoint, expected in a group of"
            " the optimizer too; give it its group back, or start a new URL"
        )
    return matched


def _refuse_group(
    saved: list[list[str]], own: list[list[str]], number: int, label: str
) -> NoReturn:
    """Name the first parameter that is not where it was."""
    places = {name: i for i, group in enumerate(saved) for name in group}
    here = {name: i for i, group in enumerate(own) for name in group}
    companions = [places[name] for name in own[number] if name in places]
    home = max(set(companions), key=companions.count, default=None)
    for name in own[number]:
        if places.get(name) != home or home is None:
            found = f"in group {places[name]}" if name in places else "in no group"
            raise StartError(
                f"{label}: parameter {name}: found {found} of the checkpoint, in group {number} of"
                " the optimizer, expected the same groups; restore them, or start a new URL"
            )
    gone = next((n for n in saved[home or 0] if here.get(n) != number), None) if saved else None
    where = f"in group {here[gone]}" if gone in here else "in no group"
    found = f"parameter {gone}: found {where}" if gone else f"group {number}: found another order"
    raise StartError(
        f"{label}: {found} of the optimizer, expected in group {number} as in the"
        " checkpoint; restore the groups, or start a new URL"
    )


# ------------------------------------------------------------------------------------------- capture
def capture_moments(optimizer: Optimizer, order: list[list[str]]) -> dict[str, Any]:
    """The optimizer's state as a tree of live tensors; `order` is what `group_names` gave.

    Optimizers with a `state_dict` of their own (or hooks on it) are asked for it.
    """
    tree: dict[str, Any] = {"kind": type(optimizer).__qualname__}
    if _has_own_pair(optimizer):
        return tree | {"own": _walk(optimizer.state_dict(), Tensor.detach), "order": order}
    state: dict[str, Any] = {}
    on_host: dict[str, list[str]] = {}
    params: set[int] = set()
    for group, group_order in zip(optimizer.param_groups, order, strict=True):
        for param, name in zip(group["params"], group_order, strict=True):
            params.add(id(param))
            entry = optimizer.state.get(param)
            if entry is None:
                continue
            state[name] = _walk(entry, Tensor.detach)
            if param.device.type != "cpu":
                on_host[name] = sorted(k for k, v in entry.items() if _lies_on_host(v))
    shared = {k: v for k, v in optimizer.state.items() if not isinstance(k, Tensor)}
    return tree | {"state": state, "on_host": on_host, "shared": _walk(shared, Tensor.detach)}


def _has_own_pair(optimizer: Optimizer) -> bool:
    kind = type(optimizer)
    own = (
        kind.state_dict is not Optimizer.state_dict
        or kind.load_state_dict is not Optimizer.load_state_dict
    )
    hooks = (
        "_optimizer_state_dict_pre_hooks",
        "_optimizer_state_dict_post_hooks",
        "_optimizer_load_state_dict_pre_hooks",
        "_optimizer_load_state_dict_post_hooks",
    )
    return own or any(getattr(optimizer, hook, None) for hook in hooks)


def _lies_on_host(value: object) -> bool:
    return isinstance(value, Tensor) and value.device.type == "cpu"


def _walk(value: Any, leaf: Callable[[Tensor], Any]) -> Any:
    """A copy of nested containers with each tensor replaced; callables are code and left out."""
    if isinstance(value, Tensor):
        return leaf(value)
    if isinstance(value, dict):
        return {k: _walk(v, leaf) for k, v in value.items() if _is_state(v)}
    if type(value) in (list, tuple):
        return type(value)(_walk(item, leaf) for item in value)
    return value


def _is_state(value: object) -> bool:
    return isinstance(value, Tensor) or not callable(value)


# ------------------------------------------------------------------------------------------- restore
def restore_moments(
    optimizer: Optimizer, saved: Mapping[str, Any], names: Mapping[Tensor, str], label: str
) -> list[str]:
    """Put saved state back into an optimizer whose groups were matched; returns what to tell.

    Each state tensor gets the place of what it replaces: the parameter's device and layout, or host
    memory, where it lay there (`step`), unless the group is capturable or fused.

    Raises:
        StartError: The saved state is for another kind of `state_dict`.
    """
    kind = type(optimizer).__qualname__
    was = saved["kind"]
    if was != kind and not any({was, kind} <= alike for alike in _ALIKE):
        return [f"{label}: {was} -> {kind} (from code and config); its state begins anew"]
    notes = [f"{label}: {was} -> {kind} (from code and config)"] if was != kind else []
    if _has_own_pair(optimizer) != ("own" in saved):
        raise StartError(
            f"{label}: found state of {was} with{'' if 'own' in saved else 'out'} a state_dict of"
            " its own in the checkpoint, expected it as the optimizer is now; start a new URL"
        )
    if "own" in saved:
        match_groups(saved["order"], group_names(optimizer, names), label, ordered=True)
        optimizer.load_state_dict(_walk(saved["own"], Tensor.clone))
        return notes
    _restore_own(optimizer, saved, names)
    return notes


def _restore_own(
    optimizer: Optimizer, saved: Mapping[str, Any], names: Mapping[Tensor, str]
) -> None:
    order = group_names(optimizer, names)
    for group, group_order in zip(optimizer.param_groups, order, strict=True):
        on_device = bool(group.get("capturable") or group.get("fused"))
        for param, name in zip(group["params"], group_order, strict=True):
            if name not in saved["state"]:
                optimizer.state.pop(param, None)
                continue
            before = optimizer.state.get(param, {})
            host = {"step", *saved["on_host"].get(name, ())}
            entry: dict[Any, Any] = {}
            for key, value in saved["state"][name].items():
                stays = key in host and not on_device
                entry[key] = _restore_value(value, before.get(key), param, on_host=stays)
                if key == "step" and on_device and isinstance(entry[key], Tensor):
                    entry[key] = entry[key].to(torch.float32)  # all that such a kernel takes
            for option, made, like in _BORN_LATER:
                if group.get(option) and like in entry:
                    entry.setdefault(made, torch.zeros_like(entry[like]))
            optimizer.state[param] = entry
    for key, value in saved["shared"].items():
        optimizer.state[key] = _walk(value, Tensor.clone)  # not a parameter's


def _restore_value(value: Any, before: object, param: Tensor, *, on_host: bool) -> Any:
    def place(tensor: Tensor) -> Tensor:
        device = torch.device("cpu") if on_host else param.device
        if _is_like(before, tensor, device):
            target = before  # the same memory again, which a captured graph may know
        elif tensor.shape == param.shape:
            target = torch.empty_like(param, dtype=tensor.dtype, device=device, requires_grad=False)
        else:
            target = torch.empty_like(tensor, device=device)
        assert isinstance(target, Tensor)
        with torch.no_grad():
            return target.copy_(tensor)

    return _walk(value, place)


def _is_like(before: object, tensor: Tensor, device: torch.device) -> bool:
    return (
        isinstance(before, Tensor)
        and before.dtype == tensor.dtype
        and before.shape == tensor.shape
        and before.device == device
    )
