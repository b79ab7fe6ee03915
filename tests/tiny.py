"""Tiny models, and a fit that prints nothing: what tests of callbacks train, where it does not matter what is trained."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from lightning_moe_ckpt.moe import MoELayer

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]


LEARN: MakeOptimizer = partial(AdamW, lr=1e-2)


class ToZero(LightningModule):
    """Layers, one behind the other, that learn to give zero.

    Args:
        layers: from the batch to what is squared.
        optimizer: gets all parameters.
    """

    def __init__(self, *layers: nn.Module, optimizer: MakeOptimizer = LEARN) -> None:
        super().__init__()
        self.net, self.make_optimizer = nn.Sequential(*layers), optimizer

    @override
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self(batch[0]).square().mean()  # type: ignore[no-any-return]

    @override
    def configure_optimizers(self) -> Any:
        return self.make_optimizer(self.parameters())


def with_dropout(features: int = 4) -> ToZero:
    """Two layers, with numbers drawn between them in each step."""
    return ToZero(nn.Linear(features, 8), nn.Dropout(0.2), nn.Linear(8, 1))


def with_experts(features: int = 8, hidden: int = 16, num_experts: int = 4) -> ToZero:
    """A layer, and one of experts."""
    return ToZero(nn.Linear(features, features), MoELayer(features, hidden, num_experts))


def rows(x: Tensor, batch_size: int = 1, **options: Any) -> DataLoader[Any]:
    """Batches of the rows of a tensor."""
    return DataLoader(TensorDataset(x), batch_size=batch_size, **options)


def waves(number: int, features: int) -> Tensor:
    """Rows that differ, the same ones each time."""
    return torch.arange(float(number * features)).view(-1, features).sin()


def quiet_trainer(*callbacks: Callback, **options: Any) -> Trainer:
    """A trainer on one CPU that logs and shows nothing; `max_steps` means steps, however many epochs that takes."""
    off = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    epochs = {"max_epochs": -1} if "max_steps" in options else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's advice about such a run
        return Trainer(**{"accelerator": "cpu", "devices": 1, **off, **epochs, **options}, callbacks=list(callbacks))


def fit(module: LightningModule, data: Any, *callbacks: Callback, **options: Any) -> Trainer:
    """Train as `quiet_trainer` does, `data` being what `Trainer.fit` takes for training."""
    trainer = quiet_trainer(*callbacks, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, data)
    return trainer
