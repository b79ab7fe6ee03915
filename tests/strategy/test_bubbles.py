"""Copies wait for the bubbles of a pipeline, and change nothing of what is trained and stored."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_moe_ckpt.callbacks import DenseCheckpoint
from lightning_moe_ckpt.native import BubbleFigures
from lightning_moe_ckpt.native._cpu import CompiledCpuEngine
from strategy._staged import D, Staged, train

STEPS, SECONDS = 10, 0.04


class Large(nn.Module):
    """Has 48 MiB with its moments, a few chunks."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4 * 2**20))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight[:D]


class SlowStage(nn.Module):
    """A stage that takes its time."""

    def __init__(self, stage: nn.Module, number: int) -> None:
        super().__init__()
        self.stage = stage
        self.large = nn.ModuleDict({str(number): Large()})

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(SECONDS)
        (large,) = self.large.values()
        y: Tensor = self.stage(large(x))
        return y


class Slow(Staged):
    """Forwards take far longer than copies."""

    def configure_stage(self, stage: int, num_stages: int) -> nn.Module:
        return SlowStage(super().configure_stage(stage, num_stages), stage)


def _figures(trainer: pl.Trainer) -> BubbleFigures | None:
    (checkpoint,) = [callback for callback in trainer.callbacks if isinstance(callback, DenseCheckpoint)]  # type: ignore[attr-defined]
    found: BubbleFigures | None = checkpoint.report.bubbles
    return found


def _trained(folder: Path | None, stages: int = 2) -> list[Any]:
    callbacks = [] if folder is None else [DenseCheckpoint(folder.as_uri(), every_n_steps=1, overhead_target=None)]
    strategy = {"pipeline_parallel": stages, "micro_batches": 4}
    after = None if folder is None else _figures
    more: dict[str, Any] = {"callbacks": callbacks, "enable_checkpointing": bool(callbacks), "max_steps": STEPS}
    return train(stages, model=Slow, after=after, strategy=strategy, **more)


@pytest.mark.parametrize("stages", [2, pytest.param(3, marks=pytest.mark.soak)])
def test_copies_of_a_step_are_made_in_its_bubbles(tmp_path: Path, stages: int) -> None:
    """Or between steps; the first step's are made at any time, since nothing is known then. Weights are those without copies."""
    found, plain = _trained(tmp_path / "run", stages), _trained(None, stages)
    for ours, theirs in zip(found, plain, strict=True):
        assert ours.parameters.keys() == theirs.parameters.keys()
        assert all(torch.equal(parameter, theirs.parameters[name]) for name, parameter in ours.parameters.items())
        figures = ours.value
        assert figures.nbytes > 0
        per_step = sum(figures.chunks.values()) / STEPS
        assert per_step >= 3
        assert figures.chunks["in_bubbles"] > 0
        assert figures.chunks["beside"] <= 2 * per_step
    first, *_, last = (each.value.seconds for each in found)
    # Each of the last stage's forwards but the first waits for nobody; the first stage waits for backwards of others.
    assert first >= (stages - 1) * SECONDS
    assert last >= (stages - 1) * SECONDS


@pytest.mark.soak
def test_without_that_copies_run_beside_operations(tmp_path: Path) -> None:
    """What the rule is for: operations of the first stage begin at once, and so do copies that wait for nothing."""
    with patch.object(CompiledCpuEngine, "fit_gaps", lambda *_: None):
        first, _ = [each.value.chunks for each in _trained(tmp_path / "run")]
    assert first["beside"] > first["in_bubbles"]
