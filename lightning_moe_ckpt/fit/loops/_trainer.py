"""Take a Trainer's state and the progress of its loops, and set a resumed run's, through private attributes.

Lightning's own resume is not exact: mid-epoch it restarts plain loaders at batch 0, it runs no plateau scheduler at the
end of a resumed epoch, and it calls no `on_train_epoch_start` after an epoch boundary. So progress is taken *between*
batches (after validation, schedulers and epoch end), and a resumed epoch re-enters its loop with every "restarting"
flag cleared: from then on the run is ordinary.
"""

from __future__ import annotations

import copy
import itertools
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import fields
from operator import is_
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.loops.progress import _BaseProgress
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor
from torch._dynamo import OptimizedModule

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt.errors import IdentityMismatch
from lightning_moe_ckpt.journal import Unread, Written, written
from lightning_moe_ckpt.operators import load_groups_state, stepped_parameters
from lightning_moe_ckpt.parallel import ParallelGroups, build_groups

log = rank_logger(__name__)

LoopState = dict[str, Any]

_SETTINGS = ("accumulate_grad_batches", "train_loader_epoch", "validation_loader_epoch")
_OTHER_LOOPS = ("validate_loop", "test_loop", "predict_loop")
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
    if taken is not None and take_buffer_sync(trainer) is not None:  # another strategy may have none
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


def stage_size(trainer: Trainer) -> int:
    """Return the number of ranks per pipeline stage; without stages, the world size."""
    return trainer.world_size // int(getattr(trainer.strategy, "pipeline_parallel", 1))


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
    """Return the trainer's own list of callbacks, untyped in Lightning."""
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
    """Return the strategy's groups; under other strategies than `MoEStrategy` every rank has whole what is plain."""
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
    if (datamodule := datamodule_of(trainer)) is not None:
        extra["datamodule"] = type(datamodule).__qualname__
    for owner in (module, datamodule):
        if owner is not None and owner.hparams:
            if hasattr(owner, "_hparams_name"):
                extra[owner.CHECKPOINT_HYPER_PARAMS_NAME] = owner._hparams_name
            extra[owner.CHECKPOINT_HYPER_PARAMS_KEY] = dict(owner.hparams)
    return extra


def compiled_modules(module: LightningModule) -> set[torch.nn.Module]:
    """Return the modules within `torch.compile`: of those to which, or to a method of which, it was applied, all parts."""
    found = [module] if module._compiler_ctx is not None else filter(_is_compiled, module.modules())
    return {part for each in found for part in each.modules()}


def _is_compiled(module: torch.nn.Module) -> bool:
    if isinstance(module, OptimizedModule) or module._compiled_call_impl is not None:
        return True
    attributes = itertools.chain(vars(module).values(), vars(type(module)).values())
    return any(hasattr(attribute, "_torchdynamo_orig_callable") for attribute in attributes if callable(attribute))


