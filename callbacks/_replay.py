"""Define the callback that runs first and replays; `CheckpointCallback` adds it, users do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lightning_moe_ckpt.fit import FitSession


class ReplayHooks(Callback):
    """Restore random state and drop gradients of frozen parameters, before any other callback sees the model.

    Args:
        begin: opens the run and loads the generation to resume from; called in `on_fit_start`.
    """

    def __init__(self, begin: Callable[[Trainer, LightningModule], FitSession]) -> None:
        self._begin = begin
        self._run: FitSession | None = None

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._run = self._begin(trainer, pl_module)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._run is not None:
            self._run.batch_start()

    @override
    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        if self._run is not None:
            self._run.replay_before_optimizer_step(optimizer)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._run is not None:
            self._run.batch_end(outputs)

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._run is not None:
            self._run.validation_begins()

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._run is not None:
            self._run.end()
