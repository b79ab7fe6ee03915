"""In a fit: layers whose tokens are counted wrong are named once, left out of figures and order, and trained on."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from lightning.pytorch import LightningModule, seed_everything
from torch import Tensor, nn
from typing_extensions import override

from lightning_moe_ckpt.callbacks import ExpertLoadMonitor, SparseCheckpoint

D, E, T = 8, 4, 32


class Experts(nn.Module):
    """Runs expert `i + shift` where it is given index `i`."""

    def __init__(self, shift: int) -> None:
        super().__init__()
        self.w1, self.w2, self.shift = nn.Parameter(torch.randn(E, D, D)), nn.Parameter(torch.randn(E, D, D)), shift

    def forward(self, x_TD: Tensor, idx_T1: Tensor) -> Tensor:
        idx_T = (idx_T1[:, 0] + self.shift) % E
        return torch.einsum("td,tdf,tfe->te", x_TD, self.w1[idx_T], self.w2[idx_T])


class Block(nn.Module):
    """Top-1, never the last expert."""

    top_k = 1

    def __init__(self, shift: int) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(D, E), Experts(shift)

    def forward(self, x_TD: Tensor) -> Tensor:
        weight_T1, idx_T1 = self.gate(x_TD)[:, : E - 1].softmax(-1).max(-1, keepdim=True)
        out_TD: Tensor = self.experts(x_TD, idx_T1) * weight_T1
        return out_TD


class Model(LightningModule):
    """A layer that is counted right, and one that `shift` may make wrong."""

    def __init__(self, shift: int) -> None:
        super().__init__()
        self.right, self.moe = Block(0), Block(shift)

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x_TD = batch[0] + self.right(batch[0])
        loss: Tensor = (x_TD + self.moe(x_TD)).square().mean()
        return loss

    @override
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


def fit(model: Model, *callbacks: Any) -> None:
    data = tiny.rows(torch.randn(10 * T, D), T)
    tiny.fit(model, data, *callbacks, max_epochs=1, accumulate_grad_batches=2)


@pytest.mark.parametrize("shift", [0, 1])
def test_a_layer_that_is_counted_wrong_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, shift: int
) -> None:
    """The other layer is not; nor is this one where it is counted right."""
    seed_everything(0, verbose=False)
    model, monitor = Model(shift), ExpertLoadMonitor(every_n_steps=1)
    with caplog.at_level(logging.WARNING, "lightning_moe_ckpt"):
        fit(model, SparseCheckpoint(tmp_path / "run", window=2), monitor)
    told = [r.getMessage() for r in caplog.records if "not counted as its experts process them" in r.getMessage()]
    assert len(told) == 2 * shift, "the order of checkpoints asks, and the monitor"
    assert all("`moe` (Block)" in each and "experts [3] have a gradient" in each for each in told)
    assert "moe/load_skew/right" in monitor.latest
    assert ("moe/load_skew/moe" in monitor.latest) == (not shift)
    hooks = [m for m in model.modules() if m._forward_hooks or m._forward_pre_hooks or m._backward_hooks]
    assert not hooks
