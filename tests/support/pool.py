"""Worlds that stay: the ranks of one are started once and then called as often as a test likes."""

import contextlib
import tempfile
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from tests.support.ranked import _context, _receive, world_of

CALL_S = 60


class Pool:
    """The ranks of one world, waiting for calls."""

    def __init__(self, pipes: list[Connection]) -> None:
        self._pipes = pipes
        self._broken = ""

    @property
    def size(self) -> int:
        return len(self._pipes)

    def call(self, body: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What `body(world, *arguments)` returns on each rank; an exception on one is raised here."""
        if self._broken:  # its ranks are not at one any more
            raise AssertionError(self._broken)
        for pipe in self._pipes:
            pipe.send((body, arguments))
        outcomes = [_receive(pipe, CALL_S) for pipe in self._pipes]
        failed = [f"rank {rank}: {text}" for rank, (good, text) in enumerate(outcomes) if not good]
        if failed:
            self._broken = "\n".join(failed)
            raise AssertionError(self._broken)
        return [value for _, value in outcomes]


@contextlib.contextmanager
def pool(size: int) -> Iterator[Pool]:
    """A world of `size` ranks, each a process with one thread."""
    context = _context()
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe() for _ in range(size)]
        ranks = [
            context.Process(target=_serve, args=(theirs, rank, size, folder))
            for rank, (_, theirs) in enumerate(pipes)
        ]
        try:
            for process, (_, theirs) in zip(ranks, pipes, strict=True):
                process.start()
                theirs.close()
            yield Pool([ours for ours, _ in pipes])
        finally:
            for ours, _ in pipes:
                with contextlib.suppress(OSError):
                    ours.send(None)
            for process in ranks:
                process.join(timeout=10)
                process.kill()
                process.join()
                process.close()
            for ours, _ in pipes:
                ours.close()


def _serve(pipe: Connection, rank: int, size: int, folder: str) -> None:
    torch.set_num_threads(1)
    with contextlib.suppress(EOFError), world_of(rank, size, Path(folder)) as world:
        while (call := pipe.recv()) is not None:
            body, arguments = call
            try:
                outcome = True, body(world, *arguments)
            except BaseException:  # noqa: BLE001  # the top of the process
                outcome = False, traceback.format_exc()
            pipe.send(outcome)
