"""The world of one generation: its facts, its process groups, and the few collectives that the runner uses.

Two groups: the default one (nccl or gloo) is DDP's and carries tensors; a small gloo group beside it, with a time-out
of its own, carries flags, verdicts and decisions as JSON (never pickle). Guarantees: a peer that is gone is a
CollectiveError on every rank, never another error; nothing is left behind at `close`, and rank 0, who serves the store,
leaves last.
"""

import contextlib
import json
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, Protocol
from urllib.parse import unquote, urlsplit

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from elastic.bounded import run_bounded
from elastic.errors import CollectiveError, MeetingError, StartError
from elastic.monitor import Slot
from elastic.ranks import Place

__all__ = ["Pending", "World", "choose_backend", "start_world"]

logger = logging.getLogger(__name__)

CONTROL_TIMEOUT_S: Final = 1800.0
"""Peers may wait this long while the primary reads or saves a checkpoint; a dead one is noticed at once."""
_FLAG_BITS: Final = 32
_SLOT_BYTES: Final = 4096
"""A message up to this size takes one round."""
_HEADER_BYTES: Final = 8
_CHUNK_BYTES: Final = 32 << 20
_LEAVE_S: Final = 5.0


class Met(Protocol):
    """What this room wants of a meeting (elastic.meeting.Meeting is one)."""

    session: str
    hellos: list[dict[str, Any]]
    kv: Store | None


@dataclass(kw_only=True, slots=True)
class Pending:
    """A collective on its way."""

    _work: dist.Work | None
    _bits: Tensor
    _slot: Slot | None = None

    def wait(self) -> int:
        """Return the union of all ranks' bits.

        Raises:
            CollectiveError: Raised when a peer is gone.
        """
        if self._work is not None:
            with _peers("flags", self._slot):
                self._work.wait()
            self._work = None
        return sum(1 << bit for bit, is_set in enumerate(self._bits.tolist()) if is_set)

    def is_done(self) -> bool:
        """Tell whether `wait` would return at once."""
        return self._work is None or self._work.is_completed()


