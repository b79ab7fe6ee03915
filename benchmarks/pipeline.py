"""Measure the cost of a lost pipeline stage: stages sleep in place of computing, so that bubbles are real on few cores.

    torchrun      new processes for all stages, which all go back to the newest generation
    computes_all  `moe-ckpt run --spares 1`; all stages go back in place, and gradients of frozen weights are computed too
    in_place      the same, without gradients of frozen weights
    reordered     the same, and popular experts are taken last, so that they are frozen longest; with experts only
    alone         only the lost stage goes back, fed by its neighbours' logs

Source: MoEvement (2026), Sec. 3.3 (gradients of frozen weights), 3.4 and Fig. 9 (23 % shorter with logs), Fig. 13.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from types import SimpleNamespace

from rich.table import Table

from benchmarks.failure import MeasuredFailure
from benchmarks.in_place import FailingJob, job, time_ratio
from benchmarks.killed_fit import WINDOW
from lightning_moe_ckpt.benchmarks._benchmark import Progress, rounds_of, table_of
from lightning_moe_ckpt.testing._records import Record

SYSTEMS = {
    "torchrun": "torchrun, all stages anew",
    "computes_all": "in place, all stages, all gradients",
    "in_place": "in place, all stages",
    "reordered": "in place, all stages, by popularity",
    "alone": "in place, that stage alone",
}
_SCRIPT = "benchmarks.pipeline_fit"
_COLUMNS = (
    *("system", "step", "trains again", "re-run", "of steps", "stay", "skipped"),
    *("first new step", "range", "time ratio"),
)
_NOTE = """\
seconds from the SIGKILL of one stage, medians: until whoever goes back trains again; for steps that are taken again,
and how many; stages that stay in theirs; share of that work that is left out, gradients of frozen weights; until the
first step that was never taken before. time ratio: effective training time at an MTBF of 10 minutes, as far as failures cost it"""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageFigure:
    """Failures under a system."""

    system: str
    num_stages: int
    failures: list[MeasuredFailure]
    skipped: list[float]
    """Share of repeated work that was left out, by failure."""
    stayed: list[int]
    """Stages that took no step again, by failure."""

    @property
    def step_seconds(self) -> float:
        """An ordinary step."""
        return statistics.median(failure.step_seconds for failure in self.failures)


def measure(options: SimpleNamespace, progress: Progress) -> list[StageFigure]:
    """Run the benchmark."""
    num_stages, kills = options.stages, options.pipeline_kills
    found: dict[str, list[tuple[MeasuredFailure, float, int]]] = {name: [] for name in options.pipeline_systems}
    with ExitStack() as stack:
        progress(f"{num_stages} stages are started", 0, len(found) * kills)
        jobs = {name: stack.enter_context(_job(name, options)) for name in found}
        for done, (turn, name) in enumerate(rounds_of(kills, list(found))):
            progress(f"one of {num_stages} stages killed, {SYSTEMS[name]}", done, len(found) * kills)
            killed = turn % num_stages
            begun = _begins(jobs[name])
            failure = jobs[name].lose(killed, 2 * WINDOW + 2 + turn % WINDOW, alone=name == "alone")
            stayed = sum(now == before for now, before in zip(_begins(jobs[name]), begun, strict=True))
            found[name].append((failure, _skipped(jobs[name].lines()[killed], failure.rerun_steps), stayed))
    return [
        StageFigure(
            system=name,
            num_stages=num_stages,
            failures=[failure for failure, _, _ in each],
            skipped=[skipped for _, skipped, _ in each],
            stayed=[stayed for _, _, stayed in each],
        )
        for name, each in found.items()
    ]


def table(figures: Sequence[StageFigure]) -> Table:
    """Return the figures for people."""
    title = (
        f"From the SIGKILL of one of {figures[0].num_stages} pipeline stages to the first new step: sparse checkpoints over "
        f"{WINDOW} steps, medians of {len(figures[0].failures)} kills"
    )
    return table_of(title, _COLUMNS, [_row(figure) for figure in figures], _NOTE)


def _row(figure: StageFigure) -> list[str]:
    totals = [failure.total_seconds for failure in figure.failures]
    again = [failure.rerun_seconds for failure in figure.failures]
    return [
        SYSTEMS[figure.system],
        f"{figure.step_seconds:.3f}",
        f"{statistics.median(failure.begin_seconds for failure in figure.failures):.2f}",
        f"{statistics.median(again):.2f}",
        f"{statistics.median(failure.rerun_steps for failure in figure.failures):.0f}",
        f"{statistics.median(figure.stayed):.0f}",
        f"{100 * statistics.median(figure.skipped):.0f} %",
        f"{statistics.median(totals):.2f}",
        f"{min(totals):.2f} to {max(totals):.2f}",
        f"{time_ratio(figure.failures):.4f}",
    ]


def _job(system: str, options: SimpleNamespace) -> AbstractContextManager[FailingJob]:
    arguments = (
        system,
        str(options.stages),
        str(options.micro_batches),
        str(options.stage_ms),
        str(options.stage_experts),
    )
    launcher = "torchrun" if system == "torchrun" else "spare"
    return job(launcher, options.stages, options.pipeline_folder, _SCRIPT, *arguments)


def _begins(job: FailingJob) -> list[int]:
    """Return how often each stage has begun to train."""
    return [sum(line["what"] == "begin" for line in lines) for lines in job.lines()]


def _skipped(lines: Sequence[Record], steps: int) -> float:
    """Return the share of a step's work, a third of which is weight gradients, that repeated steps left out."""
    last = max(place for place, line in enumerate(lines) if line["what"] == "begin")
    before, after = (
        [line["slept"] for line in part if line["what"] == "step"] for part in (lines[:last], lines[last:])
    )
    again = after[:steps]
    return (1 - statistics.mean(again) / max(before)) / 3 if again else 0.0
