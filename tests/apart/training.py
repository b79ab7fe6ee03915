"""A training on nodes that are really apart: training.py FOLDER STEPS [SECONDS], with storage and what ranks say in FOLDER.

A step takes SECONDS (0.05), and every step is a generation with one copy on another node. Storage is full from step 5 on, until the
end, so that newer generations are in memory only; not if FOLDER has a file `room`. SILENCE in the environment is the limit for a peer's silence, in the place of two minutes.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from lightning_moe_ckpt.callbacks import DenseCheckpoint
from lightning_moe_ckpt.errors import StorageError
from lightning_moe_ckpt.moe import MoELayer
from lightning_moe_ckpt.parallel import _gloo
from lightning_moe_ckpt.storage import PosixBackend
from lightning_moe_ckpt.strategy import MoEStrategy
from lightning_moe_ckpt.testing._records import digest

FOLDER, STEPS = Path(sys.argv[1]), int(sys.argv[2])
SECONDS = float(sys.argv[3]) if len(sys.argv) > 3 else 0.05
WIDTH, FULL = 16, 5


class Model(LightningModule):
    """Experts between two layers, and numbers drawn in each step."""

    @override
    def configure_model(self) -> None:
        if not hasattr(self, "head"):
            torch.manual_seed(1)
            self.inp, self.drop, self.moe = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2), MoELayer(WIDTH, 32, 8)
            self.head = nn.Linear(WIDTH, 1)

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        hidden = self.drop(self.inp(batch[0]))
        loss: Tensor = self.head(hidden + self.moe(hidden)).square().mean()
        return loss

    @override
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-2)


PUT = PosixBackend.put


def refuse(*_: object) -> None:
    """Do what a full medium does."""
    raise StorageError("No space left on device.")


class Tell(Callback):
    """Write down how far this rank is, and what it begins from."""

    def __init__(self, checkpoint: DenseCheckpoint) -> None:
        self._checkpoint = checkpoint

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        report = self._checkpoint.report
        sources = {tier: nbytes for tier, nbytes in report.restored_from.items() if nbytes}
        print(f"rank {trainer.global_rank} of {trainer.world_size} from step {trainer.global_step} by {sources}")

    @override
    def on_train_batch_end(self, trainer: Trainer, *args: object) -> None:
        time.sleep(SECONDS)
        copied = self._checkpoint.report.generations.get("peer", -1)
        new = FOLDER / f"new{trainer.global_rank}-{os.getpid()}"
        new.write_text(f"{trainer.global_step} {copied}")
        new.rename(FOLDER / f"rank{trainer.global_rank}")

        if trainer.global_step == FULL and not (FOLDER / "room").exists():
            assert self._checkpoint.wait_committed()
        if trainer.global_step >= FULL and not (FOLDER / "room").exists():
            setattr(PosixBackend, "put", refuse if trainer.global_step < STEPS else PUT)  # noqa: B010  # mypy: a method is assigned

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        print(f"rank {trainer.global_rank} ends at step {trainer.global_step} with {digest(pl_module.state_dict())}")


def main() -> None:
    """Train."""
    logging.basicConfig(level=logging.INFO)
    logging.getLogger("lightning_moe_ckpt.tiers").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    _gloo._SILENCE_SECONDS = float(os.environ.get("SILENCE", "120"))
    seed_everything(3, verbose=False)
    samples = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(0))
    checkpoint = DenseCheckpoint(
        (FOLDER / "run").as_uri(),
        every_n_steps=1,
        replicas=1 if int(os.environ["WORLD_SIZE"]) > 1 else 0,
        redundancy=False,
        overhead_target=None,
    )
    trainer = Trainer(
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        num_nodes=int(os.environ["WORLD_SIZE"]) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        accelerator="cpu",
        strategy=MoEStrategy(),
        callbacks=[checkpoint, Tell(checkpoint)],
        max_steps=STEPS,
        max_epochs=-1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(), DataLoader(TensorDataset(samples), batch_size=4, shuffle=True))


if __name__ == "__main__":
    main()