class LoopProgress:
    """Take the progress of all loops of one fit between two batches or epochs.

    Same entries as `_Loop.state_dict`. Among a hundred entries only numbers ever change, so the text around them is
    made once.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._parts: list[object] = []
        """All loops and their progress."""
        self._links: list[tuple[dict[str, Any], str]] = []
        """Places of loops and progress, in attributes."""
        self._numbers: list[tuple[dict[str, Any], str]] = []
        """Places of changing values, in written order."""
        self._loops: list[tuple[str, _Loop]] = []
        self._rest: dict[str, Written] = {}
        """Entries besides progress: states of the loops themselves, and settings."""
        self._settings: tuple[object, ...] = (self,) * len(_SETTINGS)
        self._text = ""

    def take(self) -> Written:
        """Return the progress."""
        if not self._parts or not all(map(is_, [values[name] for values, name in self._links], self._parts)):
            self._parts, self._links, self._numbers, self._loops = [], [], [], []
            entries = [*self._of_loop(self._trainer.fit_loop, ""), self._entry(self._rest, "settings", "settings")]
            self._text = f'["d",{",".join(entries)}]'
        for name, loop in self._loops:
            own = loop.on_save_checkpoint()
            # Loaders are repositioned by fetching, see `skip_batches`; their own state is exact only in special cases.
            own.pop("combined_loader", None)
            self._rest[name] = written(own) if own else _NOTHING
        fit_loop = self._trainer.fit_loop
        reloads = fit_loop._last_train_dl_reload_epoch, fit_loop.epoch_loop.val_loop._last_val_dl_reload_epoch
        settings = (self._trainer.accumulate_grad_batches, *reloads)
        if not all(map(is_, settings, self._settings)):  # they seldom change
            self._settings = settings
            self._rest["settings"] = written(dict(zip(_SETTINGS, settings, strict=True)))
        found = [values[name] for values, name in self._numbers]
        texts = [e if type(e) is int else e.text if type(e) is Written else written(e).text for e in found]
        return Written(self._text % tuple(texts))

    def _link(self, values: dict[str, Any], name: str) -> None:
        self._parts.append(values[name])
        self._links.append((values, name))

    def _entry(self, values: dict[str, Any], name: str, key: str) -> str:
        self._numbers.append((values, name))
        return f'["{key}",%s]'

    def _of_loop(self, loop: _Loop, prefix: str) -> Iterator[str]:
        self._loops.append((f"{prefix}state_dict", loop))
        yield self._entry(self._rest, *[f"{prefix}state_dict"] * 2)
        for name, value in vars(loop).items():
            if isinstance(value, _BaseProgress | _Loop):
                self._link(vars(loop), name)
            if isinstance(value, _BaseProgress):
                yield f'["{prefix}{name}",{self._of_progress(value)}]'
            elif isinstance(value, _Loop):
                yield from self._of_loop(value, f"{prefix}{name}.")

    def _of_progress(self, progress: Any) -> str:
        values, entries = vars(progress), list[str]()
        for name in (field.name for field in fields(progress)):
            if isinstance(values[name], _BaseProgress):
                self._link(values, name)
                entries.append(f'["{name}",{self._of_progress(values[name])}]')
            else:
                entries.append(self._entry(values, name, name))
        return f'["d",{",".join(entries)}]'


_NOTHING = written({})


def last_step(trainer: Trainer) -> int | None:
    """Return the step at which training is planned to end; `None` if only time, or nothing, ends it.

    Call in training: before, Lightning would build the loader for the answer.
    """
    planned = trainer.estimated_stepping_batches
    return int(planned) if 0 < planned < float("inf") else None


def _load_loops(trainer: Trainer, state: LoopState) -> None:
    _skip_sanity_check(trainer)
    trainer.fit_loop.load_state_dict({name: each for name, each in state.items() if name != "settings"})


def ends_in_mid_epoch(trainer: Trainer) -> bool:
    """Return whether training ends in mid-epoch; call after its last batch, before the epoch-end hooks."""
    out_of_steps = 0 <= trainer.max_steps <= trainer.global_step
    return (out_of_steps or trainer.should_stop) and not trainer.fit_loop.epoch_loop._num_ready_batches_reached()


def finished_because(trainer: Trainer) -> tuple[str, str] | None:
    """Return why a restored run trains no further, and the remedy; `None` if it trains. Call before the fit loop runs."""
    max_steps, max_epochs = trainer.max_steps, trainer.max_epochs
    epochs: Any = trainer.fit_loop.epoch_progress.current
    if 0 <= max_steps <= trainer.global_step:
        return f"`max_steps={max_steps}` is reached", "a larger `max_steps`"
    if max_epochs is not None and 0 <= max_epochs <= epochs.processed:
        return f"`max_epochs={max_epochs}` is reached", "a larger `max_epochs`"
    if trainer.should_stop and trainer.fit_loop._can_stop_early:
        return "it was stopped for good, as by EarlyStopping", "`min_steps` or `min_epochs` beyond this step"
    return None


def _skip_sanity_check(trainer: Trainer) -> None:
    """Skip the next validation before training: the resumed run has had it, and its changes were restored."""

    def skipped() -> None:
        del trainer._run_sanity_check

    trainer._run_sanity_check = skipped  # type: ignore[method-assign]


def resumes_inside(trainer: Trainer) -> bool:
    """Return whether Lightning is about to go on inside an epoch, from a `.ckpt` of its own."""
    epoch_loop = trainer.fit_loop.epoch_loop
    return epoch_loop.restarting and 0 < epoch_loop.batch_progress.current.ready < trainer.num_training_batches


def resume_between_epochs(trainer: Trainer, state: LoopState) -> None:
    """Continue as if the last epoch had just ended in this process; call before the fit loop runs."""
    _load_loops(trainer, state)
    _clear_restart_flags(trainer)


def restore_imported(trainer: Trainer, entries: Mapping[str, Any]) -> None:
    """Restore what an imported checkpoint has beside weights and the optimizer's state, as Lightning does from its file.

    Call in `on_fit_start`, when these are loaded. Raises `IdentityMismatch` if the optimizer has other groups, or parameters in another
    order.
    """
    log.warning(
        "goes on from an imported checkpoint, which has neither random state nor a place in the data: both are as in a fit with "
        "`ckpt_path`, and from here on they are stored",
        alike=True,
    )
    optimizer, checkpoint = trainer.optimizers[0], copy.deepcopy(dict(entries))
    names = {id(param): name for name, param in stepped_parameters(trainer.lightning_module).items()}
    now = [[names[id(param)] for param in group["params"]] for group in optimizer.param_groups]
    here = {name for group in now for name in group}  # of this pipeline stage
    for stored in checkpoint.get("optimizer_states", ()):
        was = [[name for name in group.pop("params") if name in here] for group in stored["param_groups"]]
        # Names were made of numbers, by the order of the module. If this order is another one, they may be wrong.
        if was != now:
            raise IdentityMismatch(
                f"The imported optimizer has {[each[:2] for each in was]} and so on in its groups, this one {[each[:2] for each in now]}. "
                "Give the optimizer its parameters as they were, or import with --weights-only to begin with a new one."
            )
        load_groups_state(optimizer, stored["param_groups"])
    if checkpoint:
        connector = trainer._checkpoint_connector
        connector._loaded_checkpoint = checkpoint
        trainer.lightning_module.on_load_checkpoint(checkpoint)
        connector.restore_datamodule()
        connector.restore_callbacks()
        connector.restore_precision_plugin_state()
        connector.restore_loops()
        if "lr_schedulers" in checkpoint:
            connector.restore_lr_schedulers()
        connector._loaded_checkpoint = {}


def restore_ended(trainer: Trainer, state: LoopState) -> None:
    """Give loops their progress at training's end, if nothing is left to train."""
    del state["settings"]
    trainer.fit_loop.load_state_dict(state)
    _clear_restart_flags(trainer)
    for loader in trainer.fit_loop._combined_loader.flattened if trainer.fit_loop._combined_loader is not None else ():
        _set_sampler_epoch(loader, trainer.fit_loop.epoch_progress.current.ready - 1)


