"""Run `moe-ckpt bench`: benchmarks one after another, then their figures as tables or as one JSON document."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.progress import Progress
from rich.table import Table

from lightning_moe_ckpt.benchmarks._benchmark import Machine
from lightning_moe_ckpt.inspection import Screen

_WIDEST = 10_000


def bench(modules: Mapping[str, Any], *, as_json: bool, **options: Any) -> int:
    """Run benchmarks, by name, and return the exit status."""
    machine = Machine.read()
    figures = _measure(modules, SimpleNamespace(**options))
    accelerator = options["accelerator"]
    if as_json:
        document: dict[str, Any] = {"machine": dataclasses.asdict(machine), "accelerator": accelerator}
        document |= {name: [dataclasses.asdict(figure) for figure in each] for name, each in figures.items()}
        sys.stdout.write(json.dumps(document, indent=2) + "\n")
        return 0
    console = Screen()
    console.print(f"{machine}; trainings on: {accelerator or 'cpu'}")
    for name, module in modules.items():
        show_table(console, module.table(figures[name]))
    return 0


def show_table(console: Console, table: Table) -> None:
    """Print a table, wider than the screen if it has to be: a screen breaks lines, which loses nothing, rich cuts names."""
    least = Measurement.get(console, console.options.update(width=_WIDEST), table).minimum
    console.print(table, width=max(console.width, least), crop=False)


def _measure(modules: Mapping[str, Any], options: SimpleNamespace) -> dict[str, list[Any]]:
    # No thread that refreshes, and standard streams as they are: a benchmark may fork.
    bar = Progress(
        console=Console(stderr=True), transient=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
    )
    with bar:
        task = bar.add_task("")

        def show(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total, refresh=True)

        return {name: module.measure(options, show) for name, module in modules.items()}
