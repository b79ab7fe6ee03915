"""Judge rows of `moe-ckpt bench native` by the goals of the CUDA engine.

Goals are relative to a baseline of the same run where there is one: absolute rates depend on the host.
"""

from __future__ import annotations

import statistics
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from lightning_moe_ckpt.benchmarks._benchmark import Cost, Goal

Action = Callable[[], object]
GoalMeasurement = Callable[[], float]


@dataclass(frozen=True, kw_only=True, slots=True)
class NativeFigure:
    """One way to do one thing."""

    what: str
    how: str
    value: float | None
    """Median over runs; `None` if it could not be run here."""
    unit: str
    note: str = ""
    traceback: str = ""
    """Traceback of the error that left it without a value."""


GOALS = (
    Goal("G1", "device to host, slices of 1 MiB, of one pinned copy", 95, "%"),
    Goal("G2", "the same while matrices are multiplied, of G1's rate", 90, "%"),
    Goal("G3", "slowdown of those multiplications", 1.5, "%", at_least=False),
    Goal("G4", "slowdown of a loop bound by memory", 3, "%", at_least=False),
    Goal("G5", "delay added to a 4 KiB copy of training, p99", 0.8, "ms", at_least=False),
    Goal("G6", "8192 slices of 4 KiB, of torch's loop", 5, "times"),
    Goal("G7", "time of a submit of 10,000 slices", 50, "us", at_least=False),
    Goal("G8", "CPU of the process while copying", 5, "% of a core", at_least=False),
    Goal("G9", "compression, of torch", 4, "times"),
    Goal("G10", "replay of 8 steps, of torch fused", 4, "times"),
    Goal("G11", "checksum", 8, "GB/s"),
    Goal("G12", "mapping and registering host memory", 4, "GB/s"),
    Goal("G13", "loading both libraries, beyond importing the package", 50, "ms", at_least=False),
)


def judge(measurements: Mapping[str, GoalMeasurement], reason: str) -> list[NativeFigure]:
    """Measure a row per goal.

    Args:
        measurements: by name of the goal; what is missing was not run.
        reason: why those that are missing are.
    """
    rows, how = list[NativeFigure](), "compiled engine"
    for goal in GOALS:
        what, note, measure = f"{goal.name} {goal.what}", f"goal {goal}", measurements.get(goal.name)
        if measure is None:
            note = f"{note}: not run on a GPU: {reason}"
            row = NativeFigure(what=what, how=how, value=None, unit=goal.unit, note=note)
        else:
            row = attempt(what, how, measure, unit=goal.unit, note=note)
        if row.value is not None:
            row = replace(row, note=f"{note}: {goal.outcome(row.value)}")
        rows.append(row)
    return rows


def attempt(what: str, how: str, measure: GoalMeasurement, *, unit: str, note: str = "") -> NativeFigure:
    """Return a row with what `measure` returns; one that fails must not cost the others, and says where it did."""
    try:
        return NativeFigure(what=what, how=how, value=measure(), unit=unit, note=note)
    except Exception as error:  # noqa: BLE001  # kept whole, in the row
        said, where = f"FAILED: {type(error).__name__}: {error}", traceback.format_exc()
        note = f"{note}: {said}" if note else said
        return NativeFigure(what=what, how=how, value=None, unit=unit, note=note, traceback=where)


def in_turns(ways: Mapping[str, Action], repeats: int) -> dict[str, Cost]:
    """Run each way once per round, so that what else the machine does hits all alike; the first round does not count."""
    costs: dict[str, list[Cost]] = {how: [] for how in ways}
    for _ in range(repeats + 1):
        for how, action in ways.items():
            costs[how].append(Cost.of(action))
    return {how: Cost(*map(statistics.median, zip(*found[1:], strict=True))) for how, found in costs.items()}


def median(action: Action, repeats: int) -> float:
    """Return seconds; the first run, which also meets untouched memory, does not count."""
    return in_turns({"": action}, repeats)[""].wall


def seconds_of(action: Action) -> float:
    """Return the wall time of one call."""
    return Cost.of(action).wall
