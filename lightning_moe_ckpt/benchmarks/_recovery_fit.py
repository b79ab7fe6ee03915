"""Run one attempt of a fit that is killed or resumed, and note the times at which it got to each step.

Times are of the monotonic clock, which the processes of one machine share, so a kill in one attempt and a step in the next
can be subtracted.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from typing_extensions import override

from lightning_moe_ckpt.benchmarks._benchmark import Accelerator
from lightning_moe_ckpt.benchmarks._fits import (
    BenchModel,
    ModelSize,
    bench_trainer,
    lines_of,
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

    def __call__(self, attempt: Attempt) -> dict[str, Any]:
        """Run an attempt; return the times of steps on this rank, and what the callback says about its restore."""
        begun, is_killed = time.monotonic(), attempt.rank == attempt.world_size - 1
        loses_memory = self.loss == "cluster" or (self.loss == "node" and is_killed)
        own_memory(f"{self.memory}/node{attempt.rank}", lost=attempt.index > 0 and loses_memory)
        folder = Path(attempt.url.removeprefix("file://"))
        first = newest_step(folder) if self.system == "dcp" else 0
        checkpoint = self._checkpoint(attempt, folder, first)
        path = attempt.records.with_suffix(".times")
        times = StepTimes(path, first, checkpoint)
        with quiet_lightning():
            trainer = bench_trainer(
                accelerator=self.accelerator,
                devices=attempt.world_size,
                callbacks=attempt.callbacks(*([checkpoint] if checkpoint is not None else []), times),
                max_steps=self.max_steps - first,
                deterministic="warn" if self.deterministic else None,
            )
            torch.manual_seed(0)
            model = BenchModel(self.size)
            seed_everything(attempt.seed, verbose=False)  # another in every attempt: what is not restored shows
            data = random_tokens(self.size, attempt.world_size * (self.max_steps + 1))
            trainer.fit(model, data, ckpt_path=self._ckpt_path(folder))
        return {"begun": begun, **read_times(path), **_report(checkpoint)}

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


class StepTimes(Callback):
    """Append a line at every step.

    Args:
        path: file of the lines.
        first_step: added to `global_step`.
        checkpoint: asked at every step for what it has cost so far.
    """

    def __init__(self, path: Path, first_step: int, checkpoint: Callback | None) -> None:
        self._first, self._checkpoint, self._lines = first_step, checkpoint, JsonLines(path)
        self._started = False

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._write("ready", trainer)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *args: object) -> None:
        if not self._started:
            self._started = True
            self._write("started", trainer)

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: object) -> None:
        self._write("step", trainer, _costs(self._checkpoint))

    def _write(self, what: str, trainer: Trainer, costs: tuple[float, int] | None = None) -> None:
        step = self._first + trainer.global_step
        self._lines.write({"what": what, "step": step, "at": time.monotonic(), "costs": costs})


def read_times(path: Path) -> dict[str, Any]:
    """Return when the state was there, when and at which step the first batch was, and when each step was done.

    Also, by step, what checkpoints had cost by then: seconds of the training thread, and bytes.
    """
    ready, started = lines_of(path, "ready", "started")
    steps = {line["step"]: line for line in lines_of(path, "step")}
    done, costs = ({step: line[key] for step, line in steps.items()} for key in ("at", "costs"))
    return {"ready": ready["at"], "started": started["at"], "from": started["step"], "done": done, "costs": costs}


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
