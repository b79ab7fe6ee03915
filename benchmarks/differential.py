"""Measure differences between steps: bytes and time of a step beside dense and sparse checkpoints, and how fast they are applied.

Fits of one model follow each other, one for each kind of checkpoint, with storage on local disk. Of each: bytes of a step, in
memory and durable, the largest size of the folder meanwhile, memory reserved, and the median time of a step. Which of them are
slower by how much is for `moe-ckpt bench overhead`, whose turns alternate.

Then N differences of one parameter are applied to its state: in one pass, as a restart does; one at a time, as one pass for
each; and by torch's optimizer, step by step.

Source: TierCheck (2026), Sec. 5.3, Exp#7 (fused replay, 3.5 times as fast) and Exp#9 (size of storage).
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from rich.console import Group, RenderableType
from torch import Tensor
from typing_extensions import override

from benchmarks.native import in_turns
from lightning_moe_ckpt._units import size_text
from lightning_moe_ckpt.benchmarks._benchmark import (
    Progress,
    accelerator_for,
    milliseconds,
    table_of,
)
from lightning_moe_ckpt.benchmarks._fits import BenchModel, ModelSize, bench_trainer, quiet_lightning, random_tokens
from lightning_moe_ckpt.callbacks import DenseCheckpoint, DifferentialCheckpoint, SparseCheckpoint
from lightning_moe_ckpt.recovery import Difference, fold
from lightning_moe_ckpt.storage import KindColumns, NameColumns, SegmentLayout
from lightning_moe_ckpt.tiers import StepSettings

_LENGTHS = (1, 8, 64)
_SETTINGS = StepSettings(1e-3, 0.9, 0.999, 1e-8, 0.01, decoupled=True, maximize=False)
_NAMES = ("param", "exp_avg", "exp_avg_sq")

Checkpoint = DenseCheckpoint | DifferentialCheckpoint | SparseCheckpoint


@dataclass(frozen=True, kw_only=True)
class DifferentialFigure:
    """One kind of checkpoint in a fit, or one way to apply differences."""

    what: str
    seconds: float
    """Of a step, the median; or of all differences."""
    step_nbytes: float = 0.0
    """Taken to memory of a step, on average."""
    durable_nbytes: float = 0.0
    """Stored of a step, on average."""
    folder_nbytes: int = 0
    """Largest size of the folder."""
    folder_sizes: list[int] = field(default_factory=list)
    """Its size at every step."""
    dense_nbytes: int = 0
    """Of a full snapshot."""
    reserved_nbytes: int = 0
    """Memory for what was taken."""
    length: int = 0
    """Differences; 0 of a fit."""


def measure(options: SimpleNamespace, show: Progress) -> list[DifferentialFigure]:
    """Measure fits, then how differences are applied."""
    kinds: dict[str, Callable[[str], Checkpoint] | None] = {
        "none": None,
        "dense, every step": lambda url: DenseCheckpoint(url, every_n_steps=1, overhead_target=None),
        "sparse, window of 8": lambda url: SparseCheckpoint(url, window=8, overhead_target=None),
        "differential": lambda url: DifferentialCheckpoint(url, every_n_steps=options.differential_every),
        "differential, bf16": lambda url: DifferentialCheckpoint(
            url, every_n_steps=options.differential_every, mode="bf16"
        ),
        "differential, compressed": lambda url: DifferentialCheckpoint(
            url, every_n_steps=options.differential_every, mode="compressed"
        ),
    }
    figures: list[DifferentialFigure] = []
    for number, (name, make) in enumerate(kinds.items()):
        show(name, number, len(kinds) + 1)
        figures.append(fit_of(name, make, options))
    show("differences", len(kinds), len(kinds) + 1)
    return figures + applied(options)


def table(figures: Sequence[DifferentialFigure]) -> RenderableType:
    """Return both tables."""
    fits = [figure for figure in figures if not figure.length]
    rows = [
        [
            each.what,
            milliseconds(each.seconds),
            *(size_text(n) for n in (each.step_nbytes, each.durable_nbytes, each.folder_nbytes, each.reserved_nbytes)),
        ]
        for each in fits
    ]
    columns = ["checkpoints", "step", "taken per step", "durable per step", "largest folder", "memory"]
    applied = [figure for figure in figures if figure.length]
    by = {(each.length, each.what): each.seconds for each in applied}
    ways = list(dict.fromkeys(each.what for each in applied))
    times = [
        [length, *(f"{milliseconds(by[length, way])} ({by[length, way] / by[length, ways[0]]:.1f})" for way in ways)]
        for length in _LENGTHS
    ]
    return Group(
        table_of("Fits, one after another", columns, rows),
        table_of("Differences applied to a state, and how many times the first way", ["steps", *ways], times),
    )


class StepTimes(Callback):
    """Notes times between steps, and the size of a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._last = folder, 0.0
        self.seconds: list[float] = []
        self.sizes: list[int] = []

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: object) -> None:
        now = time.perf_counter()
        self.seconds.append(now - self._last)
        self.sizes.append(_size_of(self._folder))
        self._last = time.perf_counter()


