"""Real worlds for unit tests: a function run by a few processes over gloo, or a world of one in this process."""

import contextlib
import multiprocessing
import os
import re
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import HashStore, Store

from elastic.ranks import Place
from elastic.world import World, start_world

_NOTE = re.compile(
    r"INFO elastic\.saving: checkpoint\.tier\.memory: every \S+ \S+ now: a save costs "
    r"|INFO elastic\.keeping: /dev/shm/\S+: its (run|launch) is over; removed$"
)


@dataclass
class Met:
    """A meeting that has taken place."""

    session: str
    hellos: list[dict[str, Any]]
    kv: Store | None


def place_of(rank: int, size: int) -> Place:
    """A worker's place as if started by hand on one node."""
    return Place(
        rank=rank, world_size=size, local_rank=rank, local_world_size=size, node_rank=0, nodes=1,
        launcher="hand" if size > 1 else "none", group="test", restart_count=0, address=None, agent_store=False,
    )  # fmt: skip


@contextlib.contextmanager
def world_of(rank: int, size: int, folder: Path) -> Iterator[World]:
    """The world of one rank; more than one meet through a file in `folder`."""
    met = Met("test", [{"host": "here"}] * size, HashStore() if size == 1 else None)
    base = None if size == 1 else f"file://{folder}/ranks"
    world = start_world(place_of(rank, size), met, backend="gloo", init_method=base, timeout_s=60)
    try:
        yield world
    except BaseException:
        world.close(orderly=False)
        raise
    world.close()


def run_ranks(
    size: int, body: Callable[..., Any], *arguments: Any, timeout_s: float = 90
) -> list[Any]:
    """What `body(world, *arguments)` returns on each rank; it must be importable by its name.

    An exception on a rank is raised here, with the ranks' tracebacks.
    """
    context = _context()
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(size)]
        ranks = [
            context.Process(target=_rank, args=(pipe[1], body, rank, size, folder, arguments))
            for rank, pipe in enumerate(pipes)
        ]
        try:
            for process, pipe in zip(ranks, pipes, strict=True):
                process.start()
                pipe[1].close()
            outcomes = [_receive(pipe[0], timeout_s) for pipe in pipes]
        finally:
            for process in ranks:
                process.join(timeout=10)
                process.kill()
                process.join()
                process.close()
            for pipe in pipes:
                pipe[0].close()
    failed = [f"rank {rank}: {text}" for rank, (good, text) in enumerate(outcomes) if not good]
    if failed:
        raise AssertionError("\n".join(failed))
    return [value for _, value in outcomes]


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a process of its own ended."""

    code: int | None
    out: str
    err: str
    """Without the notes."""
    notes: tuple[str, ...] = ()
    """Lines that depend on this machine's pace, and on what others left in its memory."""


def run_alone(
    body: Callable[..., Any], *arguments: Any, environ: dict[str, str] | None = None
) -> Ended:
    """Run `body(*arguments)` in a process of its own, which may set handlers and leave as it likes.

    A number that it returns is its exit code. Its temporary folder is its own, too.
    """
    context = _context()
    with tempfile.TemporaryDirectory() as folder:
        process = context.Process(
            target=_alone, args=(body, arguments, folder, {"TMPDIR": folder, **(environ or {})})
        )
        process.start()
        process.join(timeout=90)
        process.kill()
        process.join()
        code = process.exitcode
        process.close()
        out, err = (Path(folder, name).read_text(encoding="utf-8") for name in ("out", "err"))
    lines = err.splitlines(keepends=True)
    return Ended(
        code=code,
        out=out,
        err="".join(line for line in lines if not _NOTE.match(line)),
        notes=tuple(line for line in lines if _NOTE.match(line)),
    )


def _alone(body: Callable[..., Any], arguments: Any, folder: str, environ: dict[str, str]) -> None:
    torch.set_num_threads(1)
    os.environ.update(environ)
    for number, name in ((1, "out"), (2, "err")):
        file = os.open(Path(folder, name), os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        os.dup2(file, number)
    try:
        code = body(*arguments)
    except Exception as error:  # noqa: BLE001  # what the interpreter would do at the end of a script
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    sys.exit(code)


def _context() -> multiprocessing.context.ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    # Imported once; each process is then a fork of that clean one.
    context.set_forkserver_preload(
        ["pytest", "tests.support.ranked", "elastic.own", "elastic.loop"]
    )
    return context


def _receive(pipe: Connection, timeout_s: float) -> tuple[bool, Any]:
    if not pipe.poll(timeout_s):
        return False, f"said nothing for {timeout_s} s"
    try:
        good, value = pipe.recv()
    except EOFError:
        return False, "ended without a word"
    return good, value


def _rank(
    pipe: Connection, body: Callable[..., Any], rank: int, size: int, folder: str, arguments: Any
) -> None:
    torch.set_num_threads(1)
    try:
        with world_of(rank, size, Path(folder)) as world:
            outcome = True, body(world, *arguments)
    except BaseException:  # noqa: BLE001  # the top of the process
        outcome = False, traceback.format_exc()
    pipe.send(outcome)
    pipe.close()
