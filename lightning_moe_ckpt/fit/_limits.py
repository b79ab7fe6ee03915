"""Refuse fits that no run can resume, before they train, and name causes of an inexact resume, once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning, LambdaCallback, ModelPruning, StochasticWeightAveraging
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from torchmetrics import Metric

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt.errors import ConfigurationError
from lightning_moe_ckpt.fit._callbacks import averaging_callbacks
from lightning_moe_ckpt.fit.loaders._loaders import loaders_of
from lightning_moe_ckpt.fit.loops._trainer import callbacks_of, takes_iterator
from lightning_moe_ckpt.fit.objects._users import is_library
from lightning_moe_ckpt.operators import is_sharded
from lightning_moe_ckpt.parallel import ordered_hook
from lightning_moe_ckpt.policies import Policy
from lightning_moe_ckpt.recovery import Omits

_LIBRARIES = ("lightning", "lightning_moe_ckpt")


def inexact_reasons(trainer: Trainer, module: LightningModule, *, replays: bool) -> list[str]:
    """Return reasons as text for the log; empty if none was recognised. Call when the first batch begins; `replays` repeat steps
    with frozen parts.
    """
    found = [*_of_reduction(trainer), *_of_kernels(module), *_of_copies(trainer), *_of_clocks(trainer)]
    found += _of_loaders(trainer)
    if replays:
        found += _of_replay(module)
    return found


def gradients_are_seen(trainer: Trainer, module: LightningModule, skip: tuple[type[Callback], ...]) -> bool:
    """Return whether the user's code, without callbacks in `skip`, is called when gradients exist, and so has to find all of them."""
    hooks = ("on_after_backward", "on_before_optimizer_step")
    return is_overridden("configure_gradient_clipping", module) or _calls(trainer, module, skip, hooks)


def may_edit_unseen(trainer: Trainer, module: LightningModule, skip: tuple[type[Callback], ...]) -> bool:
    """Return whether the user's code is called while a boundary is copied, and may change shards without a trace.

    Version counters of shards do not count `torch._foreach_*`. Code inside `training_step` is taken to leave weights alone.
    """
    hooks = (
        *("on_train_batch_start", "on_before_zero_grad", "on_before_backward"),
        *("on_after_backward", "on_before_optimizer_step"),
    )
    own = ("optimizer_zero_grad", "optimizer_step", "backward")
    return is_sharded(module) and (
        any(is_overridden(hook, module) for hook in own)
        or any(vars(optimizer)["_optimizer_step_pre_hooks"] for optimizer in trainer.optimizers)
        or _calls(trainer, module, skip, hooks)
    )


def may_edit_steps(trainer: Trainer, module: LightningModule, skip: tuple[type[Callback], ...]) -> bool:
    """Return whether the user's code is called between a step and its boundary, or as `may_edit_unseen`. Arguments likewise."""
    own = ("configure_gradient_clipping", "lr_scheduler_step")
    return is_sharded(module) and (
        may_edit_unseen(trainer, module, skip)
        or any(is_overridden(hook, module) for hook in own)
        or any(vars(optimizer)["_optimizer_step_post_hooks"] for optimizer in trainer.optimizers)
        or _calls(trainer, module, skip, ("on_train_batch_end",))
        or not module.automatic_optimization
    )


def _calls(trainer: Trainer, module: LightningModule, skip: tuple[type[Callback], ...], hooks: Sequence[str]) -> bool:
    """Return whether the user's module or callbacks have any of these hooks."""
    return any(is_overridden(hook, module) for hook in hooks) or any(
        is_overridden(hook, callback, Callback)
        for callback in callbacks_of(trainer)
        if isinstance(callback, LambdaCallback)
        or not (isinstance(callback, skip) or type(callback).__module__.partition(".")[0] in _LIBRARIES)
        for hook in hooks
    )


