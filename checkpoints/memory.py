"""The tier in memory: whole snapshots that a node still holds, found again and read without a copy.

Promises: a torn snapshot is never taken for a whole one; the tensors of a loaded state are views of the
node's memory, so that any number of processes of the node load it at the cost of one; they must be used
up before the memory is filled anew. What is read is believed no more than a checkpoint: it runs no code.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from checkpoints import parts, reader, snapshots
from checkpoints.errors import CheckpointError, DamagedError
from checkpoints.segments import Segment, leftovers, segments_of
from checkpoints.serialization import decode_header, decode_state, join, tensor_view
from checkpoints.snapshots import Plan, Snapshot
from checkpoints.staging import STATE
from checkpoints.tensorfile import DTYPES

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable
    from pathlib import Path

    from torch import Tensor

    from checkpoints.layout import AgentId, CheckpointName, Manifest
    from checkpoints.store import Store

logger = logging.getLogger(__name__)

_TABLE_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """A whole snapshot that the node holds, told without its state."""

    name: CheckpointName
    run_id: str
    info: dict[str, Any]
    known: CheckpointName | None
    """The newest checkpoint that its maker knew to be in the store."""
    tries: int
    """How often a generation has tried to begin from it and was not seen to succeed."""
    path: str
    """Under which every process of the node can open it."""


def held(segments: Iterable[Segment], paths: Collection[str], run_id: str) -> list[Held]:
    """The whole snapshots of a run in some segments, newest first; `paths` are theirs, in order."""
    found = []
    for segment, path in zip(segments, paths, strict=True):
        try:
            snapshot = snapshots.read(segment.view())
        except (CheckpointError, ValueError) as error:
            logger.warning("a snapshot in memory is left out: %s", error)
            continue
        if snapshot is None or snapshot.run_id != run_id:
            continue
        found.append(
            Held(
                name=snapshot.name,
                run_id=snapshot.run_id,
                info=dict(snapshot.info),
                known=snapshots.known(segment.view()),
                tries=snapshots.tries(segment.view()),
                path=path,
            )
        )
    # Of one step there may be two: before the epoch's end and after it.
    return sorted(found, key=lambda one: (one.name, str(one.info.get("epoch"))), reverse=True)


def open_leftovers(run_id: str) -> list[Segment]:
    """The named segments of a run on this node that outlive the agent they belonged to."""
    return _open(leftovers(run_id))


def open_named(owner: AgentId, run_id: str) -> list[Segment]:
    """The named segments of a run that live by a process."""
    return _open(segments_of(owner, run_id))


def _open(paths: Iterable[Path]) -> list[Segment]:
    segments = []
    for path in paths:
        with contextlib.suppress(OSError):
            segments.append(Segment.open(path))
    return segments


def load(path: str | Path, name: CheckpointName) -> dict[str, object]:
    """The state in a snapshot, as views of private pages: they change with the memory, not the reverse.

    Raises:
        DamagedError: There is no whole snapshot of that name, or it does not verify.
    """
    try:
        with open(path, "rb") as file:
            memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:
        raise DamagedError(f"snapshot {name}: its memory cannot be opened: {error}") from error
    snapshot = snapshots.read(memoryview(memory))
    if snapshot is None or snapshot.name != name:
        raise DamagedError(f"snapshot {name}: is no longer in this node's memory")
    return load_snapshot(snapshot)


def load_snapshot(snapshot: Snapshot) -> dict[str, object]:
    """The state in a snapshot; its tensors are views of its memory.

    Raises:
        DamagedError: Its files are not what they should be.
    """
    import torch

    where = f"snapshot {snapshot.name}"
    files = {file.name: file.data for file in snapshot.files}
    if STATE not in files:
        raise DamagedError(f"{where}: {STATE} is missing")
    state = reader.check_state(decode_state(bytes(files[STATE]), where=f"{where}: {STATE}"), where)
    tree: dict[str, object] = {}
    for key, skeleton in state.skeletons.items():
        tensors: dict[str, Tensor] = {}
        for name in state.files.get(key, ()):
            if name not in files:
                raise DamagedError(f"{where}: {name} is missing")
            data = files[name]
            start = bytes(data[: reader.header_size(data, f"{where}: {name}")])
            header = decode_header(start, data.nbytes, where=f"{where}: {name}")
            if any(spec.offset % DTYPES[spec.dtype][1] for spec in header.tensors):
                raise DamagedError(f"{where}: {name}: a tensor begins where none of its type can")
            image = torch.frombuffer(data, dtype=torch.uint8)
            tensors |= {spec.name: tensor_view(image, spec) for spec in header.tensors}
        tree[key] = join(skeleton, tensors, where=f"{where}: {STATE}: {key}")
    return tree


def size_of(manifest: Manifest) -> int:
    """The memory that a checkpoint takes once it is fetched."""
    return Plan.of({e.name: e.size_bytes for e in manifest.files}).capacity(_TABLE_BYTES)


def fetch(store: Store, manifest: Manifest, memory: memoryview) -> Snapshot:
    """Read a checkpoint into a slot's memory, every byte verified; it is a snapshot then.

    Raises:
        DamagedError: A file is missing, has another size, or does not verify.
    """
    snapshots.clear(memory)
    reader.read_state(store, manifest)
    plan = Plan.of({entry.name: entry.size_bytes for entry in manifest.files})
    loads = []
    files = []
    for entry in manifest.files:
        reader.check_kind(manifest, entry)
        parts.check_size(store, manifest, entry)
        at, size = plan.places[entry.name]
        target = memory[at : at + size]
        loads.append(parts.Load(store, manifest, entry, [target]))
        files.append(snapshots.StagedFile(name=entry.name, data=target))
    parts.run_parts(loads)
    snapshot = Snapshot(
        name=manifest.name,
        parent=manifest.parent,
        run_id=manifest.run_id,
        info=manifest.info,
        files=tuple(files),
        token=manifest.token,
        created_at=manifest.created_at,
    )
    snapshots.seal(memory, snapshot, plan, known=manifest.name)
    return snapshot
