"""What checkpoints cost in training speed: no checkpoints, dense ones at every step, sparse ones without and with a monitor.

Four fits of the same model take turns, in another order in each round. Ratios are taken within a round, where the
variants met the same machine, and their median is reported. The first turn of a fit has a warm-up in which generation
0 is written, the window planned, and the ring filled for the first time.

A round's mean step is what throughput is; its median step leaves out those that waited longest. CPU seconds of the
training thread and of the process are reported beside: other load on the machine changes them little, but they do not
see waiting.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import SimpleNamespace
from typing import get_args

from rich.table import Table
from typing_extensions import override

from lightning_moe_ckpt.benchmarks._benchmark import (
    Benchmark,
    Progress,
    accelerator_for,
    medians,
    megabytes,
    milliseconds,
    rounds_of,
    table_of,
)
from lightning_moe_ckpt.benchmarks._fits import bench_folders
from lightning_moe_ckpt.benchmarks._model import ModelSize
from lightning_moe_ckpt.benchmarks._overhead_fit import FitOptions, StepCosts, Turn, Variant, train
from lightning_moe_ckpt.benchmarks._turns import HandOver, TurnTaker

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
    """Least and most of the rounds."""
    by_median_step: float
    """As `throughput`, from median instead of mean steps."""
    window: int
    """Steps per generation; 0 without checkpoints."""
    nbytes_per_step: float
    """Mean, 0 without checkpoints."""
    dense_nbytes: int
    """Bytes of a snapshot of everything, 0 without checkpoints."""
    rounds: list[StepCosts]

    @property
    def stall(self) -> float:
        """Seconds per step, all causes."""
        return sum(self.stall_seconds.values())


class OverheadBench(Benchmark[OverheadFigure]):
    """See the module."""

    name = "overhead"

    @override
    def measure(self, options: SimpleNamespace, progress: Progress) -> list[OverheadFigure]:
        turns: dict[Variant, list[Turn]] = {variant: [] for variant in VARIANTS}
        wanted = _fit_options(options)
        # Fits end in mid-step, as by an exception: what is newest stays in memory for a next start that never comes.
        with bench_folders() as (folder, memory), ExitStack() as stack:
            base = folder.as_uri() if options.url is None else options.url.rstrip("/")
            takers = {v: stack.enter_context(_taker(v, f"{base}/{v}", str(memory), wanted)) for v in VARIANTS}
            for index, (_, variant) in enumerate(rounds_of(options.rounds, VARIANTS)):
                progress(f"training, checkpoints: {variant}", index, options.rounds * len(VARIANTS))
                turns[variant].append(takers[variant].take())
        return [_figure(variant, wanted, turns) for variant in VARIANTS]

    @override
    def table(self, figures: Sequence[OverheadFigure]) -> Table:
        first = figures[0]
        title = (
            f"Training {first.num_params / 1e6:.1f}M parameters in {first.precision}, "
            f"medians of {len(first.rounds)} interleaved rounds"
        )
        causes = "\n".join(_causes(figure) for figure in figures if figure.stall_seconds)
        return table_of(title, _COLUMNS, [_row(figure) for figure in figures], causes)


def _fit_options(options: SimpleNamespace) -> FitOptions:
    return FitOptions(
        size=ModelSize(
            num_blocks=options.blocks,
            model_dim=options.dim,
            num_experts=options.experts,
            expert_dim=2 * options.dim,
            batch_size=options.batch_size,
        ),
        precision=options.precision,
        window=options.window,
        warm_up=options.warm_up,
        settle=options.settle,
        steps=options.steps,
        turns=options.rounds,
        accelerator=accelerator_for(options.accelerator),
    )


def _taker(variant: Variant, url: str, memory: str, options: FitOptions) -> TurnTaker[Turn]:
    def work(hand_over: HandOver[Turn]) -> None:
        os.environ["MOE_CKPT_SHARED_MEMORY"] = memory
        train(variant, url, options, hand_over)

    return TurnTaker(work)


def _figure(variant: Variant, options: FitOptions, turns: Mapping[Variant, Sequence[Turn]]) -> OverheadFigure:
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
        num_params=options.size.num_params(),
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
