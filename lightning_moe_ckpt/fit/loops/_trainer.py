"""Read a Trainer's state and arguments, and set a resumed run's, through private attributes."""

from __future__ import annotations

import copy
import itertools
import os
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor
from torch._dynamo import OptimizedModule

from lightning_moe_ckpt.fit.loops._progress import _OTHER_LOOPS
from lightning_moe_ckpt.journal import Unread
from lightning_moe_ckpt.parallel import ParallelGroups, build_groups

_SEED_VARIABLE = "PL_GLOBAL_SEED"
"""Environment variable in which `seed_everything` leaves the seed; Lightning seeds `DistributedSampler` from it."""


def take_precision(trainer: Trainer) -> dict[str, Any]:
    """Return the precision plugin's state for the journal, without reading a scaler's values on a device."""
    plugin = trainer.precision_plugin
    scaler: Any = getattr(plugin, "scaler", None)
    scale: Tensor | None = getattr(scaler, "_scale", None)
    if scale is None or not scale.is_cuda:
        return plugin.state_dict()
    # The scaler's `state_dict` calls these two, which would wait for the device.
    unread = {"get_scale": Unread(scale.clone()), "_get_growth_tracker": Unread(scaler._growth_tracker.clone())}
    for name, number in unread.items():
        setattr(scaler, name, lambda number=number: number)
    try:
        return plugin.state_dict()
    finally:
        for name in unread:
            delattr(scaler, name)


def take_buffer_sync(trainer: Trainer) -> bool | None:
    """Return whether DDP broadcasts buffers before the next forward; validation and accumulating batches turn this off."""
    found: bool | None = getattr(trainer.strategy.model, "require_forward_param_sync", None)
    return found


def restore_buffer_sync(trainer: Trainer, taken: bool | None) -> None:
    """Restore the result of `take_buffer_sync`."""
    if taken is not None:
        trainer.strategy.model.require_forward_param_sync = taken  # type: ignore[union-attr]


def takes_iterator(trainer: Trainer) -> bool:
    """Return whether the module fetches by itself: `training_step(self, dataloader_iter)`."""
    return is_param_in_hook_signature(trainer.lightning_module.training_step, "dataloader_iter", explicit=True)


def should_stop(trainer: Trainer) -> bool:
    """Return whether the run was stopped for good. An end by `max_time` does not count: a later run may have more time."""
    timers = [callback for callback in callbacks_of(trainer) if isinstance(callback, Timer)]
    return trainer.should_stop and all((timer.time_remaining() or 1.0) > 0 for timer in timers)


def use_clipping(trainer: Trainer, value: float | None, algorithm: str | None) -> None:
    """Clip gradients from here on as if these were the trainer's arguments."""
    trainer.gradient_clip_val = value
    trainer.gradient_clip_algorithm = None if algorithm is None else GradClipAlgorithmType(algorithm)


def batches_done(trainer: Trainer) -> int:
    """Return the number of batches trained in this epoch."""
    return trainer.fit_loop.epoch_loop.batch_progress.current.ready


def dtype_of_steps(trainer: Trainer, module: LightningModule) -> torch.dtype:
    """Return torch's default type at optimizer steps; in manual optimization, inside the precision's own context."""
    with nullcontext() if module.automatic_optimization else trainer.precision_plugin.train_step_context():
        return torch.get_default_dtype()


def max_time(trainer: Trainer) -> float | None:
    """Return the run's limit in seconds by `max_time` or a `Timer`; `None` without a limit."""
    return next((callback._duration for callback in callbacks_of(trainer) if isinstance(callback, Timer)), None)


def detects_anomaly(trainer: Trainer) -> bool:
    """Return the argument of `Trainer(detect_anomaly=...)`."""
    return trainer._detect_anomaly


def take_seed() -> str | None:
    """Return the seed of samplers made by Lightning; `None` if there is none."""
    return os.environ.get(_SEED_VARIABLE)


def restore_seed(seed: str | None) -> None:
    """Set the seed of samplers made by Lightning from now on."""
    if seed is None:
        os.environ.pop(_SEED_VARIABLE, None)
    else:
        os.environ[_SEED_VARIABLE] = seed


def callbacks_of(trainer: Trainer) -> list[Callback]:
    """Return the trainer's own list of callbacks, which is untyped in Lightning."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return callbacks


def log_row(trainer: Trainer, row: Mapping[str, float]) -> None:
    """Log `row` to every logger under the current batch's step, past the module, whose values are in journals."""
    for logger in trainer.loggers:
        logger.log_metrics(dict(row), step=trainer.fit_loop.epoch_loop._batches_that_stepped)


def expert_parallel_size(trainer: Trainer) -> int:
    """Return the number of ranks that share a layer's experts."""
    groups = getattr(trainer.strategy, "groups", None)
    return groups.ep_size if isinstance(groups, ParallelGroups) else 1


def groups_of(strategy: Strategy) -> ParallelGroups:
    """Return the strategy's groups; under strategies other than `MoEStrategy`, every rank holds everything."""
    own: object = getattr(strategy, "groups", None)
    if isinstance(own, ParallelGroups):
        return own
    return build_groups() if dist.is_available() and dist.is_initialized() else ParallelGroups()


def datamodule_of(trainer: Trainer) -> LightningDataModule | None:
    """Return the data module, if the run has one."""
    datamodule: LightningDataModule | None = getattr(trainer, "datamodule", None)
    return datamodule


def checkpoint_extra(trainer: Trainer, module: LightningModule) -> dict[str, object]:
    """Return entries of Lightning's checkpoints beside the state: hyper-parameters, other loops, names of states."""
    loops = {name: copy.deepcopy(getattr(trainer, name).state_dict()) for name in _OTHER_LOOPS}
    extra: dict[str, object] = {"precision": type(trainer.precision_plugin).__qualname__, "loops": loops}
    datamodule = datamodule_of(trainer)
    if datamodule is not None:
        extra["datamodule"] = type(datamodule).__qualname__
    for owner in (module, datamodule):
        if owner is not None and owner.hparams:
            if hasattr(owner, "_hparams_name"):
                extra[owner.CHECKPOINT_HYPER_PARAMS_NAME] = owner._hparams_name
            extra[owner.CHECKPOINT_HYPER_PARAMS_KEY] = dict(owner.hparams)
    return extra


def is_compiled(module: LightningModule) -> bool:
    """Return whether `torch.compile` was applied to a module, to a part or to a method."""
    return module._compiler_ctx is not None or any(map(_is_compiled, module.modules()))


def _is_compiled(module: torch.nn.Module) -> bool:
    if isinstance(module, OptimizedModule) or module._compiled_call_impl is not None:
        return True
    attributes = itertools.chain(vars(module).values(), vars(type(module)).values())
    return any(hasattr(attribute, "_torchdynamo_orig_callable") for attribute in attributes if callable(attribute))
