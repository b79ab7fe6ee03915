"""Measure how the cost of checkpoints grows with the number of operators.

A model of four layers of tiny experts is trained with a window of eight steps, from 256 experts in all up to those of the
largest models that the paper plans for: the more experts, the smaller, so that all models have the same bytes in them, and
what grows is the price of an operator. Two fits take turns, without checkpoints and with sparse ones in memory only: storage
rests once it has generation 0. Then the second one is killed by SIGKILL, and a new process resumes from memory.

Of each figure a line (cost = fixed + slope x operators) and an exponent (cost grows as operators ** exponent) are fitted. Time
in hooks is CPU time of the training thread, which other load changes little; the added time of a step sees everything. A last
table has the CPU time of a step by place, less that of the fit without checkpoints: the training thread, the threads of tiers
with the native ones that they wait for (digests, copies), and what encodes journals.

Source: MoEvement (2026), Sec. 5.4, which has 15,000 operators; `Measured` is judged by goals of our own.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from rich.console import Group, RenderableType
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from benchmarks.breakdown import ENDED, HookMeter, ThreadTimes
from benchmarks.costs import Goal
from lightning_moe_ckpt.benchmarks._benchmark import (
    Progress,
    accelerator_for,
    milliseconds,
    table_of,
)
from lightning_moe_ckpt.benchmarks._fits import (
    HandOver,
    StorageGate,
    TurnTaker,
    bench_folders,
    bench_trainer,
    one_thread,
    own_memory,
    patient_storage,
    quiet_lightning,
)
from lightning_moe_ckpt.benchmarks._overhead import shared_arguments
from lightning_moe_ckpt.callbacks import SparseCheckpoint
from lightning_moe_ckpt.errors import ConfigurationError
from lightning_moe_ckpt.moe import MoELayer
from lightning_moe_ckpt.storage import wrapping_backends

WINDOW, _LAYERS, _DIM, _HIDDEN, _VOCABULARY, _TOKENS, _BATCH = 8, 4, 16, 32, 512, 17, 2
_SETTLE = WINDOW
"""Steps of a turn before those that count: the pause is over, and a window begins."""


class ManyExperts(LightningModule):
    """Predict the next token with layers of tiny experts and nothing between them.

    Args:
        num_experts: over all layers, a multiple of four.
        hidden: width of an expert.
    """

    def __init__(self, num_experts: int, hidden: int = _HIDDEN) -> None:
        super().__init__()
        self.embed = nn.Embedding(_VOCABULARY, _DIM)
        self.layers = nn.ModuleList(MoELayer(_DIM, hidden, num_experts // _LAYERS) for _ in range(_LAYERS))
        self.head = nn.Linear(_DIM, _VOCABULARY)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Return cross-entropy."""
        (tokens_BT,) = batch
        x_BTD = self.embed(tokens_BT[:, :-1])
        for layer in self.layers:
            x_BTD = x_BTD + layer(x_BTD)
        return nn.functional.cross_entropy(self.head(x_BTD).flatten(0, 1), tokens_BT[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class ScaleTurn(NamedTuple):
    """Times of one turn, in seconds."""

    first_batch: float
    """From `Trainer.fit` to the first batch."""
    restore: float
    """Part of it that restoring took, as the report says; 0 for a fresh start."""
    steps: list[float]
    """Of the steps that count; none if the turn ended at the first batch."""
    hooks: float
    """CPU time of the training thread in hooks, mean of these steps."""
    threads: dict[str, float]
    """CPU time of other threads by name, mean of these steps."""
    window: float
    """From the first batch to the end of two windows, in the first turn with steps."""


@dataclass(frozen=True, kw_only=True)
class _ScaleFit:
    """A fit in turns. A fresh one ends its first turn at the first batch, one that resumes has no other."""

    num_experts: int
    url: str
    memory: Path
    options: SimpleNamespace
    checkpoints: bool
    resumes: bool = False

    def __call__(self, hand_over: HandOver[ScaleTurn]) -> None:
        own_memory(self.memory, lost=False)
        gate = StorageGate()
        checkpoint = None
        if self.checkpoints:
            resume = {"resume": "must" if self.resumes else "never"}
            checkpoint = SparseCheckpoint(self.url, window=WINDOW, **(shared_arguments(memory_only=True) | resume))
        turns = _ScaleTurns(self, checkpoint, gate, hand_over)
        torch.manual_seed(0)
        model = ManyExperts(self.num_experts, _HIDDEN * max(sizes_of(self.options.sizes)) // self.num_experts)
        # Two windows before the first turn that counts.
        total_steps = 2 * WINDOW + self.options.scale_rounds * (_SETTLE + self.options.scale_steps)
        tokens = torch.randint(_VOCABULARY, (_BATCH * (total_steps + 1), _TOKENS))
        with (
            one_thread(),
            quiet_lightning(),
            patient_storage(),
            wrapping_backends(gate.backend) if self.checkpoints else nullcontext(),
        ):
            trainer = bench_trainer(
                accelerator=accelerator_for(self.options.accelerator),
                strategy="auto",
                callbacks=[turns, *([checkpoint] if checkpoint is not None else [])],
                max_steps=total_steps,
                enable_checkpointing=self.checkpoints,
            )
            turns.began = time.perf_counter()
            trainer.fit(model, DataLoader(TensorDataset(tokens), batch_size=_BATCH))


class _ScaleTurns(Callback):
    """Measure the time to the first batch, then turns of steps. It goes before the checkpoint callback in the list."""

    def __init__(
        self, fit: _ScaleFit, checkpoint: SparseCheckpoint | None, gate: StorageGate, hand_over: HandOver[ScaleTurn]
    ) -> None:
        self.began = 0.0
        """When `fit` was called."""
        self._steps, self._period = fit.options.scale_steps, _SETTLE + fit.options.scale_steps
        self._checkpoint, self._gate, self._hand_over = checkpoint, gate, hand_over
        self._meter = HookMeter(None)
        self._clocks, self._hooks, self._first = list[float](), 0.0, True
        self._threads, self._window = ThreadTimes.now(), 0.0

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *args: object) -> None:
        if not self._first:
            return
        self._first, seconds = False, time.perf_counter() - self.began
        restore = self._checkpoint.report.restore_seconds if self._checkpoint is not None else 0.0
        self._hand_over(ScaleTurn(seconds, restore, [], 0.0, {}, 0.0))
        self._window = time.perf_counter()

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: object) -> None:
        if trainer.global_step == 1 and self._checkpoint is not None:
            self._checkpoint.wait_committed()  # of generation 0
            self._gate.close()
        if trainer.global_step == 2 * WINDOW:
            self._window = time.perf_counter() - self._window
        step = trainer.global_step - 2 * WINDOW - _SETTLE
        within = step % self._period
        if step < 0 or within > self._steps:
            return
        if within == 0:
            self._clocks, self._hooks, self._threads = [], self._hook_seconds(), ThreadTimes.now()
        self._clocks.append(time.perf_counter())
        if within == self._steps:
            steps = [end - start for start, end in pairwise(self._clocks)]
            hooks = (self._hook_seconds() - self._hooks) / len(steps)
            threads = ThreadTimes.now().since(self._threads, len(steps))
            self._hand_over(ScaleTurn(0.0, 0.0, steps, hooks, threads, self._window))

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._gate.open()

    def _hook_seconds(self) -> float:
        return sum(cost.cpu for cost in self._meter.costs().values())


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaleFigure:
    """Costs with one number of experts, in seconds."""

    num_experts: int
    num_operators: int
    """Experts, and per layer a router; embedding and head are one."""
    slot_operators: float
    """Operators that a step of the window takes in full, mean."""
    step_seconds: float
    """Mean step without checkpoints, median over the rounds."""
    added_seconds: float
    """Mean step less that without checkpoints in the same round, median over the rounds."""
    hook_seconds: float
    """CPU time of the training thread in hooks per step, median over the rounds."""
    thread_seconds: dict[str, float]
    """CPU time of other threads per step beyond that of a fit without checkpoints, median over the rounds."""
    start_seconds: float
    """Time until two windows are done beyond that of a fit without checkpoints: until the first batch, and to plan."""
    first_batch_seconds: float
    """From `Trainer.fit` to the first batch."""
    bare_first_batch_seconds: float
    """The same without checkpoints."""
    restore_seconds: float
    """From the start of `fit` in a new process to the first slot loaded, from memory, after a SIGKILL."""
    resumed_first_batch_seconds: float
    """From `Trainer.fit` in that process to its first batch."""


class Growth(NamedTuple):
    """How a figure grows, fitted by least squares."""

    fixed: float
    """Seconds, of the line."""
    slope: float
    """Seconds per operator, of the line."""
    exponent: float
    """Of a power law, fitted to logarithms."""

    @classmethod
    def of(cls, operators: Sequence[float], seconds: Sequence[float]) -> Growth:
        """Fit two or more points; an exponent needs seconds above zero and is NaN without."""
        slope, fixed = statistics.linear_regression(operators, seconds)
        if min(seconds) <= 0:
            return cls(fixed, slope, math.nan)
        exponent, _ = statistics.linear_regression([*map(math.log, operators)], [*map(math.log, seconds)])
        return cls(fixed, slope, exponent)


class Measured(NamedTuple):
    """A figure with its goal, which is a line: seconds, and seconds per operator."""

    what: str
    of: Callable[[ScaleFigure], float]
    operators: Callable[[ScaleFigure], float]
    fixed: float
    slope: float

    def goal(self, figure: ScaleFigure) -> Goal:
        """Return the goal for a number of operators."""
        return Goal(self.what, self.what, self.fixed + self.slope * self.operators(figure), "s", at_least=False)


MEASURED = (
    Measured("added per step", lambda f: f.added_seconds, lambda f: f.slot_operators, 1e-4, 2e-7),
    Measured("hooks per step, CPU", lambda f: f.hook_seconds, lambda f: f.slot_operators, 1e-4, 2e-7),
    Measured("start", lambda f: f.start_seconds, lambda f: f.num_operators, 3.0, 1e-4),
    Measured("restore", lambda f: f.restore_seconds, lambda f: f.num_operators, 3.0, 1e-4),
)
"""Figures by operators: per step of those of a slot, else of all."""
PRICE = Goal("price", "of an operator and step, in any place", 1.0, "us", at_least=False)
_PLACES = {
    "tiers: marker": ("moe-ckpt-host", "moe-ckpt-storage"),
    "copy engine": ("native python", "moe-ckpt-copy"),
    "digests": ("moe-ckpt-digest", ENDED),
    "journal": ("moe-ckpt-seal",),
}
"""Threads by place; those that digest end with their work."""


def sizes_of(text: str) -> list[int]:
    """Return numbers of experts in rising order.

    Raises:
        ConfigurationError: one is no multiple of four, or there are fewer than two.
    """
    sizes = sorted({int(size) if size.isdigit() else 0 for size in text.split(",")})
    if len(sizes) < 2 or any(size < 2 * _LAYERS or size % _LAYERS for size in sizes):
        raise ConfigurationError(
            f"`--sizes {text}` must be two or more numbers of experts, such as 256,1024, each a multiple of {_LAYERS}."
        )
    return sizes


def measure(options: SimpleNamespace, progress: Progress) -> list[ScaleFigure]:
    """Run the benchmark."""
    sizes = sizes_of(options.sizes)
    found = []
    for done, num_experts in enumerate(sizes):
        progress(f"training {num_experts} experts", done, len(sizes))
        with bench_folders() as (folder, memory):
            found.append(_measure(num_experts, folder.as_uri(), memory, options))
    return found


def _measure(num_experts: int, url: str, memory: Path, options: SimpleNamespace) -> ScaleFigure:
    def fit(*, checkpoints: bool, resumes: bool = False) -> TurnTaker[ScaleTurn]:
        return TurnTaker(
            _ScaleFit(
                num_experts=num_experts, url=url, memory=memory, options=options, checkpoints=checkpoints, resumes=resumes
            )
        )  # fmt: skip

    with fit(checkpoints=False) as bare, fit(checkpoints=True) as sparse:
        first_bare, first = bare.take(), sparse.take()
        rounds = [(bare.take(), sparse.take()) for _ in range(options.scale_rounds)]
        sparse.kill()
    with fit(checkpoints=True, resumes=True) as resumed:
        again = resumed.take()
        resumed.kill()
    means = [(statistics.fmean(none.steps), statistics.fmean(own.steps)) for none, own in rounds]
    num_operators = num_experts + _LAYERS + 1
    names = {name for _, own in rounds for name in own.threads}
    threads = {
        name: statistics.median(own.threads.get(name, 0.0) - none.threads.get(name, 0.0) for none, own in rounds)
        for name in names
    }
    return ScaleFigure(
        num_experts=num_experts,
        num_operators=num_operators,
        slot_operators=num_operators / WINDOW,
        step_seconds=statistics.median(none for none, _ in means),
        added_seconds=statistics.median(own - none for none, own in means),
        hook_seconds=statistics.median(own.hooks for _, own in rounds),
        thread_seconds=threads,
        start_seconds=first.first_batch + rounds[0][1].window - first_bare.first_batch - rounds[0][0].window,
        first_batch_seconds=first.first_batch,
        bare_first_batch_seconds=first_bare.first_batch,
        restore_seconds=again.restore,
        resumed_first_batch_seconds=again.first_batch,
    )


def table(figures: Sequence[ScaleFigure]) -> RenderableType:
    """Return the figures for people."""
    title = f"Sparse checkpoints in memory, window {WINDOW}, of {_LAYERS} layers of tiny experts"
    columns = ("experts", "step", "added", "hooks, CPU", "start", "first batch", "restore", "first batch")
    costs = table_of(
        title, columns, [_row(figure) for figure in figures], "the last two: a new process after a SIGKILL"
    )
    largest = figures[-1]
    growth = ("", "fixed", "us/operator", "exponent", f"{largest.num_experts:,} experts", "goal", "outcome")
    note = "per step, operators are those that a step of the window takes; else all"
    grown = table_of("What it grows by", growth, [_grown(each, figures) for each in MEASURED], note)
    header = ("place", *(f"{figure.num_experts:,}" for figure in figures), "us/operator", "goal", "outcome")
    places = table_of("CPU time of a step by place", header, _places(figures), "operators are all those of the model")
    return Group(costs, grown, places)


def _places(figures: Sequence[ScaleFigure]) -> list[list[str]]:
    rows = []
    for place in ("training thread", *_PLACES):
        seconds = [
            sum(figure.thread_seconds.get(name, 0.0) for name in _PLACES[place])
            if place in _PLACES
            else figure.hook_seconds
            for figure in figures
        ]
        slope = Growth.of([figure.num_operators for figure in figures], seconds).slope * 1e6
        rows.append([place, *map(milliseconds, seconds), f"{slope:.3f}", str(PRICE), PRICE.outcome(slope)])
    return rows


def _row(figure: ScaleFigure) -> list[str]:
    per_step = (figure.step_seconds, figure.added_seconds, figure.hook_seconds)
    starts = (figure.start_seconds, figure.first_batch_seconds)
    resumed = (figure.restore_seconds, figure.resumed_first_batch_seconds)
    return [f"{figure.num_experts:,}", *map(milliseconds, per_step), *(f"{each:.2f} s" for each in (*starts, *resumed))]


def _grown(measured: Measured, figures: Sequence[ScaleFigure]) -> list[str]:
    growth = Growth.of([measured.operators(figure) for figure in figures], [measured.of(figure) for figure in figures])
    goal, seconds = measured.goal(figures[-1]), measured.of(figures[-1])
    fitted = [milliseconds(growth.fixed), f"{growth.slope * 1e6:.3g}", f"{growth.exponent:.2f}"]
    return [measured.what, *fitted, milliseconds(seconds), milliseconds(goal.wanted), goal.outcome(seconds)]
