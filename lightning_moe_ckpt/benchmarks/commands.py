"""Run `moe-ckpt bench`: benchmarks one after another, then their figures as tables or as one JSON document."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.progress import Progress
from rich.table import Table

from lightning_moe_ckpt.benchmarks import (
    _differential,
    _first_run,
    _in_place,
    _native,
    _overhead,
    _papers,
    _persist,
    _pipeline,
    _quality,
    _recovery,
    _scale,
    _selection,
)
from lightning_moe_ckpt.benchmarks._benchmark import Machine
from lightning_moe_ckpt.inspection import Screen

_WIDEST = 10_000
# The first ones fork, and a fork copies what others leave behind.
_BENCHMARKS: dict[str, Any] = {
    "in-place": _in_place,
    "pipeline": _pipeline,
    "recovery": _recovery,
    "quality": _quality,
    "papers": _papers,
    "selection": _selection,
    "persist": _persist,
    "overhead": _overhead,
    "differential": _differential,
    "scale": _scale,
    "native": _native,
}


def bench(names: Sequence[str], *, as_json: bool, **options: Any) -> int:
    """Run the benchmarks of these names and return the exit status."""
    chosen, machine = [name for name in _BENCHMARKS if name in names], Machine.read()
    figures = _measure(chosen, SimpleNamespace(**options))
    accelerator = options["accelerator"]
    if as_json:
        document: dict[str, Any] = {"machine": dataclasses.asdict(machine), "accelerator": accelerator}
        document |= {name: [dataclasses.asdict(figure) for figure in each] for name, each in figures.items()}
        sys.stdout.write(json.dumps(document, indent=2) + "\n")
        return 0
    console = Screen()
    console.print(f"{machine}; trainings on: {accelerator or 'cpu'}")
    for name in chosen:
        show_table(console, _BENCHMARKS[name].table(figures[name]))
    return 0


def show_table(console: Console, table: Table) -> None:
    """Print a table, wider than the screen if it has to be: a screen breaks lines, which loses nothing, rich cuts names."""
    least = Measurement.get(console, console.options.update(width=_WIDEST), table).minimum
    console.print(table, width=max(console.width, least), crop=False)


def _measure(chosen: Sequence[str], options: SimpleNamespace) -> dict[str, list[Any]]:
    # No thread that refreshes, and standard streams as they are: a benchmark may fork.
    bar = Progress(
        console=Console(stderr=True), transient=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
    )
    with bar:
        task = bar.add_task("")

        def show(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total, refresh=True)

        modules = {name: _BENCHMARKS[name] for name in chosen}
        if "native" in modules and options.first_run:
            modules["native"] = _first_run
        return {name: module.measure(options, show) for name, module in modules.items()}
