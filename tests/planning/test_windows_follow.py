"""Windows under `auto` follow what is measured while training goes on: slower steps hide more, and windows get shorter."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_moe_ckpt.callbacks import SparseCheckpoint
from lightning_moe_ckpt.planning import _budgets

REMEMBERED, STEPS = 6, 60


class _Layers(LightningModule):
    """Twelve matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(32, 32) for _ in range(12)))

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.layers(batch).square().mean()
        return loss

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def _windows(folder: Path, caplog: pytest.LogCaptureFixture, *, steps: int) -> list[int]:
    """Train up to a step, and return the windows of the plans that came into force, in order."""
    caplog.clear()
    data: Any = DataLoader(torch.randn(STEPS, 32), batch_size=1)  # type: ignore[arg-type]  # a tensor is a dataset
    silent: dict[str, Any] = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    callbacks: Any = [SparseCheckpoint(folder / "run", overhead_target=None)]
    with caplog.at_level("INFO"):
        Trainer(max_steps=steps, accelerator="cpu", callbacks=callbacks, **silent).fit(_Layers(), data)
    return [int(found) for found in re.findall(r"plan [0-9a-f]+: (\d+) segments", caplog.text)]


def test_slower_steps_make_windows_shorter(tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: Any) -> None:
    """What was planned when steps were short stays as long as they are, and goes when they are long, after a restart too."""
    monkeypatch.setattr(_budgets, "measure_bandwidth", lambda *_: 4e6)  # in 10 ms a quarter of the state
    monkeypatch.setattr(_budgets, "_REMEMBERED_STEPS", REMEMBERED)
    monkeypatch.setattr(_budgets.StepClock, "median", 0.01)
    first = _windows(tmp_path, caplog, steps=STEPS // 3)
    monkeypatch.setattr(_budgets.StepClock, "median", 0.04)
    restarted = _windows(tmp_path, caplog, steps=STEPS)
    assert len(first) == 1
    assert first[0] > 5 > restarted[-1]
