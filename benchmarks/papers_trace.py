"""A training under 24 faults, with four kinds of checkpoints: what of its batches was of use.

Source: MoEvement (2026), Fig. 10 and Table 1. All counts of steps are a quarter of the paper's: 6 hours of 2.9 s, intervals of
124 and 92 steps, a window of 6. The times of the trace's faults are in a picture only; these are drawn, evenly. Faults strike
by the number of batches that were run, those that repeat steps among them: as in time, a system that repeats more gets less far.
"""

from __future__ import annotations

import multiprocessing
import random
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Literal

from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from typing_extensions import override

from benchmarks.papers_plans import Rows, Way
from benchmarks.quality_fit import TextModel, training_text
from benchmarks.steps import StepLines, lines_of, write_line
from lightning_moe_ckpt.benchmarks._fits import (
    ModelSize,
    bench_folders,
    bench_trainer,
    own_memory,
    patient_storage,
    quiet_lightning,
)
from lightning_moe_ckpt.callbacks import (
    CheckpointArguments,
    DenseCheckpoint,
    PartialExpertCheckpoint,
    SparseCheckpoint,
)
from lightning_moe_ckpt.process import compute_alone
from lightning_moe_ckpt.testing import Attempt, Kill, run_attempts
from lightning_moe_ckpt.testing._records import JsonLines, Record

TraceSystem = Literal["CheckFreq", "Gemini", "MoC", "MoEvement"]
SYSTEMS: tuple[TraceSystem, ...] = ("CheckFreq", "Gemini", "MoC", "MoEvement")
_FAULTS, _BATCHES = 24, 1860
_EVERY = {"CheckFreq": 31, "Gemini": 23, "MoC": 1, "MoEvement": 1}
"""Steps between two checkpoints."""
_WINDOW, _K, _PLT_BUDGET = 2, 2, 0.0375
_SIZE = ModelSize(num_blocks=1, model_dim=32, num_experts=16, expert_dim=64, context=32, batch_size=8, balance=0.0)
_SETTLE = 60.0
_LEAST = 4
"""Batches between two faults."""


def gaps(seed: int, faults: int, batches: int) -> list[int]:
    """Return the batches before each fault, and after the last one: faults at times drawn evenly."""
    draw, free = random.Random(f"trace {seed}"), batches - _LEAST * (faults + 1)
    places = sorted(draw.randrange(free + 1) for _ in range(faults))
    return [_LEAST + later - earlier for earlier, later in pairwise([0, *places, free])]


@dataclass(frozen=True, kw_only=True)
class TraceFit:
    """A run under a trace of faults; picklable."""

    system: TraceSystem
    seed: int
    gaps: list[int]
    """Batches of each attempt."""
    memory: str = ""
    record: str = ""

    def __call__(self, attempt: Attempt) -> Record:
        """Run an attempt; its lines are in the record, beside those of attempts that were killed."""
        # CheckFreq keeps checkpoints on a disk, Gemini and the others in the memory of nodes.
        own_memory(self.memory, lost=attempt.index > 0 and self.system == "CheckFreq")
        seed_everything(self.seed + 7919 * attempt.index, verbose=False)
        checkpoint, steps = self._checkpoint(attempt.url), sum(self.gaps)
        own: list[Callback] = [_Trace(self, checkpoint, attempt.index), checkpoint]
        with quiet_lightning(), patient_storage():
            trainer = bench_trainer(
                accelerator="cpu",
                strategy="auto",
                callbacks=attempt.callbacks(*own),
                max_steps=steps,
                enable_checkpointing=True,
            )
            trainer.fit(TextModel(_SIZE, steps), training_text(_SIZE, steps + 1, self.seed))
        return {}

    def _checkpoint(self, url: str) -> DenseCheckpoint | PartialExpertCheckpoint | SparseCheckpoint:
        # `_Trace` counts batches of its own process, which a restart must not put back.
        shared: CheckpointArguments = {"overhead_target": None, "untouched": ["callback.*"]}
        if self.system == "MoEvement":
            return SparseCheckpoint(url, window=_WINDOW, **shared)
        if self.system == "MoC":
            return PartialExpertCheckpoint(url, k=_K, select="sequential", plt_budget=_PLT_BUDGET, **shared)
        return DenseCheckpoint(url, every_n_steps=_EVERY[self.system], **shared)

    def run(self) -> tuple[TraceSystem, Traced]:
        """Run all attempts, in a process of its own."""
        with bench_folders() as (folder, memory):
            (folder / "run").mkdir()
            record = folder / "lines"
            fit = replace(self, memory=str(memory), record=str(record))
            kills = [Kill(phase="after_backward", batches=gap, settle=_SETTLE) for gap in self.gaps[:-1]]
            run_attempts(fit, url=(folder / "run").as_uri(), workdir=folder, kills=kills, timeout=600)
            return self.system, _read(record)


