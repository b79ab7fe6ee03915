"""A training to be made dense: to_densify.py FOLDER STEPS WORLD [layout], layout being `experts`, `stages`,
`at_once` (windows of one step) or `none` (no checkpoints).

FOLDER says by its files what becomes of it: `whole` saves Lightning's checkpoint as each batch begins;
`die` ends every rank by SIGKILL once steps enough are in storage; `full` lets storage refuse what comes after a few.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from lightning_moe_ckpt.callbacks import SparseCheckpoint
from lightning_moe_ckpt.errors import StorageError
from lightning_moe_ckpt.moe import MoELayer
from lightning_moe_ckpt.storage import PosixBackend
from lightning_moe_ckpt.strategy import MoEStrategy

FOLDER, STEPS, WORLD = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
LAYOUT = sys.argv[4] if len(sys.argv) > 4 else ""
FULL, DEATH = 5, 11
WIDTH = 8


class Model(LightningModule):
    """Experts between two layers; with `stages` a block for each stage."""

    if LAYOUT == "stages":

        def configure_stage(self, stage: int, num_stages: int) -> nn.Module:
            torch.manual_seed(stage)
            blocks = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2)) for _ in range(3))
            return nn.Sequential(OrderedDict((f"{stage}-{number}", each) for number, each in enumerate(blocks)))

        def stage_loss(self, output: Tensor, target: Tensor) -> Tensor:
            return (output - target).square().mean()

    else:

        @override
        def configure_model(self) -> None:
            if not hasattr(self, "head"):
                torch.manual_seed(1)
                self.inp, self.drop, self.moe = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2), MoELayer(WIDTH, 16, 8)
                self.head = nn.Linear(WIDTH, 1)

        @override
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            hidden = self.drop(self.inp(batch[0]))
            loss: Tensor = self.head(hidden + self.moe(hidden)).square().mean()
            return loss

        @override
        def on_train_epoch_end(self) -> None:
            """Change the weights where a stored boundary has the change already."""
            with torch.no_grad():
                self.head.weight.mul_(1.5)

    @override
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-2)


def refuse(*_: object) -> None:
    """Do what a full medium does."""
    raise StorageError("No space left on device.")


class Script(Callback):
    """What the files in the folder ask for."""

    def __init__(self, checkpoint: SparseCheckpoint) -> None:
        self.checkpoint = checkpoint

    @override
    def on_train_batch_start(self, trainer: Trainer, *args: object) -> None:
        if (FOLDER / "whole").exists():
            trainer.save_checkpoint(FOLDER / f"{trainer.global_step}.ckpt")

    @override
    def on_train_batch_end(self, trainer: Trainer, *args: object) -> None:
        assert PosixBackend.put is refuse or self.checkpoint.wait_committed()
        if (FOLDER / "full").exists() and trainer.global_step == FULL:
            setattr(PosixBackend, "put", refuse)  # noqa: B010  # mypy: a method is assigned
        if (FOLDER / "die").exists() and trainer.global_step == DEATH:
            trainer.strategy.barrier()
            os.kill(os.getpid(), signal.SIGKILL)

    @override
    def on_train_end(self, trainer: Trainer, *args: object) -> None:
        trainer.save_checkpoint(FOLDER / "end.ckpt")


def main() -> None:
    """Train."""
    logging.basicConfig(level=logging.INFO)
    torch.set_num_threads(1)
    samples = torch.randn(48, WIDTH, generator=torch.Generator().manual_seed(0))
    data: DataLoader[Any] = DataLoader(
        TensorDataset(samples, samples.flip(1)), batch_size=2 if LAYOUT == "stages" else 1, shuffle=True
    )
    window = 1 if LAYOUT == "at_once" else 4
    replicas: Any = int(os.environ["TEST_REPLICAS"]) if "TEST_REPLICAS" in os.environ else "auto"
    url = (FOLDER / "run").as_uri()
    checkpoint = SparseCheckpoint(url, window=window, overhead_target=None, keep=9, replicas=replicas)
    layouts: dict[str, dict[str, Any]] = {
        "experts": {"expert_parallel": 2},
        "stages": {"pipeline_parallel": 2, "micro_batches": 2},
    }
    place: dict[str, Any] = {} if WORLD == "auto" else {"devices": int(WORLD), "accelerator": "cpu"}
    trainer = Trainer(
        **place,
        strategy=MoEStrategy(**layouts.get(LAYOUT, {})),
        callbacks=[Script(checkpoint), *([checkpoint] if LAYOUT != "none" else [])],
        max_steps=STEPS,
        max_epochs=-1,
        limit_train_batches=4,
        logger=False,
        enable_checkpointing=LAYOUT != "none",
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(), data)


if __name__ == "__main__":
    main()
