"""Every name under a run's URL, and the records that stand there as frozen dataclasses.

Names and the manifest live in rooms of their own and are given on here, so that this is the one place
to ask. A record is written canonically and read strictly: what cannot be read ends in a RecordError (a
DamagedError for a manifest) that names it. Pure: no I/O.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Literal, Self, get_args

from checkpoints.canonical import JSON, Fields, dump, parse, plain
from checkpoints.manifests import (
    MANIFEST_LIMIT_BYTES,
    RUN_ID_LIMIT,
    FileEntry,
    Manifest,
    PartSum,
    is_void,
    optional_checkpoint,
    void_manifest,
)
from checkpoints.names import (
    CHECKPOINTS,
    GENERATIONS,
    LARGEST_GENERATION,
    LARGEST_STEP,
    MANIFEST,
    RUN,
    SUMMARY,
    CheckpointName,
    audit_prefix,
    check_name,
    claim_name,
    generation_of,
    journal_prefix,
    meeting_name,
    new_token,
    started_name,
    utc_now,
)
from checkpoints.redaction import redact, redact_options, redact_url
from checkpoints.rollbacks import Rollback

__all__ = [
    "CHECKPOINTS",
    "GENERATIONS",
    "JSON",
    "MANIFEST",
    "MANIFEST_LIMIT_BYTES",
    "RUN",
    "RUN_ID_LIMIT",
    "SUMMARY",
    "AgentId",
    "CheckpointName",
    "Claim",
    "FileEntry",
    "Manifest",
    "PartSum",
    "Rollback",
    "RunRecord",
    "Source",
    "Started",
    "audit_prefix",
    "check_name",
    "claim_name",
    "generation_of",
    "is_void",
    "journal_prefix",
    "meeting_name",
    "new_token",
    "redact",
    "redact_options",
    "redact_url",
    "started_name",
    "utc_now",
    "void_manifest",
]

Source = Literal["fresh", "memory", "store", "init", "rollback"]
"""Where the state that a generation began from was taken from."""


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class AgentId:
    """One agent: the process that starts workers on a node, told apart from any later one."""

    host: str
    boot_id: str
    pid: int
    start: int
    """When it began, in ticks since boot (field 22 of /proc/PID/stat)."""

    def __str__(self) -> str:
        return f"{self.host}:{self.pid}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """The claim of a generation; created exclusively, never changed."""

    generation: int
    run_id: str
    launch: str
    """Shared by all generations of one launch."""
    agents: tuple[AgentId, ...]
    world_size: int
    nodes: int
    hosts: tuple[str, ...]
    versions: Mapping[str, JSON] = field(default_factory=dict)
    config: Mapping[str, JSON] = field(default_factory=dict)
    """Without credentials."""
    cause: str = "start"
    faults: tuple[Mapping[str, JSON], ...] = ()
    rollbacks: tuple[Rollback, ...] = ()
    """All of the run so far, in order; the last may be this generation's own."""
    token: str = field(default_factory=new_token)
    created_at: str = field(default_factory=utc_now)
    format: int = 1

    @property
    def rollback(self) -> Rollback | None:
        """The rollback that this generation itself is."""
        own = [one for one in self.rollbacks if one.generation == self.generation]
        return own[-1] if own else None

    def to_json(self) -> bytes:
        """The claim as it is written."""
        own = self.rollback
        said = {
            **{key: value for key, value in asdict(self).items() if key != "rollbacks"},
            "rollbacks": [one.to_json() for one in self.rollbacks],
            "rollback_to": None if own is None else str(own.to),
            "skip": [] if own is None else own.to_json()["skip"],
        }
        return dump(plain(said))

    @classmethod
    def from_json(cls, data: bytes, name: str) -> Self:
        """Read a claim, or raise RecordError."""
        fields = Fields(parse(data, name), name)
        fields.version()
        generation = fields.whole("generation", 1, LARGEST_GENERATION)
        if generation_of(name) not in {None, generation}:
            raise fields.wrong("generation", "that of its name")
        return cls(
            generation=generation,
            run_id=fields.text("run_id", limit=RUN_ID_LIMIT),
            launch=fields.text("launch", limit=200),
            agents=tuple(_agent(inner) for inner in fields.records("agents")),
            world_size=fields.whole("world_size", 1),
            nodes=fields.whole("nodes", 1),
            hosts=fields.texts("hosts"),
            versions=fields.mapping("versions"),
            config=fields.mapping("config"),
            cause=fields.text("cause", limit=100_000, empty=True),
            faults=fields.mappings("faults"),
            rollbacks=tuple(
                Rollback.read(inner)
                for inner in (fields.records("rollbacks") if "rollbacks" in fields.values else ())
            ),
            token=fields.text("token", limit=200),
            created_at=fields.text("created_at", limit=60),
        )


def _agent(fields: Fields) -> AgentId:
    return AgentId(
        host=fields.text("host", empty=True),
        boot_id=fields.text("boot_id", empty=True),
        pid=fields.whole("pid"),
        start=fields.whole("start"),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Started:
    """The state from which a generation began; written once, when the restore has verified."""

    generation: int
    parent: str | None
    """The generation-step of that state, also where it was only a snapshot in memory."""
    source: Source
    start_step: int
    position: tuple[int, int]
    """(epoch, samples of it consumed)."""
    token: str = field(default_factory=new_token)
    created_at: str = field(default_factory=utc_now)
    format: int = 1

    @property
    def parent_name(self) -> CheckpointName | None:
        """The parent, read."""
        return None if self.parent is None else CheckpointName.parse(self.parent)

    def to_json(self) -> bytes:
        """The record as it is written."""
        return dump(asdict(self))

    @classmethod
    def from_json(cls, data: bytes, name: str) -> Self:
        """Read a started record, or raise RecordError."""
        fields = Fields(parse(data, name), name)
        fields.version()
        parent = optional_checkpoint(fields, "parent")
        source = fields.text("source")
        position = fields.items("position")
        match position:
            case [int(epoch), int(samples)] if epoch >= 0 and samples >= 0:
                pass
            case _:
                raise fields.wrong("position", "[epoch, samples]")
        if source not in get_args(Source):
            raise fields.wrong("source", " or ".join(get_args(Source)))
        return cls(
            generation=fields.whole("generation", 1, LARGEST_GENERATION),
            parent=None if parent is None else str(parent),
            source=source,  # type: ignore[arg-type]  # compared with the Literal's own values above
            start_step=fields.whole("start_step", 0, LARGEST_STEP),
            position=(epoch, samples),
            token=fields.text("token", limit=200),
            created_at=fields.text("created_at", limit=60),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """The identity of a run; created once, after all start checks have passed."""

    run_id: str
    identity: Mapping[str, JSON]
    token: str = field(default_factory=new_token)
    created_at: str = field(default_factory=utc_now)
    format: int = 1

    def to_json(self) -> bytes:
        """The record as it is written."""
        return dump(asdict(self))

    @classmethod
    def from_json(cls, data: bytes, name: str) -> Self:
        """Read a run record, or raise RecordError."""
        fields = Fields(parse(data, name), name)
        fields.version()
        return cls(
            run_id=fields.text("run_id", limit=RUN_ID_LIMIT),
            identity=fields.mapping("identity"),
            token=fields.text("token", limit=200),
            created_at=fields.text("created_at", limit=60),
        )
