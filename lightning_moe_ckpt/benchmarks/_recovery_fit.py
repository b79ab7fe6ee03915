"""Run one attempt of a fit that is killed or resumed, and note the times at which it got to each step."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, seed_everything
from typing_extensions import override

from lightning_moe_ckpt.benchmarks._benchmark import Accelerator
from lightning_moe_ckpt.benchmarks._fits import (
    BenchModel,
    ModelSize,
    StepLines,
    bench_trainer,
    own_memory,
    quiet_lightning,
    random_tokens,
)
from lightning_moe_ckpt.benchmarks._peers import DcpCheckpoint, MeteredCheckpoint
from lightning_moe_ckpt.callbacks import (
    DenseCheckpoint,
    PartialExpertCheckpoint,
    SelectiveExpertCheckpoint,
    SparseCheckpoint,
)
from lightning_moe_ckpt.testing import Attempt
from lightning_moe_ckpt.testing._records import JsonLines

RecoverySystem = Literal["none", "sparse", "dense", "partial", "selective", "dcp", "lightning"]
OWN = DenseCheckpoint | SparseCheckpoint | PartialExpertCheckpoint | SelectiveExpertCheckpoint
_SHARE_K = 4
"""Experts per layer that partial checkpoints take, of 16."""
RecoveryLoss = Literal["process", "node", "cluster"]
"""A loss is that of one process, with it of its node's memory, or of the memory of every node."""
Precision = Literal["32-true", "bf16-mixed"]


@dataclass(frozen=True, kw_only=True)
class RecoveryFit:
    """A run that is killed and resumed; picklable. Each rank is on a node of its own."""

    system: RecoverySystem
    loss: RecoveryLoss
    size: ModelSize
    every: int
    """Steps between two checkpoints; the window of sparse ones."""
    max_steps: int
    memory: str
    """Folder on a tmpfs with a folder per node, which is that node's shared memory."""
    accelerator: Accelerator = "cpu"
    deterministic: bool = False
    """Argument of the Trainer, which warns of kernels that are not."""
    precision: Precision = "32-true"

    def __call__(self, attempt: Attempt) -> dict[str, Any]:
        """Run an attempt; return when it began, and what the callback says about its restore."""
        begun, is_killed = time.monotonic(), attempt.rank == attempt.world_size - 1
        loses_memory = self.loss == "cluster" or (self.loss == "node" and is_killed)
        own_memory(f"{self.memory}/node{attempt.rank}", lost=attempt.index > 0 and loses_memory)
        folder = Path(attempt.url.removeprefix("file://"))
        first = newest_step(folder) if self.system == "dcp" else 0
        checkpoint = self._checkpoint(attempt, folder, first)
        times = StepTimes(attempt.records.with_suffix(".times"), first, checkpoint)
        with quiet_lightning():
            trainer = bench_trainer(
                accelerator=self.accelerator,
                devices=attempt.world_size,
                callbacks=attempt.callbacks(*([checkpoint] if checkpoint is not None else []), times),
                max_steps=self.max_steps - first,
                deterministic="warn" if self.deterministic else None,
                precision=self.precision,
            )
            torch.manual_seed(0)
            model = BenchModel(self.size)
            seed_everything(attempt.seed, verbose=False)  # another in every attempt: what is not restored shows
            data = random_tokens(self.size, attempt.world_size * (self.max_steps + 1))
            trainer.fit(model, data, ckpt_path=self._ckpt_path(folder))
        return {"begun": begun, **_report(checkpoint)}

    def _checkpoint(self, attempt: Attempt, folder: Path, first: int) -> Callback | None:
        if self.system == "sparse":
            return SparseCheckpoint(attempt.url, window=self.every, overhead_target=None)
        if self.system == "dense":
            return DenseCheckpoint(attempt.url, every_n_steps=self.every, overhead_target=None)
        if self.system == "partial":
            return PartialExpertCheckpoint(
                attempt.url, every_n_steps=self.every, k=_SHARE_K, plt_budget=None, overhead_target=None
            )
        if self.system == "selective":
            return SelectiveExpertCheckpoint(attempt.url, every_n_steps=self.every, overhead_target=None)
        if self.system == "dcp":
            return DcpCheckpoint(folder, every_n_steps=self.every, first_step=first)
        return MeteredCheckpoint(folder, every_n_train_steps=self.every) if self.system == "lightning" else None

    def _ckpt_path(self, folder: Path) -> str | None:
        if self.system != "lightning":
            return None
        files = sorted(folder.glob("*.ckpt"), key=lambda path: path.stat().st_mtime)
        return str(files[-1]) if files else None


def newest_step(folder: Path) -> int:
    """Return the newest step of whole checkpoints in `folder`, 0 if there is none. Their metadata is written last."""
    return max((int(path.parent.name) for path in folder.glob("*/.metadata")), default=0)


class StepTimes(StepLines):
    """Append a line at every step, with what checkpoints have cost so far.

    Args:
        path: file of the lines.
        first_step: added to `global_step`.
        checkpoint: asked for that.
    """

    def __init__(self, path: Path, first_step: int, checkpoint: Callback | None) -> None:
        self.first_step, self._checkpoint, self.lines = first_step, checkpoint, JsonLines(path)

    @override
    def values(self) -> dict[str, Any]:
        return {"costs": _costs(self._checkpoint)}


def _costs(checkpoint: Callback | None) -> tuple[float, int]:
    """Return seconds of the training thread and bytes saved so far; summed over the ranks, no byte counts twice."""
    if isinstance(checkpoint, OWN):
        return checkpoint.report.overhead_seconds, checkpoint.report.nbytes_captured
    if isinstance(checkpoint, DcpCheckpoint | MeteredCheckpoint):
        return checkpoint.seconds, checkpoint.nbytes
    return 0.0, 0


def _report(checkpoint: Callback | None) -> dict[str, Any]:
    known = ("resumed_from", "restored_from", "restore_seconds")
    if not isinstance(checkpoint, OWN):
        return {"resumed_from": None, "restored_from": {}, "restore_seconds": None, "lost_tokens": 0}
    lost = checkpoint.report.lost
    return {**{name: getattr(checkpoint.report, name) for name in known}, "lost_tokens": lost.lost if lost else 0}
