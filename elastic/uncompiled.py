"""torch without its compiler, until somebody compiles: a third of a worker's start, and of its memory at rest.

Every optimizer and every DistributedDataParallel asks `torch._dynamo` something that has one answer where nothing is
compiled, and by that imports it, sympy and some thousand modules more. Here that question is answered without. The
guarantee: whatever else is asked of it imports the real one, in whose place nothing of this remains; so it does where
another version of torch asks differently.
"""

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final

import torch

__all__ = ["postpone_compiler"]

_NAME: Final = "torch._dynamo"


def postpone_compiler() -> None:
    """Put the stand-in where the compiler would be; once it is imported there is nothing to postpone."""
    if _NAME not in sys.modules:
        stand_in = _StandIn(_NAME)
        sys.modules[_NAME] = stand_in
        vars(torch)["_dynamo"] = stand_in


class _StandIn(ModuleType):
    """What eager code asks of `torch._dynamo`. Has no spec, so that nobody takes it for something imported."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._disabled: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
        self.graph_break = _nothing
        self.trace_rules = _Part(self, "trace_rules", clear_lru_cache=_nothing)
        self.utils = _Part(self, "utils", get_optimize_ddp_mode=_ddp_mode)

    def disable(self, *given: Any, **named: Any) -> Any:
        """Keep the compiler out of a function of torch's own: there is none. Told to the real one when it comes."""
        # Somebody else who asks does not look for the answer again.
        if named.get("wrapping") is not False or sys.modules.get(_NAME) is not self:
            return self._real().disable(*given, **named)
        self._disabled.append((given[0], given[1:], named))
        return given[0]

    def __getattr__(self, name: str) -> Any:
        """Have the real one answer."""
        if name.startswith("__") and name not in {"__path__", "__all__"}:
            raise AttributeError(
                name
            )  # whoever looks through all modules wants nothing of this one
        real = self._real()
        if name == "__path__":
            # Python asks for it where a part is imported, and would load what the package just loaded once more.
            sys.meta_path.insert(0, _Loaded())
        return getattr(real, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """A part that Python has imported belongs to the real one."""
        whole = sys.modules.get(_NAME)
        if whole is None or whole is self:
            super().__setattr__(name, value)
        else:
            setattr(whole, name, value)

    def _real(self) -> ModuleType:
        """Import the real one, which answers all from then on."""
        if sys.modules.get(_NAME) is self:
            for name in ("graph_break", "trace_rules", "utils"):
                vars(self).pop(name)
            del sys.modules[_NAME]
            vars(torch).pop("_dynamo", None)  # the import puts the real one there
            real = importlib.import_module(_NAME)
            for function, given, named in self._disabled:
                if vars(function).get("__dynamo_disable") is function:
                    vars(function)["__dynamo_disable"] = real.disable(function, *given, **named)
            self._disabled.clear()
        return sys.modules[_NAME]


class _Loaded(MetaPathFinder, Loader):
    """Finds one part of the compiler where it is already: the one whose import began with the stand-in."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002  # as Python calls it
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        """The part, if it is there; whatever is asked for next is not of this finder."""
        sys.meta_path.remove(self)
        there = fullname.startswith(f"{_NAME}.") and target is None and fullname in sys.modules
        return ModuleSpec(fullname, self) if there else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The module as it is."""
        module = sys.modules[spec.name]
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """It has run; only its spec was taken from it."""
        vars(module)["__spec__"] = self._spec


class _Part:
    """A module of the compiler of which one answer is known."""

    def __init__(self, whole: _StandIn, name: str, **known: Any) -> None:
        vars(self).update(known, _whole=whole, _name=name)

    def __getattr__(self, name: str) -> Any:
        """Have the real one answer."""
        return getattr(getattr(self._whole._real(), self._name), name)  # noqa: SLF001  # of this room


def _nothing(*_: object, **__: object) -> None:
    """Where nothing is compiled there is no graph to break, and no rule remembered."""


def _ddp_mode() -> str:
    return "ddp_optimizer"  # the compiler's default, which only who imports it can change