def may_leave_out(trainer: Trainer, module: LightningModule, skip: tuple[type[Callback], ...]) -> Omits:
    """Return the gradients that replay may omit. Arguments as of `gradients_are_seen`."""
    if isinstance(trainer.model, DistributedDataParallel) or is_sharded(module):
        return "none"
    if is_overridden("optimizer_step", module):
        return "none"  # it may look at gradients, before or behind the closure
    if not gradients_are_seen(trainer, module, skip):
        return "all"
    # Hooks may keep gradients that are left in place.
    return "none" if is_overridden("optimizer_zero_grad", module) else "unseen"


def _of_replay(module: LightningModule) -> Iterator[str]:
    if averaged := [name for name, each in module.named_modules() if isinstance(each, AveragedModel)]:
        yield (
            f"the module keeps averages of weights in {averaged}: while others are frozen in replay, they are updated "
            "from outdated weights. Keep them in a `WeightAveraging` callback, or use DenseCheckpoint"
        )


def _of_reduction(trainer: Trainer) -> Iterator[str]:
    if trainer.world_size < 3:
        return  # a sum of two terms does not depend on the order
    hooks = [hook for hook, _ in getattr(trainer.model, "_comm_hooks", ())]
    if isinstance(trainer.model, DistributedDataParallel) and ordered_hook not in hooks:
        yield (
            "DistributedDataParallel sums gradients of three or more ranks in an order that changes when a process "
            "starts anew; use strategy='moe', or register `ordered_hook`"
        )
    if getattr(trainer.strategy, "gradient_reduction", None) == "allreduce":
        yield (
            "`MoEStrategy(gradient_reduction='allreduce')` leaves the order of summation over three or more ranks to "
            "the backend; use 'ordered'"
        )


def _of_kernels(module: LightningModule) -> Iterator[str]:
    if module.device.type == "cuda" and not torch.are_deterministic_algorithms_enabled():
        yield (
            "some CUDA kernels add in another order every time: what is restored is exact, steps that are run again "
            "are as reproducible as your training. `Trainer(deterministic=True)` makes both exact"
        )


def _of_copies(trainer: Trainer) -> Iterator[str]:
    known = averaging_callbacks(trainer)
    for callback in callbacks_of(trainer):
        kept = [name for name, value in vars(callback).items() if _has_weights(value)]
        # weights of the user's callbacks are restored, or named
        if kept and callback not in known and is_library(type(callback)):
            yield f"callback `{type(callback).__qualname__}` keeps weights in {kept}, which no checkpoint holds"


def _of_clocks(trainer: Trainer) -> Iterator[str]:
    for callback in trainer.checkpoint_callbacks:
        if getattr(callback, "_train_time_interval", None) is not None:
            yield (
                f"`{type(callback).__qualname__}(train_time_interval=...)` saves by the clock, so a resumed run writes "
                "other files; the training itself is exact. Use `every_n_train_steps`"
            )


def _of_loaders(trainer: Trainer) -> Iterator[str]:
    for loader in loaders_of(trainer):
        if not getattr(loader, "in_order", True) and loader.num_workers > 1:
            yield f"`{type(loader).__name__}(in_order=False)` gives batches in the order in which workers finish them"


def _has_weights(value: object) -> bool:
    """Return whether a value holds another module than the trained module, to which callbacks may keep a reference."""
    if not isinstance(value, torch.nn.Module) or isinstance(value, LightningModule | Metric):
        return False
    return next(value.parameters(), None) is not None


log = rank_logger(__name__)

_UNSUPPORTED: dict[type[Callback], str] = {
    StochasticWeightAveraging: "StochasticWeightAveraging puts another scheduler in the place of yours when it begins; a run "
    "that resumes after that has yours again, and other learning rates. Use WeightAveraging, which leaves it alone.",
    ModelPruning: "ModelPruning puts other parameters and masks in the place of the model's while it trains; a run that "
    "resumes after that has none of them. Prune when training has ended.",
}
"""Callbacks of Lightning with which no run can resume, and why."""


