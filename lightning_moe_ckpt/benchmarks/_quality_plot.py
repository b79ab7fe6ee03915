"""Validation loss over steps and its difference to the fault-free run: median and range over seeds, with faults."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lightning_moe_ckpt.benchmarks._quality_life import Loss
from lightning_moe_ckpt.benchmarks._quality_runs import QualityFigure

_PANELS: Mapping[Loss, str] = {"node": "faults take the memory of the node", "process": "memory survives"}
_STYLES = {
    "none": ("0.7", "-"),
    "control": ("0.4", ":"),
    "sparse": ("black", "--"),
    "partial": ("tab:orange", "-"),
    "dynamic": ("tab:blue", "-"),
    "selective": ("tab:green", "-"),
    "ablation": ("tab:red", "-"),
}
"""Color and line; with `CapacityBoost` the line is dashed."""
_LIMIT = 3.0
"""Of the axis of differences, in margins."""
_LABELS = (
    "validation loss, bits per byte",
    "difference to the fault-free run of the same seed, %; triangles: right after a recovery",
)


def draw(figures: Sequence[QualityFigure], path: Path) -> None:
    """Write the picture.

    Args:
        figures: the fault-free one and the control among them.
        path: of a file; its ending says the format.

    Raises:
        ModuleNotFoundError: there is no matplotlib.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    columns = [loss for loss in _PANELS if any(figure.loss == loss for figure in figures)]
    size = (8 * len(columns), 10)
    picture, rows = plt.subplots(2, len(columns), figsize=size, sharex=True, sharey="row", squeeze=False)
    for column, loss in enumerate(columns):
        shown = [figure for figure in figures if figure.loss in ("nothing", loss)]
        rows[0][column].set_title(_PANELS[loss])
        rows[1][column].set_xlabel("optimizer step (dotted: faults; each seed has steps of its own)")
        _draw_losses(rows[0][column], shown)
        _draw_differences(rows[1][column], shown)
        for step in {step for figure in shown for run in figure.runs for step in run.killed_at}:
            rows[0][column].axvline(step, color="0.7", linestyle=":", linewidth=0.8)
            rows[1][column].axvline(step, color="0.7", linestyle=":", linewidth=0.8)
    for row, label in zip(rows, _LABELS, strict=True):
        row[0].set_ylabel(label)
    picture.savefig(path, dpi=110, bbox_inches="tight")
    plt.close(picture)


def _draw_losses(axes: Any, shown: Sequence[QualityFigure]) -> None:
    for figure in shown:
        curves = [dict(run.curve) for run in figure.runs]
        _band(axes, figure, {step: [curve[step] for curve in curves] for step in curves[0]})
    # What is learned in the first steps would leave no room for the rest.
    late = [loss for figure in shown for run in figure.runs for _, loss in run.curve[len(run.curve) // 4 :]]
    axes.set_ylim(0.99 * min(late), 1.01 * max(late))
    axes.legend()


def _draw_differences(axes: Any, shown: Sequence[QualityFigure]) -> None:
    clean = {run.seed: dict([*run.curve, *run.resumed]) for run in shown[0].runs}
    margin = 100 * max(figure.margin for figure in shown)
    for figure in shown[1:]:
        pairs = [(dict(run.curve), clean[run.seed]) for run in figure.runs]
        _band(
            axes, figure, {step: [100 * (own[step] / there[step] - 1) for own, there in pairs] for step in pairs[0][0]}
        )
        for run in figure.runs:
            steps = sorted(clean[run.seed])
            for step, loss in run.resumed:  # between validations of the fault-free run a straight line
                there = float(np.interp(step, steps, [clean[run.seed][each] for each in steps]))
                axes.plot(step, 100 * (loss / there - 1), "^", color=_STYLES[figure.system][0], markersize=5)
    axes.axhline(0, color="0.7", linewidth=0.8)
    axes.axhline(margin, color="black", linewidth=0.8, label=f"margin of the median at the end, {margin:.2f} %")
    axes.set_ylim(-_LIMIT * margin, 2 * _LIMIT * margin)
    axes.legend(loc="lower right")


def _band(axes: Any, figure: QualityFigure, points: Mapping[int, Sequence[float]]) -> None:
    """Median and range."""
    color, line = _STYLES[figure.system]
    style = "--" if figure.boosted else line
    medians = [statistics.median(values) for values in points.values()]
    axes.plot([*points], medians, style, color=color, linewidth=1.5, label=figure.name)
    axes.fill_between(
        [*points], *zip(*((min(v), max(v)) for v in points.values()), strict=True), color=color, alpha=0.12
    )
