"""An own loop of which rank 1 hangs in step 5, once, and that evaluates for longer than a step may take.

Arguments: the run's URL and a file that says that it has hung.
"""

import sys
import time
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import elastic


def main(url: str, marker: Path) -> None:
    """Train ten steps."""
    run = elastic.start(url, every="1 step", hang_after="2 s")
    model = DistributedDataParallel(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.linspace(-1, 1, 40).unsqueeze(1)
    loader = run.loader(TensorDataset(x, 2 * x), global_batch_size=4)
    run.attach(model=model, optimizer=optimizer)
    for _ in run.epochs(1):
        for inputs, targets in loader:
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            if run.steps == 4 and run.world.rank == 1 and not marker.exists():
                marker.touch()
                time.sleep(3600)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.step(loss=loss)
            if run.steps == 2:
                time.sleep(3.5)  # an evaluation, say


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
