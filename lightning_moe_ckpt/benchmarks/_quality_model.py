"""A byte-level GPT with experts that overflow, and a text that is on every machine: the source of Python's own library.

The text is read where Python is installed. It differs between Python versions, so losses compare within one version
only. Whole files go to validation or training by a hash of their content, so that no validation text was trained on.
"""

from __future__ import annotations

import hashlib
import math
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from lightning_moe_ckpt.benchmarks._model import BenchModel, ModelSize
from lightning_moe_ckpt.errors import ConfigurationError

_LEFT_OUT = {"site-packages", "dist-packages", "test", "encodings", "pydoc_data"}
_VALIDATION_SHARE = 10
"""One file in ten."""
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
        with self._evaluating(), torch.no_grad():
            losses = [
                float(self.cross_entropy(crops_BT)) * len(crops_BT)
                for crops_BT in torch.split(crops_NT.to(self.device), _VALIDATION_BATCH)
            ]
        return sum(losses) / len(crops_NT) / math.log(2)

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        layers = self.moe_layers()
        before = [(layer, layer.capacity_factor, layer.l_aux) for layer in layers]
        self.eval()
        for layer in layers:
            layer.capacity_factor = 0.0
        try:
            yield
        finally:
            for layer, factor, l_aux in before:
                layer.capacity_factor, layer.l_aux = factor, l_aux
            self.train()


def training_text(size: ModelSize, num_batches: int, seed: int) -> DataLoader[tuple[Tensor, ...]]:
    """Batches of crops, one byte longer than the context, which is what is predicted; in the order of the seed."""
    crops_NT = _crops(_library_text(validation=False), num_batches * size.batch_size, size, seed)
    return DataLoader(TensorDataset(crops_NT), batch_size=size.batch_size)


def validation_text(size: ModelSize, num_crops: int) -> Tensor:
    """Crops that are the same in every run: int64 `[num_crops, context + 1]`."""
    return _crops(_library_text(validation=True), num_crops, size, _VALIDATION_SEED)


def _crops(text: Tensor, num_crops: int, size: ModelSize, seed: int) -> Tensor:
    """Crops from random places."""
    start_N = torch.randint(len(text) - size.context - 1, (num_crops,), generator=torch.Generator().manual_seed(seed))
    return text[start_N[:, None] + torch.arange(size.context + 1)].long()


def _library_text(*, validation: bool) -> Tensor:
    """Bytes, uint8."""
    root, found = Path(sysconfig.get_path("stdlib")), list[bytes]()
    for path in sorted(root.glob("*.py")) + sorted(root.glob("*/*.py")):
        text = path.read_bytes() if path.parent.name not in _LEFT_OUT else b""
        if text and (hashlib.sha256(text).digest()[0] * _VALIDATION_SHARE < 256) == validation:
            found.append(text)
    if not found:
        raise ConfigurationError(
            f"No library source under {root}. Run the benchmark with a Python that has its standard library as .py files."
        )
    return torch.frombuffer(bytearray(b"\n".join(found)), dtype=torch.uint8)
