"""torch without its compiler, until somebody compiles: a third of a worker's start, and of its memory at rest.

Every optimizer and every DistributedDataParallel asks `torch._dynamo` something that has one answer where nothing is
compiled, and by that imports it, sympy and some thousand modules more. Here that question is answered without. The
guarantee: whatever else is asked of it imports the real one, in whose place nothing of this remains; so it does where
another version of torch asks differently.
"""

import importlib
import sys
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
        return getattr(self._real(), name)

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
