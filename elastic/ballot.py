"""The record of the election on the store: read, and replaced by compare and set, whatever the store offers for that.

Object stores compare and set by themselves (one request). A folder, and whatever can only create exclusively, keeps
numbered versions instead: the next number is created, and of many that create it one wins. There is no lock that a
stopped or dead holder could keep.

Guarantees: a write that returns a tag has won, also where its reply was lost; each request is bounded and never holds up
the one who asked; they are counted. Does not import torch.
"""

import asyncio
import contextlib
import functools
import hashlib
import logging
import re
import threading
from collections.abc import Callable, Mapping
from typing import Final, Protocol, TypeVar

from checkpoints.errors import CheckpointError, TransientStoreError
from checkpoints.store import Store, open_store
from elastic.election import Record

__all__ = ["Ballot", "Tagged"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

Tagged = tuple[Record, str]
"""A record, and the tag under which it can be replaced."""

_RETRY_S: Final = 0.0
"""A try that fails is repeated by the one who asks, who looks at the clock first."""
_KEPT: Final = 32
_DIGITS: Final = 12
_MOST_STUCK: Final = 8


class _Cas(Protocol):
    """Compare and set on one object."""

    def read(self) -> tuple[bytes, str] | None: ...

    def write(self, data: bytes, tag: str | None) -> str | None: ...


class _Swapped:
    """By the store's own condition."""

    def __init__(self, store: Store, name: str) -> None:
        self._store = store
        self._name = name

    def read(self) -> tuple[bytes, str] | None:
        return self._store.get_tagged(self._name)

    def write(self, data: bytes, tag: str | None) -> str | None:
        return self._store.put_if(self._name, data, tag)


class _Versions:
    """By creating the next number; the greatest counts."""

    def __init__(self, store: Store, folder: str) -> None:
        self._store = store
        self._folder = folder

    def _numbers(self) -> list[int]:
        return sorted(int(name) for name in self._store.children(self._folder) if name.isdigit())

    def _name(self, number: int) -> str:
        return f"{self._folder}/{number:0{_DIGITS}d}"

    def read(self) -> tuple[bytes, str] | None:
        numbers = self._numbers()
        for number in reversed(numbers):
            # The one before, where a writer was killed on a file system without links: its number is taken all the same.
            with contextlib.suppress(FileNotFoundError, ValueError):
                data = self._store.get(self._name(number))
                Record.from_json(data)
                # Of this listing: a number that came since was not read, and must not be overwritten.
                return data, str(numbers[-1])
        return None

    def write(self, data: bytes, tag: str | None) -> str | None:
        number = int(tag or 0) + 1
        if not self._store.put_new(self._name(number), data):
            return None
        numbers = self._numbers()
        newer = sum(other > number for other in numbers)
        if newer >= _KEPT or number not in numbers:
            # A writer that slept: the number was taken long ago, and has been cleared away since.
            self._store.delete(self._name(number))
            return None
        for old in numbers[:-_KEPT]:
            self._store.delete(self._name(old))
        return str(number)


class Ballot:
    """The record of one rendezvous, asked from an event loop."""

    def __init__(
        self, endpoint: str, rdzv_id: str, options: Mapping[str, object] | None = None
    ) -> None:
        """Name the record.

        Args:
            endpoint: Where it lies: a folder or a URL.
            rdzv_id: What keeps several at one endpoint apart.
            options: Arguments of the fsspec file system.

        Raises:
            CheckpointError: Raised when nothing serves such a URL.
        """
        self._store = open_store(endpoint, options, retry_s=_RETRY_S)
        name = _safe(rdzv_id)
        versions = self._store.is_local or not self._store.can_swap
        self._cas: _Cas = (
            _Versions(self._store, f"{name}.leader")
            if versions
            else _Swapped(self._store, f"{name}.json")
        )
        self._stuck = 0
        self.reads = 0
        self.writes = 0

    def __str__(self) -> str:
        return self._store.display_url

    def peek(self) -> Record | None:
        """Return the record, waiting for the store: for tools, outside of an event loop."""
        found = self._cas.read()
        return None if found is None else Record.from_json(found[0])

    async def read(self, limit_s: float) -> Tagged | None:
        """Return the record and its tag, None where there is none.

        Raises:
            CheckpointError: Raised when the store does not answer, or what lies there is no record.
        """
        self.reads += 1
        found = await self._bounded(self._cas.read, limit_s)
        if found is None:
            return None
        try:
            return Record.from_json(found[0]), found[1]
        except ValueError as error:
            raise CheckpointError(
                f"{self}: {error}; give another --rdzv_endpoint, or remove what lies there"
            ) from error

    async def write(self, record: Record, tag: str | None, limit_s: float) -> str | None:
        """Replace the record that has this tag (None: there must be none); its new tag, or None if that lost.

        Raises:
            CheckpointError: Raised when the store does not answer: it may have been written, or still be.
        """
        self.writes += 1
        data = record.to_json()
        return await self._bounded(lambda: self._cas.write(data, tag), limit_s)

    async def _bounded(self, call: Callable[[], T], limit_s: float) -> T:
        """Run a request in a thread of its own: one that hangs is left behind, and does not hold up the process's end."""
        if self._stuck >= _MOST_STUCK:
            raise TransientStoreError(f"{self}: {self._stuck} requests have not been answered")
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()

        def run() -> None:
            settle: Callable[[], None]
            try:
                result = call()
            except BaseException as error:  # noqa: BLE001 - handed to the one who asked
                settle = functools.partial(answer.set_exception, error)
            else:
                settle = functools.partial(answer.set_result, result)
            with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(arrive, settle)

        def arrive(settle: Callable[[], None]) -> None:
            self._stuck -= 1
            if not answer.done():
                settle()

        self._stuck += 1
        threading.Thread(target=run, name="rendezvous-store", daemon=True).start()
        try:
            return await asyncio.wait_for(answer, limit_s)
        except TimeoutError as error:
            raise TransientStoreError(f"{self}: no answer within {limit_s:.1f} s") from error


def _safe(rdzv_id: str) -> str:
    """A name for the store; ids that differ have names that differ."""
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", rdzv_id)[:60] or "none"
    return (
        name if name == rdzv_id else f"{name}-{hashlib.sha256(rdzv_id.encode()).hexdigest()[:12]}"
    )
