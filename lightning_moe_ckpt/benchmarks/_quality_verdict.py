"""What faults have cost in quality, by policy, held against margins that stand before anything is measured.

Margins:
* Exact policies: none. Every bit of the end state and of every loss is that of the fault-free run.
* Lossy policies: the median over seeds of the final validation loss, relative to the fault-free run of the same seed, is
  no more than `TOLERANCE` higher. That is what MOETION (2024), Table 1, calls minimal impact: 2.8861 without losses, below
  2.9 with up to 3 % of tokens lost. PEC (2024), Fig. 2, has 4.8854 at most against 4.8851 while PLT is below 7.5 %.
* Where runs are short, chaos alone may exceed that: two fault-free runs whose first weights differ by a rounding end apart.
  The control measures it, and the largest difference that it shows is the margin if it is more than `TOLERANCE`.
* The ablation, whose experts go back further than any of these policies lets them, has to miss the margin: else the
  benchmark could not tell.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lightning_moe_ckpt.benchmarks._quality_cases import Loss, System
from lightning_moe_ckpt.benchmarks._quality_runs import QualityRun

TOLERANCE = 2.9 / 2.8861 - 1
"""0.48 %."""

Verdict = Literal["reference", "pass", "FAIL", "fails, as it should", "PASSES, but should not"]


@dataclass(frozen=True, kw_only=True, slots=True)
class QualityFigure:
    """One policy and one kind of loss, over all seeds."""

    system: System
    loss: Loss
    boosted: bool
    runs: list[QualityRun]
    """By seed."""
    difference: list[float]
    """By seed: final validation loss against that of the fault-free run, relative."""
    margin: float
    """That the median difference may have; 0 stands for equal bits."""
    verdict: Verdict

    @property
    def median(self) -> float:
        """Final validation loss."""
        return statistics.median(run.final for run in self.runs)

    @property
    def median_difference(self) -> float:
        """See `difference`."""
        return statistics.median(self.difference)


def judge(runs: Sequence[QualityRun]) -> list[QualityFigure]:
    """Figures by policy, in the order in which the policies first come, with verdicts.

    Args:
        runs: of all policies and seeds, fault-free ones and the control among them.
    """
    groups: dict[tuple[System, Loss, bool], list[QualityRun]] = {}
    for run in runs:
        groups.setdefault((run.system, run.loss, run.boosted), []).append(run)
    clean = {run.seed: run.final for run in runs if run.system == "none"}
    chaos = max(abs(run.final / clean[run.seed] - 1) for run in runs if run.system == "control")
    return [_figure(sorted(group, key=lambda run: run.seed), clean, max(TOLERANCE, chaos)) for group in groups.values()]


def _figure(runs: list[QualityRun], clean: dict[int, float], lossy_margin: float) -> QualityFigure:
    first = runs[0]
    difference = [run.final / clean[run.seed] - 1 for run in runs]
    margin = 0.0 if first.system == "sparse" else lossy_margin
    return QualityFigure(
        system=first.system,
        loss=first.loss,
        boosted=first.boosted,
        runs=runs,
        difference=difference,
        margin=margin,
        verdict=_verdict(runs, statistics.median(difference), margin),
    )


def _verdict(runs: Sequence[QualityRun], difference: float, margin: float) -> Verdict:
    system = runs[0].system
    if system in ("none", "control"):
        return "reference"
    if system == "sparse":
        return "pass" if all(run.identical for run in runs) else "FAIL"
    if system == "ablation":
        return "fails, as it should" if difference > margin else "PASSES, but should not"
    return "pass" if difference <= margin else "FAIL"