@dataclass(kw_only=True)
class World:
    """The workers of this generation, as one of them sees it."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    nodes: int
    hosts: tuple[str, ...]
    """The host of each rank."""
    device: torch.device
    backend: str
    _control: dist.ProcessGroup
    _kv: Store | None
    slot: Slot | None = None
    """Where this worker says what it does, and that it waits for others."""
    timeout_s: float = 600.0
    """How long a collective of DDP's group waits."""
    _file: Path | None = None
    _pending: list[Pending] = field(default_factory=list)

    @property
    def is_primary(self) -> bool:
        """Tell whether this is rank 0, who writes."""
        return self.rank == 0

    def gather(self, item: Any) -> list[Any]:
        """Give each rank's item, JSON, to all. Collective."""
        data = _encode(item)
        first = self._gather_bytes(_slot(data, _SLOT_BYTES), _SLOT_BYTES)
        sizes = [_size(slot) for slot in first]
        if max(sizes) > _SLOT_BYTES - _HEADER_BYTES:
            size = max(sizes) + _HEADER_BYTES
            first = self._gather_bytes(_slot(data, size), size)
        return [_decode(slot) for slot in first]

    def _gather_bytes(self, mine: Tensor, size: int) -> list[Tensor]:
        found = [torch.empty(size, dtype=torch.uint8) for _ in range(self.world_size)]
        with _peers("gather", self.slot):
            dist.all_gather(found, mine, group=self._control)
        return found

    def broadcast(self, item: Any, src: int = 0) -> Any:
        """Give one rank's item, JSON, to all; what the others pass is not looked at. Collective."""
        data = _encode(item) if self.rank == src else b""
        slot = _slot(data, _SLOT_BYTES)
        with _peers("broadcast", self.slot):
            dist.broadcast(slot, src, group=self._control)
            size = _size(slot)
            if size > _SLOT_BYTES - _HEADER_BYTES:
                slot = _slot(data, size + _HEADER_BYTES)
                dist.broadcast(slot, src, group=self._control)
        return _decode(slot)

    def broadcast_tensors(self, tensors: Sequence[Tensor], src: int = 0) -> None:
        """Overwrite tensors with those of one rank, bit by bit; same shapes, types and order everywhere. Collective."""
        if self.world_size == 1:
            return
        for chunk in _chunks(tensors):
            group = self._control if chunk[0].device.type == "cpu" else dist.group.WORLD
            flat = torch.cat([_bytes(tensor) for tensor in chunk])
            with _peers("broadcast", self.slot):
                dist.broadcast(flat, src, group=group)
            if self.rank == src:
                continue
            start = 0
            for tensor in chunk:
                size = tensor.numel() * tensor.element_size()
                part = flat[start : start + size].clone().view(tensor.dtype).view(tensor.shape)
                with torch.no_grad():
                    tensor.copy_(part)
                start += size

    def all_sum(self, values: Sequence[float]) -> list[float]:
        """Add up each rank's values, in float64. Collective."""
        summed = torch.tensor(list(values), dtype=torch.float64)
        if self.world_size > 1 and summed.numel():
            with _peers("sum", self.slot):
                dist.all_reduce(summed, group=self._control)
        return [float(value) for value in summed.tolist()]

    def flags_async(self, bits: int) -> Pending:
        """Begin to unite all ranks' bits (32 at most); look at the result some steps later. Collective."""
        if not 0 <= bits < 1 << _FLAG_BITS:
            raise ValueError(f"flags: found {bits:#x}, expected {_FLAG_BITS} bits")
        flags = torch.tensor([bits >> bit & 1 for bit in range(_FLAG_BITS)], dtype=torch.uint8)
        with _peers("flags", self.slot):
            work = dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self._control, async_op=True)
        pending = Pending(_work=work, _bits=flags, _slot=self.slot)
        self._pending = [one for one in self._pending if not one.is_done()] + [pending]
        return pending

    def wait_for_gradients(self) -> None:
        """Say that all of this rank's gradients are there: from here on it only waits. Any thread; no collective."""
        if self.slot is not None:
            self.slot.wait(self.timeout_s)

    def has_gradients(self) -> None:
        """Say that the others' gradients have come."""
        if self.slot is not None:
            self.slot.resume()

    def enter(self, phase: str) -> None:
        """Say what this rank does now; also where it is the same as before, as a sign of life."""
        if self.slot is not None:
            self.slot.enter(phase)

    def barrier(self) -> None:
        """Wait for all ranks. Collective."""
        with _peers("barrier", self.slot):
            dist.all_reduce(torch.zeros(1), group=self._control)

    def close(self, *, orderly: bool = True) -> None:
        """Leave the world. Collective where orderly; otherwise (a peer is gone) without a word to the others.

        Rank 0's store outlives the others' use of it.
        """
        if orderly:
            with contextlib.suppress(CollectiveError):
                for pending in self._pending:
                    pending.wait()
                self.barrier()
        self._pending.clear()
        _destroy()
        # Its threads end with it. One that still frees a tensor when Python ends would abort the process.
        self.__dict__.pop("_control", None)
        if orderly and self._kv is not None and self.world_size > 1:
            with contextlib.suppress(RuntimeError):
                self._leave(self._kv)
        if self._file is not None and self.is_primary:
            self._file.unlink(missing_ok=True)
        self._kv = None

    def _leave(self, kv: Store) -> None:
        if not self.is_primary:
            kv.set(f"left/{self.rank}", "1")
            return
        others = [f"left/{rank}" for rank in range(1, self.world_size)]
        deadline = time.monotonic() + _LEAVE_S
        while not kv.check(others) and time.monotonic() < deadline:
            time.sleep(0.005)


# ------------------------------------------------------------------------------------------- starting it
def choose_backend(name: str) -> str:
    """Return the back end to use: the one named, or for "auto" nccl with CUDA and gloo without.

    Raises:
        StartError: Raised when this torch or this machine does not have it.
    """
    there = {
        "nccl": dist.is_nccl_available() and torch.cuda.is_available(),
        "gloo": dist.is_gloo_available(),
        "mpi": dist.is_mpi_available(),
    }
    if name == "auto":
        return "nccl" if there["nccl"] else "gloo"
    if not there.get(name, False):
        found = ", ".join(known for known, is_there in there.items() if is_there)
        why = {
            "nccl": "no CUDA device is seen"
            if dist.is_nccl_available()
            else "this torch was built without it",
            "mpi": "pip's torch has none: it takes one built from source on a host with MPI",
        }.get(name, "this torch does not know it")
        raise StartError(f"backend: found {name} ({why}), expected auto or one of: {found}")
    return name


