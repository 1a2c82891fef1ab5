"""A trainer that does nothing but change its state and save it, until it is killed: one process, no ranks.

    python alone_worker.py FOLDER URL(JSON) AGENT(JSON) STEPS STATE_MB memory|none

Every tensor of step s is filled with s; a step takes about 20 ms. Each step is one line on stdout, with what
the writer said since. It begins from the newest of the node's memory and the store.
"""

import json
import sys
import time
from pathlib import Path

import torch

from checkpoints import memory
from checkpoints.buffers import Buffers, Place
from checkpoints.copier import Copier
from checkpoints.generations import claim, write_started
from checkpoints.layout import AgentId, CheckpointName, Claim, Started
from checkpoints.manager import CheckpointManager
from checkpoints.remote import RemoteWriter
from checkpoints.store import open_store

RUN_ID = "saved"


def main(arguments: list[str]) -> None:
    """Save until killed, or until so many steps are done."""
    folder, url, agent = Path(arguments[0]), json.loads(arguments[1]), json.loads(arguments[2])
    steps, megabytes, keeps = int(arguments[3]), int(arguments[4]), arguments[5] == "memory"
    owner = AgentId(**agent)
    store = open_store(url["url"], url["options"], retry_s=20)
    claimed = claim(store, agents=[owner], make=lambda g, launch: _claim(g, launch, owner))
    manager = CheckpointManager(store)
    place = Place(owner, RUN_ID) if keeps else Place()
    buffers = Buffers(split_bytes=10**10, max_slots=3 if keeps else 2, place=place)
    writer = RemoteWriter(folder, owner, buffers)
    parent, step = _newest(manager, buffers)
    record = Started(
        generation=claimed.generation,
        parent=None if parent is None else str(parent),
        source="fresh" if parent is None else "memory",
        start_step=step,
        position=(0, step),
    )
    write_started(store, record)
    writer.open(
        {
            "url": url["url"],
            "storage_options": url["options"],
            "keep": 3,
            "keep_every": None,
            "part_bytes": 1 << 22,
            "claim": claimed.to_json().decode(),
            "retry_s": 5,
            "pause_s": 0.5,
        }
    )
    _train(writer, buffers, claimed.generation, parent, (step, steps, megabytes))
    while writer.is_busy:
        writer.wait(1)
        writer.look()
    writer.finish()
    buffers.close()


def _claim(generation: int, launch: str, owner: AgentId) -> Claim:
    return Claim(
        generation=generation,
        run_id=RUN_ID,
        launch=launch,
        agents=(owner,),
        world_size=1,
        nodes=1,
        hosts=("here",),
    )


def _newest(manager: CheckpointManager, buffers: Buffers) -> tuple[CheckpointName | None, int]:
    segments = buffers.segments
    paths = [f"/proc/self/fd/{segment.fd}" for segment in segments]
    held = memory.held(segments, paths, RUN_ID)
    names = [*(one.name for one in held), *manager.names()[:1]]
    newest = max(names, key=lambda name: name.step, default=None)
    return newest, 0 if newest is None else newest.step


def _train(
    writer: RemoteWriter,
    buffers: Buffers,
    generation: int,
    parent: CheckpointName | None,
    sizes: tuple[int, int, int],
) -> None:
    step, steps, megabytes = sizes
    weights = torch.full((megabytes << 18,), float(step))
    moments = torch.full((1000,), float(step))
    still = frozenset({weights.data_ptr(), moments.data_ptr()})
    copier = Copier()
    while step < steps:
        step += 1
        weights.fill_(float(step))
        moments.fill_(float(step))
        tree = {"model": {"w": weights}, "optimizer": {"m": moments, "step": step}}
        told: list[object] = []
        while (
            step == steps and not buffers.has_free
        ):  # the last one is saved, however slow the disk is
            writer.wait(1)
            told += writer.look()
        if buffers.has_free:
            filling = buffers.begin(
                tree,
                name=CheckpointName(generation, step),
                parent=parent,
                run_id=RUN_ID,
                info={"epoch": 0, "position": step},
                still=still,
            )
            future = copier.start(filling.copy)
            time.sleep(0.02)  # the forward and backward of the next step
            writer.offer(future.result())
            told.append("offered")
        told += writer.look()
        print(step, json.dumps(told), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
