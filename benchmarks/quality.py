"""Measure the final validation loss after faults: what policies whose restarts are not exact cost in quality.

The text example at the size of a benchmark, a byte-level GPT with experts on the source of Python's standard library,
is trained several times with each policy and killed at the same steps, by SIGKILL, in real processes. One process
holds all experts: what a recovery does to weights depends on which experts come back how old, not on how many ranks hold
them, and only then is a run the same on any machine, since no rank waits for another. Faults take the memory of the node
too, so that storage is all there is, or leave it. Every fault strikes when what was complete is durable.

Every policy is held against margins, see `_quality_runs`.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from rich.table import Table

from benchmarks.documents import write_document
from benchmarks.quality_fit import CASES, EXACT, QUICK, Loss, Scale
from benchmarks.quality_runs import TOLERANCE, QualityFigure, QualityRun, judge, run_all
from lightning_moe_ckpt.benchmarks._benchmark import Machine, Progress, accelerator_for, table_of

_LOSSES = {"nothing": "", "process": "process", "node": "process, memory"}
_COLUMNS = (
    *("policy", "a fault takes", "loss by seed", "difference", "PLT", "MLT", "K", "tokens lost", "bytes", "boosts"),
    "verdict",
)
_CAPTION = """\
difference: to the fault-free run of the same seed, median and range; PLT, MLT, tokens, bytes: medians
bytes: per step of the last attempt, to memory / to storage, of a dense snapshot; K: experts per layer at the end, by seed
boosts: experts with more capacity, times steps, per run; and how much of what was lost they made up for
verdict: on the median difference, in brackets the margin. Exact policies: equal bits
  lossy ones: {tolerance:.2%}, as MOETION's Table 1 has it up to 3 % of tokens lost (PEC, Fig. 2: 0.01 % below 7.5 %),
  or what a rounding does to fault-free runs, if that is more: here {chaos:.2%}; their seeds are {apart:.2%} apart
