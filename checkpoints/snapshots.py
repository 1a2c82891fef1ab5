"""A snapshot: the state as the very files that a checkpoint will hold, in memory that is shared or not.

The memory of one is a *slot*: a page of words, then each file at a multiple of 4096, then a table that
says what they are. Promises: the slot is the files, so writing them is no copy; whoever finds a slot after
its maker was killed can tell a whole snapshot from a torn one, because the step's word is zeroed before
anything else changes and written last. Needs no torch.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol

import xxhash

from checkpoints.canonical import Fields, dump, parse
from checkpoints.errors import CheckpointError, DamagedError
from checkpoints.layout import RUN_ID_LIMIT, CheckpointName, new_token, utc_now

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from checkpoints.canonical import JSON

PAGE: Final = 4096
_MAGIC: Final = 0x3130_544F_4C53_4C45  # "ELSLOT01"
_WORDS: Final = struct.Struct("<8Q")
"""Magic, step + 1, generation, where the table is, its length, its sum, times tried, one to spare."""
_STEP_AT: Final = 8
_TRIED_AT: Final = 48
_KNOWN_AT: Final = 64
_KNOWN: Final = struct.Struct("<2Q")
_LARGEST_TABLE: Final = 64 << 20


class Holder(Protocol):
    """Whoever gave the memory of a snapshot and gets it back."""

    def free(self) -> None:
        """Let the next snapshot have it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StagedFile:
    """One file of a snapshot, all of its bytes in host memory."""

    name: str
    data: memoryview

    @property
    def size_bytes(self) -> int:
        """The size that the file will have."""
        return self.data.nbytes


