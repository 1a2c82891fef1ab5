"""The events and the audit lines of one generation, as they happen.

Where files can grow, a line is one write to a file held open and survives the death of the process at
once (not a power cut: `flush(durable=True)` does). Where they cannot, lines gather and go up as numbered
parts, in the background when they are old or many, and before `flush` returns. A store that fails for a
while costs no line and never stops the caller: lines wait, and `flush` alone raises.

    journal/000007.jsonl            audit/000007.rank3.jsonl
    journal/000007-000001.jsonl     audit/000007.rank3-000001.jsonl
"""

import contextlib
import errno
import json
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Final, Self

from checkpoints.canonical import plain
from checkpoints.errors import CheckpointError, StoreError, StoreFullError
from checkpoints.layout import audit_prefix, journal_prefix
from checkpoints.store import Store

if TYPE_CHECKING:
    from checkpoints.backends import Appender

logger = logging.getLogger(__name__)

_FLUSH_S: Final = 10.0
_PART_BYTES: Final = 1 << 20
_READ_BYTES: Final = 4 << 20
_LONGEST_LINE: Final = 64 << 20
# json.dumps would build one for each line: 22 against 8 microseconds.
_ENCODER: Final = json.JSONEncoder(allow_nan=False)
_NAME: Final = re.compile(
    r"(?:journal|audit)/(\d{6,10})(?:\.rank(\d+))?(?:-(\d+))?\.jsonl", re.ASCII
)


