"""`python -m elastic doctor`: looks at this node as `launch`, with the same arguments, would use it, and starts nothing.

Promises: each finding is one line that names the way out; what is tried on the store is a small object that is deleted
again; nothing is claimed, and a run at the URL is only read. Exit codes: 0, warnings or not; 2 where a start would fail.
"""

import json
import os
import secrets
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Final

from checkpoints.catalog import Catalog
from checkpoints.errors import CheckpointError
from checkpoints.segments import check_room
from checkpoints.store import Store, open_store
from checkpoints.terminal import put_out
from elastic import summary
from elastic.agent import agent_of, node_folder
from elastic.config import parse_arguments, read_settings
from elastic.errors import ConfigError, ExitCode, StartError
from elastic.launching import Command, Launch, complete, split
from elastic.options import Settings
from elastic.reachable import (
    Finding,
    Kind,
    look_at_endpoint,
    look_at_name,
    look_at_peers,
    peers_of,
)
from jobs.errors import JobError
from jobs.loading import load_job

__all__ = ["doctor"]

_ROOT: Final = Path(__file__).resolve().parent.parent
_USAGE: Final = """usage: python -m elastic doctor [--peer HOST ...] [--json] [torchrun's options] [JOB] [key=value ...]

Looks at this node as `python -m elastic launch` with the same arguments would use it, and starts nothing: versions, devices,
config, job, store (a small object is written and deleted), memory, host name, rendezvous. --peer HOST: another node, whose
name has to resolve here (under Slurm those of the job are known). Exit code 0, or 2 where a start would fail.
"""
_SLOTS: Final = 3
"""Snapshots that a node holds at most."""
_RETRY_S: Final = 10.0


def doctor(argv: Sequence[str]) -> int:
    """Look, print what was found, and return the exit code."""
    words, peers, as_json = _own_options(argv)
    try:
        command = split(words)
    except ConfigError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.code
    if command.help:
        put_out(_USAGE)
        return ExitCode.DONE
    findings: list[Finding] = []
    for finding in _look(command, [*peers, *peers_of(os.environ)], os.environ):
        findings.append(finding)
        if not as_json:
            put_out(f"{finding.kind:5}  {finding.what:10}  {finding.told}\n")
    if as_json:
        told = [{"kind": f.kind, "what": f.what, "told": f.told} for f in findings]
        put_out(f"{json.dumps(told, indent=1)}\n")
    is_wrong = any(finding.kind == "wrong" for finding in findings)
    return ExitCode.WRONG if is_wrong else ExitCode.DONE


def _own_options(argv: Sequence[str]) -> tuple[list[str], list[str], bool]:
    """What is launch's, the peers, and whether the answer is to be JSON."""
    words, peers = [], []
    rest, as_json = list(argv), False
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if name == "--peer" and (equals or rest):
            peers += (value if equals else rest.pop(0)).split(",")
        elif word == "--json":
            as_json = True
        else:
            words.append(word)
    return words, [peer for peer in peers if peer], as_json


def _look(command: Command, peers: Sequence[str], environ: Mapping[str, str]) -> Iterator[Finding]:
    """All findings, one after the other."""
    yield _versions()
    try:
        settings = read_settings(parse_arguments(command.arguments), root=_ROOT)
        launch = complete(command, settings, environ)
    except StartError as error:
        yield Finding(kind="wrong", what="config", told=str(error))
        return
    yield Finding(kind="ok", what="config", told=f"{settings.job}, {settings.checkpoint.url}")
    yield _job(settings)
    yield _devices(settings, launch)
    yield from _store(settings, launch)
    yield _folder()
    yield from _meeting(command, launch, peers)


def _versions() -> Finding:
    found = [f"Python {sys.version.split()[0]}"]
    missing = []
    for name in ("torch", "fsspec", "tenacity", "PyYAML"):
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            missing.append(name)
    if missing:
        told = f"found no {', '.join(missing)}; pip install elastic-trainer takes what is needed"
        return Finding(kind="wrong", what="versions", told=told)
    return Finding(kind="ok", what="versions", told=", ".join(found))


def _job(settings: Settings) -> Finding:
    try:
        job = load_job(settings.job, settings.args)
    except JobError as error:
        return Finding(kind="wrong", what="job", told=str(error))
    except Exception as error:  # noqa: BLE001 - the user's own code
        told = f"{settings.job}: {type(error).__name__}: {error}"
        return Finding(kind="wrong", what="job", told=" ".join(told.split()))
    return Finding(kind="ok", what="job", told=f"{type(job).__name__} is made")


