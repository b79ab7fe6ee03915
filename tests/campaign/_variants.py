"""Runs that use more of Lightning: other loops, other data, metrics of every kind."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, distributed
from torch.utils.data import DataLoader, IterableDataset, Subset, get_worker_info
from torchmetrics import MeanMetric, SumMetric
from typing_extensions import override

from campaign._data import Tokens, make_validation_loader
from campaign._training import Module, Setup
from lightning_moe_ckpt.testing import Attempt

Source = Literal["tokens", "stream", "endless", "combined", "by_epoch"]
"""Kinds of training data: `by_epoch` comes from a hook of the module, which gives other items in every epoch."""
Item = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class Variant(Setup):
    """A training run with arguments of the Trainer and data of its own."""

    trainer: tuple[tuple[str, Any], ...] = ()
    """Arguments of the Trainer, over those that the setup implies."""
    source: Source = "tokens"
    logged: bool = False
    """Whether the module logs in every way that Lightning accumulates over an epoch."""
    plateau: tuple[str, int] | None = None
    """Interval and frequency of a plateau scheduler on the validation loss."""
    growing_accumulation: bool = False
    """Whether every epoch accumulates over more batches than the one before."""

    @override
    def make_module(self, life: Attempt) -> Module:
        return VariantModule(self, life)

    @override
    def callbacks(self, life: Attempt) -> Sequence[Callback]:
        return [GradientAccumulationScheduler({0: 1, 1: 2, 2: 3})] if self.growing_accumulation else []

    @override
    def trainer_options(self, life: Attempt) -> dict[str, Any]:
        return {**super().trainer_options(life), **dict(self.trainer)}

    @override
    def loaders(self, life: Attempt) -> tuple[Any, Any]:
        if self.source == "tokens":
            return super().loaders(life)
        length = self.batches * self.batch_size * life.world_size
        makers = {"combined": _combined, "stream": _stream, "endless": _stream, "by_epoch": lambda *_: None}
        training = makers[self.source](self, length)
        return training, make_validation_loader(self.batch_size) if self.validate_every else None


class VariantModule(Module):
    """Logs the loss by every reduction, and through metric objects of its own."""

    def __init__(self, setup: Variant, life: Attempt) -> None:
        super().__init__(setup, life)
        self._variant = setup
        if setup.logged:
            self.mean, self.total = MeanMetric(), SumMetric()

    def _loss(self, batch: Any) -> Tensor:
        if isinstance(batch, dict):  # of a combined loader
            return torch.stack([super(VariantModule, self)._loss(each) for each in batch.values()]).mean()
        return super()._loss(batch)

    @override
    def train_dataloader(self) -> Any:
        setup, length = self._variant, self._variant.batches * self._variant.batch_size
        items = Tokens(length * (self.current_epoch + 1), augment=setup.augment)
        return DataLoader(
            Subset(items, range(len(items) - length, len(items))),
            batch_size=setup.batch_size,
            shuffle=True,
            num_workers=setup.workers,
        )

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self._variant.logged:
            self._log_everything(loss, batch_idx)
        return loss

    def _log_everything(self, loss: Tensor, batch_idx: int) -> None:
        for reduction in ("mean", "sum", "max", "min"):
            self.log(f"both_{reduction}", loss, on_step=True, on_epoch=True, reduce_fx=reduction, batch_size=4)
        self.log("synced", loss, on_epoch=True, sync_dist=True, batch_size=4)
        if batch_idx == 0:  # in no later batch of the epoch
            self.log("first", loss, on_epoch=True, batch_size=4)
            self.log("first_sum", loss, on_epoch=True, reduce_fx="sum", sync_dist=True)
        if batch_idx % 3 == 1:
            self.log("rare", loss, on_step=True, on_epoch=True, reduce_fx="max", sync_dist=True)
        self.mean.update(loss.detach())
        self.log("mean_object", self.mean, on_step=False, on_epoch=True)
        self.total(loss.detach())
        if batch_idx < 2:
            self.log("total_object", self.total, on_step=True, on_epoch=True)

    @override
    def configure_optimizers(self) -> Any:
        configured = super().configure_optimizers()
        if self._variant.plateau is not None:
            interval, frequency = self._variant.plateau
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(
                configured["optimizer"], factor=0.5, patience=0, threshold=1.0
            )
            configured["lr_scheduler"] = {
                "scheduler": plateau,
                "monitor": "validation_loss",
                "interval": interval,
                "frequency": frequency,
            }
        return configured


class Stream(IterableDataset[Item]):
    """Items that come in one order only, divided among ranks and workers; endless without a length."""

    def __init__(self, length: int | None, *, augment: bool) -> None:
        self._length, self._items = length, Tokens(0, augment=augment)

    @override
    def __iter__(self) -> Iterator[Item]:
        rank, ranks = (distributed.get_rank(), distributed.get_world_size()) if _distributed() else (0, 1)
        worker = get_worker_info()
        if worker is not None:
            rank, ranks = rank * worker.num_workers + worker.id, ranks * worker.num_workers
        for index in itertools.islice(itertools.count(), rank, self._length, ranks):
            yield self._items[index]


def _distributed() -> bool:
    return distributed.is_available() and distributed.is_initialized()


def _stream(setup: Variant, length: int) -> Any:
    stream = Stream(None if setup.source == "endless" else length, augment=setup.augment)
    return DataLoader(stream, batch_size=setup.batch_size, num_workers=setup.workers)


def _combined(setup: Variant, length: int) -> Any:
    """Two loaders of different length, of which the shorter one starts over."""
    longer, shorter = (
        DataLoader(
            Tokens(items, augment=setup.augment),
            batch_size=setup.batch_size,
            shuffle=True,
            num_workers=setup.workers,
        )
        for items in (length, length // 2)
    )
    return CombinedLoader({"first": longer, "second": shorter}, "max_size_cycle")