def start_world(
    place: Place,
    meeting: Met,
    *,
    backend: str,
    init_method: str | None,
    timeout_s: float,
    control_timeout_s: float = CONTROL_TIMEOUT_S,
    slot: Slot | None = None,
) -> World:
    """Start the process groups of a world that has met. Collective, main thread.

    Raises:
        StartError: Raised when the back end or this rank's device is not there.
        MeetingError: Raised when a rank was lost since the meeting.
    """
    backend = choose_backend(backend)
    device = _device(place, backend)
    timeout = timedelta(seconds=timeout_s)
    given: dict[str, Any] = {"device_id": device} if device.type == "cuda" else {}
    path: Path | None = None
    method = urlsplit(init_method or "env://")
    if method.scheme == "file" and place.world_size > 1:
        # A base: each world gets a file of its own, since one that a dead world left holds its addresses.
        path = Path(f"{unquote(method.netloc + method.path).rstrip('/')}.{meeting.session}")
        given["init_method"] = f"file://{path}"
    elif backend != "mpi":
        if meeting.kv is None:
            raise MeetingError("world: the meeting is closed, expected one with a store")
        given["store"] = PrefixStore(f"s/{meeting.session}", meeting.kv)
    if backend != "mpi":
        given.update(rank=place.rank, world_size=place.world_size)

    def start() -> dist.ProcessGroup:
        dist.init_process_group(backend, timeout=timeout, **given)
        if dist.get_world_size() != place.world_size or dist.get_rank() != place.rank:
            raise StartError(
                f"backend: {backend} says rank {dist.get_rank()} of {dist.get_world_size()}, expected"
                f" {place.rank} of {place.world_size} as the launcher's variables say"
            )
        control_timeout = timedelta(seconds=control_timeout_s)
        group = dist.new_group(backend="gloo", timeout=control_timeout, group_desc="control")
        if not isinstance(group, dist.ProcessGroup):
            raise StartError(
                f"backend: the control group of rank {place.rank} is {group!r}, expected a group"
            )
        return group

    try:
        # In native code until all have connected: a peer may have died since the meeting.
        control = run_bounded(start)
    except RuntimeError as error:
        _destroy()
        raise MeetingError(
            f"world: a rank was lost since the meeting: {_first_line(error)}"
        ) from error
    hosts = tuple(str(hello.get("host", "")) for hello in meeting.hellos)
    return World(
        rank=place.rank,
        world_size=place.world_size,
        local_rank=place.local_rank,
        local_world_size=place.local_world_size,
        nodes=place.nodes or len(set(hosts)),
        hosts=hosts,
        device=device,
        backend=backend,
        _control=control,
        _kv=meeting.kv,
        _file=path,
        slot=slot,
        timeout_s=timeout_s,
    )


def _device(place: Place, backend: str) -> torch.device:
    if backend != "nccl" and not (torch.cuda.is_available() and backend == "mpi"):
        return torch.device("cpu")
    there = torch.cuda.device_count()
    if place.local_rank >= there:
        raise StartError(
            f"LOCAL_RANK: found {place.local_rank} but {there} CUDA devices, expected one for each worker of a node;"
            f" start at most {there} workers on it, or use backend=gloo"
        )
    device = torch.device("cuda", place.local_rank)
    torch.cuda.set_device(device)
    return device


def _destroy() -> None:
    if dist.is_initialized():
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()


# ------------------------------------------------------------------------------------------- bytes and errors
@contextlib.contextmanager
def _peers(what: str, slot: Slot | None) -> Iterator[None]:
    """Tell that this rank waits for others, and the failure of a collective as what it is: a peer is gone."""
    if slot is not None:
        slot.wait(CONTROL_TIMEOUT_S)
    try:
        yield
    except RuntimeError as error:
        raise CollectiveError(f"{what}: a peer is gone: {_first_line(error)}") from error
    finally:
        if slot is not None:
            slot.resume()


def _encode(item: Any) -> bytes:
    return json.dumps(item, separators=(",", ":")).encode()


def _slot(data: bytes, size: int) -> Tensor:
    """Lay a message out: its length, then as much of it as there is room for."""
    room = size - _HEADER_BYTES
    padded = len(data).to_bytes(_HEADER_BYTES, "little") + data[:room].ljust(room, b"\0")
    return torch.frombuffer(bytearray(padded), dtype=torch.uint8)


def _size(slot: Tensor) -> int:
    return int.from_bytes(bytes(slot[:_HEADER_BYTES].tolist()), "little")


def _decode(slot: Tensor) -> Any:
    return json.loads(slot[_HEADER_BYTES : _HEADER_BYTES + _size(slot)].numpy().tobytes())


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _chunks(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Group tensors of one kind of device into messages of a moderate size."""
    for kind in ("cpu", "cuda"):
        chunk: list[Tensor] = []
        size = 0
        for tensor in tensors:
            if (tensor.device.type == "cpu") != (kind == "cpu") or not tensor.numel():
                continue
            if chunk and size > _CHUNK_BYTES:
                yield chunk
                chunk, size = [], 0
            chunk.append(tensor)
            size += tensor.numel() * tensor.element_size()
        if chunk:
            yield chunk


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).partition("\n")[0][:300]
