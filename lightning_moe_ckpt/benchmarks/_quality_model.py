"""The text example at the size of a benchmark: a byte-level GPT with experts that overflow, on real text."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from lightning_moe_ckpt.benchmarks._model import BenchModel, ModelSize
from lightning_moe_ckpt.benchmarks._text import library_text, random_crops

_LEARNING_RATE, _WARM_UP = 4e-3, 20
"""As in the text example."""
_VALIDATION_SEED = 10**6
"""Validation crops are the same in every run."""
_VALIDATION_BATCH = 32


class TextModel(BenchModel):
    """`BenchModel` with the text example's schedule and a validation loss.

    Args:
        size: what is built.
        total_steps: after which the cosine has come down to a tenth of the peak.
    """

    def __init__(self, size: ModelSize, total_steps: int) -> None:
        super().__init__(size)
        self.total_steps = total_steps

    @override
    def configure_optimizers(self) -> OptimizerLRScheduler:
        """AdamW under a warm-up with a cosine."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=_LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1)
        schedule = LambdaLR(optimizer, self._relative_rate)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _relative_rate(self, step: int) -> float:
        if step < _WARM_UP:
            return (step + 1) / _WARM_UP
        progress = (step - _WARM_UP) / max(1, self.total_steps - _WARM_UP)
        return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, progress)))

    def bits_per_byte(self, crops_NT: Tensor) -> float:
        """Validation loss. Nothing is dropped in it: a capacity that is raised at the time must not flatter it."""
        with _evaluating(self), torch.no_grad():
            losses = [
                float(self.cross_entropy(crops_BT)) * len(crops_BT)
                for crops_BT in torch.split(crops_NT.to(self.device), _VALIDATION_BATCH)
            ]
        return sum(losses) / len(crops_NT) / math.log(2)


@contextmanager
def _evaluating(model: BenchModel) -> Iterator[None]:
    layers = model.moe_layers()
    before = [(layer, layer.capacity_factor, layer.l_aux) for layer in layers]
    model.eval()
    for layer in layers:
        layer.capacity_factor = 0.0
    try:
        yield
    finally:
        for layer, factor, l_aux in before:
            layer.capacity_factor, layer.l_aux = factor, l_aux
        model.train()


def training_text(size: ModelSize, num_batches: int, seed: int) -> DataLoader[tuple[Tensor, ...]]:
    """Batches of crops, one byte longer than the context, which is what is predicted; in the order of the seed."""
    text, _ = library_text()
    crops_NT = random_crops(text, num_batches * size.batch_size, size.context + 1, seed=seed)
    return DataLoader(TensorDataset(crops_NT), batch_size=size.batch_size)


def validation_text(size: ModelSize, num_crops: int) -> Tensor:
    """Crops that are the same in every run: int64 `[num_crops, context + 1]`."""
    _, text = library_text()
    return random_crops(text, num_crops, size.context + 1, seed=_VALIDATION_SEED)
