"""Validation data that draw random numbers of their own go on where they were."""

from __future__ import annotations

from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_moe_ckpt.callbacks import DenseCheckpoint


class Noisy(Dataset[Tensor]):
    """Items with noise from a generator of the data set."""

    def __init__(self, length: int) -> None:
        self.items = torch.randn(length, 4, generator=torch.Generator().manual_seed(length))
        self.generator = torch.Generator().manual_seed(7)

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Tensor:
        return self.items[index] + torch.randn(4, generator=self.generator)


class Model(LightningModule):
    """A linear map to zero."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def training_step(self, batch: Tensor) -> Tensor:
        return self._loss(batch)

    def validation_step(self, batch: Tensor) -> None:
        self.log("validation_loss", self._loss(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-2)

    def _loss(self, batch: Tensor) -> Tensor:
        loss: Tensor = self.linear(batch).pow(2).mean()
        return loss


def validated(url: Path, steps: int) -> Tensor:
    """Train to so many steps, from where the run at `url` is, and return the newest validation's loss."""
    seed_everything(1)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=steps,
        val_check_interval=4,
        callbacks=[DenseCheckpoint(str(url), every_n_steps=2)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=url.parent,
    )
    trainer.fit(Model(), DataLoader(Noisy(80), batch_size=4), DataLoader(Noisy(12), batch_size=4))
    return trainer.callback_metrics["validation_loss"]


def test_a_resumed_run_validates_with_the_numbers_that_come_next(tmp_path: Path) -> None:
    """A metric that schedulers, stopping and files look at is that of a run without a break."""
    validated(tmp_path / "broken", 10)
    assert torch.equal(validated(tmp_path / "broken", 16), validated(tmp_path / "whole", 16))
