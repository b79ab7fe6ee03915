"""Final validation loss after faults: what policies whose restarts are not exact cost in quality.

The text example at the size of a benchmark, a byte-level GPT with experts on the source of Python's standard library,
is trained several times with each policy and killed at the same steps, by SIGKILL, in real processes. One process
holds all experts: what a recovery does to weights depends on which experts come back how old, not on how many ranks hold
them, and only then is a run the same on any machine, since no rank waits for another. Faults take the memory of the node
too, so that storage is all there is, or leave it. Every fault strikes when what was complete is durable.

Every policy is held against margins, see `_quality_verdict`.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

from rich.table import Table
from typing_extensions import override

from lightning_moe_ckpt.benchmarks._benchmark import Benchmark, Progress, accelerator_for, table_of
from lightning_moe_ckpt.benchmarks._machine import Machine
from lightning_moe_ckpt.benchmarks._quality_cases import CASES, QUICK, Scale
from lightning_moe_ckpt.benchmarks._quality_plot import draw
from lightning_moe_ckpt.benchmarks._quality_runs import run_all
from lightning_moe_ckpt.benchmarks._quality_verdict import TOLERANCE, QualityFigure, judge

_SYSTEMS = {
    "none": "fault-free",
    "control": "fault-free, first weights off by a rounding",
    "sparse": "SparseCheckpoint",
    "partial": "PEC",
    "dynamic": "PEC, Dynamic-K",
    "selective": "MOETION",
    "ablation": "ablation: PEC with rare generations",
}
_LOSSES = {"nothing": "", "process": "process", "node": "process, memory"}


class QualityBench(Benchmark[QualityFigure]):
    """See the module."""

    name = "quality"

    @override
    def measure(self, options: SimpleNamespace, progress: Progress) -> list[QualityFigure]:
        scale = QUICK if options.quality_quick else Scale()
        cases = [case for case in CASES if case.loss == "nothing" or case.system in options.quality_policies]
        seeds = range(1, options.quality_seeds + 1)
        machine = Machine.read()
        out: Path = options.quality_out
        out.mkdir(parents=True, exist_ok=True)
        runs = run_all(
            cases,
            seeds,
            scale,
            jobs=options.quality_jobs,
            folder=options.quality_folder,
            accelerator=accelerator_for(options.accelerator),
            progress=progress,
        )
        order = {(case.system, case.loss, case.boosted): place for place, case in enumerate(cases)}
        figures = judge(sorted(runs, key=lambda run: order[run.system, run.loss, run.boosted]))
        write(figures, machine, scale, out)
        return figures

    @override
    def table(self, figures: Sequence[QualityFigure]) -> Table:
        clean = next(figure for figure in figures if figure.system == "none")
        first = clean.runs[0]
        faults = max(len(run.killed_at) for figure in figures for run in figure.runs)
        title = (
            f"Final validation loss (bits per byte) after {first.curve[-1][0]} steps and {faults} faults, "
            f"seeds {', '.join(str(run.seed) for run in clean.runs)}"
        )
        columns = ["policy", "a fault takes", "loss by seed", "difference", "PLT", "MLT", "K", "tokens lost", "bytes"]
        columns += ["boosts", "verdict"]
        table = table_of(title, columns, [_row(figure) for figure in figures])
        table.caption = "\n".join(_caption(clean, figures))
        return table


def write(figures: Sequence[QualityFigure], machine: Machine, scale: Scale, out: Path) -> None:
    """Everything as JSON, and the plot where there is matplotlib."""
    document = {
        "machine": dataclasses.asdict(machine),
        "scale": dataclasses.asdict(scale),
        "tolerance": TOLERANCE,
        "quality": [dataclasses.asdict(figure) for figure in figures],
    }
    (out / "quality.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    if find_spec("matplotlib") is not None:
        draw(figures, [_name(figure) for figure in figures], out / "quality.png")


def _name(figure: QualityFigure) -> str:
    return _SYSTEMS[figure.system] + (" + CapacityBoost" if figure.boosted else "")


def _row(figure: QualityFigure) -> list[str]:
    return [
        *(_name(figure), _LOSSES[figure.loss], " ".join(f"{run.final:.4f}" for run in figure.runs)),
        *(_difference(figure), *_tokens(figure), _nbytes(figure), _boosts(figure), _verdict(figure)),
    ]


def _difference(figure: QualityFigure) -> str:
    if figure.system == "none":
        return ""
    if figure.system == "sparse" and figure.verdict == "pass":
        return "identical bits"
    low, high = min(figure.difference), max(figure.difference)
    return f"{figure.median_difference:+.2%} ({low:+.2%} to {high:+.2%})"


def _tokens(figure: QualityFigure) -> list[str]:
    """PLT, MLT, K by seed and tokens lost."""
    runs = figure.runs
    if not any(run.processed for run in runs):
        return ["", "", "", ""]
    plt, mlt, lost = (statistics.median(values) for values in zip(*((r.plt, r.mlt, r.lost) for r in runs), strict=True))
    ks = " ".join(str(run.k) for run in runs) if runs[0].k is not None else ""
    return [f"{plt:.2%}", f"{mlt:.2%}", ks, f"{lost / 1e3:.0f}k"]


def _nbytes(figure: QualityFigure) -> str:
    captured, persisted = (
        statistics.median(values) for values in zip(*((r.captured, r.persisted) for r in figure.runs), strict=True)
    )
    return f"{captured:.0%} / {persisted:.0%}" if captured else ""


def _boosts(figure: QualityFigure) -> str:
    if not figure.boosted:
        return ""
    given, repaid, lost = (
        sum(values) for values in zip(*((r.boosted_steps, r.repaid, r.lost) for r in figure.runs), strict=True)
    )
    return f"{given / len(figure.runs):.0f}, {repaid / max(1, lost):.0%}"


def _verdict(figure: QualityFigure) -> str:
    return "" if figure.verdict == "reference" else f"{figure.verdict} ({figure.margin:.2%})"


def _caption(clean: QualityFigure, figures: Sequence[QualityFigure]) -> list[str]:
    finals = [run.final for run in clean.runs]
    control = next(figure for figure in figures if figure.system == "control")
    chaos = max(abs(difference) for difference in control.difference)
    skew, dropped = (statistics.mean(values) for values in zip(*((r.skew, r.dropped) for r in clean.runs), strict=True))
    apart = max(finals) / min(finals) - 1
    return [
        "difference: to the fault-free run of the same seed, median and range; PLT, MLT, tokens, bytes: medians",
        "bytes: per step of the last life, to memory / to storage, of a dense snapshot; K: experts per layer at the end, by seed",
        "boosts: experts with more capacity, times steps, per run; and how much of what was lost they made up for",
        "verdict: on the median difference, in brackets the margin. Exact policies: equal bits",
        f"  lossy ones: {TOLERANCE:.2%}, as MOETION's Table 1 has it up to 3 % of tokens lost (PEC, Fig. 2: 0.01 % below 7.5 %),",
        f"  or what a rounding does to fault-free runs, if that is more: here {chaos:.2%}; their seeds are {apart:.2%} apart",
        f"routers: normalised HHI {skew:.3f}; {dropped:.1%} of tokens are dropped over capacity",
    ]
