"""Measure what checkpoints cost in training speed: no checkpoints, dense ones at every step, sparse ones without and with a monitor.

Four fits of the same model take turns, in another order in each round. Ratios are taken within a round, where the
variants met the same machine, and their median is reported. The first turn of a fit has a warm-up in which generation
0 is written, the window planned, and the ring filled for the first time. Before a fit pauses between two turns, what is
complete is stored, so that it leaves the machine to others; each later turn therefore begins with steps that are not
measured, which fill the pipeline again.

A step is the time from one `on_train_batch_end` to the next, so that everything between counts, whichever hook or
thread it is spent in. A round's mean step is what throughput is; its median step leaves out those that waited longest.
CPU seconds of the training thread and of the process are reported beside: other load on the machine changes them
little, but they do not see waiting.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple, get_args

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from rich.table import Table
from typing_extensions import override

from lightning_moe_ckpt.benchmarks._benchmark import (
    Progress,
    accelerator_for,
    medians,
    megabytes,
    milliseconds,
    rounds_of,
    table_of,
)
from lightning_moe_ckpt.benchmarks._fits import (
    BenchModel,
    HandOver,
    ModelSize,
    TurnTaker,
    bench_folders,
    bench_trainer,
    one_thread,
    own_memory,
    quiet_lightning,
    random_tokens,
)
from lightning_moe_ckpt.callbacks import DenseCheckpoint, ExpertLoadMonitor, SparseCheckpoint
from lightning_moe_ckpt.session import Report

Variant = Literal["none", "sparse", "monitored", "dense"]
"""`monitored` is `sparse` beside an `ExpertLoadMonitor` with a row every ten steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCosts:
    """Costs of a step, over the steps that are measured."""

    mean_seconds: float
    median_seconds: float
    thread_seconds: float
    """CPU time of the training thread, mean."""
    process_seconds: float
    """CPU time of all threads, mean."""
    stall_seconds: dict[str, float]
    """Time the training thread waited, mean, by cause; empty without checkpoints."""
    device_stall_seconds: float
    """Time training's stream stood still on a CUDA device, mean."""
    overhead_seconds: float
    """Time of the training thread in hooks of checkpoints, mean, waits included."""
    generations_complete: int
    generations_committed: int
    """Storage is given the newest complete generation whenever it has finished one."""


class Turn(NamedTuple):
    """Measurements of one turn of a fit."""

    costs: StepCosts
    report: Report | None
    """Report of the checkpoint callback after the last step measured."""


def train(variant: Variant, url: str, memory: Path, options: SimpleNamespace, hand_over: HandOver[Turn]) -> None:
    """Train from scratch; the same model and data whatever the variant.

    Args:
        variant: which checkpoints to take; `dense` ones at every step.
        url: where they go; a new run is started beside an earlier one there.
        memory: folder on a tmpfs that is the shared memory of the process.
        options: of the command line.
        hand_over: called at the end of every turn.
    """
    own_memory(memory, lost=False)
    checkpoint = _checkpoint(variant, url, options)
    measured = _Turns(options, checkpoint, hand_over)
    beside = [ExpertLoadMonitor(every_n_steps=10)] if variant == "monitored" else []
    total_steps = options.warm_up + options.rounds * (options.settle + options.steps) - options.settle
    torch.manual_seed(0)
    size, accelerator = _size(options), accelerator_for(options.accelerator)
    model = BenchModel(size)
    with one_thread(), quiet_lightning():
        trainer = bench_trainer(
            accelerator=accelerator,
            strategy="auto",
            precision=options.precision,
            callbacks=[measured, *beside, *([checkpoint] if checkpoint is not None else [])],
            max_steps=total_steps,
            enable_checkpointing=checkpoint is not None,
        )
        # One batch more than it takes, so that no epoch ends.
        trainer.fit(model, random_tokens(size, total_steps + 1))


def _checkpoint(variant: Variant, url: str, options: SimpleNamespace) -> DenseCheckpoint | SparseCheckpoint | None:
    if variant == "dense":
        return DenseCheckpoint(url, every_n_steps=1, resume="never")
    return None if variant == "none" else SparseCheckpoint(url, window=options.window, resume="never")


class _Clocks(NamedTuple):
    wall: float
    thread: float
    process: float