def _devices(settings: Settings, launch: Launch) -> Finding:
    import torch
    import torch.distributed as dist

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    backend = settings.backend if settings.backend != "auto" else "nccl" if count else "gloo"
    there = {
        "gloo": dist.is_gloo_available(),
        "nccl": dist.is_nccl_available() and count > 0,
        "mpi": dist.is_mpi_available(),
    }
    cores = len(os.sched_getaffinity(0))
    told = f"backend {backend}, {count} CUDA devices, {cores} cores, {launch.nproc} workers"
    if not there.get(backend, True):
        way = "leave backend out, or install a torch that has it"
        return Finding(kind="wrong", what="devices", told=f"{told}: found no {backend} here; {way}")
    workers = int(launch.nproc) if launch.nproc.isdigit() else 0
    if backend == "nccl" and workers > count:
        told += "; expected no more workers than devices: --nproc_per_node"
        return Finding(kind="wrong", what="devices", told=told)
    if workers > cores:
        told += ": more workers than cores, which slow each other down"
        return Finding(kind="warn", what="devices", told=told)
    return Finding(kind="ok", what="devices", told=told)


def _store(settings: Settings, launch: Launch) -> Iterator[Finding]:
    options = settings.checkpoint
    try:
        store = open_store(options.url, options.storage_options, retry_s=_RETRY_S)
        store.check()
        took_s = _try_exclusive(store)
    except (CheckpointError, OSError) as error:
        told = f"checkpoint.url: {' '.join(str(error).split())}"
        yield Finding(kind="wrong", what="store", told=told)
        return
    if took_s is None:
        told = (
            f"{store.display_url}: an object that is there was created once more: two writers could both believe to "
            "have committed; take another store (docs/stores.md)"
        )
        yield Finding(kind="wrong", what="store", told=told)
        return
    shared = launch.nnodes.rpartition(":")[2] != "1"
    told = f"{store.display_url}: written, read and deleted, {1000 * took_s:.0f} ms a request"
    if store.is_local and shared:
        told += "; all nodes have to see this very folder: it is looked at when they meet"
    yield Finding(kind="ok", what="store", told=told)
    yield from _run(store, settings)


def _try_exclusive(store: Store) -> float | None:
    """Seconds that a request took; None where creating is not exclusive."""
    name = f"meeting/doctor-{secrets.token_hex(8)}"
    began = time.monotonic()
    try:
        first, second = store.put_new(name, b"1"), store.put_new(name, b"2")
        kept = store.get(name)
    finally:
        store.delete(name)
    took_s = (time.monotonic() - began) / 4
    return took_s if first and not second and kept == b"1" else None


def _run(store: Store, settings: Settings) -> Iterator[Finding]:
    """What is at the URL, and whether this node's memory has room for its snapshots."""
    size_bytes: int | None = None
    try:
        told_by = summary.read(store)
        catalog = Catalog(store)
        manifest = next(filter(None, catalog.inventory().committed.values()), None)
        size_bytes = None if manifest is None else manifest.size_bytes
    except CheckpointError as error:
        yield Finding(kind="warn", what="run", told=" ".join(str(error).split()))
    else:
        told = "there is none yet: a start begins it"
        if told_by is not None:
            told = f"{told_by.get('status')}, step {told_by.get('steps')}, generation {told_by.get('generation')}"
        yield Finding(kind="ok", what="run", told=told)
    slots = _SLOTS if not settings.checkpoint.tier.memory.is_off else _SLOTS - 1
    yield _memory(size_bytes, slots, named=slots == _SLOTS)


def _memory(size_bytes: int | None, slots: int, *, named: bool) -> Finding:
    if size_bytes is None:
        told = f"of the state's size nothing is known yet; {slots} times that is needed in /dev/shm"
        return Finding(kind="ok", what="memory", told=told)
    needed = slots * size_bytes
    try:
        check_room(needed, named=named)
    except OSError as error:
        told = f"{error.strerror}: the loop will wait for each save; enlarge it, or checkpoint.tier.memory=off"
        return Finding(kind="warn", what="memory", told=told)
    told = f"room for {slots} snapshots of {size_bytes / 1e6:.0f} MB"
    return Finding(kind="ok", what="memory", told=told)


def _folder() -> Finding:
    try:
        folder = node_folder(agent_of(os.getpid()))
        folder.rmdir()
    except (OSError, StartError) as error:
        return Finding(kind="wrong", what="folder", told=str(error))
    return Finding(kind="ok", what="folder", told=f"workers of a node share {folder.parent}")


def _meeting(command: Command, launch: Launch, peers: Sequence[str]) -> Iterator[Finding]:
    """How the agents of several nodes will find each other."""
    if launch.backend == "fsspec":
        yield _ballot(launch.endpoint)
        return
    if launch.nnodes.rpartition(":")[2] == "1":
        return
    yield look_at_name(command.options.get("local-addr"))
    yield from look_at_peers(peers)
    if not launch.endpoint:
        told = "found no --rdzv_endpoint, expected HOST:PORT of one node, the same on all"
        yield Finding(kind="wrong", what="rendezvous", told=told)
    else:
        yield look_at_endpoint(launch.endpoint)


def _ballot(endpoint: str) -> Finding:
    kind: Kind = "ok"
    told = "addresses are told, never names; no node is special"
    try:
        open_store(endpoint, retry_s=_RETRY_S).check()
    except CheckpointError as error:
        kind, told = "wrong", " ".join(str(error).split())
    return Finding(kind=kind, what="rendezvous", told=f"{endpoint}: {told}")
