"""The manifest: the list of a checkpoint's files, whose creation is the commit.

It is written canonically with a checksum of itself, and read as if it were hostile: sizes, names and
checksums are bounded and verified, and only the canonical spelling is accepted, so that no byte of it
can change unseen. Pure: no I/O.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Self

import xxhash

from checkpoints.canonical import JSON, LIMIT_BYTES, Fields, dump, parse
from checkpoints.errors import DamagedError, NewerFormatError, RecordError
from checkpoints.names import CHECKPOINTS, MANIFEST, CheckpointName, new_token, utc_now

MANIFEST_LIMIT_BYTES: Final = LIMIT_BYTES
"""The largest manifest: it is created by one request, and one that is larger was never written."""
RUN_ID_LIMIT: Final = 200
_LARGEST_FILE: Final = 1 << 53
_FOLDER: Final = re.compile(rf"(?:^|/){CHECKPOINTS}/([^/]+)/")
_FILE: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")
_SUM: Final = re.compile(r"[0-9a-f]{32}")
_SEAL: Final = re.compile(rb'\{"checksum":"([0-9a-f]{32})",')
"""How each manifest begins, its keys being sorted: all that follows is what the checksum is of."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PartSum:
    """The checksum of one part of a file."""

    offset: int
    size: int
    xxh3_128: str


@dataclass(frozen=True, kw_only=True, slots=True)
class FileEntry:
    """One file of a checkpoint, its size and the checksums of its parts."""

    name: str
    size_bytes: int
    parts: tuple[PartSum, ...]
    """In order, without gap or overlap; none where the file is empty."""
    owner: CheckpointName | None = None
    """The checkpoint that first wrote the file and in whose folder it lies; None: this one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """The list of a checkpoint's files: its creation is the commit."""

    name: CheckpointName
    parent: CheckpointName | None
    run_id: str
    files: tuple[FileEntry, ...]
    info: Mapping[str, JSON] = field(default_factory=dict)
    token: str = field(default_factory=new_token)
    created_at: str = field(default_factory=utc_now)
    format: int = 1

    @property
    def size_bytes(self) -> int:
        """The bytes of all files together."""
        return sum(entry.size_bytes for entry in self.files)

    def to_json(self) -> bytes:
        """The manifest as it is written, with a checksum of itself."""
        content = {
            "format": self.format,
            "name": str(self.name),
            "parent": None if self.parent is None else str(self.parent),
            "run_id": self.run_id,
            "files": [_file_json(entry) for entry in self.files],
            "info": dict(self.info),
            "token": self.token,
            "created_at": self.created_at,
        }
        try:
            return dump({**content, "checksum": _checksum(content)})
        except (TypeError, ValueError) as error:
            raise RecordError(f"{self.name.manifest}: info is not JSON: {error}") from error

    @classmethod
    def from_json(cls, data: bytes, name: str) -> Self:
        """Read and verify a manifest.

        Where `name` is that of a file in a checkpoint's folder, the manifest has to be that
        checkpoint's own: one that was copied from another step is refused.

        Raises:
            DamagedError: It does not verify, or is the void manifest of a checkpoint that was swept or deleted.
        """
        if len(data) > MANIFEST_LIMIT_BYTES:
            raise DamagedError(
                f"{name}: found {len(data)} bytes, expected at most {MANIFEST_LIMIT_BYTES}"
            )
        if is_void(data):
            raise DamagedError(
                f"{name}: a void manifest: swept before it was committed, or deleted"
            )
        # First: what is damaged is not parsed, which takes long where it holds millions of values.
        if not _is_sealed(data):
            raise DamagedError(f"{name}: the checksum of the manifest itself does not verify")
        values = parse(data, name, limit_bytes=MANIFEST_LIMIT_BYTES, error=DamagedError)
        fields = Fields(values, name, DamagedError)
        # Only the canonical spelling is taken, so that no byte can change unseen.
        if dump(values) != data:
            raise fields.fail(
                "found another spelling, expected the one in which manifests are written"
            )
        if type(found := fields.values.get("format")) is int and found > 1:
            raise NewerFormatError(
                f"{name}: found format {found}, expected 1: a newer version of this package wrote it; use that version"
            )
        fields.version()
        manifest = cls(
            name=_checkpoint(fields, "name"),
            parent=optional_checkpoint(fields, "parent"),
            run_id=fields.text("run_id", limit=RUN_ID_LIMIT),
            files=_files(fields),
            info=fields.mapping("info"),
            token=fields.text("token", limit=200),
            created_at=fields.text("created_at", limit=60),
        )
        folder = _FOLDER.search(name)
        if folder and folder[1] != str(manifest.name):
            raise fields.fail(
                f"found the manifest of {manifest.name}, expected that of {folder[1]}"
            )
        return manifest


