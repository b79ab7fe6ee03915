"""Small models and how they are trained, for runs to look at."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import tiny
import torch
from door import CheckpointCallback
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from typing_extensions import override

from lightning_moe_ckpt.moe import MoELayer

FEATURES = 4
SGD: tiny.MakeOptimizer = partial(torch.optim.SGD, lr=0.05)


class Small(tiny.ToZero):
    """Two layers, a buffer, and a number of its own in Lightning checkpoints."""

    def __init__(self, optimizer: tiny.MakeOptimizer = tiny.LEARN) -> None:
        super().__init__(nn.Linear(FEATURES, 3), nn.Linear(3, 1), optimizer=optimizer)
        self.register_buffer("scale", torch.tensor([0.5, 2.0]))
        self.seen = 0

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.seen += 1
        return super().training_step(batch, batch_idx)

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
    data = tiny.rows(tiny.waves(4 * 6, FEATURES), 2)
    return tiny.fit(module, data, Patient(checkpoint), *others, checkpoint, max_steps=steps, **options)
