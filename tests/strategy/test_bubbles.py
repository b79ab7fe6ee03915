"""Copies wait for the bubbles of a pipeline where that pays, and change nothing of what is trained and stored."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_moe_ckpt.callbacks import DenseCheckpoint
from lightning_moe_ckpt.native import BubbleFigures, Bubbles, PipelinePhase, _bubbles
from lightning_moe_ckpt.native._cpu import CpuCopyEngine
from lightning_moe_ckpt.native._prototypes import GateCounts
from strategy._staged import D, Staged, train

STEPS, SECONDS = 36, 0.02


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


class Waits(pl.Callback):
    """Lets few steps skip their copies."""

    def __init__(self, checkpoint: DenseCheckpoint) -> None:
        self._checkpoint = checkpoint

    def on_train_batch_start(self, *_: object) -> None:
        self._checkpoint.wait_committed()


def _trained(folder: Path | None, stages: int = 2) -> list[Any]:
    callbacks: list[pl.Callback] = []
    if folder is not None:
        checkpoint = DenseCheckpoint(folder.as_uri(), every_n_steps=1, overhead_target=None)
        callbacks = [checkpoint, Waits(checkpoint)]
    strategy = {"pipeline_parallel": stages, "micro_batches": 4}
    after = None if folder is None else _figures
    more: dict[str, Any] = {"callbacks": callbacks, "enable_checkpointing": bool(callbacks), "max_steps": STEPS}
    return train(stages, model=Slow, after=after, strategy=strategy, **more)


@pytest.mark.parametrize("stages", [2, pytest.param(3, marks=pytest.mark.soak)])
def test_copies_wait_for_bubbles_in_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stages: int) -> None:
    """A trial has steps of both kinds, and ends with a verdict. Weights are those without copies."""
    monkeypatch.setattr(_bubbles, "_SAMPLES", 2)
    monkeypatch.setattr(_bubbles, "_TURN", 2)
    monkeypatch.setattr(_bubbles, "_FEW", -1.0)  # on a busy machine copies end before a sleeping operation begins
    found, plain = _trained(tmp_path / "run", stages), _trained(None, stages)
    for ours, theirs in zip(found, plain, strict=True):
        assert ours.parameters.keys() == theirs.parameters.keys()
        assert all(torch.equal(parameter, theirs.parameters[name]) for name, parameter in ours.parameters.items())
        assert min(map(len, ours.value.steps.values())) >= 2
        assert ours.value.verdict.startswith(("copies wait for them: steps of", "copies do not wait: steps of"))
        assert sum(ours.value.chunks.values()) >= STEPS
    # Each of the last stage's forwards but the first waits for nobody; the first stage waits for backwards of others.
    assert all(each.value.seconds >= (stages - 1) * SECONDS for each in (found[0], found[-1]))


class Engine:
    """Stands in for an engine: counts chunks by the way that the test says, and how often it hears of a phase."""

    def __init__(self, beside: int) -> None:
        self.beside, self.fits, self.heard = beside, 0, 0
        self.counts = GateCounts()

    def enter(self, phase: PipelinePhase) -> None:
        self.heard += 1
        if phase is PipelinePhase.OUTSIDE:
            self.counts.passes += 1
            self.counts.gap_ns = 10**7

    def copy(self) -> None:
        self.counts.outside += 10 - self.beside
        self.counts.in_gaps += self.beside if self.fits else 0
        self.counts.beside += 0 if self.fits else self.beside

    def gate_counts(self) -> GateCounts:
        return GateCounts.from_buffer_copy(self.counts)

    def fit_gaps(self, nbytes: int) -> None:
        self.fits = nbytes


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock that steps set, and a rate at which 8 MB fit into bubbles."""
    clock = SimpleNamespace(now=1.0)
    monkeypatch.setattr(_bubbles, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    monkeypatch.setattr(_bubbles, "measure_bandwidth", lambda *_: 1e9)
    return clock


def _take_steps(bubbles: Bubbles, engine: Engine, clock: SimpleNamespace, steps: int, saved: float) -> None:
    """Take steps of 100 ms, less what waiting saves; a list is begun at the end of the step before."""
    for _ in range(steps):
        waits = engine.fits > 0
        for phase in (PipelinePhase.GAP, PipelinePhase.OPERATION, PipelinePhase.GAP, PipelinePhase.OUTSIDE):
            bubbles.enter(phase)
        clock.now += 0.1 - saved * waits
        engine.copy()


@pytest.mark.parametrize(
    ("beside", "saved", "waits", "says"),
    [
        (0, 0.02, False, "they end before the first operation"),
        (1, 0.02, False, "they end before the first operation"),
        (8, 0.0, False, "copies do not wait: steps of 100.0 ms with waiting, 100.0 ms without"),
        (8, -0.02, False, "copies do not wait: steps of 120.0 ms with waiting, 100.0 ms without"),
        (8, 0.02, True, "copies wait for them: steps of 80.0 ms with waiting, 100.0 ms without"),
    ],
)
def test_copies_wait_only_where_steps_get_shorter(
    clock: SimpleNamespace, caplog: pytest.LogCaptureFixture, *, beside: int, saved: float, waits: bool, says: str
) -> None:
    """It is said once, and the engine hears of no phase where nothing waits. Another trial follows."""
    caplog.set_level("INFO")
    engine = Engine(beside)
    bubbles = Bubbles(engine, torch.device("cpu"))  # type: ignore[arg-type]
    assert bubbles.figures() is None
    _take_steps(bubbles, engine, clock, 90, saved)
    figures = bubbles.figures()
    assert figures is not None
    assert figures.verdict.endswith(says)
    assert figures.seconds == pytest.approx(0.01)
    assert engine.fits == (8_000_000 if waits else 0)
    assert sum("bubbles" in message for message in caplog.messages) == 1
    heard = engine.heard
    _take_steps(bubbles, engine, clock, 100, saved)
    assert engine.heard == heard + (400 if waits else 0)
    engine.beside = 8 - 8 * (beside == 8)  # the other answer
    _take_steps(bubbles, engine, clock, 1000, 0.02)
    assert engine.fits == (0 if beside == 8 else 8_000_000)


def test_engines_that_copy_at_any_time_have_no_figures() -> None:
    """As those of torch."""
    bubbles = Bubbles(CpuCopyEngine(), torch.device("cpu"))
    bubbles.enter(PipelinePhase.GAP)
    bubbles.enter(PipelinePhase.OUTSIDE)
    assert bubbles.figures() is None
