"""One run's URL: the only door to files and objects, to fsspec and to tenacity.

Promises: `put` replaces a whole object or nothing; `put_new` creates it for exactly one of many
writers, also where the reply is lost; every error is one of `checkpoints.errors`, told in one line
without credentials; transient ones are retried here and nowhere else (exponential, jittered, bounded by
time). No listing is ever served from a cache. Credentials that have expired are read anew, and what was
asked is asked again. An upload needs the same small memory whatever its size. Any thread may call.
"""

import builtins
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, ParamSpec, TypeAlias, TypeVar

import tenacity

from checkpoints.backends import (
    Appender,
    Backend,
    NotAFileError,
    Verdict,
    classify,
    error_code,
    hint,
    is_denied,
    open_backend,
)
from checkpoints.errors import (
    DamagedError,
    ObjectMissingError,
    PermanentStoreError,
    RecordError,
    StoreError,
    StoreFullError,
    TransientStoreError,
)
from checkpoints.layout import check_name, redact_url
from checkpoints.redaction import redact, secret_values
from checkpoints.uploads import transfer

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")
Buffer: TypeAlias = "bytes | bytearray | memoryview[Any]"
Buffers: TypeAlias = "Buffer | Sequence[Buffer]"

_FIRST_WAIT_S: Final = 0.2
_LONGEST_WAIT_S: Final = 10.0
LARGEST_NEW: Final = 4 << 20
"""Exclusive creation has to be one request: conditions on multipart uploads do not hold everywhere."""


def open_store(
    url: str | os.PathLike[str],
    storage_options: Mapping[str, object] | None = None,
    *,
    retry_s: float = 60.0,
    sleep: Callable[[float], None] = time.sleep,
) -> "Store":
    """Open the store at a URL; nothing is asked of it yet.

    Args:
        url: A folder, or anything fsspec knows, e.g. s3://bucket/run-42.
        storage_options: Arguments of the fsspec file system; kept, not copied, so that credentials
            renewed in it are used once the old ones have expired.
        retry_s: How long a transient error is retried.
        sleep: Waits between two tries.

    Raises:
        PermanentStoreError: Nothing serves such a URL, or its package is not installed.
    """
    options = {} if storage_options is None else storage_options
    url = os.fspath(url)
    backend = open_backend(url, options)
    return Store(url, backend, options=options, retry_s=retry_s, sleep=sleep)


