"""The errors of this library.

Each is also the builtin that a caller would catch. Messages are one line: what, found, expected, way
out; none of them ever holds a credential.

    CheckpointError
     ├ StoreError(OSError)
     │   ├ TransientStoreError
     │   ├ StoreFullError
     │   └ PermanentStoreError
     ├ ObjectMissingError(FileNotFoundError)
     ├ DamagedError(ValueError)
     ├ NoCheckpointError(FileNotFoundError)
     ├ UnsupportedStateError(TypeError)
     ├ RecordError(ValueError)
     │   └ NewerFormatError
     ├ OptionError(ValueError)
     └ SupersededError, PartedError
"""


class CheckpointError(Exception):
    """The root of all errors that this library raises on purpose."""


class StoreError(CheckpointError, OSError):
    """Raised when the store at the URL could not do what was asked."""


class TransientStoreError(StoreError):
    """Raised when a retry may cure it: connection, time-out, throttling, 5xx; the retries are spent."""


class StoreFullError(StoreError):
    """Raised when the store has no room left: the disk is full or a quota is reached."""


class PermanentStoreError(StoreError):
    """Raised when a retry cannot cure it: credentials, a missing bucket, a path that is no folder."""


class ObjectMissingError(CheckpointError, FileNotFoundError):
    """Raised when an object that was asked for is not in the store."""


class DamagedError(CheckpointError, ValueError):
    """Raised when bytes of a checkpoint do not verify; names the checkpoint and the file."""


class NoCheckpointError(CheckpointError, FileNotFoundError):
    """Raised when the URL holds no checkpoint of the kind that was asked for."""


class UnsupportedStateError(CheckpointError, TypeError):
    """Raised when state is neither tensor nor JSON; names the key."""


class RecordError(CheckpointError, ValueError):
    """Raised when a JSON record or a name at the URL cannot be read; names it."""


class NewerFormatError(RecordError):
    """Raised when a checkpoint was written in a format that this version does not know: it is no damage."""


class OptionError(CheckpointError, ValueError):
    """Raised when an option has an impossible value."""


class _FencedError(CheckpointError):
    """What the two verdicts of the fence have in common: whose generation, and which is newest."""

    def __init__(self, message: str, *, generation: int = 0, newest: int = 0) -> None:
        super().__init__(message)
        self.generation = generation
        """The generation that found itself overtaken; 0 where none was claimed yet."""
        self.newest = newest
        """The newest generation that was claimed."""


class SupersededError(_FencedError):
    """Raised when the newest claim is of another launch, so that this one has to end."""


class PartedError(_FencedError):
    """Raised when the newest claim is of our launch, made without our agents or after us."""
