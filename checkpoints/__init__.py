"""Durable state on any fsspec file system; usable alone, from anyone's loop.

Everything is imported when it is first asked for, so that naming an error does not pay for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from checkpoints.errors import CheckpointError as CheckpointError
    from checkpoints.errors import DamagedError as DamagedError
    from checkpoints.errors import NoCheckpointError as NoCheckpointError
    from checkpoints.errors import ObjectMissingError as ObjectMissingError
    from checkpoints.errors import OptionError as OptionError
    from checkpoints.errors import PartedError as PartedError
    from checkpoints.errors import PermanentStoreError as PermanentStoreError
    from checkpoints.errors import RecordError as RecordError
    from checkpoints.errors import StoreError as StoreError
    from checkpoints.errors import StoreFullError as StoreFullError
    from checkpoints.errors import SupersededError as SupersededError
    from checkpoints.errors import TransientStoreError as TransientStoreError
    from checkpoints.errors import UnsupportedStateError as UnsupportedStateError
    from checkpoints.layout import CheckpointName as CheckpointName
    from checkpoints.layout import Manifest as Manifest
    from checkpoints.manager import CheckpointInfo as CheckpointInfo
    from checkpoints.manager import CheckpointManager as CheckpointManager
    from checkpoints.options import CheckpointOptions as CheckpointOptions
    from checkpoints.options import Interval as Interval
    from checkpoints.store import Store as Store
    from checkpoints.store import open_store as open_store

_ROOMS = {
    "CheckpointError": "errors",
    "CheckpointInfo": "manager",
    "CheckpointManager": "manager",
    "CheckpointName": "layout",
    "CheckpointOptions": "options",
    "DamagedError": "errors",
    "Interval": "options",
    "Manifest": "layout",
    "NoCheckpointError": "errors",
    "ObjectMissingError": "errors",
    "OptionError": "errors",
    "PartedError": "errors",
    "PermanentStoreError": "errors",
    "RecordError": "errors",
    "Store": "store",
    "StoreError": "errors",
    "StoreFullError": "errors",
    "SupersededError": "errors",
    "TransientStoreError": "errors",
    "UnsupportedStateError": "errors",
    "open_store": "store",
}

__all__ = list(_ROOMS)  # names and rooms stand in one place


def __getattr__(name: str) -> object:
    room = _ROOMS.get(name)
    if room is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{room}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_ROOMS})