def void_manifest(token: str | None = None) -> bytes:
    """What is created in a manifest's place to take its name for ever."""
    return dump({"void": True, "format": 1, "token": token or new_token()})


def is_void(data: bytes) -> bool:
    """Whether these are the bytes of a void manifest."""
    try:
        return len(data) <= 4096 and parse(data, MANIFEST).get("void") is True
    except RecordError:
        return False


def _checksum(content: Mapping[str, object]) -> str:
    return xxhash.xxh3_128_hexdigest(dump(content))


def _is_sealed(data: bytes) -> bool:
    """Whether the bytes begin with the checksum of what follows."""
    seal = _SEAL.match(data)
    if seal is None:
        return False
    found = xxhash.xxh3_128(b"{")
    found.update(memoryview(data)[seal.end() :])
    return found.hexdigest().encode() == seal[1]


def _file_json(entry: FileEntry) -> dict[str, object]:
    return {
        "name": entry.name,
        "size_bytes": entry.size_bytes,
        "parts": [[part.offset, part.size, part.xxh3_128] for part in entry.parts],
        "owner": None if entry.owner is None else str(entry.owner),
    }


def _files(fields: Fields) -> tuple[FileEntry, ...]:
    entries = tuple(_file(inner) for inner in fields.records("files"))
    seen: set[str] = set()
    for entry in entries:
        if entry.name in seen:
            raise fields.fail(f"files: {entry.name!r} stands there twice")
        seen.add(entry.name)
    return entries


def _file(fields: Fields) -> FileEntry:
    name = fields.text("name", limit=200)
    if not _FILE.fullmatch(name) or name == MANIFEST:
        raise fields.wrong("name", "a plain file name of letters, digits, '.', '_' and '-'")
    size_bytes = fields.whole("size_bytes", 0, _LARGEST_FILE)
    parts = []
    offset = 0
    for item in fields.items("parts", limit=1_000_000):
        match item:
            # A bool is an int to Python; here it would be a second spelling of 0 or 1.
            case [int(start), int(size), str(digest)] if (
                type(start) is int
                and start == offset
                and 0 < size <= size_bytes - offset
                and type(size) is int
                and _SUM.fullmatch(digest)
            ):
                parts.append(PartSum(offset=start, size=size, xxh3_128=digest))
                offset += size
            case _:
                raise fields.fail(
                    f"parts: found {str(item)[:60]} at offset {offset} of {size_bytes}, expected "
                    "the next [offset, size, xxh3_128]"
                )
    if offset != size_bytes:
        raise fields.fail(f"parts: found {offset} bytes, expected the {size_bytes} of size_bytes")
    owner = optional_checkpoint(fields, "owner")
    return FileEntry(name=name, size_bytes=size_bytes, parts=tuple(parts), owner=owner)


def _checkpoint(fields: Fields, key: str) -> CheckpointName:
    name = CheckpointName.find(fields.text(key, limit=60))
    if name is None:
        raise fields.wrong(key, "generation-step as in 000007-000000001200")
    return name


def optional_checkpoint(fields: Fields, key: str) -> CheckpointName | None:
    """A checkpoint's name out of a record, or null."""
    return None if fields.optional_text(key) is None else _checkpoint(fields, key)