def resume_mid_epoch(trainer: Trainer, state: LoopState, position: Callable[[], None]) -> None:
    """Continue inside an epoch with the result of `LoopProgress.take`; call before the fit loop runs.

    `position` moves the data fetcher past the consumed batches, as soon as its iterator exists.
    """
    epoch_loop = trainer.fit_loop.epoch_loop
    _load_loops(trainer, state)  # "restarting" makes the fit loop skip this epoch's start hooks, which have run
    start = epoch_loop.on_run_start

    def no_reset() -> None:
        del epoch_loop.reset  # Lightning's reset would count this epoch's batches again

    def run_start(data_fetcher: Any) -> None:
        epoch_loop.on_run_start = start  # type: ignore[method-assign]
        # Set by a callback when this epoch started; not before, since that callback checks it when training starts.
        trainer.accumulate_grad_batches = state["settings"]["accumulate_grad_batches"]
        position()
        start(data_fetcher)  # adds the consumed batches to `fetched`; makes no iterator while the flags are set
        _clear_restart_flags(trainer)

    epoch_loop.reset = no_reset  # type: ignore[method-assign]
    epoch_loop.on_run_start = run_start  # type: ignore[method-assign]


def _clear_restart_flags(trainer: Trainer) -> None:
    for loop in _with_children(trainer.fit_loop):
        # Not through `restarting`: with `max_steps` its setter leaves the fit loop restarting whatever it is given, which
        # then counts the ended epoch once more and makes no iterator for the next epoch.
        loop._restarting = False
        loop._loaded_from_state_dict = False
        loop._resuming_from_checkpoint = False
        loop.reset_restart_stage()


def _with_children(loop: _Loop) -> Iterator[_Loop]:
    yield loop
    for value in vars(loop).values():
        if isinstance(value, _Loop):
            yield from _with_children(value)
