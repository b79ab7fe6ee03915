"""What checkpoints cost in training speed: no checkpoints, dense ones at every step, sparse ones.

Every round trains the same model once with each variant, in another order each time, for a few steps that are not
counted (generation 0, planning, the first windows) and some that are. Ratios are taken within a round, where the
variants met the same machine, and their median over the rounds is reported.

A step is the time from one `on_train_batch_end` to the next. A round's mean is what throughput is; its median leaves
out the steps that waited longest. CPU seconds of the training thread are reported beside: what else runs on the
machine does not change them much, but they do not see waiting.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from rich.table import Table
from typing_extensions import override

from lightning_moe_ckpt.benchmarks._benchmark import Benchmark, Progress, megabytes, milliseconds, positive, table_of
from lightning_moe_ckpt.benchmarks._model import BenchModel, ModelSize, random_tokens
from lightning_moe_ckpt.callbacks import DenseCheckpoint, SparseCheckpoint
from lightning_moe_ckpt.session import Report

Variant = Literal["none", "sparse", "dense"]
VARIANTS: tuple[Variant, ...] = get_args(Variant)


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """One variant in one round."""

    mean_seconds: float
    """Of a step."""
    median_seconds: float
    """Of a step."""
    cpu_seconds: float
    """CPU time of the training thread in a step, mean."""
    stall_seconds: dict[str, float]
    """Time training waited in a step, mean, by cause."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OverheadFigure:
    """One variant over all rounds; medians."""

    variant: Variant
    precision: str
    num_params: int
    steps_per_second: float
    throughput: float
    """Steps per second relative to `none` in the same round."""
    throughput_range: tuple[float, float]
    """Least and most of the rounds."""
    median_step: float
    """Median step of `none` relative to the median step of this variant, in the same round."""
    cpu_seconds: float
    """CPU time of the training thread in a step."""
    stall_seconds: dict[str, float]
    """Time training waited in a step, by cause."""
    window: int
    """Steps per generation; 0 without checkpoints."""
    nbytes_per_step: float
    dense_nbytes: int
    """Bytes of a snapshot of everything."""
    generations_complete: int
    """Per fit, steps that are not counted included."""
    generations_committed: int
    rounds: list[Round]


@dataclass
class _Fit:
    """What one fit left behind."""

    round: Round
    num_params: int
    report: Report | None


@dataclass(kw_only=True)
class _Setting:
    """One variant in one round, about to be trained."""

    variant: Variant
    url: str
    options: argparse.Namespace
    size: ModelSize = field(init=False)

    def __post_init__(self) -> None:
        wanted = self.options
        self.size = ModelSize(
            num_blocks=wanted.blocks,
            model_dim=wanted.dim,
            num_experts=wanted.experts,
            expert_dim=2 * wanted.dim,
            batch_size=wanted.batch_size,
        )

    def checkpoint(self) -> DenseCheckpoint | SparseCheckpoint | None:
        # `never`: a run that an earlier bench left at the same URL is not resumed.
        if self.variant == "dense":
            return DenseCheckpoint(self.url, every_n_steps=1, resume="never")
        if self.variant == "sparse":
            return SparseCheckpoint(self.url, window=self.options.window, resume="never")
        return None


