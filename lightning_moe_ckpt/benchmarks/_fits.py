"""A fit with or without checkpoints that is measured turn by turn.

A step is the time from one `on_train_batch_end` to the next, so that everything between counts, whichever hook or
thread it is spent in. Before the fit pauses between two turns, what is complete is stored, so that it leaves the
machine to others; each turn therefore begins with steps that are not measured, which fill the pipeline again.
"""

from __future__ import annotations

import logging
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lightning_moe_ckpt.benchmarks._benchmark import Accelerator
from lightning_moe_ckpt.benchmarks._model import BenchModel, ModelSize, random_tokens
from lightning_moe_ckpt.benchmarks._turns import HandOver
from lightning_moe_ckpt.callbacks import DenseCheckpoint, ExpertLoadMonitor, SparseCheckpoint
from lightning_moe_ckpt.session import Report

Variant = Literal["none", "sparse", "monitored", "dense"]
"""`monitored` is `sparse` beside an `ExpertLoadMonitor` with a row every ten steps."""
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
    """Steps before the first that is measured, at least one."""
    settle: int
    """Steps of every later turn before those that are measured, at least one."""
    steps: int
    """Steps of a turn that are measured, at least one."""
    turns: int
    accelerator: Accelerator = "cpu"

    @property
    def total_steps(self) -> int:
        """Of the whole fit."""
        return self.warm_up + self.turns * self.steps + (self.turns - 1) * self.settle


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCosts:
    """One turn, in the steps measured."""

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """What one turn of a fit showed."""

    costs: StepCosts
    num_params: int
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
    beside = [ExpertLoadMonitor(every_n_steps=10)] if variant == "monitored" else []
    checkpoint = _checkpoint(variant, url, options)
    own = [] if checkpoint is None else [checkpoint]
    torch.manual_seed(0)
    model = BenchModel(options.size)
    num_params = sum(parameter.numel() for parameter in model.parameters())
    turns = _Turns(
        options, checkpoint, lambda costs, report: hand_over(Turn(costs=costs, num_params=num_params, report=report))
    )
    with one_thread(), quiet_lightning():
        trainer = Trainer(
            accelerator=options.accelerator,
            devices=1,
            precision=options.precision,
            callbacks=[turns, *beside, *own],
            max_steps=options.total_steps,
            gradient_clip_val=1.0,
            logger=False,
            enable_checkpointing=checkpoint is not None,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        # One batch more than it takes, so that no epoch ends.
        trainer.fit(model, random_tokens(options.size, options.total_steps + 1))


@dataclass(frozen=True, slots=True)
class _Clocks:
    wall: float
    thread: float
    process: float

    @classmethod
    def read(cls) -> _Clocks:
        return cls(time.perf_counter(), time.thread_time(), time.process_time())


class _Turns(Callback):
    """Measures the last steps of every turn. Goes before the checkpoint callback in the list."""

    def __init__(
        self,
        options: FitOptions,
        checkpoint: CheckpointCallback | None,
        hand_over: Callable[[StepCosts, Report | None], None],
    ) -> None:
        self._warm_up, self._steps, self._period = options.warm_up, options.steps, options.settle + options.steps
        self._checkpoint, self._hand_over = checkpoint, hand_over
        self._before: Report | None = None
        self._clocks: list[_Clocks] = []

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step - self._warm_up
        within = step % self._period
        if step < 0 or within > self._steps:
            return
        if pl_module.device.type == "cuda" and within in (0, self._steps):
            torch.cuda.synchronize()  # the host runs ahead of the device, by a step or more
        if within == 0:
            self._before, self._clocks = self._report(), []  # takes a while, so before the first clock is read
        self._clocks.append(_Clocks.read())
        if within == self._steps:
            self._end_turn()

    def _end_turn(self) -> None:
        report = self._report()
        if self._checkpoint is not None:
            self._checkpoint.wait_committed()
        self._hand_over(_costs(self._clocks, self._before, report), report)

    def _report(self) -> Report | None:
        return self._checkpoint.report if self._checkpoint is not None else None


def _costs(clocks: Sequence[_Clocks], before: Report | None, after: Report | None) -> StepCosts:
    first, last, num_steps = clocks[0], clocks[-1], len(clocks) - 1
    stalls, on_device, overhead, complete, committed = _gained(before, after, num_steps)
    return StepCosts(
        mean_seconds=(last.wall - first.wall) / num_steps,
        median_seconds=statistics.median(end.wall - start.wall for start, end in pairwise(clocks)),
        thread_seconds=(last.thread - first.thread) / num_steps,
        process_seconds=(last.process - first.process) / num_steps,
        stall_seconds=stalls,
        device_stall_seconds=on_device,
        overhead_seconds=overhead,
        generations_complete=complete,
        generations_committed=committed,
    )


def _gained(
    before: Report | None, after: Report | None, num_steps: int
) -> tuple[dict[str, float], float, float, int, int]:
    """Stall per step by cause, the device's, time in hooks per step, generations complete and committed between two reports."""
    if before is None or after is None:
        return {}, 0.0, 0.0, 0, 0
    on_device = sum(after.device_stall_seconds.values()) - sum(before.device_stall_seconds.values())
    waited = {cause: seconds - before.stall_seconds.get(cause, 0.0) for cause, seconds in after.stall_seconds.items()}
    return (
        {cause: seconds / num_steps for cause, seconds in waited.items() if seconds > 0},
        on_device / num_steps,
        (after.overhead_seconds - before.overhead_seconds) / num_steps,
        after.generations_complete - before.generations_complete,
        after.generations_committed - before.generations_committed,
    )


def _checkpoint(variant: Variant, url: str, options: FitOptions) -> CheckpointCallback | None:
    if variant == "dense":
        return DenseCheckpoint(url, every_n_steps=1, resume="never")
    if variant in ("sparse", "monitored"):
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
    """Lines about devices, and advice on loaders and on other checkpoints, would bury the table."""
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=r".*does not have many workers.*")
            warnings.filterwarnings("ignore", message=r".*assuming the intent is to (save|load) in a single process.*")
            warnings.filterwarnings("ignore", message=r".*your dataloader is not resumable.*")
            warnings.filterwarnings("ignore", message=r".*isinstance\(treespec, LeafSpec\).*")
            yield
    finally:
        logger.setLevel(level)
