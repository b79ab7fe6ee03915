"""Checkpoints that `moe-ckpt bench overhead` compares, by name: policies of this package, and other systems.

Other systems are callbacks that note their cost to the training thread. Each saves model, optimizer and schedulers in the
way its documentation shows first. Lightning's own, `torch.save` and torch's Distributed Checkpoint are here wherever this
package is; DLRover and lm-resiliency are compared where they are installed, and nothing here needs them.

Sources: DLRover Flash Checkpoint, github.com/intelligent-machine-learning/dlrover, `docs/blogs/flash_checkpoint.md`; lm-resiliency's
in-memory checkpoints after Gemini (2023), github.com/LMResiliency/lm-resiliency, `docs/gemini.md`.
"""

from __future__ import annotations

import importlib
import logging
import os
import shutil
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.distributed import HashStore  # type: ignore[attr-defined]  # exported at run time only
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save
from typing_extensions import override

from lightning_moe_ckpt.callbacks import (
    CheckpointArguments,
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
        self._folder, self._every, self._first = folder, every_n_steps, first_step
        self.seconds, self.nbytes = 0.0, 0
        """Training-thread time in saves so far, and the bytes saved on one rank: all ranks have the same state."""

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = self._first + trainer.global_step
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
        torch.save({"step": step, **_state_dicts(trainer, module)}, staged)
        return staged.replace(self._folder / "newest.pt").stat().st_size


class DcpCheckpoint(SavingEvery):
    """`torch.distributed.checkpoint.async_save` of model, optimizer and scheduler, one save at a time, one folder per step."""

    _group: dist.ProcessGroup | None = None
    _saving: Future[Any] | None = None

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
    def save(self, step: int, trainer: Trainer, module: LightningModule) -> int:
        self._wait()
        self._forget_old(trainer)
        state = self._state(trainer, module)
        saving = async_save(state, checkpoint_id=self._folder / str(step), process_group=self._group)
        assert isinstance(saving, Future)  # the other kind of answer is for stagers
        self._saving = saving
        return _nbytes(state) if trainer.global_rank == 0 else 0

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


class DlroverCheckpoint(SavingEvery):
    """DLRover's Flash Checkpoint into shared memory (`StorageType.MEMORY`), one rank, without its agent; the folder stays empty."""

    _saver: Any = None
    _memory: Any = None

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _own_world()
        self._name = f"moe-ckpt-bench-{os.getpid()}"
        os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        os.environ["TORCHELASTIC_RUN_ID"] = self._name  # of its memory
        logging.disable(logging.WARNING)
        ddp: Any = importlib.import_module("dlrover.trainer.torch.flash_checkpoint.ddp")
        self._saver, self._memory = ddp.DdpCheckpointer(str(self._folder)), ddp.StorageType.MEMORY

    @override
    def save(self, step: int, trainer: Trainer, module: LightningModule) -> int:
        state = {"step": step, **_state_dicts(trainer, module)}
        self._saver.save_checkpoint(step, state, storage_type=self._memory)
        return _nbytes(state)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        for path in Path("/dev/shm").glob(f"{self._name}*"):  # noqa: S108  # it leaves its memory behind
            path.unlink(missing_ok=True)


class LmResiliencyCheckpoint(SavingEvery):
    """lm-resiliency's in-memory checkpoint on a single rank, without replicas; copies until the next optimizer step."""

    _keeper: Any = None

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _own_world()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            package: Any = importlib.import_module("lm_resiliency")
            experimental: Any = importlib.import_module("lm_resiliency.experimental")
        config = package.InMemoryCkptConfig(
            enable=True, interval=self._every, disk_flush_interval=0, disk_folder=str(self._folder), run_id="bench",
            verify_integrity=True, pin_memory=False, replication_jump=1,
        )  # fmt: skip
        self._keeper = experimental.InMemoryCheckpointManager(config)

    @override
    def save(self, step: int, trainer: Trainer, module: LightningModule) -> int:
        state = _state_dicts(trainer, module)
        self._keeper.save(state, step)
        return _nbytes(state)

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: object) -> None:
        began = time.perf_counter()
        self._keeper.maybe_wait()
        self.seconds += time.perf_counter() - began


PEERS: dict[str, Callable[..., Callback]] = {
    "lightning": lambda folder, every_n_steps: MeteredCheckpoint(folder, every_n_train_steps=every_n_steps),
    "torch.save": TorchSave,
    "dcp": DcpCheckpoint,
    "dlrover": DlroverCheckpoint,
    "lm-resiliency": LmResiliencyCheckpoint,
}
"""Callbacks by system; each takes a folder and `every_n_steps`."""
ONE_RANK = {"dlrover": "dlrover", "lm-resiliency": "lm_resiliency"}
"""Systems that need not be there, with their modules; they make a process group of one."""


def installed(system: str) -> bool:
    """Return whether a peer can be imported."""
    return system not in ONE_RANK or find_spec(ONE_RANK[system]) is not None


