"""Windows under `auto` follow what is measured while training goes on: slower steps hide more, and windows get shorter."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from torch import nn

from lightning_moe_ckpt.callbacks import SparseCheckpoint
from lightning_moe_ckpt.planning import _budgets

REMEMBERED, STEPS = 6, 60


def _windows(folder: Path, caplog: pytest.LogCaptureFixture, *, steps: int) -> list[int]:
    """Train up to a step, and return the windows of the plans that came into force, in order."""
    caplog.clear()
    twelve = tiny.ToZero(*(nn.Linear(32, 32) for _ in range(12)))
    checkpoint = SparseCheckpoint(folder / "run", overhead_target=None)
    with caplog.at_level("INFO"):
        tiny.fit(twelve, tiny.rows(torch.randn(STEPS, 32)), checkpoint, max_steps=steps)
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