class OverheadBench(Benchmark[OverheadFigure]):
    """See the module."""

    name = "overhead"
    summary = "training speed with sparse checkpoints, dense ones at every step, and none"

    @override
    def add_options(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--rounds", type=positive, default=5, help="fits of every variant (default: %(default)s)")
        parser.add_argument(
            "--steps", type=positive, default=32, help="steps of a fit that count (default: %(default)s)"
        )
        parser.add_argument("--warm-up", type=positive, default=8, help="steps before them (default: %(default)s)")
        parser.add_argument("--window", type=_window, default=8, help="of sparse checkpoints, or auto (default: 8)")
        parser.add_argument("--precision", default="bf16-mixed", help="of the Trainer (default: %(default)s)")
        parser.add_argument("--blocks", type=positive, default=4, help="transformer blocks (default: %(default)s)")
        parser.add_argument("--dim", type=positive, default=128, help="model dimension (default: %(default)s)")
        parser.add_argument("--experts", type=positive, default=16, help="experts per block (default: %(default)s)")
        parser.add_argument("--batch-size", type=positive, default=16, help="crops of 64 tokens (default: %(default)s)")
        parser.add_argument("--url", help="where checkpoints go, and stay (default: a temporary folder)")

    @override
    def measure(self, options: argparse.Namespace, progress: Progress) -> list[OverheadFigure]:
        fits: dict[Variant, list[_Fit]] = {variant: [] for variant in VARIANTS}
        with _one_thread(), _quiet_lightning(), _folder(options.url) as base:
            for index, (turn, variant) in enumerate(_turns(options.rounds)):
                progress(f"training with checkpoints: {variant}", index, options.rounds * len(VARIANTS))
                url = f"{base}/{variant}{turn}"
                fits[variant].append(_train(_Setting(variant=variant, url=url, options=options)))
        return [_figure(variant, options.precision, fits) for variant in VARIANTS]

    @override
    def table(self, figures: Sequence[OverheadFigure]) -> Table:
        none = figures[VARIANTS.index("none")]
        columns = [
            "checkpoints",
            "steps/s",
            "against none",
            "range",
            "by median step",
            "CPU per step",
            "stall per step",
        ]
        columns += ["bytes per step", "of dense", "W", "committed"]
        table = table_of(
            f"Training {none.num_params / 1e6:.1f}M parameters in {none.precision}, "
            f"medians of {len(none.rounds)} interleaved rounds",
            columns,
            [_row(figure) for figure in figures],
        )
        table.caption = "\n".join(_causes(figure) for figure in figures if figure.stall_seconds)
        return table


class _StepTimes(Callback):
    """Measures the steps after `warm_up`, from one batch end to the next."""

    def __init__(self, warm_up: int, steps: int, checkpoint: DenseCheckpoint | SparseCheckpoint | None) -> None:
        self._first, self._last, self._checkpoint = warm_up, warm_up + steps, checkpoint
        self._stalls: list[dict[str, float]] = []
        self._walls: list[float] = []
        self._cpu: list[float] = []
        self.report: Report | None = None

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self._last:
            self._tick()
        if trainer.global_step in (self._first, self._last):
            self._read_stalls()  # takes a while, so outside what is measured
        if self._first <= trainer.global_step < self._last:
            self._tick()

    def round(self) -> Round:
        """The figures of the steps measured."""
        steps = [end - start for start, end in zip(self._walls, self._walls[1:], strict=False)]
        before, after = self._stalls
        return Round(
            mean_seconds=statistics.mean(steps),
            median_seconds=statistics.median(steps),
            cpu_seconds=(self._cpu[-1] - self._cpu[0]) / len(steps),
            stall_seconds={cause: (after[cause] - before.get(cause, 0.0)) / len(steps) for cause in after},
        )

    def _tick(self) -> None:
        self._walls.append(time.perf_counter())
        self._cpu.append(time.thread_time())

    def _read_stalls(self) -> None:
        if self._checkpoint is not None:
            self.report = self._checkpoint.report
        self._stalls.append(dict(self.report.stall_seconds) if self.report is not None else {})


def _train(setting: _Setting) -> _Fit:
    """Train from scratch; the same model and data whatever the variant."""
    options = setting.options
    checkpoint = setting.checkpoint()
    times = _StepTimes(options.warm_up, options.steps, checkpoint)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = BenchModel(setting.size)
        num_steps = options.warm_up + options.steps
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
        # More than it takes, so that no epoch ends.
        trainer.fit(model, random_tokens(setting.size, num_steps + 1))
    num_params = sum(parameter.numel() for parameter in model.parameters())
    return _Fit(round=times.round(), num_params=num_params, report=times.report)


def _turns(num_rounds: int) -> Iterator[tuple[int, Variant]]:
    """Every variant in every round, each beginning a round equally often: what one leaves to disk hits the next."""
    for turn in range(num_rounds):
        start = turn % len(VARIANTS)
        yield from ((turn, variant) for variant in VARIANTS[start:] + VARIANTS[:start])


def _figure(variant: Variant, precision: str, fits: dict[Variant, list[_Fit]]) -> OverheadFigure:
    rounds = [fit.round for fit in fits[variant]]
    pairs = [(none.round, own) for none, own in zip(fits["none"], rounds, strict=True)]
    throughput = [none.mean_seconds / own.mean_seconds for none, own in pairs]
    report = fits[variant][-1].report
    return OverheadFigure(
        variant=variant,
        precision=precision,
        num_params=fits[variant][-1].num_params,
        steps_per_second=1 / _median(rounds, lambda each: each.mean_seconds),
        throughput=statistics.median(throughput),
        throughput_range=(min(throughput), max(throughput)),
        median_step=statistics.median(none.median_seconds / own.median_seconds for none, own in pairs),
        cpu_seconds=_median(rounds, lambda each: each.cpu_seconds),
        stall_seconds={cause: _stall(rounds, cause) for cause in rounds[-1].stall_seconds},
        window=report.window if report is not None else 0,
        nbytes_per_step=report.nbytes_per_step if report is not None else 0.0,
        dense_nbytes=report.dense_nbytes if report is not None else 0,
        generations_complete=report.generations_complete if report is not None else 0,
        generations_committed=report.generations_committed if report is not None else 0,
        rounds=rounds,
    )


def _median(rounds: Sequence[Round], of: Callable[[Round], float]) -> float:
    return statistics.median(of(each) for each in rounds)


def _stall(rounds: Sequence[Round], cause: str) -> float:
    return _median(rounds, lambda each: each.stall_seconds.get(cause, 0.0))


def _row(figure: OverheadFigure) -> list[str]:
    low, high = figure.throughput_range
    row = [figure.variant, f"{figure.steps_per_second:.2f}", f"{figure.throughput:.3f}", f"{low:.2f}-{high:.2f}"]
    row += [f"{figure.median_step:.3f}", milliseconds(figure.cpu_seconds)]
    if not figure.dense_nbytes:
        return row
    taken = [megabytes(figure.nbytes_per_step), f"{figure.nbytes_per_step / figure.dense_nbytes:.0%}"]
    generations = f"{figure.generations_committed} of {figure.generations_complete}"
    return [*row, milliseconds(sum(figure.stall_seconds.values())), *taken, str(figure.window), generations]


def _causes(figure: OverheadFigure) -> str:
    causes = sorted(figure.stall_seconds.items(), key=lambda item: -item[1])
    return f"stall, {figure.variant}: " + ", ".join(f"{cause} {milliseconds(seconds)}" for cause, seconds in causes)


def _window(text: str) -> int | Literal["auto"]:
    return "auto" if text == "auto" else positive(text)


@contextmanager
def _folder(url: str | None) -> Iterator[str]:
    """The URL under which every fit has its own."""
    if url is not None:
        yield url.rstrip("/")
        return
    with tempfile.TemporaryDirectory(prefix="moe-ckpt-bench-") as folder:
        yield Path(folder).as_uri()


@contextmanager
def _one_thread() -> Iterator[None]:
    """Torch with one thread: copies and digests run beside training, as they do where training has a device."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def _quiet_lightning() -> Iterator[None]:
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
