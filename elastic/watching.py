"""The worker's side of the watch for hangs: what its slot says of it, and the node's watcher started.

Guarantees: the start costs the worker about a millisecond and no wait; the watcher inherits the standard streams
alone; where it cannot be started the training goes on unwatched, and one line says so.
"""

import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from checkpoints.layout import AgentId
from elastic.agent import current_agent, die_with_agent, node_folder, process_start
from elastic.bounds import Bounds
from elastic.monitor import Slot, open_slot
from elastic.ranks import Place, read_place
from elastic.spawning import close_inherited

__all__ = ["STUB", "Standing", "stand", "watch"]

logger = logging.getLogger(__name__)

STUB: Final = "ELASTIC_STUB_PID"
"""In the environment that a forked worker's `main` is given: the process that torchrun knows it by."""
_ROOT: Final = Path(__file__).resolve().parent.parent
_START: Final = (
    "import sys; sys.path[:0] = [sys.argv[1]]; from elastic.watcher import main; main(sys.argv[2:])"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """This process on its node: who it is, who stands over it, what it leaves behind."""

    place: Place
    agent: AgentId
    folder: Path
    slot: Slot


def stand(environ: Mapping[str, str]) -> Standing:
    """Find this worker's place, tie it to its agent, and open its slot. Main thread, before anything heavy.

    Raises:
        StartError: The rank variables do not make sense.
    """
    place = read_place(environ)
    agent = current_agent(place, environ)
    die_with_agent(place)
    folder = node_folder(agent)
    slot = open_slot(folder, place.local_rank)
    slot.begin(place.rank, None)
    return Standing(place=place, agent=agent, folder=folder, slot=slot)


def watch(
    standing: Standing,
    environ: Mapping[str, str],
    *,
    hang_after: float | None,
    long_s: float,
    timeout_s: float,
) -> None:
    """Have this worker watched from here on; the first one of a node starts who watches all of them.

    Args:
        standing: The worker.
        environ: What its `main` was given.
        hang_after: As the setting, in seconds; 0 for never, None for what the measured times say.
        long_s: `hang_after_long`, in seconds.
        timeout_s: `timeout`, in seconds.
    """
    slot, place, agent = standing.slot, standing.place, standing.agent
    stub = environ.get(STUB, "")
    slot.stand(
        stub=int(stub) if stub.isdigit() else 0,
        world_is_here=place.local_world_size == place.world_size,
    )
    if hang_after == 0:
        return
    alone = place.world_size == 1
    slot.bounds = Bounds(hang_after, long_s, timeout_s=timeout_s, alone=alone)
    slot.enter("start")
    # Without a launcher each worker is its own agent, in a folder of its own.
    if place.local_rank == 0 or agent.pid == os.getpid():
        _start(standing.folder, agent, environ)


def _start(folder: Path, agent: AgentId, environ: Mapping[str, str]) -> None:
    """Start the watcher in a session of its own, so that no signal to the worker's group ends it."""
    own = os.getpid()
    words = (folder, agent.pid, agent.start, own, process_start(own) or 0)
    flags = (
        "-I",
        "-S",
    )  # it needs the standard library and this project, and starts in half the time
    command = [sys.executable, *flags, "-c", _START, str(_ROOT), *map(str, words)]
    # A watcher has no rank, and is not to be taken for a worker by who looks for them.
    named = {n: text for n, text in environ.items() if n not in {"RANK", "LOCAL_RANK"}}
    try:
        os.posix_spawn(
            sys.executable,
            command,
            named,
            file_actions=[
                *close_inherited(),
                (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
                (os.POSIX_SPAWN_DUP2, 2, 1),
            ],
            setsid=True,
        )
    except OSError as error:
        logger.warning("hang_after: no watcher could be started (%s); hangs are not seen", error)