class _Turns(Callback):
    """Measure the last steps of every turn. It goes before the checkpoint callback in the list."""

    def __init__(
        self, options: SimpleNamespace, checkpoint: DenseCheckpoint | SparseCheckpoint | None, hand_over: HandOver[Turn]
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
    """Return the fields of `StepCosts` that follow from two reports."""
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


VARIANTS: tuple[Variant, ...] = get_args(Variant)
_COLUMNS = (
    *("checkpoints", "steps/s", "against none", "range", "by median step", "CPU of training", "of process"),
    *("in hooks per step", "stall per step", "of the device", "bytes per step (of dense)", "W", "committed"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class OverheadFigure(StepCosts):
    """One variant: medians over the rounds, sums of generations."""

    variant: Variant
    precision: str
    num_params: int
    steps_per_second: float
    throughput: float
    """Steps per second relative to `none` in the same round."""
    throughput_range: tuple[float, float]
    """Least and greatest of the rounds."""
    by_median_step: float
    """The same from median instead of mean steps."""
    window: int
    """Steps per generation; 0 without checkpoints."""
    nbytes_per_step: float
    """Mean, 0 without checkpoints."""
    dense_nbytes: int
    """Bytes of a snapshot of everything, 0 without checkpoints."""
    rounds: list[StepCosts]

    @property
    def stall(self) -> float:
        """Seconds per step, over all causes."""
        return sum(self.stall_seconds.values())


def measure(options: SimpleNamespace, progress: Progress) -> list[OverheadFigure]:
    """Run the benchmark."""
    turns: dict[Variant, list[Turn]] = {variant: [] for variant in VARIANTS}
    # Fits end in mid-step, as by an exception: what is newest stays in memory for a next start that never comes.
    with bench_folders() as (folder, memory), ExitStack() as stack:
        base = folder.as_uri() if options.url is None else options.url.rstrip("/")
        takers = {
            each: stack.enter_context(TurnTaker[Turn](partial(train, each, f"{base}/{each}", memory, options)))
            for each in VARIANTS
        }
        for index, (_, variant) in enumerate(rounds_of(options.rounds, VARIANTS)):
            progress(f"training, checkpoints: {variant}", index, options.rounds * len(VARIANTS))
            turns[variant].append(takers[variant].take())
    return [_figure(variant, options, turns) for variant in VARIANTS]


def table(figures: Sequence[OverheadFigure]) -> Table:
    """Return the figures for people."""
    first = figures[0]
    title = (
        f"Training {first.num_params / 1e6:.1f}M parameters in {first.precision}, "
        f"medians of {len(first.rounds)} interleaved rounds"
    )
    causes = "\n".join(_causes(figure) for figure in figures if figure.stall_seconds)
    return table_of(title, _COLUMNS, [_row(figure) for figure in figures], causes)


def _size(options: SimpleNamespace) -> ModelSize:
    dim, experts = options.dim, options.experts
    return ModelSize(
        num_blocks=options.blocks, model_dim=dim, num_experts=experts, expert_dim=2 * dim, batch_size=options.batch_size
    )


def _figure(variant: Variant, options: SimpleNamespace, turns: Mapping[Variant, Sequence[Turn]]) -> OverheadFigure:
    rounds = [turn.costs for turn in turns[variant]]
    pairs = [(none.costs, own) for none, own in zip(turns["none"], rounds, strict=True)]
    throughput = [none.mean_seconds / own.mean_seconds for none, own in pairs]
    causes = sorted({cause for each in rounds for cause in each.stall_seconds})
    report = turns[variant][-1].report
    own = medians(
        rounds,
        *("mean_seconds", "median_seconds", "thread_seconds", "process_seconds"),
        *("device_stall_seconds", "overhead_seconds"),
    )
    return OverheadFigure(
        **own,
        variant=variant,
        precision=options.precision,
        num_params=_size(options).num_params(),
        steps_per_second=1 / own["mean_seconds"],
        throughput=statistics.median(throughput),
        throughput_range=(min(throughput), max(throughput)),
        by_median_step=statistics.median(none.median_seconds / own.median_seconds for none, own in pairs),
        stall_seconds={c: statistics.median(each.stall_seconds.get(c, 0.0) for each in rounds) for c in causes},
        window=report.window if report is not None else 0,
        nbytes_per_step=report.nbytes_per_step if report is not None else 0.0,
        dense_nbytes=report.dense_nbytes if report is not None else 0,
        generations_complete=sum(each.generations_complete for each in rounds),
        generations_committed=sum(each.generations_committed for each in rounds),
        rounds=rounds,
    )


def _row(figure: OverheadFigure) -> list[str]:
    low, high = figure.throughput_range
    row = [figure.variant, f"{figure.steps_per_second:.2f}", f"{figure.throughput:.3f}", f"{low:.2f}-{high:.2f}"]
    row += [f"{figure.by_median_step:.3f}", milliseconds(figure.thread_seconds), milliseconds(figure.process_seconds)]
    if figure.variant == "none":
        return row
    in_hooks = (figure.overhead_seconds, figure.stall, figure.device_stall_seconds)
    taken = f"{megabytes(figure.nbytes_per_step)} ({figure.nbytes_per_step / figure.dense_nbytes:.0%})"
    generations = f"{figure.generations_committed} of {figure.generations_complete}"
    return [*row, *map(milliseconds, in_hooks), taken, str(figure.window), generations]


def _causes(figure: OverheadFigure) -> str:
    causes = sorted(figure.stall_seconds.items(), key=lambda item: -item[1])
    return f"stall, {figure.variant}: " + ", ".join(f"{cause} {milliseconds(seconds)}" for cause, seconds in causes)
