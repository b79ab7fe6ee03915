"""Run `moe-ckpt bench`: measure, judge, and show figures as tables or as one JSON document.

Each benchmark is a module with `measure`, which returns dataclasses of JSON values, and `table`. Variants are measured side
by side in one run and take turns, because what else the machine does hits all alike. Medians and ratios of such figures say
something about another machine; absolute seconds say something about this one.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, TypeVar

import lightning
import torch
from rich.console import Console
from rich.measure import Measurement
from rich.progress import Progress as Bar
from rich.table import Table

from lightning_moe_ckpt.errors import ConfigurationError
from lightning_moe_ckpt.inspection import Screen

_CPU_INFO = Path("/proc/cpuinfo")
T = TypeVar("T")
Accelerator = Literal["cpu", "gpu"]
Progress = Callable[[str, int, int], None]
"""Function that takes the next case's name, the number of cases before, and the number of all cases."""

_WIDEST = 10_000


def accelerator_for(wanted: str | None, num_ranks: int = 1) -> Accelerator:
    """Return the accelerator of trainings: `cpu` by default; `auto` takes GPUs if there is a GPU for every rank.

    The driver is not asked: trainings are forked, and CUDA works in no fork of a process that has used it. Raises `ConfigurationError` if
    `gpu` is wanted, and there are too few.
    """
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    num_devices = torch.cuda.device_count() if wanted in ("gpu", "auto") and torch.cuda.is_available() else 0
    if wanted == "gpu" and num_devices < num_ranks:
        raise ConfigurationError(
            f"`--accelerator gpu` needs a CUDA device for each of {num_ranks} ranks, torch sees {num_devices}. "
            "Take fewer ranks, or `--accelerator cpu`."
        )
    return "gpu" if 0 < num_ranks <= num_devices else "cpu"


def rounds_of(num_rounds: int, cases: Sequence[T]) -> Iterator[tuple[int, T]]:
    """Yield every case in every round, each first in turn: the writes that a case leaves hit another case each time."""
    for turn in range(num_rounds):
        start = turn % len(cases)
        yield from ((turn, case) for case in [*cases[start:], *cases[:start]])


def medians(rounds: Sequence[object], *names: str) -> dict[str, Any]:
    """Return the median over the rounds of each attribute that is named, `None` where no round has a number."""
    columns = {name: [getattr(run, name) for run in rounds] for name in names}
    known = {name: [value for value in column if value is not None] for name, column in columns.items()}
    return {name: statistics.median(column) if column else None for name, column in known.items()}


def milliseconds(seconds: float | None) -> str:
    """Return text with a unit and about three digits; empty if there is nothing to say."""
    return "" if seconds is None else f"{seconds * 1e3:.{_decimals(seconds * 1e3)}f} ms"


def table_of(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], caption: str = "") -> Table:
    """Return a table whose columns are aligned right but for the first; only its headings break their lines."""
    table = Table(title=title, caption=caption or None, title_justify="left", caption_justify="left")
    for index, column in enumerate(columns):
        least = max(map(len, [*column.split(), *(str(row[index]) for row in rows if index < len(row))]), default=0)
        table.add_column(column, justify="right" if index else "left", min_width=least)
    for row in rows:
        table.add_row(*map(str, row))
    return table


def _decimals(value: float) -> int:
    return 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Hardware, versions and the time of a measurement: without them figures mean nothing a week later."""

    date: str
    """UTC, to the second, ISO 8601."""
    system: str
    cpu: str
    num_cores: int
    """Cores this process may use."""
    load: float
    """Processes that were running or waiting for a core in the last minute, ours not included at start; -1 unknown."""
    memory_nbytes: int
    large_pages: bool
    """Whether the C library asks for large pages, without which two processes are not equally fast."""
    python: str
    torch: str
    lightning: str
    devices: str
    """Names and drivers of the GPUs, as `nvidia-smi` says; empty where there is none."""

    @classmethod
    def read(cls) -> Machine:
        """Return this machine, now."""
        return cls(
            date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            system=platform.platform(terse=True),
            cpu=_cpu_name(),
            # macOS cannot restrict a process to some cores.
            num_cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
            load=round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else -1.0,
            memory_nbytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            large_pages="glibc.malloc.hugetlb=1" in os.environ.get("GLIBC_TUNABLES", ""),
            python=platform.python_version(),
            torch=torch.__version__,
            lightning=lightning.__version__,
            devices=_devices(),
        )

    def __str__(self) -> str:
        return (
            f"{self.date}, {self.cpu}, {self.num_cores} cores at load {self.load}, "
            f"{self.memory_nbytes / 2**30:.0f} GiB{' in large pages' if self.large_pages else ''}, {self.system}, "
            f"Python {self.python}, torch {self.torch}, Lightning {self.lightning}{f', {self.devices}' if self.devices else ''}"
        )


def _cpu_name() -> str:
    if _CPU_INFO.exists():
        for line in _CPU_INFO.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _devices() -> str:
    # The driver is not asked in this process, which may have to fork.
    if (program := shutil.which("nvidia-smi")) is None:
        return ""
    command = [program, "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)  # noqa: S603
    return "; ".join(done.stdout.splitlines()) if done.returncode == 0 else ""


def module_of(name: str, place: str, *, apart: bool) -> Any:
    """Return the module of a benchmark at `place`; if `apart`, that of a checkout. Raises `ConfigurationError` elsewhere."""
    if apart:
        place, checkout = "benchmarks.", Path(__file__).resolve().parents[2]
        if not (checkout / "benchmarks" / f"{name}.py").exists():
            raise ConfigurationError(
                f"`bench {name}` is not installed with the package, since pip would install other systems: clone the repository, and call it there."
            )
        sys.path.insert(0, str(checkout))
    return importlib.import_module(place + name.replace("-", "_"))


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
    """Print a table, wider than the screen if necessary: a screen breaks lines, which loses nothing, rich cuts names."""
    least = Measurement.get(console, console.options.update(width=_WIDEST), table).minimum
    console.print(table, width=max(console.width, least), crop=False)


def _measure(modules: Mapping[str, Any], options: SimpleNamespace) -> dict[str, list[Any]]:
    # No thread that refreshes, and standard streams as they are: a benchmark may fork.
    bar = Bar(
        console=Console(stderr=True), transient=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
    )
    with bar:
        task = bar.add_task("")

        def show(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total, refresh=True)

        return {name: module.measure(options, show) for name, module in modules.items()}


def rewritten(page: str, begin: str, end: str, write: Callable[[str], str]) -> str:
    """Return a page with what `write` makes of the text between two marks in its place. Raises `ConfigurationError` without both marks, once."""
    before, _, rest = page.partition(begin)
    if page.count(begin) != 1 or end not in rest:
        raise ConfigurationError(f"The page has no `{begin}` with `{end}` after it. Put both where the text belongs.")
    was, _, after = rest.partition(end)
    return f"{before}{begin}\n\n{write(was).strip()}\n\n{end}{after}"
