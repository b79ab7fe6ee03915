"""What it costs until a generation is durable, and what training notices of it.

A generation is digested, stored, marked and committed by the worker that does it in training; beside it the same bytes
are written without any of that: to local disk by write and fsync, to object storage by `obstore.put` with its own
settings. Both take turns in one process, each first in turn, and the ratio is taken within a turn. Deleting older generations
comes afterwards and is not measured.

Steps are those of a fit with sparse checkpoints on local disk, told apart by whether a segment was being written. To have
idle ones, writes are held up in every other stretch of steps.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rich.table import Table

from lightning_moe_ckpt.benchmarks._benchmark import (
    Goal,
    Progress,
    accelerator_for,
    milliseconds,
    table_of,
)
from lightning_moe_ckpt.benchmarks._fits import HandOver, TurnTaker
from lightning_moe_ckpt.benchmarks._model import ModelSize
from lightning_moe_ckpt.benchmarks._persist_runs import Cost, Pair, StepsMeanwhile, take_pairs, time_steps

LOCAL = Goal("local", "time until durable on local disk, of a raw write and fsync", 1.2, "times", at_least=False)
OBJECT = Goal("object", "time until durable in object storage, of a bare obstore put", 1.25, "times", at_least=False)
CPU = Goal("cpu", "CPU seconds per GB uploaded", 0.6, "s", at_least=False)
STEP = Goal("step", "p99 of a step while a segment is written, of other steps", 1.5, "times", at_least=False)
_WARM_UP = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class PersistFigure:
    """One goal and what was measured of it; without a value it was not run."""

    what: str
    wanted: str
    unit: str
    value: float | None
    """Median over the rounds, for ratios of two times; of all steps together for p99."""
    range: tuple[float, float] | None
    """Least and most of the rounds."""
    baseline: str
    """What `value` is relative to, in absolute terms."""
    ours: str
    outcome: str


def measure(options: SimpleNamespace, progress: Progress) -> list[PersistFigure]:
    """Run the benchmark."""
    with tempfile.TemporaryDirectory(prefix="moe-ckpt-bench-", dir=options.persist_folder) as folder:
        url = Path(folder).as_uri()
        local = _pairs(options, url, None, progress, "local disk")
        stored = _pairs(options, options.object_url, options.object_options, progress, "object storage")
        progress("training with sparse checkpoints", 0, 1)
        steps = _steps(options, f"{url}/fit")
    unnamed = "not run: name a bucket with --object-url"
    return [_ratio(LOCAL, local, ""), _ratio(OBJECT, stored, unnamed), _cpu(stored, unnamed), _p99(steps)]


def table(figures: Sequence[PersistFigure]) -> Table:
    """Return the figures for people."""
    columns = ("goal", "measured", "range", "baseline", "ours", "wanted", "outcome")
    return table_of("What persisting costs", columns, [_row(figure) for figure in figures])


def _pairs(
    options: SimpleNamespace, url: str | None, storage_options: dict[str, Any] | None, progress: Progress, where: str
) -> list[Pair]:
    if url is None:
        return []
    nbytes = options.generation_megabytes * 10**6

    def work(hand_over: HandOver[Pair]) -> None:
        take_pairs(url, storage_options, nbytes, options.segments, hand_over)

    with TurnTaker(work) as taker:
        taker.take()  # the first touches new memory and opens connections
        pairs = []
        for turn in range(options.persist_rounds):
            progress(f"storing, {where}", turn, options.persist_rounds)
            pairs.append(taker.take())
    return pairs


def _steps(options: SimpleNamespace, url: str) -> StepsMeanwhile:
    dim, accelerator = options.persist_dim, accelerator_for(options.accelerator)
    size = ModelSize(model_dim=dim, expert_dim=2 * dim, num_blocks=max(1, dim // 32))

    def work(hand_over: HandOver[StepsMeanwhile]) -> None:
        hand_over(time_steps(url, size, options.persist_steps, _WARM_UP, accelerator))

    with TurnTaker(work, timedelta(hours=1)) as taker:
        return taker.take()


def _ratio(goal: Goal, pairs: Sequence[Pair], unnamed: str) -> PersistFigure:
    ratios = [pair.ours.seconds / pair.bare.seconds for pair in pairs]
    baseline, ours = _rate([pair.bare for pair in pairs]), _rate([pair.ours for pair in pairs])
    return _figure(goal, ratios, baseline, ours, unnamed)


def _cpu(pairs: Sequence[Pair], unnamed: str) -> PersistFigure:
    def per_gigabyte(cost: Cost) -> float:
        return cost.cpu_seconds / cost.nbytes * 1e9

    ours = [per_gigabyte(pair.ours) for pair in pairs]
    bare = [per_gigabyte(pair.bare) for pair in pairs]
    baseline = f"{statistics.median(bare):.2f} s/GB" if bare else ""
    return _figure(CPU, ours, baseline, f"{statistics.median(ours):.2f} s/GB" if ours else "", unnamed)


def _p99(steps: StepsMeanwhile) -> PersistFigure:
    """Needs enough of both kinds."""
    if min(len(steps.idle), len(steps.persisting)) < 2:
        reason = f"not run: {len(steps.persisting)} steps met a write and {len(steps.idle)} did not"
        return _figure(STEP, [], "", "", reason)
    idle, persisting = (statistics.quantiles(each, n=100)[98] for each in (steps.idle, steps.persisting))
    baseline = f"{milliseconds(idle)} of {len(steps.idle)} steps"
    return _figure(STEP, [persisting / idle], baseline, f"{milliseconds(persisting)} of {len(steps.persisting)}", "")


def _rate(costs: Sequence[Cost]) -> str:
    if not costs:
        return ""
    return f"{statistics.median(cost.nbytes / cost.seconds for cost in costs) / 1e6:.0f} MB/s"


def _figure(goal: Goal, values: Sequence[float], baseline: str, ours: str, unnamed: str) -> PersistFigure:
    value = statistics.median(values) if values else None
    outcome = unnamed if value is None else goal.outcome(value)
    return PersistFigure(
        what=goal.what,
        wanted=str(goal),
        unit=goal.unit,
        value=value,
        range=(min(values), max(values)) if values else None,
        baseline=baseline,
        ours=ours,
        outcome=outcome,
    )


def _row(figure: PersistFigure) -> list[str]:
    value = "" if figure.value is None else f"{figure.value:.2f} {figure.unit}"
    spread = "" if figure.range is None else f"{figure.range[0]:.2f}-{figure.range[1]:.2f}"
    return [figure.what, value, spread, figure.baseline, figure.ours, figure.wanted, figure.outcome]
