"""The torchrun tutorial's script: DDP, DistributedSampler, a torch.save at each step; notes its moments.

torchrun --nproc_per_node=2 --max_restarts=N tests/support/plain_ddp.py FOLDER DELAY
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.utils.data import DataLoader, DistributedSampler

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.support.recovering import data, network, note


def main(folder: str, delay: float) -> None:
    """Train for ever, from the snapshot if there is one."""
    note(folder, "imported")
    dist.init_process_group("gloo")
    note(folder, "met")
    dataset = data(512)
    sampler = DistributedSampler[object](dataset)
    loader = DataLoader(dataset, batch_size=32, sampler=sampler)
    model = network()
    optimizer = SGD(model.parameters(), lr=0.01, momentum=0.9)
    snapshot, step, epoch = Path(folder) / "snapshot.pt", 0, 0
    if snapshot.exists():
        found = torch.load(snapshot, weights_only=True)
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        step, epoch = found["step"], found["epoch"]
        note(folder, "restored")
    wrapped = DistributedDataParallel(model)
    while True:
        sampler.set_epoch(epoch)
        for features, wanted in loader:
            time.sleep(delay)
            optimizer.zero_grad()
            nn.functional.mse_loss(wrapped(features), wanted).backward()
            optimizer.step()
            step += 1
            if dist.get_rank() == 0:
                note(folder, "stepped", step)
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save({**state, "step": step, "epoch": epoch}, snapshot.with_suffix(".new"))
                snapshot.with_suffix(".new").replace(snapshot)
        epoch += 1


if __name__ == "__main__":
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    main(sys.argv[1], float(sys.argv[2]))
