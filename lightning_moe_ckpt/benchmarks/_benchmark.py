"""What a benchmark is to the command line: options, a measurement, and the figures as a table.

Variants are measured side by side in one run and take turns, because what else the machine does hits all alike.
Medians and ratios of such figures say something about another machine; absolute seconds say something about this one.
"""

from __future__ import annotations

import json
import os
import statistics
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Generic, Literal, TypeVar

import torch
from rich.table import Table

from lightning_moe_ckpt.errors import ConfigurationError

T = TypeVar("T")
Figure = TypeVar("Figure")
Accelerator = Literal["cpu", "gpu"]
Progress = Callable[[str, int, int], None]
"""Called with what begins, how many were done before it, and how many there are."""


class Benchmark(ABC, Generic[Figure]):
    """One measurement that `moe-ckpt bench` offers. Its figures are dataclasses of JSON values."""

    name: ClassVar[str]

    @abstractmethod
    def measure(self, options: SimpleNamespace, progress: Progress) -> list[Figure]:
        """Run it."""

    @abstractmethod
    def table(self, figures: Sequence[Figure]) -> Table:
        """The figures for people."""


@dataclass(frozen=True, slots=True)
class Goal:
    """A number to reach, or to stay below."""

    name: str
    what: str
    wanted: float
    unit: str
    at_least: bool = True

    def outcome(self, measured: float) -> str:
        """`met` or `NOT met`; NaN meets nothing."""
        return "met" if (measured >= self.wanted if self.at_least else measured <= self.wanted) else "NOT met"

    def __str__(self) -> str:
        return f"at {'least' if self.at_least else 'most'} {self.wanted:g} {self.unit}"


def accelerator_for(wanted: str | None, num_ranks: int = 1) -> Accelerator:
    """What to train on: `cpu` if nothing is said; `auto` takes GPUs if there is one for every rank.

    The driver is not asked: trainings are forked, and CUDA works in no fork of a process that has used it.

    Raises:
        ConfigurationError: `gpu` is wanted, and there are too few.
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
    """Every case in every round, each first in turn: what one leaves for the disk to do hits another each time."""
    for turn in range(num_rounds):
        start = turn % len(cases)
        yield from ((turn, case) for case in [*cases[start:], *cases[:start]])


def medians(rounds: Sequence[object], *names: str) -> dict[str, Any]:
    """Median over the rounds of each attribute that is named, `None` where no round has a number."""
    columns = {name: [getattr(each, name) for each in rounds] for name in names}
    known = {name: [value for value in column if value is not None] for name, column in columns.items()}
    return {name: statistics.median(column) if column else None for name, column in known.items()}


def write_document(path: Path, document: Mapping[str, Any]) -> None:
    """Put JSON of values and dataclasses into `path`, whole or not at all."""
    staged = path.with_name(f".{path.name}")
    staged.write_text(json.dumps(document, indent=1, default=asdict) + "\n", encoding="utf-8")
    staged.replace(path)


def milliseconds(seconds: float | None) -> str:
    """Text with a unit and three or so digits that matter; empty if there is nothing to say."""
    return "" if seconds is None else f"{seconds * 1e3:.{_decimals(seconds * 1e3)}f} ms"


def megabytes(nbytes: float) -> str:
    """Text with a unit; 10^6 bytes."""
    return f"{nbytes / 1e6:.{_decimals(nbytes / 1e6)}f} MB"


def table_of(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], caption: str = "") -> Table:
    """A table whose columns are aligned right but for the first."""
    table = Table(title=title, caption=caption or None, title_justify="left", caption_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left")
    for row in rows:
        table.add_row(*(str(cell) for cell in row))
    return table


def _decimals(value: float) -> int:
    return 0 if value >= 100 else 1 if value >= 10 else 2