def _size_of(folder: Path) -> int:
    """Return the bytes of segments; files and folders may go meanwhile."""
    total = 0
    for here, _, names in os.walk(folder):  # passes over folders that are gone
        for name in names:
            if name.endswith(".safetensors"):
                with suppress(FileNotFoundError):
                    total += Path(here, name).stat().st_size
    return total


def fit_of(
    name: str, make: Callable[[str], Checkpoint] | None, options: SimpleNamespace, size: ModelSize | None = None
) -> DifferentialFigure:
    """Run one fit; `make` gets the URL of its checkpoints."""
    size = size or replace(ModelSize(), model_dim=options.differential_dim)
    steps = options.differential_steps
    with tempfile.TemporaryDirectory(prefix="moe-ckpt-bench-") as folder, quiet_lightning():
        watch, checkpoint = StepTimes(Path(folder)), None if make is None else make(f"{folder}/run")
        trainer = bench_trainer(
            accelerator=accelerator_for(options.accelerator),
            max_steps=steps,
            enable_checkpointing=checkpoint is not None,
            callbacks=[watch, *([] if checkpoint is None else [checkpoint])],
        )
        trainer.fit(BenchModel(size), random_tokens(size, steps))
        seconds = statistics.median(watch.seconds[len(watch.seconds) // 4 :])
        if checkpoint is None:
            return DifferentialFigure(what=name, seconds=seconds)
        report = checkpoint.report
        return DifferentialFigure(
            what=name,
            seconds=seconds,
            step_nbytes=report.nbytes_captured / report.steps,
            durable_nbytes=report.nbytes_persisted / report.steps,
            folder_nbytes=max(watch.sizes),
            folder_sizes=watch.sizes,
            dense_nbytes=report.dense_nbytes,
            reserved_nbytes=report.reserved_nbytes.get("host", 0),
        )


def applied(options: SimpleNamespace, lengths: Sequence[int] = _LENGTHS) -> list[DifferentialFigure]:
    """Apply so many differences to a state in each of three ways."""
    numel = options.differential_elements
    state_U8, layout = laid_out(
        {
            "full/w/0/present": torch.ones(1, dtype=torch.uint8),
            "full/w/0/step": torch.ones(1),
            **{f"full/w/0/{name}": torch.rand(numel) for name in _NAMES},
        }
    )
    said = {"outcome": {"consumed": {"settings": [asdict(_SETTINGS)], "others": {}}}}
    difference = Difference(*laid_out({"delta/w/0/gradient": torch.randn(numel)}), said)
    param = torch.nn.Parameter(torch.rand(numel))
    param.grad = torch.randn(numel)
    optimizer = torch.optim.AdamW([param], lr=1e-3, foreach=False)

    def one_at_a_time(length: int) -> None:
        for _ in range(length):
            fold(state_U8, layout, [difference])

    def by_torch(length: int) -> None:
        for _ in range(length):
            optimizer.step()

    figures: list[DifferentialFigure] = []
    for length in lengths:
        ways = {
            "one pass": lambda length=length: fold(state_U8, layout, [difference] * length),
            "a pass each": lambda length=length: one_at_a_time(length),
            "torch.optim.AdamW": lambda length=length: by_torch(length),
        }
        costs = in_turns(ways, options.differential_repeats)
        figures += [DifferentialFigure(what=way, length=length, seconds=cost.wall) for way, cost in costs.items()]
    return figures


def laid_out(tensors: dict[str, Tensor]) -> tuple[Tensor, SegmentLayout]:
    """A file with these tensors: its bytes, as in memory, and its layout."""
    kinds = [(tensor.dtype, tuple(tensor.shape)) for tensor in tensors.values()]
    layout = SegmentLayout.of_columns([NameColumns.of([*tensors])], KindColumns.of(kinds), metadata={})
    memory_U8 = torch.zeros(layout.nbytes, dtype=torch.uint8)
    for name, tensor in tensors.items():
        layout.view(memory_U8, name).copy_(tensor)
    return memory_U8, layout
