"""What grows with the number of ranks, up to ten thousand: the product's own code, in one process, over stubs.

`store` runs commit, deletes, start and restore over a bucket in memory that takes 20 ms for every request (`ranks_store.py`).
Time is simulated: each process waits for its own requests one after another. CPU time is this machine's, and is added.

`agree` lets ranks agree on what to resume from, over a simulated network (`ranks_agree.py`).

Of each figure an exponent is fitted (it grows as ranks ** exponent). N log N has an exponent of about 1.1 between 64 and 10,000.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace

from rich.table import Table

from benchmarks.costs import Goal
from benchmarks.scale import Growth
from lightning_moe_ckpt.benchmarks._benchmark import Progress, table_of
from lightning_moe_ckpt.errors import ConfigurationError

PARTS = ("store", "agree")
STEEPEST = 1.2
"""Exponent that is still taken for N log N."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RanksFigure:
    """A figure of one part with one number of ranks."""

    part: str
    what: str
    num_ranks: int
    value: float
    unit: str
    most: float | None = None
    """Goal at the largest number of ranks; `None` without one."""


def ranks_of(text: str) -> list[int]:
    """Return numbers of ranks in rising order. Raises `ConfigurationError` for others, or fewer than two."""
    sizes = sorted({int(size) if size.isdigit() else 0 for size in text.split(",")})
    if len(sizes) < 2 or sizes[0] < 2:
        raise ConfigurationError(f"`--ranks {text}` must be two or more numbers of ranks, such as 64,256.")
    return sizes


def measure(options: SimpleNamespace, progress: Progress) -> list[RanksFigure]:
    """Run the parts that are named, or all."""
    cases = [(part, size) for part in options.parts or PARTS for size in ranks_of(options.ranks)]
    found: list[RanksFigure] = []
    for done, (part, size) in enumerate(cases):
        progress(f"{part} of {size:,} ranks", done, len(cases))
        found += importlib.import_module(f"benchmarks.ranks_{part}").figures(size)
    return found


def table(figures: Sequence[RanksFigure]) -> Table:
    """Show a line per figure."""
    sizes = sorted({figure.num_ranks for figure in figures})
    rows: dict[tuple[str, str], list[RanksFigure]] = {}
    for figure in figures:
        rows.setdefault((figure.part, figure.what), []).append(figure)
    columns = ("figure", "", *(f"{size:,}" for size in sizes), "exponent", "goal", "outcome")
    note = "seconds are simulated, 20 ms for every request, plus CPU time here"
    return table_of("What grows with the number of ranks", columns, [_row(row) for row in rows.values()], note)


def growth_of(figures: Sequence[RanksFigure]) -> float:
    """Return the exponent; NaN if a value is zero."""
    return Growth.of([figure.num_ranks for figure in figures], [figure.value for figure in figures]).exponent


def _row(figures: Sequence[RanksFigure]) -> list[str]:
    last, exponent = figures[-1], growth_of(figures)
    outcome = "" if last.most is None else Goal(last.what, "", last.most, last.unit, at_least=False).outcome(last.value)
    steep = " too steep" * (exponent > STEEPEST)
    goal = "" if last.most is None else f"{last.most:g}"
    values = [f"{figure.value:,.3g}" if figure.value < 1000 else f"{figure.value:,.0f}" for figure in figures]
    return [last.what, last.unit, *values, f"{exponent:.2f}", goal, outcome + steep]
