"""One short fit with or without checkpoints, and what its steps cost.

A step is the time from one `on_train_batch_end` to the next, so that everything between counts, whichever hook or
thread it is spent in.
"""

from __future__ import annotations

import logging
import statistics
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lightning_moe_ckpt.benchmarks._model import BenchModel, ModelSize, random_tokens
from lightning_moe_ckpt.callbacks import DenseCheckpoint, SparseCheckpoint
from lightning_moe_ckpt.session import Report

Variant = Literal["none", "sparse", "dense"]
CheckpointCallback = DenseCheckpoint | SparseCheckpoint


@dataclass(frozen=True, kw_only=True, slots=True)
class FitOptions:
    """What every variant has in common."""

    size: ModelSize
    precision: Any
    """Of the Trainer."""
    window: int | Literal["auto"]
    """Of sparse checkpoints."""
    warm_up: int
    """Steps before those that are measured, at least one."""
    steps: int
    """Steps that are measured, at least one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCosts:
    """One fit, in the steps measured."""

    mean_seconds: float
    """Of a step."""
    median_seconds: float
    """Of a step."""
    thread_seconds: float
    """CPU time of the training thread in a step, mean."""
    process_seconds: float
    """CPU time of all threads in a step, mean."""
    stall_seconds: dict[str, float]
    """Time training waited in a step, mean, by cause; empty without checkpoints."""
    generations_complete: int
    generations_committed: int
    """Storage is given the newest complete generation whenever it has finished one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """What one fit left behind."""

    costs: StepCosts
    num_params: int
    report: Report | None
    """Of the checkpoint callback at the last step measured."""


def train(variant: Variant, url: str, options: FitOptions) -> Fit:
    """Train from scratch; the same model and data whatever the variant.

    Args:
        variant: which checkpoints to take; `dense` ones at every step.
        url: where they go; an earlier run there is left alone.
        options: see `FitOptions`.
    """
    checkpoint = _checkpoint(variant, url, options)
    times = _StepTimes(options.warm_up, options.steps, checkpoint)
    num_steps = options.warm_up + options.steps
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = BenchModel(options.size)
        trainer = Trainer(
            accelerator="cpu",
            devices=1,
            precision=options.precision,
            callbacks=[times] if checkpoint is None else [times, checkpoint],
            max_steps=num_steps,
            gradient_clip_val=1.0,
            logger=False,
            enable_checkpointing=checkpoint is not None,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        # One batch more than it takes, so that no epoch ends.
        trainer.fit(model, random_tokens(options.size, num_steps + 1))
    num_params = sum(parameter.numel() for parameter in model.parameters())
    return Fit(costs=times.costs(), num_params=num_params, report=times.report)


class _StepTimes(Callback):
    """Measures the steps after `warm_up`. Goes before the checkpoint callback in the list."""

    def __init__(self, warm_up: int, steps: int, checkpoint: CheckpointCallback | None) -> None:
        self._first, self._last, self._checkpoint = warm_up, warm_up + steps, checkpoint
        self._reports: list[Report] = []
        self._walls: list[float] = []
        self._thread: list[float] = []
        self._process: list[float] = []

    @property
    def report(self) -> Report | None:
        return self._reports[-1] if self._reports else None

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # A report takes a while to make, so both are made outside what is measured.
        if trainer.global_step == self._last:
            self._tick()
        if self._checkpoint is not None and trainer.global_step in (self._first, self._last):
            self._reports.append(self._checkpoint.report)
        if self._first <= trainer.global_step < self._last:
            self._tick()

    def costs(self) -> StepCosts:
        steps = [end - start for start, end in pairwise(self._walls)]
        stalls, complete, committed = self._gained(len(steps))
        return StepCosts(
            mean_seconds=statistics.mean(steps),
            median_seconds=statistics.median(steps),
            thread_seconds=(self._thread[-1] - self._thread[0]) / len(steps),
            process_seconds=(self._process[-1] - self._process[0]) / len(steps),
            stall_seconds=stalls,
            generations_complete=complete,
            generations_committed=committed,
        )

    def _gained(self, num_steps: int) -> tuple[dict[str, float], int, int]:
        """Stall per step by cause, generations complete and committed, from the first report to the last."""
        if not self._reports:
            return {}, 0, 0
        first, last = self._reports
        waited = {cause: seconds - first.stall_seconds.get(cause, 0.0) for cause, seconds in last.stall_seconds.items()}
        return (
            {cause: seconds / num_steps for cause, seconds in waited.items() if seconds > 0},
            last.generations_complete - first.generations_complete,
            last.generations_committed - first.generations_committed,
        )

    def _tick(self) -> None:
        self._walls.append(time.perf_counter())
        self._thread.append(time.thread_time())
        self._process.append(time.process_time())


def _checkpoint(variant: Variant, url: str, options: FitOptions) -> CheckpointCallback | None:
    if variant == "dense":
        return DenseCheckpoint(url, every_n_steps=1, resume="never")
    if variant == "sparse":
        return SparseCheckpoint(url, window=options.window, resume="never")
    return None


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch with one thread: copies and digests run beside training, as they do where training has a device."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def quiet_lightning() -> Iterator[None]:
    """A line per fit about devices, and advice on loaders, would bury the table."""
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=r".*does not have many workers.*")
            warnings.filterwarnings("ignore", message=r".*isinstance\(treespec, LeafSpec\).*")
            yield
    finally:
        logger.setLevel(level)
