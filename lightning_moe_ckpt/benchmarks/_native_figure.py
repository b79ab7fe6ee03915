"""One row of `moe-ckpt bench native`, and medians of things that take turns."""

from __future__ import annotations

import statistics
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass


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
    """Of the error that left it without a value."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Medians over runs, seconds."""

    wall: float
    cpu: float
    """Of all threads of the process."""


def in_turns(ways: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, Cost]:
    """Each way once per round, so that what else the machine does hits all alike; the first round does not count."""
    costs: dict[str, list[Cost]] = {how: [] for how in ways}
    for _ in range(repeats + 1):
        for how, action in ways.items():
            wall, cpu = time.perf_counter(), time.process_time()
            action()
            costs[how].append(Cost(time.perf_counter() - wall, time.process_time() - cpu))
    return {how: _median_cost(found[1:]) for how, found in costs.items()}


def cost_figures(what: str, costs: Mapping[str, Cost], notes: Mapping[str, str]) -> list[NativeFigure]:
    """Milliseconds of wall time, with CPU time beside them."""
    return [
        NativeFigure(
            what=what,
            how=how,
            value=cost.wall * 1e3,
            unit="ms",
            note="; ".join(filter(None, (f"CPU {cost.cpu * 1e3:,.4g} ms", notes.get(how, "")))),
        )
        for how, cost in costs.items()
    ]


def _median_cost(costs: list[Cost]) -> Cost:
    return Cost(statistics.median(c.wall for c in costs), statistics.median(c.cpu for c in costs))


def attempt(what: str, how: str, measure: Callable[[], float], *, unit: str, note: str = "") -> NativeFigure:
    """A row with what `measure` returns; one that fails must not cost the others, and says where it did."""
    try:
        return NativeFigure(what=what, how=how, value=measure(), unit=unit, note=note)
    except Exception as error:  # noqa: BLE001  # kept whole, in the row
        said, where = f"FAILED: {type(error).__name__}: {error}", traceback.format_exc()
        note = f"{note}: {said}" if note else said
        return NativeFigure(what=what, how=how, value=None, unit=unit, note=note, traceback=where)
