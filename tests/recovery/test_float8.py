"""Weights and moments in eight bits are captured as they are, sparse windows included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import AdamW
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_moe_ckpt.callbacks import SparseCheckpoint
from lightning_moe_ckpt.operators import register_optimizer

NARROW = {"exp_avg": torch.float8_e4m3fn, "exp_avg_sq": torch.float8_e5m2}


class Narrow(AdamW):
    """Keeps its moments in eight bits, as recipes for training in fp8 do; scales are left out."""

    @override
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure()
        for param in (
            parameter for group in self.param_groups for parameter in group["params"] if parameter.grad is not None
        ):
            state = self.state[param]
            if not state:
                state["step"] = torch.zeros(())
                state.update({key: torch.zeros_like(param, dtype=dtype) for key, dtype in NARROW.items()})
            state["step"] += 1
            gradient = param.grad.float()
            mean = state["exp_avg"].float().lerp_(gradient, 0.1)
            square = state["exp_avg_sq"].float().mul_(0.9).addcmul_(gradient, gradient, value=0.1)
            state["exp_avg"].copy_(mean)
            state["exp_avg_sq"].copy_(square)
            param.copy_(param.float() - 0.05 * mean / (square.sqrt() + 1e-3))
        return loss


class Narrows(LightningModule):
    """A perceptron whose weights have eight bits."""

    def __init__(self, fails_at: int | None = None) -> None:
        super().__init__()
        rng = torch.Generator().manual_seed(2)
        shapes = [(8, 16), (16, 16), (16, 4)]
        self.weights = nn.ParameterList(
            nn.Parameter((torch.randn(shape, generator=rng) / 2).to(torch.float8_e4m3fn)) for shape in shapes
        )
        self._fails_at = fails_at

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.global_step == self._fails_at:
            raise RuntimeError("fails here")
        x = batch
        for weight in self.weights:
            x = torch.tanh(x @ weight.to(torch.float32))
        return (x - batch[:, :4]).square().mean()

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return Narrow(self.parameters())


def _fit(folder: Path | None, module: Narrows) -> Narrows:
    batches: Any = DataLoader(torch.randn(64, 8, generator=torch.Generator().manual_seed(1)), batch_size=4)  # type: ignore[arg-type]
    silent: dict[str, Any] = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    callbacks: Any = [] if folder is None else [SparseCheckpoint(folder / "run", window=3)]
    Trainer(max_steps=14, accelerator="cpu", callbacks=callbacks, enable_checkpointing=bool(callbacks), **silent).fit(
        module, batches
    )
    return module


def test_a_run_in_eight_bits_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """Weights in e4m3, moments in e4m3 and e5m2, an exception in the middle of a window."""
    register_optimizer(Narrow, like=AdamW, dtypes=NARROW)
    with pytest.raises(RuntimeError, match="fails here"):
        _fit(tmp_path, Narrows(fails_at=10))
    resumed, alone = _fit(tmp_path, Narrows()), _fit(None, Narrows())
    assert resumed.global_step == alone.global_step
    for got, want in zip(resumed.parameters(), alone.parameters(), strict=True):
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))
