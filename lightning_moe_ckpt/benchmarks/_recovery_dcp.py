"""What a user of torch's Distributed Checkpoint writes: asynchronous saves every so many steps, and a load at start."""

from __future__ import annotations

import shutil
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save
from typing_extensions import override

_KEEP = 2


def newest_step(folder: Path) -> int:
    """Of the whole checkpoints in `folder`; 0 if there is none. Metadata is what the coordinator writes last."""
    return max((int(path.parent.name) for path in folder.glob("*/.metadata")), default=0)


class DcpCheckpoint(Callback):
    """`torch.distributed.checkpoint.async_save` of model, optimizer and scheduler, one save at a time.

    Args:
        folder: where checkpoints go, one folder per step.
        every_n_steps: optimizer steps between two saves. A save that is still running holds up the next.
        first_step: the checkpoint to load at start, whose step is added to `global_step`; 0 for none.
    """

    def __init__(self, folder: Path, *, every_n_steps: int, first_step: int) -> None:
        self._folder, self._every, self._first = folder, every_n_steps, first_step
        self._group: dist.ProcessGroup | None = None
        self._saving: Future[Any] | None = None
        self.seconds, self.nbytes = 0.0, 0
        """Of the training thread in saves so far, and bytes that they saved; of one rank, as all have the same state."""

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if dist.is_initialized():
            self._group = dist.new_group(backend="gloo")  # saves run beside training
        if not self._first:
            return
        state = self._state(trainer, pl_module)
        load(state, checkpoint_id=self._folder / str(self._first), process_group=self._group)
        set_state_dict(
            pl_module, trainer.optimizers, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        for config, saved in zip(trainer.lr_scheduler_configs, state["schedulers"], strict=True):
            config.scheduler.load_state_dict(saved)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = self._first + trainer.global_step
        if step % self._every:
            return
        began = time.perf_counter()
        self._wait()
        self._forget_old(trainer)
        state = self._state(trainer, pl_module)
        saving = async_save(state, checkpoint_id=self._folder / str(step), process_group=self._group)
        assert isinstance(saving, Future)  # the other kind of answer is for stagers
        self._saving = saving
        self.seconds += time.perf_counter() - began
        if trainer.global_rank == 0:
            self.nbytes += _nbytes(state)

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._wait()

    def _state(self, trainer: Trainer, module: LightningModule) -> dict[str, Any]:
        model, optimizer = get_state_dict(module, trainer.optimizers)
        schedulers = [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs]
        return {"model": model, "optimizer": optimizer, "schedulers": schedulers}

    def _wait(self) -> None:
        if self._saving is not None:
            self._saving.result()
            self._saving = None

    def _forget_old(self, trainer: Trainer) -> None:
        if trainer.global_rank == 0:
            for path in sorted(self._folder.glob("*/.metadata"), key=lambda path: int(path.parent.name))[: 1 - _KEEP]:
                shutil.rmtree(path.parent)


def _nbytes(state: object) -> int:
    """Of all tensors in it."""
    if isinstance(state, torch.Tensor):
        return state.nbytes
    return sum(_nbytes(each) for each in state.values()) if isinstance(state, dict) else 0
