"""Small models and how they are trained, for runs to look at."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import torch
from door import CheckpointCallback
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_moe_ckpt.moe import MoELayer

FEATURES = 4


class Small(LightningModule):
    """Two layers, a buffer, and a number of its own in Lightning checkpoints."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(FEATURES, 3), nn.Linear(3, 1))
        self.register_buffer("scale", torch.tensor([0.5, 2.0]))
        self.optimizer, self.seen = optimizer, 0

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.seen += 1
        loss: Tensor = self.net(batch[0]).pow(2).mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.optimizer == "sgd":
            return torch.optim.SGD(self.parameters(), 0.05)
        return torch.optim.AdamW(self.parameters(), 1e-2)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["seen"] = self.seen

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seen = checkpoint["seen"]


class SmallMoE(LightningModule):
    """Four experts between two layers; built where the ranks are known."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.head = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, 1)
        self.moe: MoELayer | None = None

    def configure_model(self) -> None:
        if self.moe is None:
            self.moe = MoELayer(FEATURES, 8, 4)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        assert self.moe is not None
        h = self.inp(batch[0])
        loss: Tensor = self.head(h + self.moe(h)).pow(2).mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-2)


class Patient(Callback):
    """Lets every checkpoint become durable, so that each that is due is taken however fast the steps are."""

    def __init__(self, checkpoint: CheckpointCallback) -> None:
        self.checkpoint = checkpoint

    def on_train_batch_end(self, *_: Any) -> None:
        assert self.checkpoint.wait_committed()


def train(
    module: LightningModule, checkpoint: CheckpointCallback, *others: Callback, steps: int, **options: Any
) -> Trainer:
    """Train for `steps` optimizer steps."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    x = torch.arange(4.0 * 6 * FEATURES).view(-1, FEATURES).sin()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's advice about this tiny run
        trainer = Trainer(
            **{"accelerator": "cpu", "devices": 1, **options},
            max_steps=steps,
            max_epochs=-1,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[Patient(checkpoint), *others, checkpoint],
        )
        trainer.fit(module, DataLoader(TensorDataset(x), batch_size=2))
    return trainer
