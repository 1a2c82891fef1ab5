"""Everything that a run must not lose, as one tree: captured, restored, compared, broadcast.

The tree of `capture` holds live tensors (copy them before the next step) under these keys:

    model           plain name -> tensor
    model_extra     what else the model's state holds; only where it does
    optimizer       name ("main" where there is one) -> groups with their constants, moments
    scheduler       name -> its state and constants
    scaler          name -> state and constants of each gradient scaler, or None
    job             the job's own state, or None
    ema             plain name -> average of the model's tensors; only where there is one
    others          name -> state of whatever else was attached

`restore` is strict where silence would harm: a missing or different model, an optimizer without its
state, groups with other parameters are a StartError. What has been added to a run or taken from it
(a scheduler, a scaler, a job's state, others) is allowed, and told in one line each.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from elastic.attachable import Averaged, Broadcaster, Stateful, is_stateful
from elastic.constants import merge, plain, same, tell_change
from elastic.digest import digest_of
from elastic.errors import StartError
from elastic.moments import capture_moments, group_names, match_groups, restore_moments
from elastic.schedule import Driver, Schedule, Scheduler
from elastic.weights import load_model, model_state, parameter_names

__all__ = ["TrainState"]

_MAIN: Final = "main"
_KEYS: Final = (
    "model", "model_extra", "optimizer", "scheduler", "scaler", "job", "ema", "others",
)  # fmt: skip
_SCALER_POSITION: Final = ("scale", "_growth_tracker")

Drivers = Scheduler | tuple[Scheduler, str]

_Form: TypeAlias = tuple[torch.dtype, torch.Size]


class TrainState:
    """The state of a training. Attach once, right after code and config made the objects."""

    def __init__(self) -> None:
        self._model: nn.Module | None = None
        self._layout: dict[str, _Form] = {}
        """What the model's tensors are when training begins."""
        self._optimizers: dict[str, Optimizer] = {}
        self._schedules: dict[str, Schedule] = {}
        self._driven: dict[str, str] = {}
        self._scalers: dict[str, Stateful] = {}
        self._built_scalers: dict[str, dict[str, Any]] = {}
        self._job: Stateful | None = None
        self._ema: Averaged | None = None
        self._others: dict[str, Stateful] = {}

    # -------------------------------------------------------------------------------------- attach
    def attach(
        self,
        *,
        model: nn.Module,
        optimizer: Optimizer | Mapping[str, Optimizer] | None = None,
        scheduler: Drivers | Mapping[str, Drivers] | None = None,
        scaler: Stateful | Mapping[str, Stateful] | None = None,
        job: object = None,
        ema: Averaged | None = None,
        **others: Stateful,
    ) -> None:
        """Take the objects that make up the state, and remember their constants as they are now.

        Args:
            model: Wrapped or not.
            optimizer: One, or several by name.
            scheduler: One, `(scheduler, "epoch")` where it is stepped by epoch, or several by name.
            scaler: A gradient scaler, or several by name.
            job: Its state is kept where it has `state_dict` and `load_state_dict`.
            ema: An average of the model's weights.
            others: Anything else with these two.

        Raises:
            StartError: Something was attached before, or cannot be saved and restored.
        """
        if self._model is not None:
            raise StartError(
                "attach: found a second call, expected one for each state; make a new one"
            )
        for name, thing in others.items():
            if not is_stateful(thing):
                raise StartError(
                    f"attach: {name}: found {type(thing).__name__}, expected something with"
                    " state_dict and load_state_dict"
                )
        self._model = model
        self._layout = {name: _form(tensor) for name, tensor in model_state(model)[0].items()}
        self._optimizers = _by_name(optimizer)
        self._attach_schedules({n: _driver(n, d) for n, d in _by_name(scheduler).items()})
        self._scalers = _by_name(scaler)
        self._built_scalers = {n: plain(s.state_dict()) for n, s in self._scalers.items()}
        self._job = job if is_stateful(job) else None  # type: ignore[assignment]
        self._ema = ema
        self._others = dict(others)

    def _attach_schedules(self, drivers: Mapping[str, Driver]) -> None:
        for name, driver in drivers.items():
            self._driven[name] = self._optimizer_of(name, driver)
        for name, optimizer in self._optimizers.items():
            own = {
                _label("scheduler", n): drivers[n] for n, of in self._driven.items() if of == name
            }
            self._schedules[name] = Schedule(optimizer, own, _label("optimizer", name))

    def _optimizer_of(self, name: str, driver: Driver) -> str:
        """Which optimizer a scheduler drives: the one it holds, else the one of its name."""
        held = getattr(driver.scheduler, "optimizer", None)
        for candidate, optimizer in self._optimizers.items():
            if optimizer is held:
                return candidate
        if held is None and name in self._optimizers:
            return name
        raise StartError(
            f"{_label('scheduler', name)}: found one that drives none of the attached optimizers"
            f" ({', '.join(self._optimizers) or 'none'}), expected that of one of them; attach its"
            " optimizer too"
        )

    # ------------------------------------------------------------------------------------- capture
    def capture(self) -> dict[str, Any]:
        """The state as a tree of live tensors, for `CheckpointManager.stage`. Any rank; no collectives.

        Raises:
            StartError: The model has other tensors than when it was attached, so that a restart could not load them.
        """
        model = self._attached()
        names = parameter_names(model)
        tensors, extra = model_state(model)
        self._check_layout(tensors)
        tree: dict[str, Any] = {"model": tensors}
        if extra:
            tree["model_extra"] = extra
        tree["optimizer"], tree["scheduler"] = {}, {}
        for name, optimizer in self._optimizers.items():
            schedule = self._schedules[name]
            orders = group_names(optimizer, names)
            groups = zip(orders, schedule.capture_groups(), strict=True)
            tree["optimizer"][name] = {
                "groups": [{"names": order, **group} for order, group in groups],
                **capture_moments(optimizer, orders),
            }
            captured = schedule.capture_drivers()
            for driver in (n for n, of in self._driven.items() if of == name):
                entry = captured[_label("scheduler", driver)]
                tree["scheduler"][driver] = {"optimizer": name, **entry}
        tree["scaler"] = {
            name: {
                "current": plain(scaler.state_dict()),
                "at_construction": plain(self._built_scalers[name]),
            }
            for name, scaler in self._scalers.items()
        } or None
        tree["job"] = None if self._job is None else self._job.state_dict()
        if self._ema is not None:
            tree["model"] |= self._ema.raw()
            tree["ema"] = dict(self._ema.tensors())
        tree["others"] = {name: thing.state_dict() for name, thing in self._others.items()}
        return tree

    def _check_layout(self, tensors: Mapping[str, Tensor]) -> None:
        for name in {**self._layout, **tensors}:
            found = _form(tensors[name]) if name in tensors else None
            begun = self._layout.get(name)
            if found != begun:
                raise StartError(
                    f"model: tensor {name!r}: found {_told(found)} after training began, expected {_told(begun)} as at the start:"
                    " a restart could not load it; give it its size in model(), or register it with persistent=False"
                )

    def still(self) -> frozenset[int]:
        """The data pointers of the tensors that only an optimizer's step changes."""
        found = {parameter.data_ptr() for parameter in self._attached().parameters()}
        for optimizer in self._optimizers.values():
            for moments in optimizer.state.values():
                found.update(t.data_ptr() for t in moments.values() if isinstance(t, Tensor))
        return frozenset(found)

    @property
    def size_bytes(self) -> int:
        """The bytes of parameters and moments."""
        tensors: list[Tensor] = list(self._attached().parameters())
        for optimizer in self._optimizers.values():
            for moments in optimizer.state.values():
                tensors += [t for t in moments.values() if isinstance(t, Tensor)]
        return sum(t.numel() * t.element_size() for t in tensors)

    def before_updates(self, call: Callable[[], None]) -> None:
        """Have something called right before any attached optimizer changes the parameters."""
        for optimizer in self._optimizers.values():
            optimizer.register_step_pre_hook(lambda _optimizer, _args, _kwargs: call())

    def _attached(self) -> nn.Module:
        if self._model is None:
            raise StartError(
                "state: found no model attached, expected attach(model=…) before it is used"
            )
        return self._model

    # ------------------------------------------------------------------------------------- restore
    def restore(
        self, tree: Mapping[str, Any], *, steps: int | None = None, epochs: int | None = None
    ) -> list[str]:
        """Put a captured state back into the attached objects, fresh or used.

        Args:
            tree: What `capture` gave. It is not kept: nothing of it is alive in the objects.
            steps: Steps of the run done, for a scheduler that the saved state knows nothing of.
            epochs: Epochs of the run done, for the same.

        Returns:
            What has changed since it was saved, one line each.

        Raises:
            StartError: Model or optimizers are not those of the tree; names the first difference.
        """
        model = self._attached()
        if not isinstance(tree.get("model"), Mapping):
            raise StartError(
                f"state: found {', '.join(tree) or 'nothing'} in the checkpoint, expected a model"
            )
        load_model(model, tree["model"], strict=True, extra=tree.get("model_extra"))
        notes = self._restore_optimizers(tree, {"step": steps, "epoch": epochs})
        notes += self._restore_scalers(tree.get("scaler") or {})
        notes += self._restore_ema(tree.get("ema"))
        notes += self._restore_others(tree)
        unknown = [key for key in tree if key not in _KEYS]
        return notes + [f"{key}: in the checkpoint, not known here; left aside" for key in unknown]

    def _restore_optimizers(
        self, tree: Mapping[str, Any], done: Mapping[str, int | None]
    ) -> list[str]:
        saved, drivers = tree.get("optimizer") or {}, tree.get("scheduler") or {}
        names = parameter_names(self._attached())
        notes: list[str] = []
        for name, optimizer in self._optimizers.items():
            label = _label("optimizer", name)
            if name not in saved:
                raise StartError(
                    f"{label}: found no state for it in the checkpoint (found"
                    f" {', '.join(saved) or 'none'}), expected the same optimizers; give it its name"
                    " back, or start a new URL from the weights with checkpoint.init_from"
                )
            groups = saved[name]["groups"]
            order = match_groups(
                [group["names"] for group in groups], group_names(optimizer, names), label
            )
            notes += restore_moments(optimizer, saved[name], names, label)
            own = {_label("scheduler", n): d for n, d in drivers.items() if d["optimizer"] == name}
            notes += self._schedules[name].restore([groups[i] for i in order], own, done)
        gone = [name for name in saved if name not in self._optimizers]
        return notes + [
            f"{_label('optimizer', name)}: in the checkpoint, not attached; left aside"
            for name in gone
        ]

    def _restore_scalers(self, saved: Mapping[str, Any]) -> list[str]:
        # One that is switched off has no state, and takes none.
        gone = [n for n in saved if saved[n]["current"] and not self._built_scalers.get(n)]
        notes = [
            f"{_label('scaler', name)}: in the checkpoint, not attached; left aside"
            for name in gone
        ]
        for name, scaler in self._scalers.items():
            built = self._built_scalers[name]
            if built:
                notes += _restore_scaler(_label("scaler", name), scaler, built, saved.get(name))
        return notes

    def _restore_ema(self, saved: Mapping[str, Tensor] | None) -> list[str]:
        if self._ema is None:
            return [] if saved is None else ["ema: in the checkpoint, not attached; left aside"]
        if saved is None:
            self._ema.begin()
            return ["ema: not in the checkpoint; it begins at the weights"]
        self._ema.load(saved)
        return []

    def _restore_others(self, tree: Mapping[str, Any]) -> list[str]:
        notes: list[str] = []
        saved: dict[str, Any] = dict(tree.get("others") or {})
        things: dict[str, Stateful] = dict(self._others)
        if tree.get("job") is not None:
            saved["job"] = tree["job"]
        if self._job is not None:
            things["job"] = self._job
        for name, thing in things.items():
            if name in saved:
                thing.load_state_dict(_own_copy(saved[name]))
            else:
                notes.append(f"{name}: not in the checkpoint; it begins anew")
        gone = [name for name in saved if name not in things]
        return notes + [f"{name}: in the checkpoint, not attached; left aside" for name in gone]

    # --------------------------------------------------------------------------- compare, broadcast
    def digest(self, *, replicated: bool = False) -> str:
        """XXH3 over every tensor (its bits, type, shape), number and text of the state, in hex.

        Args:
            replicated: Only over what must be the same on every rank after a step: parameters,
                optimizers, schedulers, scaler. Without buffers (each rank's BatchNorm counts its
                own part), the job's state and others.
        """
        return digest_of(self.replicated() if replicated else self.capture())

    def replicated(self) -> dict[str, Any]:
        """Of `capture` what must be the same on every rank after a step."""
        tree = self.capture()
        parameters = set(parameter_names(self._attached()).values())
        for key in ("model", "ema"):
            tree[key] = {k: v for k, v in tree.get(key, {}).items() if k in parameters}
        return {key: tree[key] for key in ("model", "optimizer", "scheduler", "scaler", "ema")}

    def broadcast_model(self, world: Broadcaster) -> None:
        """Give every rank the primary's parameters and buffers.

        Collective: every rank calls this in the same order.
        """
        model = self._attached()
        tensors = [*model.parameters(), *model.buffers()]
        world.broadcast_tensors([tensor.detach() for tensor in tensors], src=0)
        if self._ema is not None:
            self._ema.begin()


