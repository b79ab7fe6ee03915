"""Validation loss over steps, median and range over seeds, with faults and what they did at once."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lightning_moe_ckpt.benchmarks._quality_cases import Loss
from lightning_moe_ckpt.benchmarks._quality_runs import QualityRun
from lightning_moe_ckpt.benchmarks._quality_verdict import QualityFigure

_PANELS: tuple[tuple[Loss, str], ...] = (
    ("node", "faults take the memory of the node"),
    ("process", "memory survives"),
)
_LIMIT = 3.0
"""Of the axis of differences, in margins."""


class _Style(NamedTuple):
    color: str
    line: str = "-"
    width: float = 1.5


_STYLES = {
    "none": _Style("0.7", width=5),
    "control": _Style("0.4", ":"),
    "sparse": _Style("black", "--"),
    "partial": _Style("tab:orange"),
    "dynamic": _Style("tab:blue"),
    "selective": _Style("tab:green"),
    "ablation": _Style("tab:red"),
}


class _Shown(NamedTuple):
    figure: QualityFigure
    name: str

    @property
    def style(self) -> _Style:
        style = _STYLES[self.figure.system]
        return style._replace(line="--") if self.figure.boosted else style


def draw(figures: Sequence[QualityFigure], names: Sequence[str], path: Path) -> None:
    """Write the picture.

    Args:
        figures: the fault-free one and the control among them.
        names: of the figures, for the legend.
        path: of a file; its ending says the format.

    Raises:
        ModuleNotFoundError: there is no matplotlib.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    columns = [panel for panel in _PANELS if any(figure.loss == panel[0] for figure in figures)]
    figure, rows = plt.subplots(
        2, len(columns), figsize=(8 * len(columns), 10), sharex=True, sharey="row", squeeze=False, layout="constrained"
    )
    pairs = list(map(_Shown, figures, names))
    for column, (loss, title) in enumerate(columns):
        shown = [each for each in pairs if each.figure.loss in ("nothing", loss)]
        rows[0][column].set_title(title)
        _draw_losses(rows[0][column], shown)
        _draw_differences(rows[1][column], shown)
    rows[0][0].set_ylabel("validation loss, bits per byte")
    rows[1][0].set_ylabel("difference to the fault-free run of the same seed, %")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _draw_losses(axes: Any, shown: Sequence[_Shown]) -> None:
    for each in shown:
        curves = [dict(run.curve) for run in each.figure.runs]
        _band(axes, [(step, [curve[step] for curve in curves]) for step in curves[0]], each.style, each.name)
    _mark_faults(axes, shown)
    # What is learned in the first steps would leave no room for the rest.
    late = [loss for each in shown for run in each.figure.runs for _, loss in run.curve[len(run.curve) // 4 :]]
    axes.set_ylim(0.99 * min(late), 1.01 * max(late))
    axes.legend()


def _draw_differences(axes: Any, shown: Sequence[_Shown]) -> None:
    clean = {run.seed: dict([*run.curve, *run.resumed]) for run in _clean(shown).runs}
    margin = 100 * max(each.figure.margin for each in shown)
    for each in shown:
        if each.figure.system == "none":
            continue
        curves = [(dict(run.curve), clean[run.seed]) for run in each.figure.runs]
        points = [(step, [100 * (own[step] / other[step] - 1) for own, other in curves]) for step in curves[0][0]]
        _band(axes, points, each.style)
        for run in each.figure.runs:
            _mark_recoveries(axes, run, clean[run.seed], each.style.color)
    _mark_faults(axes, shown)
    axes.axhline(0, color="0.7", linewidth=0.8)
    axes.axhline(margin, color="black", linewidth=0.8, label=f"margin of the median at the end, {margin:.2f} %")
    axes.plot(
        [], [], "^", color="0.4", markersize=5, label="right after a recovery, every seed (some are off the scale)"
    )
    axes.set_ylim(-_LIMIT * margin, 2 * _LIMIT * margin)
    axes.set_xlabel("optimizer step (dotted: faults; each seed has steps of its own)")
    axes.legend(loc="lower right")


def _band(axes: Any, points: Sequence[tuple[int, list[float]]], style: _Style, label: str | None = None) -> None:
    """Median and range."""
    steps = [step for step, _ in points]
    medians = [statistics.median(values) for _, values in points]
    axes.plot(steps, medians, style.line, color=style.color, linewidth=style.width, label=label)
    low, high = [min(values) for _, values in points], [max(values) for _, values in points]
    axes.fill_between(steps, low, high, color=style.color, alpha=0.12, linewidth=0)


def _mark_recoveries(axes: Any, run: QualityRun, clean: Mapping[int, float], color: str) -> None:
    """Against what the fault-free run has there; between its validations in a straight line."""
    steps = sorted(clean)
    for step, loss in run.resumed:
        if step >= steps[0]:
            there = float(np.interp(step, steps, [clean[each] for each in steps]))
            axes.plot(step, 100 * (loss / there - 1), "^", color=color, markersize=5)


def _clean(shown: Sequence[_Shown]) -> QualityFigure:
    return next(each.figure for each in shown if each.figure.system == "none")


def _mark_faults(axes: Any, shown: Sequence[_Shown]) -> None:
    for step in {step for each in shown for run in each.figure.runs for step in run.killed_at}:
        axes.axvline(step, color="0.7", linestyle=":", linewidth=0.8)