class _Trace(StepLines):
    """Write lines of steps, and of what faults have cost; end the last attempt when its batches are over."""

    def __init__(
        self, fit: TraceFit, checkpoint: DenseCheckpoint | PartialExpertCheckpoint | SparseCheckpoint, index: int
    ) -> None:
        self.lines, self._checkpoint = JsonLines(fit.record), checkpoint
        self._left = fit.gaps[index]

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: object) -> None:
        self._left -= 1
        write_line(self.lines, "batch", step=trainer.global_step)

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: object) -> None:
        super().on_train_batch_end(trainer, pl_module)
        if self._left <= 0:
            trainer.should_stop = True

    @override
    def values(self) -> Record:
        lost = self._checkpoint.report.lost if isinstance(self._checkpoint, PartialExpertCheckpoint) else None
        return {} if lost is None else {"plt": lost.plt, "k": lost.k, "lost": lost.lost}


@dataclass(frozen=True, kw_only=True)
class Traced:
    """A run under the trace."""

    steps: int
    """Steps that were done in the end."""
    batches: int
    """Batches that were run, in all attempts."""
    plt: list[float]
    k: list[int]
    """PLT and K after each fault; empty where no token can be lost."""
    lost: int
    """Tokens, each as often as it was routed."""


def _read(record: Path) -> Traced:
    attempts = list[list[Record]]()
    for line in lines_of(record, "begin", "batch", "step"):
        if line["what"] == "begin":
            attempts.append([])
        else:
            attempts[-1].append(line)
    steps = [[line for line in lines if line["what"] == "step"] for lines in attempts]
    firsts = [lines[0] for lines in steps[1:] if lines and "k" in lines[0]]
    return Traced(
        steps=steps[-1][-1]["step"],
        batches=sum(line["what"] == "batch" for lines in attempts for line in lines),
        plt=[line["plt"] for line in firsts],
        k=[line["k"] for line in firsts],
        lost=steps[-1][-1].get("lost", 0),
    )


@cache
def traced(seed: int, batches: int = _BATCHES, faults: int = _FAULTS) -> dict[TraceSystem, Traced]:
    """Return a run of each system, two at a time."""
    fits = [TraceFit(system=system, seed=seed, gaps=gaps(seed, faults, batches)) for system in SYSTEMS]
    with multiprocessing.get_context("fork").Pool(2, initializer=compute_alone) as pool:
        return dict(pool.imap_unordered(TraceFit.run, fits))


def goodput(way: Way) -> Rows:
    """Useful work under 24 faults, with K and lost tokens of partial checkpoints: MoEvement, Fig. 10."""
    found = traced(way.seed)
    rows: Rows = {"faults": float(_FAULTS)}
    for system in SYSTEMS:
        run = found[system]
        rows[f"batches of use, {system}"] = 100 * run.steps / run.batches
    for system in SYSTEMS[:-1]:
        rows[f"MoEvement over {system}"] = rows["batches of use, MoEvement"] / rows[f"batches of use, {system}"]
    partial = found["MoC"]
    for fault in (1, 6, 12, 18, 24):
        at = min(fault, len(partial.k)) - 1
        rows[f"K of MoC, fault {fault}"] = 100 * partial.k[at] / _SIZE.num_experts
        rows[f"PLT of MoC, fault {fault}"] = 100 * partial.plt[at]
    return rows | {"tokens lost, MoEvement": float(found["MoEvement"].lost), "tokens lost, MoC": float(partial.lost)}


def properties(way: Way) -> Rows:
    """Four properties of four systems, from the same runs: MoEvement, Table 1."""
    found, rows = traced(way.seed), Rows()
    for system in SYSTEMS:
        run = found[system]
        rows[f"steps between checkpoints, {system}"] = float(_EVERY[system])
        rows[f"batches repeated per fault, {system}"] = (run.batches - run.steps) / _FAULTS
        rows[f"tokens lost, {system}"] = float(run.lost)
        rows[f"batches of use, {system}"] = 100 * run.steps / run.batches
    return rows
