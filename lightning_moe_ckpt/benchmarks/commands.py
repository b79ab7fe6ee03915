"""What `moe-ckpt bench` does: benchmarks one after another, then their figures as tables or as one JSON document."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from rich.console import Console
from rich.progress import Progress

from lightning_moe_ckpt.benchmarks._benchmark import Benchmark
from lightning_moe_ckpt.benchmarks._machine import Machine
from lightning_moe_ckpt.benchmarks._native import NativeBench
from lightning_moe_ckpt.benchmarks._overhead import OverheadBench
from lightning_moe_ckpt.benchmarks._persist import PersistBench
from lightning_moe_ckpt.benchmarks._quality import QualityBench
from lightning_moe_ckpt.benchmarks._recovery import RecoveryBench
from lightning_moe_ckpt.inspection import Screen

# The first ones fork, which is safe only as long as nothing else has run in this process.
_BENCHMARKS: tuple[Benchmark[Any], ...] = (
    RecoveryBench(),
    QualityBench(),
    PersistBench(),
    OverheadBench(),
    NativeBench(),
)


def bench(names: Sequence[str], *, as_json: bool, **options: Any) -> int:
    """Run the benchmarks of these names; returns the exit status."""
    chosen, machine = [each for each in _BENCHMARKS if each.name in names], Machine.read()
    figures = _measure(chosen, SimpleNamespace(**options))
    accelerator = options["accelerator"]
    if as_json:
        document: dict[str, Any] = {"machine": dataclasses.asdict(machine), "accelerator": accelerator}
        document |= {name: [dataclasses.asdict(figure) for figure in each] for name, each in figures.items()}
        sys.stdout.write(json.dumps(document, indent=2) + "\n")
        return 0
    console = Screen()
    console.print(f"{machine}; trainings on: {accelerator or 'cpu'}")
    for benchmark in chosen:
        console.print(benchmark.table(figures[benchmark.name]))
    return 0


def _measure(chosen: Sequence[Benchmark[Any]], options: SimpleNamespace) -> dict[str, list[Any]]:
    # No thread that refreshes, and standard streams as they are: a benchmark may fork.
    bar = Progress(
        console=Console(stderr=True), transient=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
    )
    with bar:
        task = bar.add_task("")

        def show(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total, refresh=True)

        return {benchmark.name: benchmark.measure(options, show) for benchmark in chosen}