# ------------------------------------------------------------------------------------------- the rest
def _restore_scaler(
    label: str, scaler: Stateful, built: Mapping[str, Any], saved: Mapping[str, Any] | None
) -> list[str]:
    was, now = (saved["at_construction"], saved["current"]) if saved else ({}, {})
    if not now:
        scaler.load_state_dict(plain(built))
        return [f"{label}: not in the checkpoint; it begins anew"]
    state = merge(built, was, now)
    state |= {key: now[key] for key in _SCALER_POSITION if key in now}
    scaler.load_state_dict(state)
    return [
        tell_change(f"{label}.{key}", was[key], value)
        for key, value in built.items()
        if key in was and key not in _SCALER_POSITION and not same(was[key], value)
    ]


def _label(kind: str, name: str) -> str:
    return kind if name == _MAIN else f"{kind}.{name}"


def _by_name(given: Any) -> dict[str, Any]:
    if given is None:
        return {}
    return dict(given) if isinstance(given, Mapping) else {_MAIN: given}


def _driver(name: str, given: Any) -> Driver:
    scheduler, per = given if isinstance(given, tuple) and len(given) == 2 else (given, "step")
    if per not in ("step", "epoch") or not is_stateful(scheduler):
        raise StartError(
            f"{_label('scheduler', name)}: found {given!r:.80}, expected a scheduler or"
            ' (scheduler, "epoch"), with state_dict and load_state_dict'
        )
    return Driver(scheduler=scheduler, per="epoch" if per == "epoch" else "step")


def _own_copy(value: Any) -> Any:
    """Containers and tensors of its own, so that who keeps them does not share them with the tree."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        copied = value.copy()
        for key, item in value.items():
            copied[key] = _own_copy(item)
        return copied
    if type(value) in (list, tuple):
        return type(value)(_own_copy(item) for item in value)
    return value


def _form(tensor: Tensor) -> _Form:
    return tensor.dtype, tensor.shape


def _told(form: _Form | None) -> str:
    return "none" if form is None else f"{str(form[0]).removeprefix('torch.')} {list(form[1])}"
