"""Measure the cost of `MoEStrategy` itself in training speed, without checkpoints, beside Lightning's `DDPStrategy`.

Fits take turns as in `_overhead`, in the order DDP, ours, ours, DDP, and each round yields one ratio. `ddp again` is
another DDP: its distance from 1 is the speed that each process has by chance. Where experts are spread over all ranks, DDP
leaves them out of its reduction, as their libraries advise.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import SimpleNamespace

from rich.console import RenderableType

from lightning_moe_ckpt.benchmarks._benchmark import Progress, milliseconds, table_of
from lightning_moe_ckpt.benchmarks._fits import bench_folders
from lightning_moe_ckpt.benchmarks._overhead import FitRanks, StepCosts, Variant, medians_by_kind, size_of

_REDUCTIONS = {"ordered": "ordered", "allreduce": "allreduce", "ddp again": "ddp"}
_COLUMNS = ("ranks", "strategy", "DDP step", "times", "range", "CPU times")
_NOTE = """\
times: step over that of DDP, CPU: of all threads, medians of rounds"""


@dataclass(frozen=True, kw_only=True, slots=True)
class StrategyFigure:
    """A strategy beside DDP: medians over the rounds."""

    strategy: str
    num_ranks: int
    expert_parallel: int
    num_params: int
    ddp_seconds: float
    """Mean step under DDP."""
    ratio: float
    """Mean step relative to DDP's in the same round."""
    ratio_range: tuple[float, float]
    """Least and greatest of the rounds."""
    cpu_ratio: float
    """The first rank's CPU time in all threads, relative to DDP's."""
    metered: dict[str, dict[str, float]]
    """Further costs per step, by kind and name, of the option `meter`; empty without."""


def measure(options: SimpleNamespace, progress: Progress) -> list[StrategyFigure]:
    """Run the benchmark."""
    found, common = list[StrategyFigure](), vars(options)
    for ranks in map(int, options.strategy_ranks.split(",")):
        spread = ranks if options.spread_experts else 1
        found += _beside_ddp(SimpleNamespace(**{**common, "ranks": ranks, "expert_parallel": spread}), progress)
    return found


def _beside_ddp(options: SimpleNamespace, progress: Progress) -> list[StrategyFigure]:
    rounds: dict[str, list[list[StepCosts]]] = {name: [] for name in _REDUCTIONS}
    total = options.rounds * len(rounds)
    with bench_folders() as (_, memory), ExitStack() as stack:

        def ranks(strategy: str, num_turns: int) -> FitRanks:
            return stack.enter_context(FitRanks(Variant("none", strategy=strategy), "", memory, options, num_turns))

        ddp, turns = ranks("ddp", 2 * total), 2 * options.rounds
        fits = {name: ranks(strategy, turns) for name, strategy in _REDUCTIONS.items()}
        for done in range(total):
            name = list(fits)[done % len(fits)]
            progress(f"training on {options.ranks} ranks, {name}", done, total)
            rounds[name].append([each.take().costs for each in (ddp, fits[name], fits[name], ddp)])
    return [_figure(name, options, each) for name, each in rounds.items()]


def _figure(name: str, options: SimpleNamespace, rounds: Sequence[Sequence[StepCosts]]) -> StrategyFigure:
    def over_ddp(which: str) -> list[float]:
        costs = [[getattr(turn, which) for turn in each] for each in rounds]
        return [(own + again) / (first + last) for first, own, again, last in costs]

    ratios = over_ddp("mean_seconds")
    return StrategyFigure(
        strategy=name,
        num_ranks=options.ranks,
        expert_parallel=options.expert_parallel,
        num_params=size_of(options).num_params(),
        ddp_seconds=statistics.median(turn.mean_seconds for first, *_, last in rounds for turn in (first, last)),
        ratio=statistics.median(ratios),
        ratio_range=(min(ratios), max(ratios)),
        cpu_ratio=statistics.median(over_ddp("process_seconds")),
        metered=medians_by_kind([turn for _, *own, _ in rounds for turn in own]),
    )


def table(figures: Sequence[StrategyFigure]) -> RenderableType:
    """Return the figures for people."""
    title = f"Training {figures[0].num_params / 1e6:.1f}M parameters under MoEStrategy and DDPStrategy"
    return table_of(title, _COLUMNS, [_row(figure) for figure in figures], _NOTE)


def _row(figure: StrategyFigure) -> list[str]:
    low, high = figure.ratio_range
    row = [f"{figure.num_ranks}", figure.strategy, milliseconds(figure.ddp_seconds), f"{figure.ratio:.3f}"]
    return [*row, f"{low:.3f} to {high:.3f}", f"{figure.cpu_ratio:.3f}"]
