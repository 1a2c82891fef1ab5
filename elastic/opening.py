"""The first half of a start: reach the store, meet the other ranks, and agree that they are alike.

Promises: what no restart can cure (an unreachable store at the first start, nodes with other code or
other settings, a local folder that the nodes do not share) ends with a StartError on every rank before
anything is claimed or written to the run. Afterwards the same troubles are told and waited out.
"""

import functools
import hashlib
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from checkpoints.errors import CheckpointError, StoreError
from checkpoints.layout import AgentId, meeting_name
from checkpoints.options import CheckpointOptions
from checkpoints.store import Store, open_store
from elastic.agent import has_agent
from elastic.errors import AttentionError, ExitCode, StartError
from elastic.faults import Signals
from elastic.meeting import Meeting, meet
from elastic.monitor import Fault, Slot, previous_faults
from elastic.notices import MARK
from elastic.ranks import Place
from elastic.verdict import UNSAVED, clear_verdict, write_verdict
from elastic.watching import Standing, stand
from elastic.world import World, start_world

__all__ = [
    "Session",
    "Setup",
    "hello_of",
    "open_run_store",
    "open_session",
    "open_world",
    "prepare_once",
]

logger = logging.getLogger(__name__)

_FIRST_RETRY_S: Final = 20.0
_LATER_PAUSE_S: Final = 5.0
_FIRST_POLL_S: Final = 0.002
_POLL_S: Final = 0.05
_OWN_PACKAGES: Final = ("elastic", "checkpoints", "jobs")


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """What a run needs to know before a job or a model is looked at."""

    checkpoint: CheckpointOptions
    seed: int = 0
    backend: str = "auto"
    init_method: str | None = None
    timeout_s: float = 600.0
    audit: bool = False
    accept: tuple[str, ...] = ()
    step_delay_s: float = 0.0
    stop_before: str | None = None
    notices: tuple[str, ...] = ()
    config: Mapping[str, Any]
    """All settings, without credentials: compared between nodes, kept in the claim."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Session:
    """This process on its node: who it is, who stands over it, what it leaves behind."""

    place: Place
    agent: AgentId
    folder: Path
    slot: Slot
    signals: Signals
    began: float
    """Unix time at which this process came up."""
    left: list[Fault] = field(default_factory=list)
    """Why workers of this node ended before; the first worker of a node has found it."""
    former: list[Fault] = field(default_factory=list)
    """Why workers of the generation before this one ended, as far as known by now."""


def open_session(
    environ: Mapping[str, str], signals: Sequence[str], standing: Standing | None = None
) -> Session:
    """Take this worker's place, found here where it was not before, and turn signals into flags. Main thread, early.

    Raises:
        StartError: The rank variables do not make sense.
    """
    here = standing or stand(environ)
    clear_verdict(here.folder, here.place.local_rank)
    leaving = functools.partial(_note_early_end, here.slot, here.folder, here.place.local_rank)
    caught = Signals(signals, end_now=leaving, mark=here.folder / MARK)
    caught.install()
    former = previous_faults(here.folder) if here.place.local_rank == 0 else []
    return Session(
        place=here.place,
        agent=here.agent,
        folder=here.folder,
        slot=here.slot,
        signals=caught,
        began=time.time(),
        left=former,
        former=list(former),
    )


def _note_early_end(slot: Slot, folder: Path, local_rank: int) -> None:
    write_verdict(folder, local_rank, ExitCode.PREEMPTED)
    slot.end(slot.fault(InterruptedError(UNSAVED), "preempted"))


def open_run_store(session: Session, options: CheckpointOptions) -> Store:
    """Open the run's URL; at a first start it has to answer, later its silence is waited out.

    Raises:
        StartError: The store cannot be reached, or not with these credentials, at the first start.
        AttentionError: It stayed silent for `checkpoint.max_unsaved` at a later start.
    """
    reached = session.folder / "reached"
    first = not reached.exists()
    if options.url.startswith("memory:") and session.place.world_size > 1:
        raise StartError(
            f"checkpoint.url: found {options.url}, which each process has for itself, with "
            f"{session.place.world_size} ranks; expected a folder or an object store"
        )
    began = time.monotonic()
    while True:
        try:
            retry_s = _FIRST_RETRY_S if first else 60.0
            store = open_store(options.url, options.storage_options, retry_s=retry_s)
            store.check()
        except (StoreError, CheckpointError) as error:
            waited = time.monotonic() - began
            if first or not isinstance(error, StoreError):
                raise StartError(f"checkpoint.url: {error}") from error
            if waited > options.max_unsaved:
                raise AttentionError(
                    f"checkpoint.max_unsaved: the store has not answered for {waited:.0f} s: {error}"
                ) from error
            logger.warning(
                "the store does not answer (%s); asked again in %.0f s", error, _LATER_PAUSE_S
            )
            time.sleep(_LATER_PAUSE_S)
        else:
            # A marker that cannot be written only makes the next start ask as strictly as this one.
            reached.touch(exist_ok=True)
            return store


def hello_of(session: Session, setup: Setup, code: str) -> dict[str, Any]:
    """What this rank tells the others when they meet."""
    return {
        "agent": asdict(session.agent),
        "has_agent": has_agent(session.place),
        "host": session.agent.host,
        "local_rank": session.place.local_rank,
        "began": session.began,
        "code": code,
        "config": dict(setup.config),
        "faults": [fault.to_json() for fault in session.left],
    }


def code_hash(extra: Sequence[Path] = ()) -> str:
    """A hash over the runner's own sources and `extra` files, to find nodes that run other code."""
    digest = hashlib.sha256()
    root = Path(__file__).resolve().parent.parent
    for package in _OWN_PACKAGES:
        for file in sorted((root / package).glob("*.py")):
            digest.update(file.name.encode() + b"\0" + file.read_bytes())
    for file in extra:
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


