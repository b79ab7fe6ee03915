"""Repeat what the papers measured, at a size that two cores do, and hold it against their claims.

`FIGURES` has of each figure what the paper says, in numbers that its text has (what only a picture shows has none), how it is
measured here, and claims on what was measured. A figure has the same shape if all of its claims hold. Plans are made at the papers' own size, where bytes are all that is asked for; all else is run.
"""

from __future__ import annotations

import statistics
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from benchmarks.papers_figure import Figure, number
from benchmarks.papers_moevement import MOEVEMENTS
from benchmarks.papers_others import OTHERS
from benchmarks.papers_page import cells, update
from benchmarks.papers_plans import Way
from lightning_moe_ckpt.benchmarks._benchmark import Machine, Progress, table_of
from lightning_moe_ckpt.errors import ConfigurationError

FIGURES = {figure.key: figure for figure in (*MOEVEMENTS, *OTHERS)}


# -- measured and judged

_WIDTH = 78
_FULL_SEEDS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class PaperFigure:
    """One figure, or, where nothing was measured, what it would be."""

    key: str
    source: str
    title: str
    takes_seconds: int
    """About, on two cores."""
    paper: dict[str, float] = field(default_factory=dict)
    """Numbers that the paper has, by row."""
    ours: dict[str, float] = field(default_factory=dict)
    """By row; the median over seeds. None where it is only listed."""
    units: dict[str, str] = field(default_factory=dict)
    claims: dict[str, bool] = field(default_factory=dict)
    """What was checked, and whether it holds."""
    same_shape: bool | None = None
    """Whether all of that holds."""
    note: str = ""
    seeds: int = 0
    seconds: float = 0.0


def measure(options: SimpleNamespace, progress: Progress) -> list[PaperFigure]:
    """Measure the figures that were asked for, by their keys or how these begin, or only list them; none stands for all that are not long."""
    wanted = options.only or ("",)
    if unknown := [each for each in wanted if not any(key.startswith(each) for key in FIGURES)]:
        raise ConfigurationError(f"`--only {' '.join(unknown)}`: there are {', '.join(FIGURES)}.")
    keys = [key for key in FIGURES if any(key == each if each in FIGURES else key.startswith(each) for each in wanted)]
    if options.list_only:
        return [PaperFigure(**_facts(FIGURES[key])) for key in keys]
    if not options.only:
        keys = [key for key in keys if not FIGURES[key].is_long]
    found = []
    for i, key in enumerate(keys):
        machine = Machine.read()
        found.append(_measured(FIGURES[key], options, progress, i, len(keys)))
        if options.page is not None:
            update(options.page, {key: cells(FIGURES[key], found[-1].ours, found[-1].claims, machine)}, FIGURES)
    return found


def _measured(figure: Figure, options: SimpleNamespace, progress: Progress, done: int, total: int) -> PaperFigure:
    began, seeds = time.perf_counter(), range(1, _FULL_SEEDS + 1) if options.full else range(1, 2)
    runs = []
    for seed in seeds if figure.is_drawn else seeds[:1]:
        progress(f"{figure.key}, seed {seed}", done, total)
        runs.append(figure.measure(Way(seed=seed, full=options.full, accelerator=options.accelerator)))
    return judged(figure, runs, seconds=time.perf_counter() - began)


def judged(figure: Figure, runs: Sequence[dict[str, float]], *, seconds: float = 0.0) -> PaperFigure:
    """Return the figure of what was measured, with one row or more per seed."""
    ours = {row: statistics.median(run[row] for run in runs) for row in runs[0]}
    claims = {claim.text: claim.holds(ours) for claim in figure.claims}
    return PaperFigure(
        **_facts(figure),
        paper=dict(figure.paper),
        ours=ours,
        units={row: figure.unit_of(row) for row in ours},
        claims=claims,
        same_shape=all(claims.values()),
        note=figure.note,
        seeds=len(runs),
        seconds=seconds,
    )


def _facts(figure: Figure) -> dict[str, Any]:
    return {name: getattr(figure, name) for name in ("key", "source", "title", "takes_seconds")}


# -- for people


def table(figures: Sequence[PaperFigure]) -> RenderableType:
    """Return a table for each figure, and at the end one line for each; or the list."""
    if not any(figure.ours for figure in figures):
        rows = [[each.key, each.title, f"{each.takes_seconds} s"] for each in figures]
        return table_of("python -m benchmarks papers --only KEY", ("figure", "what it is of", "takes"), rows)
    shown: list[RenderableType] = [part for each in figures for part in _shown(each)]
    rows = [[each.key, each.source, _verdict(each), f"{each.seconds:.0f} s"] for each in figures]
    return Group(*shown, table_of("Shapes", ("figure", "source", "shape", "took"), rows))


def _shown(figure: PaperFigure) -> list[RenderableType]:
    rows = []
    for row, ours in figure.ours.items():
        paper, unit = figure.paper.get(row), figure.units[row]
        ratio = "" if not paper else f"{ours / paper:.2f}"
        rows.append([row, "" if paper is None else number(paper, unit), number(ours, unit), ratio])
    only = [[row, number(value, ""), "", ""] for row, value in figure.paper.items() if row not in figure.ours]
    title = f"{figure.source}: {figure.title}"
    lines = [f"{'yes' if holds else 'NO '} {text}" for text, holds in figure.claims.items()]
    lines += [_verdict(figure), f"Note: {figure.note}"]
    text = "\n".join(textwrap.fill(line, _WIDTH, subsequent_indent="    ") for line in lines)
    return [table_of(title, ("", "paper", "ours", "ratio"), rows + only), Text(text + "\n")]


def _verdict(figure: PaperFigure) -> str:
    return "same shape" if figure.same_shape else "OTHER shape"
