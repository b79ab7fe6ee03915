"""Checkpoints of other systems as callbacks that note their cost to the training thread.

Each saves model, optimizer and schedulers in the way its documentation shows first: Lightning's own, `torch.save` and torch's
Distributed Checkpoint, which are here wherever this package is. `OTHERS` puts them beside policies in the fits of `bench overhead`.
"""

from __future__ import annotations

import shutil
import time
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save
from typing_extensions import override

from lightning_moe_ckpt.benchmarks._overhead import Variant


class SavingEvery(Callback):
    """Call `save` every so many optimizer steps and note the time of the training thread.

    Args:
        folder: place of what is saved.
        every_n_steps: optimizer steps between two saves. A save that is still running holds up the next.
        first_step: step of the checkpoint to begin with, which is added to `global_step`; 0 for none.
    """

    def __init__(self, folder: Path, *, every_n_steps: int, first_step: int = 0) -> None:
        self._folder, self._every = folder, every_n_steps
        self.first_step = first_step
        """Step of the checkpoint that the fit began with."""
        self.seconds, self.nbytes = 0.0, 0
        """Training-thread time in saves so far, and the bytes saved on one rank: all ranks have the same state."""

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = self.first_step + trainer.global_step
        if step % self._every:
            return
        began = time.perf_counter()
        self.nbytes += self.save(step, trainer, pl_module)
        self.seconds += time.perf_counter() - began

    def save(self, step: int, trainer: Trainer, module: LightningModule) -> int:
        """Save the state after `step`. Return the bytes that this rank wrote; 0 if another rank saves its state."""
        raise NotImplementedError


class TorchSave(SavingEvery):
    """`torch.save` of state dicts into a file that is renamed when it is whole. The newest stays."""

    @override
    def save(self, step: int, trainer: Trainer, module: LightningModule) -> int:
        if not trainer.is_global_zero:
            return 0
        staged = self._folder / "newest.staged"
        torch.save({"step": step, **state_dicts(trainer, module)}, staged)
        return staged.replace(self._folder / "newest.pt").stat().st_size


class DcpCheckpoint(SavingEvery):
    """`torch.distributed.checkpoint.async_save` of model, optimizer and scheduler, one save at a time, one folder per step."""

    _group: dist.ProcessGroup | None = None
    _saving: Future[Any] | None = None

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if dist.is_initialized():
            self._group = dist.new_group(backend="gloo")  # saves run beside training
        if not self.first_step:
            return
        state = self._state(trainer, pl_module)
        load(state, checkpoint_id=self._folder / str(self.first_step), process_group=self._group)
        set_state_dict(
            pl_module, trainer.optimizers, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        for config, saved in zip(trainer.lr_scheduler_configs, state["schedulers"], strict=True):
            config.scheduler.load_state_dict(saved)

    @override
    def save(self, step: int, trainer: Trainer, module: LightningModule) -> int:
        self._wait()
        self._forget_old(trainer)
        state = self._state(trainer, module)
        saving = async_save(state, checkpoint_id=self._folder / str(step), process_group=self._group)
        assert isinstance(saving, Future)  # the other kind of answer is for stagers
        self._saving = saving
        return nbytes_of(state) if trainer.global_rank == 0 else 0

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
            whole = sorted(self._folder.glob("*/.metadata"), key=lambda path: int(path.parent.name))
            for path in whole[:-1]:  # with the next, two stay
                shutil.rmtree(path.parent)


class MeteredCheckpoint(ModelCheckpoint):
    """Lightning's own callback, with notes of its cost."""

    seconds, nbytes = 0.0, 0

    @override
    def on_train_batch_end(self, trainer: Trainer, *args: Any, **options: Any) -> None:
        began, newest = time.perf_counter(), self.best_model_path
        super().on_train_batch_end(trainer, *args, **options)
        self.seconds += time.perf_counter() - began
        if trainer.is_global_zero and self.best_model_path != newest:
            with suppress(FileNotFoundError):  # written beside training
                self.nbytes += Path(self.best_model_path).stat().st_size


class _Beside(MeteredCheckpoint):
    """Lightning's own callback, whose files are written beside training."""

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        trainer.strategy.checkpoint_io = AsyncCheckpointIO(trainer.strategy.checkpoint_io)


def state_dicts(trainer: Trainer, module: LightningModule) -> dict[str, Any]:
    """Return the state dicts of model, optimizer and schedulers."""
    return {
        "model": module.state_dict(),
        "optimizer": trainer.optimizers[0].state_dict(),
        "schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
    }


def nbytes_of(state: object) -> int:
    """Return the bytes of all tensors in nested dicts."""
    if isinstance(state, torch.Tensor):
        return state.nbytes
    return sum(nbytes_of(each) for each in state.values()) if isinstance(state, dict) else 0


OTHERS = {
    each.name: each
    for each in (
        Variant("lightning", 4, make=lambda folder: _Beside(folder, every_n_train_steps=4)),
        Variant("torch.save", 4, make=lambda folder: TorchSave(folder, every_n_steps=4)),
        Variant("dcp", 4, make=lambda folder: DcpCheckpoint(folder, every_n_steps=4)),
    )
}
"""Other systems by name, for the option `others` of `_overhead.measure`."""