@dataclass(kw_only=True, slots=True, weakref_slot=True, eq=False)
class Snapshot:
    """A consistent copy of the training state in host memory, not yet durable."""

    name: CheckpointName
    parent: CheckpointName | None
    run_id: str
    info: Mapping[str, JSON]
    files: tuple[StagedFile, ...]
    token: str = field(default_factory=new_token)
    created_at: str = field(default_factory=utc_now)
    slot: Holder | None = None
    is_doubtful: bool = False
    """The manifest was sent and the outcome is not known: the files must stay."""

    @property
    def size_bytes(self) -> int:
        """The bytes of all files together."""
        return sum(file.size_bytes for file in self.files)

    @property
    def is_released(self) -> bool:
        """Whether its memory may already hold another snapshot."""
        return self.slot is None

    def release(self) -> None:
        """Give its memory back; it cannot be committed any more."""
        slot, self.slot = self.slot, None
        if slot is not None:
            slot.free()


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Where each file of a snapshot lies in its slot."""

    places: Mapping[str, tuple[int, int]]
    """Offset and size of each file."""
    end: int
    """Where the table may begin."""

    @classmethod
    def of(cls, sizes: Mapping[str, int]) -> Plan:
        """One file after the other, each at a multiple of 4096."""
        places: dict[str, tuple[int, int]] = {}
        at = PAGE
        for name, size in sizes.items():
            places[name] = (at, size)
            at += _padded(size)
        return cls(places=places, end=at)

    def capacity(self, table_bytes: int = 1 << 16) -> int:
        """The memory that it takes, with room for the table and for texts that grow a little."""
        return self.end + _padded(table_bytes) + (1 << 16)


def clear(memory: memoryview) -> None:
    """What is in the slot is no snapshot from now on."""
    struct.pack_into("<Q", memory, _STEP_AT, 0)


def seal(
    memory: memoryview, snapshot: Snapshot, plan: Plan, *, known: CheckpointName | None
) -> None:
    """All files are in place: write the table, and last the word that makes it a snapshot.

    Args:
        memory: The whole slot.
        snapshot: What is in it.
        plan: Where its files are.
        known: The newest checkpoint that is known to be in the store.

    Raises:
        CheckpointError: The table does not fit behind the files.
    """
    table = _table(snapshot, plan.places)
    if plan.end + len(table) > memory.nbytes:
        raise CheckpointError(
            f"snapshot {snapshot.name}: found {memory.nbytes} bytes of memory, expected "
            f"{plan.end + len(table)}"
        )
    clear(memory)
    memory[plan.end : plan.end + len(table)] = table
    note_known(memory, known)
    words = (0, snapshot.name.generation, plan.end, len(table), xxhash.xxh3_64_intdigest(table))
    _WORDS.pack_into(memory, 0, _MAGIC, *words, 0, 0)
    struct.pack_into("<Q", memory, _STEP_AT, snapshot.name.step + 1)


def copy(source: memoryview, target: memoryview) -> bool:
    """Copy the snapshot in a slot to another one; False, and no snapshot there, where it changed meanwhile.

    Args:
        source: The slot of somebody who may still write to it.
        target: At least as large.
    """
    before = bytes(source[:PAGE])
    clear(target)
    target[PAGE : source.nbytes] = source[PAGE:]
    if bytes(source[:_TRIED_AT]) != before[:_TRIED_AT]:
        return False
    after_step = _STEP_AT + 8
    target[:_STEP_AT] = before[:_STEP_AT]
    target[after_step:PAGE] = before[after_step:]
    target[_STEP_AT:after_step] = before[_STEP_AT:after_step]
    return True


def read(memory: memoryview, slot: Holder | None = None) -> Snapshot | None:
    """The whole snapshot in a slot, its files not copied; None where there is none.

    Raises:
        DamagedError: Its table does not verify.
    """
    if memory.nbytes < PAGE:
        return None
    magic, step, generation, at, length, digest, _, _ = _WORDS.unpack_from(memory, 0)
    if magic != _MAGIC or not step:
        return None
    where = f"snapshot of step {step - 1}"
    if length > _LARGEST_TABLE or at + length > memory.nbytes:
        raise DamagedError(f"{where}: its table lies outside of its memory")
    table = bytes(memory[at : at + length])
    if xxhash.xxh3_64_intdigest(table) != digest:
        raise DamagedError(f"{where}: its table does not verify")
    return _read_table(table, memory, CheckpointName(generation, step - 1), slot)


def note_known(memory: memoryview, known: CheckpointName | None) -> None:
    """Note the newest checkpoint that is known to be in the store."""
    pair = (0, 0) if known is None else (known.generation, known.step)
    _KNOWN.pack_into(memory, _KNOWN_AT, *pair)


def known(memory: memoryview) -> CheckpointName | None:
    """The newest checkpoint that the maker of the snapshot knew to be in the store."""
    generation, step = _KNOWN.unpack_from(memory, _KNOWN_AT)
    return CheckpointName(generation, step) if generation else None


def count_try(memory: memoryview, tries: int) -> None:
    """Note how often a generation has tried to begin from this snapshot."""
    struct.pack_into("<Q", memory, _TRIED_AT, tries)


def tries(memory: memoryview) -> int:
    """How often a generation has tried to begin from this snapshot and was not seen to succeed."""
    return int(struct.unpack_from("<Q", memory, _TRIED_AT)[0])


def _padded(size: int) -> int:
    return -(-size // PAGE) * PAGE


def _table(snapshot: Snapshot, places: Mapping[str, tuple[int, int]]) -> bytes:
    return dump(
        {
            "name": str(snapshot.name),
            "parent": None if snapshot.parent is None else str(snapshot.parent),
            "run_id": snapshot.run_id,
            "info": dict(snapshot.info),
            "token": snapshot.token,
            "created_at": snapshot.created_at,
            "files": [[file.name, *places[file.name]] for file in snapshot.files],
        }
    )


def _read_table(
    table: bytes, memory: memoryview, name: CheckpointName, slot: Holder | None
) -> Snapshot:
    where = f"snapshot {name}"
    fields = Fields(
        parse(table, where, limit_bytes=_LARGEST_TABLE, error=DamagedError), where, DamagedError
    )
    if fields.text("name", limit=60) != str(name):
        raise fields.wrong("name", f"{name}, as its words say")
    parent = fields.optional_text("parent")
    return Snapshot(
        name=name,
        parent=None if parent is None else CheckpointName.parse(parent),
        run_id=fields.text("run_id", limit=RUN_ID_LIMIT),
        info=fields.mapping("info"),
        files=_read_files(fields.items("files", limit=1_000_000), memory, fields),
        token=fields.text("token", limit=200),
        created_at=fields.text("created_at", limit=60),
        slot=slot,
    )


def _read_files(
    items: Sequence[JSON], memory: memoryview, fields: Fields
) -> tuple[StagedFile, ...]:
    files = []
    for item in items:
        match item:
            case [str(name), int(at), int(size)] if 0 <= at <= memory.nbytes - size and size >= 0:
                files.append(StagedFile(name=name, data=memory[at : at + size]))
            case _:
                raise fields.wrong("files", "[name, offset, size] within the memory")
    return tuple(files)
