"""Validation loss over steps, median and range over seeds, with faults and what they did at once."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_moe_ckpt.benchmarks._quality_cases import Loss
from lightning_moe_ckpt.benchmarks._quality_runs import QualityRun
from lightning_moe_ckpt.benchmarks._quality_verdict import QualityFigure

_PANELS: tuple[tuple[Loss, str], ...] = (
    ("node", "faults take the memory of the node"),
    ("process", "memory survives"),
)
_LIMIT = 3.0
"""Of the axis of differences, in margins."""


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
    for column, (loss, title) in enumerate(columns):
        shown = [
            (each, name, f"C{place}")
            for place, (each, name) in enumerate(zip(figures, names, strict=True))
            if each.loss in ("nothing", loss)
        ]
        rows[0][column].set_title(title)
        _draw_losses(rows[0][column], shown)
        _draw_differences(rows[1][column], shown)
    rows[0][0].set_ylabel("validation loss, bits per byte")
    rows[1][0].set_ylabel("difference to the fault-free run of the same seed, %")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _draw_losses(axes: Any, shown: Sequence[tuple[QualityFigure, str, str]]) -> None:
    for figure, name, color in shown:
        curves = [dict(run.curve) for run in figure.runs]
        _band(axes, [(step, [curve[step] for curve in curves]) for step in curves[0]], color, name)
    _mark_faults(axes, shown)
    # What is learned in the first steps would leave no room for the rest.
    ends = [loss for figure, *_ in shown for run in figure.runs for _, loss in run.curve[len(run.curve) // 6 :]]
    axes.set_ylim(0.99 * min(ends), 1.01 * max(ends))
    axes.legend()


def _draw_differences(axes: Any, shown: Sequence[tuple[QualityFigure, str, str]]) -> None:
    clean = {run.seed: dict(run.curve) for figure, *_ in shown if figure.system == "none" for run in figure.runs}
    margin = 100 * max(figure.margin for figure, *_ in shown)
    for figure, _, color in shown:
        if figure.system == "none":
            continue
        curves = [(dict(run.curve), clean[run.seed]) for run in figure.runs]
        steps = list(curves[0][0])
        _band(axes, [(step, [100 * (own[step] / other[step] - 1) for own, other in curves]) for step in steps], color)
        for run in figure.runs:
            _mark_recoveries(axes, run, clean[run.seed], color)
    _mark_faults(axes, shown)
    axes.axhline(0, color="0.6", linewidth=0.8)
    axes.axhline(margin, color="black", linestyle="--", linewidth=1, label=f"margin at the end, {margin:.2f} %")
    axes.plot([], [], "^", color="0.4", markersize=5, label="right after a recovery, each seed; some are off the scale")
    axes.set_ylim(-_LIMIT * margin, 2 * _LIMIT * margin)
    axes.set_xlabel("optimizer step (dotted: faults, each seed at steps of its own)")
    axes.legend(loc="upper right")


def _band(axes: Any, points: Sequence[tuple[int, list[float]]], color: str, label: str | None = None) -> None:
    steps = [step for step, _ in points]
    axes.plot(steps, [statistics.median(values) for _, values in points], color=color, linewidth=1.5, label=label)
    axes.fill_between(
        steps, [min(v) for _, v in points], [max(v) for _, v in points], color=color, alpha=0.12, linewidth=0
    )


def _mark_recoveries(axes: Any, run: QualityRun, clean: dict[int, float], color: str) -> None:
    """Against the fault-free loss of the nearest step that has one."""
    for step, loss in run.resumed:
        nearest = min(clean, key=lambda known: abs(known - step))
        axes.plot(step, 100 * (loss / clean[nearest] - 1), "^", color=color, markersize=5)


def _mark_faults(axes: Any, shown: Sequence[tuple[QualityFigure, str, str]]) -> None:
    steps = {step for figure, *_ in shown for run in figure.runs for step in run.killed_at}
    for step in steps:
        axes.axvline(step, color="0.7", linestyle=":", linewidth=0.8)