class Store:
    """The objects under one URL; names are relative to it, with `/` between components."""

    def __init__(
        self,
        url: str,
        backend: Backend,
        *,
        options: Mapping[str, object] | None = None,
        retry_s: float = 60.0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.url = url.rstrip("/") or "/"
        """The URL as it was given: it may hold credentials."""
        self._options = {} if options is None else options
        self._secrets = secret_values(url, self._options)
        self.display_url = redact(redact_url(self.url), self._secrets)
        """The URL as it may be shown."""
        self.folder = backend.folder
        """The local folder, absolute; None for any other store."""
        self.is_local = self.folder is not None
        self._backend = backend
        self._was_let_in = False
        """Whether the server has accepted the credentials once."""
        self._stop = tenacity.stop_before_delay(retry_s)
        self._retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception(self._may_pass),
            wait=tenacity.wait_random_exponential(multiplier=_FIRST_WAIT_S, max=_LONGEST_WAIT_S),
            stop=self._stop,
            sleep=sleep,
            before_sleep=self._before_another_try,
            reraise=True,
        )

    def __repr__(self) -> str:
        return f"Store({self.display_url!r})"

    @property
    def can_swap(self) -> bool:
        """Whether `put_if` replaces here; everywhere it creates."""
        return self._backend.can_swap

    @property
    def can_append(self) -> bool:
        """Whether files can grow here."""
        return self.is_local

    # ------------------------------------------------------------------------------------- writing
    def check(self) -> None:
        """See whether the URL can be reached; a local folder is made where it is missing.

        Raises:
            PermanentStoreError: Credentials, a missing bucket, a path that is no folder.
            TransientStoreError: It could not be reached in time.
        """
        self._ask("check", "", self._backend.check, writes=True)()

    def put(self, name: str, data: Buffers) -> None:
        """Replace an object atomically and durably."""
        self._ask("write", check_name(name), self._send, writes=True)(name, _views(data))

    def _send(self, name: str, views: builtins.list[memoryview]) -> None:
        upload = self._backend.upload(name, views)
        if upload is None:
            self._backend.write(name, views)
        else:
            transfer(upload, self._retry_part)

    def _retry_part(self, stop: threading.Event, call: Callable[[], object]) -> None:
        """Each part has tries of its own: one that fails does not send the others again."""
        limits = self._stop | tenacity.stop_when_event_set(stop)
        self._retrying.copy(stop=limits)(self._with_fresh_credentials(call))

    def put_new(self, name: str, data: bytes) -> bool:
        """Create an object exclusively: True if it is ours, False if somebody else's.

        `data` has to hold a random token: "it exists" is believed only after reading it back, because
        a lost reply and a retry turn one's own success into that.
        """
        if not 0 < len(data) <= LARGEST_NEW:
            raise PermanentStoreError(
                f"{self._place(name)}: found {len(data)} bytes to create exclusively, expected 1 "
                f"to {LARGEST_NEW}"
            )
        create = self._ask("create", check_name(name), self._backend.create, writes=True)
        for _ in range(3):
            if create(name, data):
                return True
            try:
                return self.get(name, limit_bytes=len(data)) == data
            except RecordError:  # a larger one is somebody else's
                return False
            except ObjectMissingError:
                pass
            # Whoever had it has deleted it in between: the name is free again.
        raise TransientStoreError(f"{self._place(name)}: appears and vanishes while being created")

    def put_if(self, name: str, data: bytes, tag: str | None) -> str | None:
        """Compare and set: replace the object that has `tag`; its new tag, or None if that lost.

        Args:
            name: The object.
            data: Its new bytes, small, holding a random token.
            tag: What `get_tagged` or the last `put_if` gave; None: it must not exist.
        """
        swap = self._ask("replace", check_name(name), self._backend.swap, writes=True)
        new = swap(name, data, tag)
        if new is None:
            # As in put_new: our own first try may have won without our knowing.
            found = self.get_tagged(name)
            if found is not None and found[0] == data:
                return found[1]
        return new

    def append(self, name: str, data: bytes) -> None:
        """Append in one write, without waiting for the disk; only where `can_append`."""
        appender = self.appender(name)
        try:
            self._ask("append", name, appender.write, writes=True)(data)
        finally:
            appender.close()

    def appender(self, name: str) -> Appender:
        """A growing file, held open; only where `can_append`."""
        opened = self._ask("append", check_name(name), self._backend.appender, writes=True)(name)
        if opened is None:
            raise PermanentStoreError(f"{self._place(name)}: files cannot grow in this store")
        return opened

    def delete(self, name: str) -> None:
        """Delete an object; one that is missing is fine."""
        self._ask("delete", check_name(name), self._backend.delete)(name)

    def delete_tree(self, prefix: str) -> None:
        """Delete a folder and all in it; one that is missing is fine."""
        folder = prefix.rstrip("/")
        self._ask("delete", check_name(folder), self._backend.delete_tree)(folder)

    def delete_temps(self, prefix: str) -> None:
        """Delete what killed writers left in a folder unseen; nobody may be writing there."""
        folder = prefix.rstrip("/")
        if folder:
            check_name(folder)
        self._ask("delete", folder, self._backend.delete_temps)(folder)

    # ------------------------------------------------------------------------------------- reading
    def get(self, name: str, *, limit_bytes: int | None = None) -> bytes:
        """The bytes of an object.

        Raises:
            ObjectMissingError: There is none.
            RecordError: It is larger than `limit_bytes`; no more than that was read.
        """
        more = None if limit_bytes is None else limit_bytes + 1
        data = self._ask("read", check_name(name), self._backend.read)(name, more)
        if limit_bytes is not None and len(data) > limit_bytes:
            raise RecordError(
                f"{self._place(name)}: found more than {limit_bytes} bytes, expected at most that"
            )
        return data

    def get_tagged(self, name: str) -> tuple[bytes, str] | None:
        """The bytes of an object and the tag for `put_if`; None where it is missing."""
        with contextlib.suppress(ObjectMissingError):
            return self._ask("read", check_name(name), self._backend.read_tagged)(name)
        return None

    def get_range(self, name: str, start: int, length: int) -> bytes:
        """Up to `length` bytes from `start`; fewer where the object ends."""
        buffer = bytearray(length)
        count = self._read_into(name, start, memoryview(buffer))
        return bytes(memoryview(buffer)[:count])

    def readinto(self, name: str, start: int, buffer: "memoryview[Any]") -> None:
        """Fill `buffer` with the bytes from `start`.

        Raises:
            DamagedError: The object ends before that.
        """
        count = self._read_into(name, start, buffer)
        if count != buffer.nbytes:
            raise DamagedError(
                f"{self._place(name)}: found {count} bytes at {start}, expected {buffer.nbytes}: "
                "the file is truncated"
            )

    def _read_into(self, name: str, start: int, buffer: "memoryview[Any]") -> int:
        if not buffer.nbytes:
            return 0
        flat = buffer.cast("B")
        return self._ask("read", check_name(name), self._backend.read_into)(name, start, flat)

    def read_pieces(self, name: str, start: int, pieces: "Sequence[memoryview[Any]]") -> None:
        """Fill several buffers, one after the other, from `start`: at once where the store is local.

        Raises:
            DamagedError: The object ends before that.
        """
        call: Callable[[str, int, Sequence[memoryview]], int] | None
        call = getattr(self._backend, "read_pieces", None)
        if call is None:
            for piece in pieces:
                self.readinto(name, start, piece)
                start += piece.nbytes
            return
        flat = [piece.cast("B") for piece in pieces if piece.nbytes]
        count = self._ask("read", check_name(name), call)(name, start, flat)
        if count != (expected := sum(piece.nbytes for piece in flat)):
            raise DamagedError(
                f"{self._place(name)}: found {count} bytes at {start}, expected {expected}: the file is truncated"
            )

    def size(self, name: str) -> int:
        """The size of an object in bytes, or ObjectMissingError."""
        return self._ask("look", check_name(name), self._backend.size)(name)

    def exists(self, name: str) -> bool:
        """Whether there is an object by that name; never an answer from memory."""
        try:
            self.size(name)
        except ObjectMissingError:
            return False
        return True

    def children(self, prefix: str) -> builtins.list[str]:
        """What lies directly in the folder `prefix` ("" is the URL itself), sorted."""
        folder = prefix.rstrip("/")
        if folder:
            check_name(folder)
        return sorted(set(self._ask("list", folder, self._backend.children)(folder)))

    def list(self, prefix: str = "") -> builtins.list[str]:
        """All names that begin with `prefix`, at any depth, sorted."""
        if prefix.rstrip("/"):
            check_name(prefix.rstrip("/"))
        return sorted(self._ask("list", prefix, self._backend.names)(prefix))

    def close(self) -> None:
        """Let connections go; the store may still be used and will open new ones."""
        self._backend.close()

    # -------------------------------------------------------------------------------------- errors
    def _ask(
        self, action: str, name: str, call: Callable[P, T], *, writes: bool = False
    ) -> Callable[P, T]:
        """The call with retries and with its errors mapped; the types stay the call's own."""

        def asked(*args: P.args, **kwargs: P.kwargs) -> T:
            try:
                return self._retrying(self._with_fresh_credentials(call), *args, **kwargs)
            except Exception as error:  # noqa: BLE001  # libraries raise anything; all of it is mapped
                mapped = self._mapped(action, name, error, writes=writes)
                # A chained error is shown with its text: never one that holds a secret.
                text = "".join(str(link) for link in (error, error.__cause__))
                raise mapped from (error if redact(text, self._secrets) == text else None)

        return asked

    def _with_fresh_credentials(self, call: Callable[P, T]) -> Callable[P, T]:
        """The call, and once more with a new client where the old one was let in before and is not now."""

        def tried(*args: P.args, **kwargs: P.kwargs) -> T:
            try:
                answer = call(*args, **kwargs)
            except Exception as error:
                if not is_denied(error):
                    self._was_let_in |= classify(error) in {Verdict.MISSING, Verdict.EXISTS}
                    raise
                if not self._was_let_in:
                    raise
                self._renew()
                answer = call(*args, **kwargs)
            self._was_let_in = True
            return answer

        return tried

    def _renew(self) -> None:
        self._backend.renew()
        self._secrets |= secret_values(self.url, self._options)

    def _may_pass(self, error: BaseException) -> bool:
        """Whether another try may help; credentials that never were good do not become so."""
        verdict = classify(error)
        return verdict is Verdict.TRANSIENT or (verdict is Verdict.EXPIRED and self._was_let_in)

    def _before_another_try(self, state: tenacity.RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome else None
        if error is None:
            return
        if classify(error) is Verdict.EXPIRED:
            self._renew()
        else:
            self._backend.reconnect()
        self._tell_retry(state, error)

    def _mapped(
        self, action: str, name: str, error: Exception, *, writes: bool
    ) -> StoreError | ObjectMissingError | DamagedError:
        verdict = classify(error)
        place = self._place(name)
        if isinstance(error, NotAFileError):
            return DamagedError(f"{place}: {error.strerror}")
        if verdict is Verdict.MISSING and not writes:
            return ObjectMissingError(f"{place}: there is no such object")
        reason = " ".join(str(error).split()) or "no reason given"
        code = error_code(error)
        known = f" ({code})" if code and code not in reason else ""
        told = redact(f"{reason}{known}", self._secrets)
        line = f"{place}: {action} failed: {type(error).__name__}: {told}"
        if self._may_pass(error):
            tries = self._retrying.statistics.get("attempt_number", 1)
            return TransientStoreError(f"{line}; given up after {tries} tries{hint(error)}")
        if verdict is Verdict.FULL:
            return StoreFullError(f"{line}; the store is full: make room, or raise the quota")
        return PermanentStoreError(line + hint(error))

    def _tell_retry(self, state: tenacity.RetryCallState, error: BaseException) -> None:
        logger.log(
            logging.WARNING if state.attempt_number == 1 else logging.INFO,
            "%s: try %d failed (%s: %s), trying again in %.1f s",
            self.display_url,
            state.attempt_number,
            type(error).__name__,
            " ".join(redact(str(error), self._secrets).split()),
            state.upcoming_sleep,
        )

    def _place(self, name: str) -> str:
        return f"{self.display_url}/{name}" if name else self.display_url


def _views(data: Buffers) -> builtins.list[memoryview]:
    """Flat views of the bytes; empty ones are left out, since they cannot be cast."""
    chunks = [data] if isinstance(data, bytes | bytearray | memoryview) else data
    views = [memoryview(chunk) for chunk in chunks]
    return [view.cast("B") for view in views if view.nbytes]
