"""How fast a window is planned and how short it is, packed by bytes beside the paper's Algorithm 1.

The operators are those of a large model: experts in some order of popularity, and to every 64 of them one dense block
as large as eight, captured last.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rich.table import Table
from typing_extensions import override

from lightning_moe_ckpt.benchmarks._benchmark import Benchmark, Progress, milliseconds, positive, table_of
from lightning_moe_ckpt.policies import PlanItem, WindowPlan, plan_window

Planner = Literal["packed", "algorithm1"]
PLANNERS: tuple[Planner, ...] = ("packed", "algorithm1")

FULL_NBYTES, COMPUTE_NBYTES = 12, 2
"""Per parameter: fp32 weights with two moments, and 16-bit weights."""
BUDGETS = (2.5, 3.0, 4.0, 6.0)
"""Bytes per parameter of the model that one step can hide."""
_EXPERT_NUMEL, _DENSE_NUMEL = 1_000_000, 8_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannerFigure:
    """One planner at one budget."""

    num_operators: int
    budget: float
    """Bytes per parameter of the model."""
    planner: Planner
    window: int
    """Slots, W."""
    largest_slot: float
    """Bytes of the largest slot, relative to the budget: what it leaves unused, or above 1 makes training wait for."""
    seconds: float
    """To plan, median over runs."""


class PlannerBench(Benchmark[PlannerFigure]):
    """See the module."""

    name = "planner"
    summary = "seconds and window length of packed plans and of the paper's Algorithm 1"

    @override
    def add_options(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--operators", type=positive, default=15_000, help="to plan (default: %(default)s)")
        parser.add_argument("--runs", type=positive, default=15, help="of every planner (default: %(default)s)")

    @override
    def measure(self, options: argparse.Namespace, progress: Progress) -> list[PlannerFigure]:
        items = operators(options.operators)
        figures = []
        for done, budget in enumerate(BUDGETS):
            progress(f"planning at {budget} bytes per parameter", done, len(BUDGETS))
            figures += _compare(items, budget, options.runs)
        return figures

    @override
    def table(self, figures: Sequence[PlannerFigure]) -> Table:
        title = (
            f"Planning {figures[0].num_operators} operators, "
            f"{FULL_NBYTES} bytes per parameter full and {COMPUTE_NBYTES} compute, medians"
        )
        columns = ["bytes per parameter", "planner", "W", "largest slot of budget", "time"]
        return table_of(title, columns, [_row(figure) for figure in figures])


def operators(num_operators: int) -> list[PlanItem]:
    """See the module."""
    popularity = random.Random(0)
    items = []
    for index in range(num_operators):
        is_dense = index % 65 == 64
        numel = _DENSE_NUMEL if is_dense else _EXPERT_NUMEL
        order = 2.0 if is_dense else popularity.random()
        items.append(PlanItem(f"operator {index}", FULL_NBYTES * numel, COMPUTE_NBYTES * numel, order))
    return items


def _compare(items: Sequence[PlanItem], budget: float, runs: int) -> list[PlannerFigure]:
    """Both planners, taking turns."""
    nbytes = int(budget * sum(item.full_nbytes for item in items) / FULL_NBYTES)
    seconds: dict[Planner, list[float]] = {planner: [] for planner in PLANNERS}
    plans: dict[Planner, WindowPlan] = {}
    for _ in range(runs):
        for planner in PLANNERS:
            started = time.perf_counter()
            plans[planner] = plan_window(items, budget_nbytes=nbytes, planner=planner, max_window=None)
            seconds[planner].append(time.perf_counter() - started)
    return [
        PlannerFigure(
            num_operators=len(items),
            budget=budget,
            planner=planner,
            window=plans[planner].window,
            largest_slot=max(plans[planner].slot_nbytes) / nbytes,
            seconds=statistics.median(seconds[planner]),
        )
        for planner in PLANNERS
    ]


def _row(figure: PlannerFigure) -> list[str]:
    cells = [str(figure.budget), figure.planner, str(figure.window)]
    return [*cells, f"{figure.largest_slot:.3f}", milliseconds(figure.seconds)]
