"""A fit with or without checkpoints that is measured turn by turn.

A step is the time from one `on_train_batch_end` to the next, so that everything between counts, whichever hook or
thread it is spent in. Before the fit pauses between two turns, what is complete is stored, so that it leaves the
machine to others; each turn therefore begins with steps that are not measured, which fill the pipeline again.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lightning_moe_ckpt.benchmarks._benchmark import Accelerator
from lightning_moe_ckpt.benchmarks._fits import bench_trainer, one_thread, quiet_lightning
from lightning_moe_ckpt.benchmarks._model import BenchModel, ModelSize, random_tokens
from lightning_moe_ckpt.benchmarks._turns import HandOver
from lightning_moe_ckpt.callbacks import DenseCheckpoint, ExpertLoadMonitor, SparseCheckpoint
from lightning_moe_ckpt.session import Report

Variant = Literal["none", "sparse", "monitored", "dense"]
"""`monitored` is `sparse` beside an `ExpertLoadMonitor` with a row every ten steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FitOptions:
    """What every variant has in common."""

    size: ModelSize
    precision: Any
    """Of the Trainer."""
    window: int | Literal["auto"]
    """Of sparse checkpoints."""
    warm_up: int
    """Steps before the first that is measured, at least one."""
    settle: int
    """Steps of every later turn before those that are measured, at least one."""
    steps: int
    """Steps of a turn that are measured, at least one."""
    turns: int
    accelerator: Accelerator = "cpu"


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCosts:
    """What steps cost, in those that are measured."""

    mean_seconds: float
    """Of a step."""
    median_seconds: float
    """Of a step."""
    thread_seconds: float
    """CPU time of the training thread in a step, mean."""
    process_seconds: float
    """CPU time of all threads in a step, mean."""
    stall_seconds: dict[str, float]
    """Time the training thread waited in a step, mean, by cause; empty without checkpoints."""
    device_stall_seconds: float
    """Time training's stream stood still on a CUDA device in a step, mean."""
    overhead_seconds: float
    """Time of the training thread in hooks of checkpoints in a step, mean, waits included."""
    generations_complete: int
    generations_committed: int
    """Storage is given the newest complete generation whenever it has finished one."""


class Turn(NamedTuple):
    """What one turn of a fit showed."""

    costs: StepCosts
    report: Report | None
    """Of the checkpoint callback after the last step measured."""


def train(variant: Variant, url: str, options: FitOptions, hand_over: HandOver[Turn]) -> None:
    """Train from scratch; the same model and data whatever the variant.

    Args:
        variant: which checkpoints to take; `dense` ones at every step.
        url: where they go; a new run is started beside an earlier one there.
        options: see `FitOptions`.
        hand_over: called at the end of every turn.
    """
    checkpoint = _checkpoint(variant, url, options)
    measured = _Turns(options, checkpoint, hand_over)
    beside = [ExpertLoadMonitor(every_n_steps=10)] if variant == "monitored" else []
    total_steps = options.warm_up + options.turns * (options.settle + options.steps) - options.settle
    torch.manual_seed(0)
    model = BenchModel(options.size)
    with one_thread(), quiet_lightning():
        trainer = bench_trainer(
            accelerator=options.accelerator,
            strategy="auto",
            precision=options.precision,
            callbacks=[measured, *beside, *([checkpoint] if checkpoint is not None else [])],
            max_steps=total_steps,
            enable_checkpointing=checkpoint is not None,
        )
        # One batch more than it takes, so that no epoch ends.
        trainer.fit(model, random_tokens(options.size, total_steps + 1))


def _checkpoint(variant: Variant, url: str, options: FitOptions) -> DenseCheckpoint | SparseCheckpoint | None:
    if variant == "dense":
        return DenseCheckpoint(url, every_n_steps=1, resume="never")
    return None if variant == "none" else SparseCheckpoint(url, window=options.window, resume="never")


class _Clocks(NamedTuple):
    wall: float
    thread: float
    process: float


class _Turns(Callback):
    """Measures the last steps of every turn. Goes before the checkpoint callback in the list."""

    def __init__(
        self, options: FitOptions, checkpoint: DenseCheckpoint | SparseCheckpoint | None, hand_over: HandOver[Turn]
    ) -> None:
        self._warm_up, self._steps, self._period = options.warm_up, options.steps, options.settle + options.steps
        self._checkpoint, self._hand_over = checkpoint, hand_over
        self._before: Report | None = None
        self._clocks: list[_Clocks] = []

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: object) -> None:
        step = trainer.global_step - self._warm_up
        within = step % self._period
        if step < 0 or within > self._steps:
            return
        if pl_module.device.type == "cuda" and within in (0, self._steps):
            torch.cuda.synchronize()  # the host runs ahead of the device, by a step or more
        if within == 0:
            self._before, self._clocks = self._report(), []  # takes a while, so before the first clock is read
        self._clocks.append(_Clocks(time.perf_counter(), time.thread_time(), time.process_time()))
        if within == self._steps:
            report = self._report()
            if self._checkpoint is not None:
                self._checkpoint.wait_committed()
            self._hand_over(Turn(_costs(self._clocks, self._before, report), report))

    def _report(self) -> Report | None:
        return self._checkpoint.report if self._checkpoint is not None else None


def _costs(clocks: Sequence[_Clocks], before: Report | None, after: Report | None) -> StepCosts:
    first, last, num_steps = clocks[0], clocks[-1], len(clocks) - 1
    return StepCosts(
        mean_seconds=(last.wall - first.wall) / num_steps,
        median_seconds=statistics.median(end.wall - start.wall for start, end in pairwise(clocks)),
        thread_seconds=(last.thread - first.thread) / num_steps,
        process_seconds=(last.process - first.process) / num_steps,
        **_gained(before, after, num_steps),
    )


def _gained(before: Report | None, after: Report | None, num_steps: int) -> dict[str, Any]:
    """Fields of `StepCosts` that two reports tell."""
    if before is None or after is None:
        nothing = ("device_stall_seconds", "overhead_seconds", "generations_complete", "generations_committed")
        return {"stall_seconds": {}, **dict.fromkeys(nothing, 0)}
    on_device = sum(after.device_stall_seconds.values()) - sum(before.device_stall_seconds.values())
    waited = {cause: seconds - before.stall_seconds.get(cause, 0.0) for cause, seconds in after.stall_seconds.items()}
    return {
        "stall_seconds": {cause: seconds / num_steps for cause, seconds in waited.items() if seconds > 0},
        "device_stall_seconds": on_device / num_steps,
        "overhead_seconds": (after.overhead_seconds - before.overhead_seconds) / num_steps,
        "generations_complete": after.generations_complete - before.generations_complete,
        "generations_committed": after.generations_committed - before.generations_committed,
    }
