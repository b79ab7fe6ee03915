"""Weights that a forward pass changes in place, while a boundary is copied: what is taken is what the batch began with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader

from lightning_moe_ckpt.callbacks import DenseCheckpoint, SparseCheckpoint

ROWS = 4_000_000
"""Of a weight large enough for its copy to be under way when the forward pass begins."""


class Edited(LightningModule):
    """Its weight is scaled by each forward pass that trains, from one step on: in place, through `.data`, or by other `.data`."""

    def __init__(self, first: int, how: str) -> None:
        super().__init__()
        self.weight, self.last = nn.Parameter(torch.ones(ROWS, 4)), nn.Linear(4, 1)
        self._from, self._how = first, how

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.global_step >= self._from and self._how == "in place":
            with torch.no_grad():
                self.weight[-1000:].mul_(0.9)
        elif self.global_step >= self._from and self._how == "through data":
            self.weight.data[-1000:].mul_(0.9)
        elif self.global_step >= self._from:
            self.weight.data = 0.9 * self.weight.data
        loss: Tensor = self.last(batch + self.weight[-4:].mean()).square().mean()
        return loss

    def configure_optimizers(self) -> SGD:
        return SGD(self.parameters(), lr=1e-2)


class Began(Callback):
    """What each batch began with; fails in the middle of one."""

    def __init__(self, fails_at: int) -> None:
        self.seen: dict[int, Tensor] = {}
        self._fails_at = fails_at

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, *args: Any) -> None:
        weight = module.get_parameter("weight").detach()
        self.seen[trainer.global_step] = weight[-1000:].clone()

    def on_before_optimizer_step(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == self._fails_at:
            raise ZeroDivisionError


def fit(checkpoint: Callback, began: Began, first: int, how: str) -> None:
    """Train, with nothing beside it that takes time."""
    torch.manual_seed(1)
    tiny.fit(Edited(first, how), DataLoader(torch.ones(40, 4), batch_size=4), checkpoint, began, max_steps=9)  # type: ignore[arg-type]


EDITS = [(0, "in place"), (4, "in place"), (0, "through data"), (4, "through data"), (4, "other data")]
BY_TURNS = [
    pytest.param(policy, *edit, marks=[pytest.mark.soak] if (index + turn) % 2 else [])
    for turn, policy in enumerate(["dense", "sparse"])
    for index, edit in enumerate(EDITS)
]
"""Each edit under one of the policies; `make soak` has all under both."""


@pytest.mark.parametrize(("policy", "first", "how"), BY_TURNS)
def test_what_is_taken_is_what_the_batch_began_with(tmp_path: Path, policy: str, first: int, how: str) -> None:
    """Where nobody saw it coming, the window in which it begins gives no generation."""

    def checkpoint() -> Callback:
        url, untouched = str(tmp_path / "run"), ["callback.Began.*"]
        if policy == "dense":
            return DenseCheckpoint(url, every_n_steps=1, untouched=untouched)
        return SparseCheckpoint(url, window=2, untouched=untouched)

    before, after = Began(fails_at=7), Began(fails_at=-1)
    with pytest.raises(ZeroDivisionError):
        fit(checkpoint(), before, first, how)
    fit(checkpoint(), after, first, how)
    resumed = min(after.seen)
    assert resumed > 0
    assert all(torch.equal(after.seen[step], before.seen[step]) for step in range(resumed, 8))
