"""Log the load of experts and the cost of checkpoints, and show replay in the progress bar.

Values go to the loggers directly, in the row of their step. Values logged through the module would be part of every
step's journal, and Lightning would repeat them in rows in which they were not measured.
"""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lightning_moe_ckpt import _lightning
from lightning_moe_ckpt._lightning_progress import ProgressNote
from lightning_moe_ckpt.callbacks._base import CheckpointCallback
from lightning_moe_ckpt.callbacks._figures import CheckpointFigures
from lightning_moe_ckpt.callbacks._loads import LayerLoads
from lightning_moe_ckpt.errors import ConfigurationError
from lightning_moe_ckpt.parallel import ParallelGroups

REPLAYING = "moe/replaying"


class ExpertLoadMonitor(Callback):
    """Log the load of every MoE layer and, beside a checkpoint callback of this package, its figures.

    Figures of each layer, over the steps since the last row and over all ranks: `moe/load_skew/<layer>` (0: even, 1: one
    expert has all tokens), `moe/min_share/<layer>` and `moe/max_share/<layer>` (shares of processed tokens of the experts
    with fewest and most) and, if the layer counts drops, `moe/dropped_share/<layer>` (over capacity, of all routed).
    Tokens count once per training forward. Accumulation adds up all forwards of a step; forwards that activation
    checkpointing repeats do not count. A layer that processed nothing is left out. If the first step shows that a layer's
    tokens are not counted as its experts process them, that layer is left out and a warning names it.

    Figures of checkpoints, over the steps since the last row:

    * `moe/stall_seconds/<cause>` and `moe/stall_seconds/all`: seconds per step that the training thread of rank 0 waited;
      `moe/stall_seconds/slowest_rank`: the same of the rank that waited longest; `moe/stall_share`: share of wall time;
    * `moe/device_stall_seconds/<cause>`, `/all` and `/slowest_rank`: the same for training's stream on a CUDA device; 0
      without one. This is what training loses there: waiting while the device has work costs nothing;
    * `moe/overhead_seconds`: seconds per step of the training thread of rank 0 in hooks of checkpoints, waits included;
    * `moe/captured_nbytes_per_step` and `moe/persisted_nbytes_per_second`: bytes that all ranks copied to host memory
      per step, and made durable per second;
    * `moe/window` and `moe/window_position`: steps per window, and steps taken of the current window;
    * `moe/generation/<tier>`: newest generation that is complete in a tier (such as `storage`); `moe/lag_steps/<tier>`:
      steps by which training is ahead of it, negative in replay; `moe/generations_complete` and
      `moe/generations_committed`: numbers of generations; `moe/generations_skipped/<tier>`: generations that a busy tier
      did not get; `moe/generations_failed/<tier>`: generations that some rank failed to keep there. If this grows with
      every generation, the tier is lost, as other nodes are to a rank whose connection to them broke;
    * `moe/windows_skipped`: windows that were not begun; `moe/windows_missed`: newest windows in a row that gave no
      generation, for any reason;
    * `moe/replaying`: 1 in the row of a step that a resumed run repeats, else 0. Every repeated step has a row (unless
      the logger's file has one of that step already), and the progress bar shows `replay=3/6`.

    A resumed run counts from where it resumes. Each row costs one small collective, and so does the first step; other
    steps cost none. Reading the counts does not change the order of checkpoints.

    Args:
        every_n_steps: optimizer steps between two rows; `None` for `Trainer(log_every_n_steps=...)`.

    Raises:
        ConfigurationError: an argument is out of range.
    """

    def __init__(self, every_n_steps: int | None = None) -> None:
        if every_n_steps is not None and every_n_steps < 1:
            raise ConfigurationError(f"`ExpertLoadMonitor(every_n_steps={every_n_steps})` must be 1 or more, or None.")
        self.every_n_steps = every_n_steps
        self.latest: dict[str, float] = {}
        """Newest row, on rank 0; it exists without any logger too."""
        self._loads: LayerLoads | None = None
        self._checkpoint: CheckpointCallback | None = None
        self._figures: CheckpointFigures | None = None
        self._note: ProgressNote | None = None
        self._step = 0
        self._replay: str | None = None
        """Position of the current batch's step among the steps to replay."""

    # -- hooks

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        groups = getattr(trainer.strategy, "groups", None)
        ep_size = groups.ep_size if isinstance(groups, ParallelGroups) else 1
        self._loads = LayerLoads(pl_module, ep_size=ep_size, device=trainer.strategy.root_device)
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        self._checkpoint = next((c for c in callbacks if isinstance(c, CheckpointCallback)), None)
        self._step, self.latest = trainer.global_step, {}
        if self._checkpoint is not None:
            self._figures = CheckpointFigures(self._checkpoint.report, self._step)
        self._note = ProgressNote(trainer, "replay", lambda: self._replay)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        # Ask before the step: after the last replayed step the answer has changed.
        self._replay = None
        if self._checkpoint is not None and self._checkpoint.replaying:
            report = self._checkpoint.report
            self._replay = f"{report.replayed_steps + 1}/{report.replay_steps}"
        elif self._loads is not None:
            self._loads.watch()

    @override
    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        if self._loads is not None and self._replay is None:
            self._loads.judge()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self._step:
            return  # gradients are still accumulating
        self._step = trainer.global_step
        every = self.every_n_steps or int(trainer.log_every_n_steps)  # type: ignore[attr-defined]
        if every and self._step % every == 0:
            self._log(trainer, self._row(trainer))
        elif self._replay is not None:
            self._log(trainer, {REPLAYING: 1.0})

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._remove()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._remove()

    # -- private

    def _row(self, trainer: Trainer) -> dict[str, float]:
        assert self._loads is not None
        report = self._checkpoint.report if self._checkpoint is not None else None
        own = self._figures.own(report) if self._figures is not None and report is not None else ()
        loads, ranks = self._loads.read(own)
        row = {f"moe/{name}/{load.layer}": value for load in loads for name, value in load.values().items()}
        if self._figures is not None and report is not None:
            row |= {**self._figures.row(report, self._step, ranks), REPLAYING: float(self._replay is not None)}
        if not trainer.is_global_zero:
            return {}
        self.latest = row
        return row

    def _log(self, trainer: Trainer, row: dict[str, float]) -> None:
        if not row:
            return
        for logger in trainer.loggers:
            logger.log_metrics(row, step=_lightning.logging_step(trainer))

    def _remove(self) -> None:
        for each in (self._loads, self._note):
            if each is not None:
                each.remove()
        self._loads = self._checkpoint = self._figures = self._note = self._replay = None
