"""Shows in Lightning's loggers how experts are used and what checkpoints cost.

Values go to the loggers directly, in the row of the step that they belong to: what is logged through the module is
part of every step's journal, and Lightning repeats it in rows in which it was not measured. Only `moe/replaying` goes
through the module, for the progress bar.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lightning_moe_ckpt import _lightning
from lightning_moe_ckpt.callbacks._base import CheckpointCallback
from lightning_moe_ckpt.callbacks._loads import LayerLoads
from lightning_moe_ckpt.errors import ConfigurationError
from lightning_moe_ckpt.parallel import ParallelGroups
from lightning_moe_ckpt.session import Report

REPLAYING = "moe/replaying"


class ExpertLoadMonitor(Callback):
    """Logs the load of every MoE layer and, beside a checkpoint callback of this package, its figures.

    Of each layer, over the steps since the last row, summed over all ranks: `moe/load_skew/<layer>` (0: even, 1: one
    expert has all tokens), `moe/min_share/<layer>` and `moe/max_share/<layer>` (of the tokens processed, the expert
    with fewest and most) and, where the layer knows it, `moe/dropped_share/<layer>` (over capacity, of all routed).
    Tokens count once per training forward: under accumulation all of a step, under activation checkpointing not
    again. A layer that processed nothing is left out.

    Of checkpoints, on rank 0: `moe/stall_seconds/<cause>` and `moe/stall_seconds/all` (per step, over the steps since
    the last row), `moe/nbytes_per_step`, `moe/window`, `moe/generations_complete`, `moe/generations_committed`, and
    `moe/replaying`: 1 in the row of a step that a resumed run repeats, also in the progress bar. A resumed run counts
    from where it resumes.

    Costs one small collective per row and none in other steps. Counts are read beside those that order checkpoints,
    and change nothing there.

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
        """The newest row, on rank 0; also without any logger."""
        self._loads: LayerLoads | None = None
        self._checkpoint: CheckpointCallback | None = None
        self._report: Report | None = None
        self._step = 0
        self._replaying = self._shown = False

    # -- hooks

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        groups = getattr(trainer.strategy, "groups", None)
        ep_size = groups.ep_size if isinstance(groups, ParallelGroups) else 1
        self._loads = LayerLoads(pl_module, ep_size=ep_size, device=trainer.strategy.root_device)
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        self._checkpoint = next((c for c in callbacks if isinstance(c, CheckpointCallback)), None)
        self._report = None if self._checkpoint is None else self._checkpoint.report
        self._step, self._shown, self.latest = trainer.global_step, False, {}

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        # Asked before the step: after the last replayed one nothing is frozen any more.
        self._replaying = self._checkpoint is not None and self._checkpoint.replaying

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self._step:
            return  # accumulated only
        self._step = trainer.global_step
        if self._replaying != self._shown or self._replaying:
            pl_module.log(REPLAYING, float(self._replaying), prog_bar=True, logger=False)
            self._shown = self._replaying
        every = self.every_n_steps or int(trainer.log_every_n_steps)  # type: ignore[attr-defined]
        if every and self._step % every == 0:
            self._log(trainer, self._row(trainer))
        elif self._replaying:
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
        loads = self._loads.read()
        if not trainer.is_global_zero:
            return {}
        row = {f"moe/{name}/{load.layer}": value for load in loads for name, value in load.values().items()}
        if self._checkpoint is not None and self._report is not None:
            before, self._report = self._report, self._checkpoint.report
            row |= {**_checkpoint_values(self._report, before), REPLAYING: float(self._replaying)}
        self.latest = row
        return row

    def _log(self, trainer: Trainer, row: dict[str, float]) -> None:
        if not row:
            return
        for logger in trainer.loggers:
            logger.log_metrics(row, step=_lightning.logging_step(trainer))

    def _remove(self) -> None:
        if self._loads is not None:
            self._loads.remove()
        self._loads = self._checkpoint = self._report = None


def _checkpoint_values(now: Report, before: Report) -> dict[str, float]:
    steps = max(1, now.steps - before.steps)
    stalls = {
        f"moe/stall_seconds/{cause}": (seconds - before.stall_seconds.get(cause, 0.0)) / steps
        for cause, seconds in now.stall_seconds.items()
    }
    return {
        **stalls,
        "moe/stall_seconds/all": sum(stalls.values()),
        "moe/nbytes_per_step": now.nbytes_per_step,
        "moe/window": now.window,
        "moe/generations_complete": now.generations_complete,
        "moe/generations_committed": now.generations_committed,
    }