class Journal:
    """Where one process of a generation writes down what happens.

    Any thread may call. After `close` further lines are left out.
    """

    def __init__(
        self,
        store: Store,
        generation: int,
        *,
        rank: int | None = None,
        flush_s: float = _FLUSH_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        who = "" if rank is None else f".rank{rank}"
        self.generation = generation
        self._clock = clock
        self._events = _open_lines(store, journal_prefix(generation) + who, flush_s)
        self._audit = _open_lines(store, audit_prefix(generation) + who, flush_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def event(self, kind: str, **fields: object) -> None:
        """Write down that something happened; `event`, `time` and `generation` are added."""
        head = {"event": kind, "time": round(self._clock(), 3), "generation": self.generation}
        self._events.add(_encode({**head, **fields}))

    def audit(self, line: Mapping[str, object]) -> None:
        """Write down which samples a step uses, as given, before its gradients are combined."""
        self._audit.add(_encode(line))

    def flush(self, durable: bool = False) -> None:
        """Return when all lines are in the store; `durable`: and would survive a power cut.

        Raises:
            StoreError: They could not be written; they are kept, and tried again.
        """
        self._events.flush(durable=durable)
        self._audit.flush(durable=durable)

    def close(self) -> None:
        """Flush what can be flushed, and let go; a second time does nothing."""
        self._events.close()
        self._audit.close()


def _encode(values: Mapping[str, object]) -> bytes:
    try:
        text = _ENCODER.encode(values)
    except (TypeError, ValueError):
        # What people read may hold a NaN or a path; a line is not worth an error.
        text = _ENCODER.encode(plain(values))
    return text.encode("ascii") + b"\n"


def _open_lines(store: Store, prefix: str, flush_s: float) -> "_Growing | _Parts":
    return _Growing(store, prefix) if store.can_append else _Parts(store, prefix, flush_s)


class _Growing:
    """Lines in one file that grows; what could not be written goes first the next time."""

    def __init__(self, store: Store, prefix: str) -> None:
        self._store = store
        self._name = f"{prefix}.jsonl"
        self._lock = threading.Lock()
        self._appender: Appender | None = None
        self._waiting = b""
        self._told = False
        self._closed = False

    def add(self, line: bytes) -> None:
        """Write the line; it waits where that fails."""
        with self._lock:
            if self._closed:
                return
            try:
                self._write(self._waiting + line)
            except (CheckpointError, OSError) as error:
                self._let_go()
                if not self._told:
                    logger.warning("%s: lines wait: %s", self._place, error)
                self._told = True

    def _write(self, data: bytes) -> None:
        self._waiting = data
        if self._appender is None:
            self._appender = self._store.appender(self._name)
        # A short write is continued where it stopped: nobody else writes to this file.
        while self._waiting:
            self._waiting = self._waiting[self._appender.write(self._waiting) :]
        self._told = False

    def flush(self, *, durable: bool) -> None:
        """Write what waits, and wait for the disk."""
        with self._lock:
            try:
                if self._waiting:
                    self._write(self._waiting)
                if durable and self._appender is not None:
                    self._appender.sync()
            except OSError as error:
                self._let_go()
                if isinstance(error, CheckpointError):
                    raise
                kind = StoreFullError if _is_full(error) else StoreError
                raise kind(f"{self._place}: lines wait: {error}") from error

    def close(self) -> None:
        """Write what waits, if that can be done, and close the file."""
        _try_flush(self, self._place)
        with self._lock:
            self._closed = True
            self._let_go()

    def _let_go(self) -> None:
        """Close the file; after an error the next line opens it anew (a stale handle stays stale)."""
        appender, self._appender = self._appender, None
        if appender is not None:
            with contextlib.suppress(OSError):
                appender.close()

    @property
    def _place(self) -> str:
        return f"{self._store.display_url}/{self._name}"


class _Parts:
    """Lines in numbered objects; a thread sends what is old or much, so that adding never waits."""

    def __init__(self, store: Store, prefix: str, flush_s: float) -> None:
        self._store = store
        self._prefix = prefix
        self._flush_s = flush_s
        self._state = threading.Condition()
        self._sending = threading.Lock()
        self._lines: list[bytes] = []
        self._size = 0
        self._part = 0
        self._thread: threading.Thread | None = None
        self._closed = False

    def add(self, line: bytes) -> None:
        """Keep the line; the thread that sends it starts with the first one."""
        with self._state:
            if self._closed:
                return
            self._lines.append(line)
            self._size += len(line)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._send_when_due, name=f"journal {self._prefix}", daemon=True
                )
                self._thread.start()
            elif self._size >= _PART_BYTES:
                self._state.notify_all()

    def _send_when_due(self) -> None:
        while True:
            with self._state:
                self._state.wait_for(
                    lambda: self._closed or self._size >= _PART_BYTES, timeout=self._flush_s
                )
                if self._closed:
                    return
            if not _try_flush(self, f"{self._store.display_url}/{self._prefix}"):
                with self._state:
                    # Much may be waiting now; that is no reason to ask a broken store at once.
                    self._state.wait_for(lambda: self._closed, timeout=self._flush_s)

    def flush(self, *, durable: bool) -> None:  # noqa: ARG002  # an object is durable once it is there
        """Send what is there as one part."""
        with self._sending:
            with self._state:
                lines, self._lines, self._size = self._lines, [], 0
            if not lines:
                return
            try:
                self._store.put(f"{self._prefix}-{self._part + 1:06d}.jsonl", lines)
            except BaseException:
                with self._state:
                    self._lines = lines + self._lines
                    self._size = sum(map(len, self._lines))
                raise
            self._part += 1

    def close(self) -> None:
        """Send what is there, if that can be done, and end the thread."""
        _try_flush(self, f"{self._store.display_url}/{self._prefix}")
        with self._state:
            self._closed = True
            self._state.notify_all()
        if self._thread is not None:
            self._thread.join(timeout=1.0)


def _try_flush(lines: "_Growing | _Parts", place: str) -> bool:
    try:
        lines.flush(durable=False)
    except CheckpointError as error:
        logger.warning("%s: lines wait: %s", place, error)
        return False
    return True


def _is_full(error: OSError) -> bool:
    return error.errno in {errno.ENOSPC, errno.EDQUOT}


# ----------------------------------------------------------------------------------------- reading
def read_events(store: Store, generation: int | None = None) -> Iterator[dict[str, object]]:
    """The events of one generation or of all, in order of generation, rank and part."""
    prefix = "journal/" if generation is None else journal_prefix(generation)
    yield from _read(store, prefix, generation)


def read_audit(store: Store, generation: int | None = None) -> Iterator[dict[str, object]]:
    """The audit lines of one generation or of all, in order of generation, rank and part."""
    prefix = "audit/" if generation is None else audit_prefix(generation)
    yield from _read(store, prefix, generation)


def _read(store: Store, prefix: str, generation: int | None) -> Iterator[dict[str, object]]:
    found = []
    for name in store.list(prefix):
        match = _NAME.fullmatch(name)
        if match and generation in {None, int(match[1])}:
            # As numbers: generation 1000000 comes after 999999, part 10 after 9.
            found.append((int(match[1]), int(match[2] or -1), int(match[3] or 0), name))
    for *_, name in sorted(found):
        for line in _lines(store, name):
            values = _decode(line)
            if values is None:
                # The writer was killed inside its last write; nothing was lost that had counted.
                logger.info("%s/%s: left out a torn line", store.display_url, name)
            else:
                yield values


def _lines(store: Store, name: str) -> Iterator[bytes]:
    """The lines of a file, read piece by piece; also the last one, if it has no end."""
    start = 0
    rest = b""
    while True:
        piece = store.get_range(name, start, _READ_BYTES)
        start += len(piece)
        *lines, rest = (rest + piece).split(b"\n")
        yield from lines
        if len(rest) > _LONGEST_LINE:
            rest = b""  # no journal of ours: its end, if there is one, is told as torn
        if len(piece) < _READ_BYTES:
            if rest:
                yield rest
            return


def _decode(line: bytes) -> dict[str, object] | None:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return values if isinstance(values, dict) else None