def _own_world() -> None:
    """Make a process group of this process alone, as these systems want."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)


def _state_dicts(trainer: Trainer, module: LightningModule) -> dict[str, Any]:
    return {
        "model": module.state_dict(),
        "optimizer": trainer.optimizers[0].state_dict(),
        "schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
    }


def _nbytes(state: object) -> int:
    if isinstance(state, torch.Tensor):
        return state.nbytes
    return sum(_nbytes(each) for each in state.values()) if isinstance(state, dict) else 0


@dataclass(frozen=True, slots=True)
class Variant:
    """Checkpoints of a fit."""

    system: str
    """Policy or peer; `none` for no checkpoints, `monitored` for sparse ones beside an `ExpertLoadMonitor`."""
    every: int = 0
    """Steps between two checkpoints; the window of sparse ones."""
    memory_only: bool = False
    """Whether storage rests."""
    shard_optimizer: bool = False
    """Whether each rank keeps the optimizer's state for a piece of every parameter."""
    strategy: str = ""
    """`ddp`, or the `gradient_reduction` of `MoEStrategy`; empty for what trains beside checkpoints."""

    @property
    def name(self) -> str:
        """Name on the command line."""
        if self.strategy:
            return self.strategy
        if self.shard_optimizer:
            return f"zero1-{replace(self, shard_optimizer=False).name}"
        return f"{self.system}{self.every or ''}{'-memory' if self.memory_only and self.system not in PEERS else ''}"

    @property
    def captures_always(self) -> bool:
        """Whether every step takes something."""
        return self.every < 2 or self.system in ("sparse", "monitored", "differential")

    def skips(self, step: int) -> bool:
        """Return whether nothing is taken at this boundary."""
        return not self.captures_always and step % self.every > 0


_POLICIES = [
    *(Variant("sparse", every, memory) for memory in (True, False) for every in (4, 8)),
    *(Variant("dense", every, memory) for memory in (True, False) for every in (1, 4)),
    *(Variant(system, 1, memory) for memory in (True, False) for system in ("partial", "selective")),
]
_PEER_VARIANTS = [
    *(Variant("dlrover", every, memory_only=True) for every in (1, 4)),
    Variant("lm-resiliency", 4, memory_only=True),
    *(Variant(system, 4) for system in ("lightning", "torch.save", "dcp")),
]
_MORE = [
    *(Variant(system, 4, memory) for system in ("partial", "selective") for memory in (True, False)),
    Variant("monitored", 8),
    *(Variant("differential", 64, memory) for memory in (True, False)),
    Variant("none", shard_optimizer=True),
    *(Variant(system, every, True, True) for system, every in (("sparse", 8), ("dense", 1), ("dense", 4))),
]
VARIANTS = {each.name: each for each in (Variant("none"), *_POLICIES, *_PEER_VARIANTS, *_MORE)}
"""All variants by name."""
_BROKEN_DOWN = ["sparse8", "dense1", "dense4", "partial1", "selective1"]


def chosen_variants(options: SimpleNamespace) -> list[Variant]:
    """Return the variants to measure, training without checkpoints first.

    Raises:
        ConfigurationError: `--variants` names an unknown variant, or a system that is not installed.
    """
    usual = [VARIANTS[name] for name in _BROKEN_DOWN] if options.breakdown else _POLICIES
    peers = [
        peer
        for peer in _PEER_VARIANTS
        if installed(peer.system) and (options.ranks == 1 or peer.system not in ONE_RANK)
    ]
    names = [name for name in (options.variants or "").split(",") if name not in ("", "none")]
    if unknown := [name for name in names if name not in VARIANTS]:
        raise ConfigurationError(f"`--variants {','.join(unknown)}`: there are {', '.join(VARIANTS)}.")
    if missing := [name for name in names if not installed(VARIANTS[name].system)]:
        raise ConfigurationError(f"`--variants {','.join(missing)}`: not installed. Install it, or leave it out.")
    return [VARIANTS["none"], *([VARIANTS[name] for name in names] or [*usual, *peers])]


def checkpoint_of(variant: Variant, url: str) -> Callback | None:
    """Return the callback that saves to `url`, a `file://` for other systems; `None` for no checkpoints."""
    system, every = variant.system, variant.every
    if system in PEERS:
        folder = Path(url.removeprefix("file://"))
        folder.mkdir(parents=True, exist_ok=True)
        return PEERS[system](folder, every_n_steps=every)
    shared: dict[str, Any] = {"resume": "never", **shared_arguments(memory_only=variant.memory_only)}
    if system in ("sparse", "monitored"):
        return SparseCheckpoint(url, window=every, **shared)
    policies = {
        "dense": DenseCheckpoint,
        "differential": DifferentialCheckpoint,
        "partial": PartialExpertCheckpoint,
        "selective": SelectiveExpertCheckpoint,
    }
    return policies[system](url, every_n_steps=every, **shared) if system in policies else None


def shared_arguments(*, memory_only: bool) -> dict[str, Any]:
    """Return arguments for all checkpoint callbacks: in memory they go as fast as they can, as other systems do.

    The measuring callback has clocks of its own process.
    """
    target = (
        {"overhead_target": None} if memory_only and "overhead_target" in CheckpointArguments.__annotations__ else {}
    )
    return {"untouched": ["callback.*"], **target}