_INSTEAD = "`strategy='moe'` spreads experts with `expert_parallel=`, and layers with `pipeline_parallel=`"
_SHARDED = "`ModelParallelStrategy` with `fully_shard` in `configure_model` shards as much, and is supported"
_STRATEGIES = {
    "FSDPStrategy": ("keeps parameters in flat shards, which cut through operators", _SHARDED),
    "DeepSpeedStrategy": ("leaves weights and optimizer state to DeepSpeed's engine, at stage 0 too", _SHARDED),
    "XLAStrategy": ("trains on XLA devices, whose memory is not copied while it trains", _INSTEAD),
    "SingleDeviceXLAStrategy": ("trains on an XLA device, whose memory is not copied while it trains", _INSTEAD),
}
"""Strategies of Lightning under which a rank's tensors are not plain ones; why, and what there is instead."""


def refuse_unsupported(trainer: Trainer, policy: Policy) -> None:
    """Raise `ConfigurationError` for parts of this trainer with which no run under `policy` can resume."""
    for cls in type(trainer.strategy).__mro__:
        if cls.__name__ in _STRATEGIES:
            why, instead = _STRATEGIES[cls.__name__]
            raise ConfigurationError(
                f"`{cls.__name__}` {why}; no policy stores that. {instead}; or leave the checkpoint callback out, and keep to the "
                "checkpoints that the strategy writes itself."
            )
    sharded = any(isinstance(each, FSDPModule) for each in trainer.lightning_module.modules())
    if sharded and trainer.strategy.root_device.type == "cpu" and not hasattr(torch.cpu.Stream, "record_event"):
        raise ConfigurationError(
            f"`fully_shard` trains on CPUs from torch 2.7 on, and this is torch {torch.__version__}. Install a newer torch, or train on GPUs."
        )
    if len(trainer.optimizers) != 1:
        raise ConfigurationError(
            f"Found {len(trainer.optimizers)} optimizers, can capture exactly one. "
            "Put all parameters into one optimizer with several param groups."
        )
    if type(trainer.optimizers[0]).__name__ == "_MockOptimizer":
        raise ConfigurationError(
            "`configure_optimizers` returned None: nothing is trained, so that there is nothing to resume. Return an optimizer, "
            "or leave the checkpoint callback out."
        )
    for kind, reason in _UNSUPPORTED.items():
        if any(isinstance(callback, kind) for callback in callbacks_of(trainer)):
            raise ConfigurationError(reason)
    if takes_iterator(trainer):
        raise ConfigurationError(
            "`training_step(self, dataloader_iter)` fetches within the step, where no restart can know what it has fetched. "
            "Write `training_step(self, batch, batch_idx)`: loaders fetch ahead by themselves, with `num_workers` and `prefetch_factor`."
        )
    if policy.replays and not trainer.lightning_module.automatic_optimization:
        raise ConfigurationError(
            "SparseCheckpoint replays steps that Lightning takes, one for each batch or more; with manual optimization the "
            "module takes them itself. Use DenseCheckpoint, or set `automatic_optimization = True`."
        )
    finetuning = [callback for callback in callbacks_of(trainer) if isinstance(callback, BaseFinetuning)]
    if finetuning and not policy.exact:
        raise ConfigurationError(
            f"{type(finetuning[0]).__name__} adds parameters to the optimizer while training, and a generation of "
            "experts from before and after that has no meaning. Use SparseCheckpoint or DenseCheckpoint."
        )


def warn_if_short(trainer: Trainer, least_steps: int) -> None:
    """Warn if training ends before any checkpoint except those of its start and end."""
    if 0 < trainer.max_steps < least_steps:
        log.warning(
            "checkpoints need %d steps and this fit ends at step %d: only its start and its end are stored, and what "
            "fails in between starts again. Shorten the window or interval, or train longer.",
            least_steps,
            trainer.max_steps,
            alike=True,
        )