def open_world(
    session: Session,
    setup: Setup,
    store: Store,
    hello: Mapping[str, Any],
    prepare: Callable[[], None],
) -> tuple[World, Meeting, list[dict[str, Any]]]:
    """Meet, prepare each node once, start the process group, compare what the ranks are.

    Collective. Returns the world, the meeting (to be closed after it) and all hellos by rank.

    Raises:
        MeetingError: Not all ranks came in time.
        StartError: Nodes run other code or settings, or do not share a local URL.
    """
    place = session.place
    session.slot.beat(0, "meeting")
    with session.slot.waiting(setup.timeout_s):
        meeting = meet(
            place,
            dict(hello),
            channel=store,
            init_method=setup.init_method,
            timeout_s=setup.timeout_s,
        )
    hellos = list(meeting.hellos)
    session.former[:] = faults_of(hellos)
    _check_alike(hellos)
    session.slot.beat(0, "prepare")
    prepare_once(place, meeting, prepare)
    session.slot.beat(0, "process group")
    world = start_world(
        place,
        meeting,
        backend=setup.backend,
        init_method=setup.init_method,
        timeout_s=setup.timeout_s,
        slot=session.slot,
    )
    hosts = {json.dumps(hello["agent"], sort_keys=True) for hello in hellos if hello["has_agent"]}
    if store.is_local and (len(hosts) > 1 or len({hello["host"] for hello in hellos}) > 1):
        _check_shared(world, store, meeting.session, hellos)
    return world, meeting, hellos


def prepare_once(place: Place, meeting: Meeting, prepare: Callable[[], None]) -> None:
    """Run `prepare` on local rank 0 of each node; the others wait as long as it takes."""
    if place.local_rank == 0:
        prepare()
    if meeting.kv is None or place.world_size == 1:
        return
    if place.local_rank == 0:
        meeting.kv.set(f"prepared/{place.rank}", "1")
    leaders = [rank for rank, hello in enumerate(meeting.hellos) if hello["local_rank"] == 0]
    keys = [f"prepared/{rank}" for rank in leaders]
    # Never a blocking wait: its time-out would bound how long a download may take.
    pause_s = _FIRST_POLL_S
    while not all(meeting.kv.check([key]) for key in keys):
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, _POLL_S)


def _check_alike(hellos: Sequence[Mapping[str, Any]]) -> None:
    first = hellos[0]
    for rank, hello in enumerate(hellos[1:], start=1):
        if hello["code"] != first["code"]:
            raise StartError(
                f"code: rank {rank} on {hello['host']} runs other sources than rank 0 on "
                f"{first['host']}; install the same version of the project and the job everywhere"
            )
        if hello["config"] != first["config"]:
            key = _first_difference(first["config"], hello["config"])
            raise StartError(
                f"{key}: ranks 0 and {rank} were given different values; start all nodes with the "
                "same settings"
            )


def _first_difference(one: Any, other: Any, path: str = "") -> str:
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for key in sorted({*one, *other}):
            if one.get(key) != other.get(key):
                return _first_difference(one.get(key), other.get(key), f"{path}.{key}".lstrip("."))
    return path or "settings"


def _check_shared(
    world: World, store: Store, session: str, hellos: Sequence[Mapping[str, Any]]
) -> None:
    """Look whether every rank sees what the primary writes at a local URL. Collective."""
    name = meeting_name(f"view-{hashlib.sha256(session.encode()).hexdigest()[:16]}")
    if world.is_primary:
        store.put(name, b"{}")
    world.barrier()
    seen = world.gather(store.exists(name))
    if world.is_primary:
        store.delete(name)
    blind = [rank for rank, sees in enumerate(seen) if not sees]
    if blind:
        raise StartError(
            f"checkpoint.url: {store.display_url} is a local folder that rank {blind[0]} on "
            f"{hellos[blind[0]]['host']} does not share with rank 0 on {hellos[0]['host']}; expected "
            "one place that all nodes see: a shared folder or an object store"
        )


def faults_of(hellos: Sequence[Mapping[str, Any]]) -> list[Fault]:
    """What the nodes' former workers left, causes before echoes."""
    faults = [Fault.from_json(found) for hello in hellos for found in hello["faults"]]
    return sorted(faults, key=lambda fault: (fault.is_secondary, fault.time))


def agents_of(hellos: Sequence[Mapping[str, Any]]) -> tuple[AgentId, ...]:
    """The agents of this world, each once, in order of rank."""
    return tuple(dict.fromkeys(AgentId(**hello["agent"]) for hello in hellos))
