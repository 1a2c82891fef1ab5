"""Saves one checkpoint after the other until it is killed.

python -m tests.support.saving_worker URL OPTIONS_JSON BYTES
"""

import json
import sys

import torch

from checkpoints.layout import CheckpointName
from checkpoints.manager import CheckpointManager
from checkpoints.store import open_store
from tests.support.states import name, state


def sized(step: int, size: int) -> dict[str, object]:
    """A state of two files of about that size, all of whose numbers tell the step."""
    weights = torch.full((size // 4,), float(step))
    return {"model": {"w": weights}, "optimizer": {"m": weights + 1}, "step": step}


def save(manager: CheckpointManager, step: int, *, generation: int = 1, size: int = 0) -> None:
    """Stage and commit."""
    tree = sized(step, size) if size else state(step)
    snapshot = manager.stage(tree, name=name(step, generation), parent=None, run_id="r", info={})
    try:
        manager.commit(snapshot)
    finally:
        snapshot.release()


def is_whole(manager: CheckpointManager, which: CheckpointName) -> bool:
    """Whether a checkpoint of `sized` verifies and is of its one step."""
    tree = manager.restore(which)
    model, optimizer = tree["model"], tree["optimizer"]
    assert isinstance(model, dict)
    assert isinstance(optimizer, dict)
    step = float(which.step)
    return bool((model["w"] == step).all() and (optimizer["m"] == step + 1).all())


def main() -> None:
    """Save."""
    url, options, size = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
    manager = CheckpointManager(open_store(url, options), keep=2)
    for step in range(1, 100_000):
        save(manager, step, size=size)


if __name__ == "__main__":
    main()