routers: normalised HHI {skew:.3f}; {dropped:.1%} of tokens are dropped over capacity"""


def measure(options: SimpleNamespace, progress: Progress) -> list[QualityFigure]:
    """Run the benchmark; its file has at any time what has ended."""
    scale, machine, out = QUICK if options.quality_quick else Scale(), Machine.read(), options.quality_out
    out.mkdir(parents=True, exist_ok=True)

    def write(runs: Sequence[QualityRun]) -> None:
        references = [{run.seed for run in runs if run.system == name} for name in ("none", "control")]
        if known := set.intersection(*references):
            figures = judge([run for run in runs if run.seed in known])
            document = {"machine": machine, "scale": scale, "tolerance": TOLERANCE, "quality": figures}
            write_document(out / "quality.json", document)

    runs = run_all(
        [case for case in CASES if case.loss == "nothing" or case.system in options.quality_policies],
        range(1, options.quality_seeds + 1),
        scale,
        jobs=options.quality_jobs,
        folder=options.quality_folder,
        accelerator=accelerator_for(options.accelerator),
        progress=progress,
        tell=write,
    )
    figures = judge(runs)
    if find_spec("matplotlib") is not None:
        draw(figures, out / "quality.png")
    return figures


def table(figures: Sequence[QualityFigure]) -> Table:
    """Return the figures for people."""
    clean, control = (next(each for each in figures if each.system == name) for name in ("none", "control"))
    faults = max(len(run.killed_at) for figure in figures for run in figure.runs)
    title = (
        f"Final validation loss (bits per byte) after {clean.runs[0].curve[-1][0]} steps and {faults} faults, "
        f"seeds {', '.join(str(run.seed) for run in clean.runs)}"
    )
    finals = [run.final for run in clean.runs]
    caption = _CAPTION.format(
        tolerance=TOLERANCE,
        chaos=max(map(abs, control.difference)),
        apart=max(finals) / min(finals) - 1,
        skew=statistics.mean(run.skew for run in clean.runs),
        dropped=statistics.mean(run.dropped for run in clean.runs),
    )
    return table_of(title, _COLUMNS, [_row(figure) for figure in figures], caption)


def _row(figure: QualityFigure) -> list[str]:
    return [
        *(figure.name, _LOSSES[figure.loss], " ".join(f"{run.final:.4f}" for run in figure.runs)),
        *(_difference(figure), *_tokens(figure), _nbytes(figure), _boosts(figure)),
        "" if figure.verdict == "reference" else f"{figure.verdict} ({figure.margin:.2%})",
    ]


def _difference(figure: QualityFigure) -> str:
    if figure.system == "none":
        return ""
    if figure.system in EXACT and figure.verdict == "pass":
        return "identical bits"
    low, high = min(figure.difference), max(figure.difference)
    return f"{figure.median_difference:+.2%} ({low:+.2%} to {high:+.2%})"


def _median(figure: QualityFigure, value: Callable[[QualityRun], float]) -> float:
    return statistics.median(map(value, figure.runs))


def _tokens(figure: QualityFigure) -> list[str]:
    """Return PLT, MLT, K by seed and tokens lost."""
    if not any(run.processed for run in figure.runs):
        return ["", "", "", ""]
    plt, mlt = _median(figure, lambda run: run.plt), _median(figure, lambda run: run.mlt)
    ks = " ".join(str(run.k) for run in figure.runs if run.k is not None)
    return [f"{plt:.2%}", f"{mlt:.2%}", ks, f"{_median(figure, lambda run: run.lost) / 1e3:.0f}k"]


def _nbytes(figure: QualityFigure) -> str:
    captured, persisted = _median(figure, lambda run: run.captured), _median(figure, lambda run: run.persisted)
    return f"{captured:.0%} / {persisted:.0%}" if captured else ""


def _boosts(figure: QualityFigure) -> str:
    if not figure.boosted:
        return ""
    repaid, lost = (sum(getattr(run, name) for run in figure.runs) for name in ("repaid", "lost"))
    return f"{statistics.mean(run.boosted_steps for run in figure.runs):.0f}, {repaid / max(1, lost):.0%}"


_PANELS: Mapping[Loss, str] = {"node": "faults take the memory of the node", "process": "memory survives"}
_STYLES = {
    "none": ("0.7", "-"),
    "control": ("0.4", ":"),
    "sparse": ("black", "--"),
    "differential": ("black", "-."),
    "bf16": ("tab:purple", "-"),
    "compressed": ("tab:brown", "-"),
    "feedback": ("tab:brown", "-."),
    "partial": ("tab:orange", "-"),
    "dynamic": ("tab:blue", "-"),
    "selective": ("tab:green", "-"),
    "ablation": ("tab:red", "-"),
}
"""Color and line; with `CapacityBoost` the line is dashed."""
_LIMIT = 3.0
"""Limit of the axis of differences, in margins."""
_LABELS = ("validation loss, bits per byte", "difference to the fault-free run of the same seed, %")


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
        for axes, step in product(rows[:, column], {s for each in shown for run in each.runs for s in run.killed_at}):
            axes.axvline(step, color="0.7", linestyle=":", linewidth=0.8)
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
        points = {step: [100 * (own[step] / there[step] - 1) for own, there in pairs] for step in pairs[0][0]}
        _band(axes, figure, points)
        for run in figure.runs:
            steps = sorted(clean[run.seed])
            for step, loss in run.resumed:  # between validations of the fault-free run a straight line
                if step < steps[0]:
                    continue
                there = float(np.interp(step, steps, [clean[run.seed][each] for each in steps]))
                axes.plot(step, 100 * (loss / there - 1), "^", color=_STYLES[figure.system][0], markersize=5)
    axes.axhline(0, color="0.7", linewidth=0.8)
    axes.axhline(margin, color="black", linewidth=0.8, label=f"margin of the median at the end, {margin:.2f} %")
    axes.plot([], [], "^", color="0.4", markersize=5, label="right after a recovery (some are off the scale)")
    axes.set_ylim(-_LIMIT * margin, 2 * _LIMIT * margin)
    axes.legend(handles=axes.lines[-2:], loc="lower right")  # the curves are named above


def _band(axes: Any, figure: QualityFigure, points: Mapping[int, Sequence[float]]) -> None:
    """Draw median and range."""
    color, line = _STYLES[figure.system]
    width = 5 if figure.system == "none" else 1.5  # to be seen below others
    style = "--" if figure.boosted else line
    medians = [statistics.median(values) for values in points.values()]
    axes.plot([*points], medians, style, color=color, linewidth=width, label=figure.name)
    axes.fill_between(
        [*points], *zip(*((min(v), max(v)) for v in points.values()), strict=True), color=color, alpha=0.12
    )
