"""The tutorial's training as Lightning and Accelerate have it, a checkpoint at each step; notes its moments.

torchrun --nproc_per_node=2 --max_restarts=N tests/support/peer_ddp.py lightning|accelerate FOLDER DELAY
"""

import importlib
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.support.recovering import data, network, note


def with_lightning(folder: str, delay: float) -> None:
    """Train for ever with its Trainer."""
    pl: Any = importlib.import_module("lightning")
    checkpoints: Any = importlib.import_module("lightning.pytorch.callbacks")
    note(folder, "imported")

    class Module(pl.LightningModule):  # type: ignore[misc]  # a peer's class, loaded by name
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def configure_optimizers(self) -> SGD:
            return SGD(self.net.parameters(), lr=0.01, momentum=0.9)

        def training_step(self, batch: list[Tensor], _: int) -> Tensor:
            time.sleep(delay)
            return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    class Moments(pl.Callback):  # type: ignore[misc]  # a peer's class, loaded by name
        def setup(self, *_: object, **__: object) -> None:
            note(folder, "met")

        def on_train_start(self, trainer: Any, _: Any) -> None:
            if trainer.global_step:
                note(folder, "restored")

        def on_train_batch_end(self, trainer: Any, *_: object) -> None:
            if trainer.global_rank == 0:
                note(folder, "stepped", trainer.global_step)

    saved = Path(folder) / "saved" / "newest.ckpt"
    keeper = checkpoints.ModelCheckpoint(
        dirpath=saved.parent, filename="newest", every_n_train_steps=1, enable_version_counter=False
    )
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=-1, logger=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[Moments(), keeper],
    )  # fmt: skip
    # It writes in place: a kill may have torn the file.
    whole = saved.exists() and _is_whole(saved)
    trainer.fit(
        Module(), DataLoader(data(512), batch_size=32), ckpt_path=str(saved) if whole else None
    )


def _is_whole(path: Path) -> bool:
    try:
        torch.load(path, weights_only=False)
    except Exception:  # noqa: BLE001  # whatever a torn file ends in
        return False
    return True


def with_accelerate(folder: str, delay: float) -> None:
    """Train for ever with its Accelerator."""
    accelerate: Any = importlib.import_module("accelerate")
    note(folder, "imported")
    accelerator = accelerate.Accelerator(cpu=True)
    note(folder, "met")
    model = network()
    optimizer = SGD(model.parameters(), lr=0.01, momentum=0.9)
    loader = DataLoader(data(512), batch_size=32, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    saved, pointer, step = Path(folder) / "saved", Path(folder) / "newest", 0
    if pointer.exists():
        step = int(pointer.read_text())
        accelerator.load_state(str(saved / str(step % 2)))
        note(folder, "restored")
    while True:
        for features, wanted in loader:
            time.sleep(delay)
            optimizer.zero_grad()
            accelerator.backward(nn.functional.mse_loss(model(features), wanted))
            optimizer.step()
            step += 1
            if accelerator.is_main_process:
                note(folder, "stepped", step)
            # As its own guide has it: every process saves its random state.
            accelerator.save_state(str(saved / str(step % 2)))
            accelerator.wait_for_everyone()
            if accelerator.is_main_process:
                pointer.with_suffix(".new").write_text(str(step))
                pointer.with_suffix(".new").replace(pointer)


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    run = {"lightning": with_lightning, "accelerate": with_accelerate}[sys.argv[1]]
    run(sys.argv[2], float(sys.argv[3]))
