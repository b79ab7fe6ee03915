"""Checkpoints that `moe-ckpt bench overhead` compares, by name: policies of this package, and other systems.

Other systems are callbacks that note their cost to the training thread. Each saves model, optimizer and schedulers in the
way its documentation shows first: Lightning's own, `torch.save` and torch's Distributed Checkpoint, which are here wherever this
package is.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save
from typing_extensions import override

from lightning_moe_ckpt.callbacks import (
    DenseCheckpoint,
    DifferentialCheckpoint,
    PartialExpertCheckpoint,
    SelectiveExpertCheckpoint,
    SparseCheckpoint,
)
from lightning_moe_ckpt.errors import ConfigurationError


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


PEERS: dict[str, Callable[..., Callback]] = {
    "lightning": lambda folder, every_n_steps: MeteredCheckpoint(folder, every_n_train_steps=every_n_steps),
    "torch.save": TorchSave,
    "dcp": DcpCheckpoint,
}
"""Callbacks by system; each takes a folder and `every_n_steps`."""


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


@dataclass(frozen=True, slots=True)
class Variant:
    """Checkpoints of a fit."""

    system: str
    """Policy or peer; `none` for no checkpoints, `monitored` for sparse ones beside an `ExpertLoadMonitor`."""
    every: int = 0
    """Steps between two checkpoints; the window of sparse ones. 0 for the default."""
    memory_only: bool = False
    """Whether storage rests."""
    shard_optimizer: bool = False
    """Whether each rank keeps the optimizer's state for a piece of every parameter."""
    strategy: str = ""
    """`ddp`, or the `gradient_reduction` of `MoEStrategy`; empty for trainings beside checkpoints."""

    @property
    def name(self) -> str:
        """Name on the command line."""
        if self.strategy:
            return self.strategy
        if self.shard_optimizer:
            return f"zero1-{replace(self, shard_optimizer=False).name}"
        return f"{self.system}{self.every or ''}{'-memory' if self.memory_only and self.system not in PEERS else ''}"

    def skips(self, step: int) -> bool:
        """Return whether nothing is taken at this boundary."""
        return not (self.every < 2 or self.system in ("sparse", "monitored", "differential")) and step % self.every > 0


_POLICIES = [
    *(Variant("sparse", every, memory) for memory in (True, False) for every in (4, 8)),
    *(Variant("dense", every, memory) for memory in (True, False) for every in (1, 4)),
    *(Variant(system, 1, memory) for memory in (True, False) for system in ("partial", "selective")),
]
_PEER_VARIANTS = [Variant(system, 4) for system in PEERS]
_MORE = [
    *(Variant(system, 4, memory) for system in ("partial", "selective") for memory in (True, False)),
    Variant("monitored", 8),
    *(Variant(system) for system in ("sparse", "dense")),
    *(Variant("differential", 64, memory) for memory in (True, False)),
    Variant("none", shard_optimizer=True),
    *(Variant(system, every, True, True) for system, every in (("sparse", 8), ("dense", 1), ("dense", 4))),
]
VARIANTS = {each.name: each for each in (Variant("none"), *_POLICIES, *_PEER_VARIANTS, *_MORE)}
"""All variants by name."""


def chosen_variants(options: SimpleNamespace) -> list[Variant]:
    """Return the variants to measure, no checkpoints first. Raises `ConfigurationError` if `--variants` names an unknown one."""
    names = [name for name in (options.variants or "").split(",") if name not in ("", "none")]
    if unknown := [name for name in names if name not in VARIANTS]:
        raise ConfigurationError(f"`--variants {','.join(unknown)}`: there are {', '.join(VARIANTS)}.")
    return [VARIANTS["none"], *([VARIANTS[name] for name in names] or [*_POLICIES, *_PEER_VARIANTS])]


def checkpoint_of(variant: Variant, url: str, **more: Any) -> Callback | None:
    """Return the callback that saves to `url`, a `file://` for other systems; `None` for no checkpoints. `more` goes to those of ours."""
    system, every = variant.system, variant.every
    if system in PEERS:
        folder = Path(url.removeprefix("file://"))
        folder.mkdir(parents=True, exist_ok=True)
        return PEERS[system](folder, every_n_steps=every)
    shared: dict[str, Any] = {"resume": "never", **shared_arguments(memory_only=variant.memory_only), **more}
    if system in ("sparse", "monitored"):
        return SparseCheckpoint(url, window=every or "auto", **shared)
    policies = {
        "dense": DenseCheckpoint,
        "differential": DifferentialCheckpoint,
        "partial": PartialExpertCheckpoint,
        "selective": SelectiveExpertCheckpoint,
    }
    return policies[system](url, **{"every_n_steps": every} if every else {}, **shared) if system in policies else None


def shared_arguments(*, memory_only: bool) -> dict[str, Any]:
    """Return arguments for all checkpoint callbacks: in memory they go as fast as they can, as other systems do.

    The measuring callback has clocks of its own process.
    """
    return {"untouched": ["callback.*"], **({"overhead_target": None} if memory_only else {})}
