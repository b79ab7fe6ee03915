"""Final validation loss after faults: what policies whose restarts are not exact cost in quality.

The text example at the size of a benchmark, a byte-level GPT with experts on the source of Python's standard library,
is trained several times with each policy and killed at the same steps, by SIGKILL, in real processes. One process
holds all experts: what a recovery does to weights depends on which experts come back how old, not on how many ranks hold
them, and only then is a run the same on any machine, since no rank waits for another. Faults take the memory of the node
too, so that storage is all there is, or leave it. Every fault strikes when what was complete is durable.

Every policy is held against margins, see `_quality_runs`.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from types import SimpleNamespace

from rich.table import Table
from typing_extensions import override

from lightning_moe_ckpt.benchmarks._benchmark import (
    Benchmark,
    Progress,
    accelerator_for,
    table_of,
    write_document,
)
from lightning_moe_ckpt.benchmarks._machine import Machine
from lightning_moe_ckpt.benchmarks._quality_life import CASES, QUICK, Scale
from lightning_moe_ckpt.benchmarks._quality_plot import draw
from lightning_moe_ckpt.benchmarks._quality_runs import TOLERANCE, QualityFigure, QualityRun, judge, run_all

_LOSSES = {"nothing": "", "process": "process", "node": "process, memory"}
_COLUMNS = (
    *("policy", "a fault takes", "loss by seed", "difference", "PLT", "MLT", "K", "tokens lost", "bytes", "boosts"),
    "verdict",
)
_CAPTION = """\
difference: to the fault-free run of the same seed, median and range; PLT, MLT, tokens, bytes: medians
bytes: per step of the last life, to memory / to storage, of a dense snapshot; K: experts per layer at the end, by seed
boosts: experts with more capacity, times steps, per run; and how much of what was lost they made up for
verdict: on the median difference, in brackets the margin. Exact policies: equal bits
  lossy ones: {tolerance:.2%}, as MOETION's Table 1 has it up to 3 % of tokens lost (PEC, Fig. 2: 0.01 % below 7.5 %),
  or what a rounding does to fault-free runs, if that is more: here {chaos:.2%}; their seeds are {apart:.2%} apart
routers: normalised HHI {skew:.3f}; {dropped:.1%} of tokens are dropped over capacity"""


class QualityBench(Benchmark[QualityFigure]):
    """See the module."""

    name = "quality"

    @override
    def measure(self, options: SimpleNamespace, progress: Progress) -> list[QualityFigure]:
        scale, machine, out = QUICK if options.quality_quick else Scale(), Machine.read(), options.quality_out
        out.mkdir(parents=True, exist_ok=True)
        runs = run_all(
            [case for case in CASES if case.loss == "nothing" or case.system in options.quality_policies],
            range(1, options.quality_seeds + 1),
            scale,
            jobs=options.quality_jobs,
            folder=options.quality_folder,
            accelerator=accelerator_for(options.accelerator),
            progress=progress,
        )
        figures = judge(runs)
        document = {"machine": machine, "scale": scale, "tolerance": TOLERANCE, "quality": figures}
        write_document(out / "quality.json", document)
        if find_spec("matplotlib") is not None:
            draw(figures, out / "quality.png")
        return figures

    @override
    def table(self, figures: Sequence[QualityFigure]) -> Table:
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
    if figure.system == "sparse" and figure.verdict == "pass":
        return "identical bits"
    low, high = min(figure.difference), max(figure.difference)
    return f"{figure.median_difference:+.2%} ({low:+.2%} to {high:+.2%})"


def _median(figure: QualityFigure, value: Callable[[QualityRun], float]) -> float:
    return statistics.median(map(value, figure.runs))


def _tokens(figure: QualityFigure) -> list[str]:
    """PLT, MLT, K by seed and tokens lost."""
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
