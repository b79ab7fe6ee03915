"""Call listeners from Lightning's loops, and take and restore their progress, through private attributes.

Only this module and its siblings `_lightning_*` touch private attributes of Lightning, and those of torch's loaders.

Two jobs. *Taps*: calls at moments for which Lightning has no hook (before an epoch starts, before the loader's
iterator is made, before a batch is fetched), installed as instance attributes on one trainer's loops and removed
again. *Loop state*: taking and restoring progress so that a resumed run continues between the same two batches, with
the same data.

Lightning can resume from a checkpoint by itself, but not exactly: mid-epoch it restarts plain loaders at batch 0, it
runs no plateau scheduler at the end of a resumed epoch, and it calls no `on_train_epoch_start` after an epoch
boundary. So progress is taken *between* batches (after validation, schedulers and epoch end), and a resumed epoch
re-enters its loop with every "restarting" flag cleared: from then on it is an ordinary run.
"""

from __future__ import annotations

import copy
import itertools
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor
from torch._dynamo import OptimizedModule

from lightning_moe_ckpt._lightning_positions import ask, loops_of
from lightning_moe_ckpt.journal import Unread
from lightning_moe_ckpt.parallel import ParallelGroups, build_groups

LoopState = dict[str, Any]

_SEED_VARIABLE = "PL_GLOBAL_SEED"
"""Environment variable in which `seed_everything` leaves the seed; Lightning seeds `DistributedSampler` from it."""


_OTHER_LOOPS = ("validate_loop", "test_loop", "predict_loop")


class LoopListener(Protocol):
    """Listener for moments that have no hook."""

    def before_epoch(self) -> None:
        """Called after all hooks of the previous epoch, before `on_train_epoch_start`."""

    def before_iter(self) -> None:
        """Called before the loader's iterator is made, when samplers and workers draw their seeds."""

    def before_fetch(self) -> None:
        """Called before the next batch is fetched; everything that follows the previous batch has run."""

    def after_fetch(self) -> None:
        """Called after a batch was fetched, before any hook has seen it."""

    def before_epoch_end(self) -> None:
        """Called after the epoch's last trained batch and all that follows it, before the epoch-end hooks."""

    def after_run(self) -> None:
        """Called when training has ended by itself, after every `on_train_end`."""

    def after_batch(self) -> None:
        """Called after all `on_train_batch_end` hooks of a batch, the module's included, before validation."""

    def after_hooks(self) -> None:
        """Called after validation, schedulers and epoch-end hooks, before Lightning decides whether to stop."""


class DataListener(Protocol):
    """Listener for further moments of loaders."""

    def after_iter(self) -> None:
        """Called when the iterator of a later epoch than the first was made."""

    def before_fetch_ahead(self) -> None:
        """Called before a fetch while that iterator is made, of loaders without a length."""

    def before_validation(self) -> None:
        """Called before loaders of validation make iterators, that of the sanity check included."""

    def load(self, name: str) -> None:
        """Called in the place of a loop's `setup_data`: let it ask for loaders, see `loops_of`, if it needs any."""


class FitLoopTaps:
    """Call listeners from inside one trainer's fit loop, but not while `resting()`, until `remove`."""

    def __init__(
        self, trainer: Trainer, listener: LoopListener, data: DataListener, resting: Callable[[], bool]
    ) -> None:
        self._resting = resting
        fit_loop, epoch_loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
        self._fit_loop, self._epoch_loop, self._val_loop = fit_loop, epoch_loop, epoch_loop.val_loop
        self._restore: list[Callable[[], object]] = []
        self._before(fit_loop, "on_advance_start", listener.before_epoch)
        # Lightning makes the first epoch's iterator in `setup_data`, right after this call...
        self._before(fit_loop, "_load_combined_loader_states", listener.before_iter)
        # ... and those of later epochs in here. Loaders without a length are fetched from right then, by the fetcher of
        # the epoch before, whose taps are in place: making an iterator ahead is one moment, as in the first epoch.
        self._making_iterator = False
        self._set(epoch_loop, "on_run_start", self._run_start(trainer, listener, data))
        ahead, fetch = data.before_fetch_ahead, listener.before_fetch
        self._before(epoch_loop, "_on_before_fetch", lambda: ahead() if self._making_iterator else fetch())
        after = listener.after_fetch
        self._after(epoch_loop, "_on_after_fetch", lambda: None if self._making_iterator else after())
        self._before(self._val_loop, "reset", data.before_validation)
        for name, loop in loops_of(trainer).items():
            self._set(loop, "setup_data", partial(self._load, trainer, data, name))
        self._before(fit_loop, "on_advance_end", listener.before_epoch_end)
        self._after(fit_loop, "on_run_end", listener.after_run)
        self._before(epoch_loop, "on_advance_end", listener.after_batch)
        self._after(epoch_loop, "on_advance_end", listener.after_hooks)
        self._after(fit_loop, "on_advance_end", listener.after_hooks)

    def _run_start(self, trainer: Trainer, listener: LoopListener, data: DataListener) -> Callable[[Any], None]:
        original = self._epoch_loop.on_run_start

        def run_start(data_fetcher: Any) -> None:
            self._making_iterator = _makes_iterator(trainer) and not self._resting()
            if not self._making_iterator:
                return original(data_fetcher)
            listener.before_iter()
            try:
                original(data_fetcher)
                data.after_iter()
            finally:
                self._making_iterator = False

        return run_start

    def _load(self, trainer: Trainer, data: DataListener, name: str) -> None:
        if self._resting():
            ask(trainer, name)
        else:
            data.load(name)

    def _before(self, owner: object, name: str, first: Callable[[], None]) -> None:
        original = getattr(owner, name)

        def tapped(*args: Any, **kwargs: Any) -> Any:
            if not self._resting():
                first()
            return original(*args, **kwargs)

        self._set(owner, name, tapped)

    def _after(self, owner: object, name: str, then: Callable[[], None]) -> None:
        original = getattr(owner, name)

        def tapped(*args: Any, **kwargs: Any) -> None:
            original(*args, **kwargs)
            if not self._resting():
                then()

        self._set(owner, name, tapped)

    def _set(self, owner: object, name: str, method: Callable[..., Any]) -> None:
        setattr(owner, name, method)
        self._restore.append(lambda: owner.__dict__.pop(name, None))

    def remove(self) -> None:
        """Restore the loops' own methods, also those of a resume that did not reach its first batch."""
        while self._restore:
            self._restore.pop()()
        self._epoch_loop.__dict__.pop("reset", None)
        self._fit_loop.trainer.__dict__.pop("_run_sanity_check", None)


def _makes_iterator(trainer: Trainer) -> bool:
    """Return whether the epoch loop is about to make an iterator; in the first epoch `setup_data` has made it."""
    fit_loop = trainer.fit_loop
    resuming = getattr(fit_loop, "is_resuming", False)  # Lightning has it from 2.5.3 on
    return trainer.current_epoch > 0 and not resuming and not fit_loop.epoch_loop.restarting


class ClipTap:
    """Record, and in replay replace, the global gradient norm that clipping uses; see what comes between it and the step.

    A frozen operator has no gradient in replay, so the norm of the original step cannot be computed again. The
    logged norm, and not a coefficient, gives the same bits.
    """

    def __init__(self, trainer: Trainer, norm: Callable[[list[torch.nn.Parameter]], Tensor] | None = None) -> None:
        self.last: Tensor | None = None
        """Norm used by the newest optimizer step, on the device; `None` if nothing was clipped by norm."""
        self.override: Tensor | None = None
        """Norm to use in place of the computed one; `None` for none."""
        self.clipped: Callable[[], None] | None = None
        """Called when hooks of the user and clipping are through with gradients, and the optimizer steps next."""
        self._plugin = trainer.precision_plugin
        self._norm = norm if norm is not None else _total_norm
        self._previous = self._plugin.__dict__.get("clip_grad_by_norm")
        after_closure = self._plugin._after_closure  # no hook comes behind clipping

        def tapped(model: LightningModule, optimizer: Any) -> None:
            after_closure(model, optimizer)
            if self.clipped is not None:
                self.clipped()

        self._plugin.clip_grad_by_norm = self._clip  # type: ignore[method-assign]
        self._plugin._after_closure = tapped  # type: ignore[method-assign]

    def _clip(self, optimizer: Any, clip_val: float) -> None:
        parameters = [p for p in self._plugin.main_params(optimizer) if p.grad is not None]
        norm = self._norm(parameters) if self.override is None else self.override
        if parameters:
            norm = norm.to(parameters[0].device)
            torch.nn.utils.clip_grads_with_norm_(parameters, clip_val, norm)
        self.last = norm

    def remove(self) -> None:
        """Restore the precision plugin's own methods."""
        self._plugin.__dict__.pop("_after_closure", None)
        self._plugin.__dict__.pop("clip_grad_by_norm", None)
        if self._previous is not None:
            self._plugin.clip_grad_by_norm = self._previous  # type: ignore[method-assign]


def _total_norm(parameters: list[torch.nn.Parameter]) -> Tensor:
    return torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])


class BatchTap:
    """Train on what `fetched` returns for each batch as the loader gave it, but not while `resting()`, until `remove`."""

    def __init__(self, trainer: Trainer, fetched: Callable[[Any], Any], resting: Callable[[], bool]) -> None:
        # The precision plugin is the first to get a batch.
        plugin = trainer.precision_plugin
        convert = plugin.convert_input

        def tapped(batch: Any) -> Any:
            return convert(fetched(batch) if trainer.training and not resting() else batch)

        plugin.convert_input = tapped  # type: ignore[assignment, method-assign]
        self._plugin = plugin

    def remove(self) -> None:
        """Restore the precision plugin's own method."""
        self._plugin.__dict__.pop("convert_input", None)


class StepTap:
    """Let `around` run every training step, until `remove`."""

    def __init__(self, trainer: Trainer, around: Callable[[Callable[[], Any]], Any]) -> None:
        self._strategy = trainer.strategy
        step = trainer.strategy.training_step
        trainer.strategy.training_step = lambda *args, **kwargs: around(lambda: step(*args, **kwargs))  # type: ignore[method-assign]

    def remove(self) -> None:
        """Restore the strategy's own method."""
        self._strategy.__dict__.pop("training_step", None)


class FoundInf:
    """Read, and in replay overwrite, the gradient scaler's overflow flag of the current step.

    A frozen operator's gradients are not computed in replay, so the scaler cannot see their overflow.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._scaler = getattr(trainer.precision_plugin, "scaler", None)

    def read(self, optimizer: torch.optim.Optimizer) -> float | Unread | None:
        """Return the flag of the coming step, for the journal; `None` without a scaler."""
        found = self._per_device(optimizer)
        if found is None:
            return None
        flags = list(found.values())
        if len(flags) == 1 and flags[0].is_cuda:
            return Unread(flags[0].clone())
        return float(sum(flag.item() for flag in flags))

    def write(self, optimizer: torch.optim.Optimizer, value: float, device: torch.device) -> None:
        """Make the scaler act as if it had found `value`."""
        found = self._per_device(optimizer)
        if found is None:
            return
        for flag in found.values():
            flag.fill_(value)
        if not found:  # no gradient at all: `scaler.step` asserts that something was checked
            found[device] = torch.full((1,), value, device=device)

    def _per_device(self, optimizer: torch.optim.Optimizer) -> dict[torch.device, Tensor] | None:
        if self._scaler is None:
            return None
        state: dict[torch.device, Tensor] = self._scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        return state


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
    """Return whether DDP broadcasts buffers before the next forward; validation and accumulating batches turn it off."""
    found: bool | None = getattr(trainer.strategy.model, "require_forward_param_sync", None)
    return found


def restore_buffer_sync(trainer: Trainer, taken: bool | None) -> None:
    """Restore the flag that `take_buffer_sync` returned."""
    if taken is not None:
        trainer.strategy.model.require_forward_param_sync = taken  # type: ignore[union-attr]


def _load_loops(trainer: Trainer, state: LoopState) -> None:
    _skip_sanity_check(trainer)
    trainer.fit_loop.load_state_dict({name: each for name, each in state.items() if name != "settings"})


def ends_in_mid_epoch(trainer: Trainer) -> bool:
    """Return whether training ends in mid-epoch; call after its last batch, before the epoch-end hooks."""
    out_of_steps = 0 <= trainer.max_steps <= trainer.global_step
    return (out_of_steps or trainer.should_stop) and not trainer.fit_loop.epoch_loop._num_ready_batches_reached()


def takes_iterator(trainer: Trainer) -> bool:
    """Return whether the module fetches by itself: `training_step(self, dataloader_iter)`."""
    return is_param_in_hook_signature(trainer.lightning_module.training_step, "dataloader_iter", explicit=True)


def should_stop(trainer: Trainer) -> bool:
    """Return whether the run was stopped for good. The end of `max_time` does not count, since a later run may have more."""
    timers = [callback for callback in callbacks_of(trainer) if isinstance(callback, Timer)]
    return trainer.should_stop and all((timer.time_remaining() or 1.0) > 0 for timer in timers)


def finished_because(trainer: Trainer) -> tuple[str, str] | None:
    """Return why a restored run trains nothing more, and what would let it; `None` if it trains. Call before the fit loop runs."""
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
    """Leave the validation before training out once: a run that is resumed has had it, and what it changes was restored."""

    def skipped() -> None:
        del trainer._run_sanity_check

    trainer._run_sanity_check = skipped  # type: ignore[method-assign]


def use_clipping(trainer: Trainer, value: float | None, algorithm: str | None) -> None:
    """Clip gradients from here on as if the trainer had been given these arguments."""
    trainer.gradient_clip_val = value
    trainer.gradient_clip_algorithm = None if algorithm is None else GradClipAlgorithmType(algorithm)


def batches_done(trainer: Trainer) -> int:
    """Return how many batches of the epoch at hand have been trained on."""
    return trainer.fit_loop.epoch_loop.batch_progress.current.ready


def max_time(trainer: Trainer) -> float | None:
    """Return the seconds that `max_time` or a `Timer` gives a run."""
    return next((each._duration for each in callbacks_of(trainer) if isinstance(each, Timer)), None)


def detects_anomaly(trainer: Trainer) -> bool:
    """Return what `Trainer(detect_anomaly=...)` was given."""
    return trainer._detect_anomaly


def resumes_inside(trainer: Trainer) -> bool:
    """Return whether Lightning is about to go on inside an epoch, from a `.ckpt` of its own."""
    epoch_loop = trainer.fit_loop.epoch_loop
    return epoch_loop.restarting and 0 < epoch_loop.batch_progress.current.ready < trainer.num_training_batches


def resume_between_epochs(trainer: Trainer, state: LoopState) -> None:
    """Continue as if the last epoch had just ended in this process; call before the fit loop runs."""
    _load_loops(trainer, state)
    _clear_restart_flags(trainer)


def restore_ended(trainer: Trainer, state: LoopState) -> None:
    """Let loops have the progress with which training ended, if nothing is left to train."""
    del state["settings"]
    trainer.fit_loop.load_state_dict(state)
    _clear_restart_flags(trainer)
    for loader in trainer.fit_loop._combined_loader.flattened if trainer.fit_loop._combined_loader is not None else ():
        _set_sampler_epoch(loader, trainer.fit_loop.epoch_progress.current.ready - 1)


def resume_mid_epoch(trainer: Trainer, state: LoopState, position: Callable[[], None]) -> None:
    """Continue inside an epoch; call before the fit loop runs.

    Args:
        trainer: the trainer whose loops get `state`.
        state: the result of `_lightning_progress.LoopProgress.take`.
        position: moves the data fetcher past the consumed batches; called once its iterator exists.
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
        # Not through `restarting`: with `max_steps` its setter keeps the fit loop restarting whatever it is told, which
        # then counts an epoch that has ended once more and makes no iterator for the next.
        loop._restarting = False
        loop._loaded_from_state_dict = False
        loop._resuming_from_checkpoint = False
        loop.reset_restart_stage()


def _with_children(loop: _Loop) -> Iterator[_Loop]:
    yield loop
    for each in vars(loop).values():
        if isinstance(each, _Loop):
            yield from _with_children(each)


def take_seed() -> str | None:
    """Return the seed of samplers that Lightning makes; `None` if there is none."""
    return os.environ.get(_SEED_VARIABLE)


def restore_seed(seed: str | None) -> None:
    """Set the seed of samplers that Lightning makes from now on."""
    if seed is None:
        os.environ.pop(_SEED_VARIABLE, None)
    else:
        os.environ[_SEED_VARIABLE] = seed


def callbacks_of(trainer: Trainer) -> list[Callback]:
    """Return the trainer's own list of callbacks, which is untyped in Lightning."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return callbacks


def log_row(trainer: Trainer, row: Mapping[str, float]) -> None:
    """Log `row` to every logger under the step of the current batch, past the module, whose values journals have."""
    for logger in trainer.loggers:
        logger.log_metrics(dict(row), step=trainer.fit_loop.epoch_loop._batches_that_stepped)


def expert_parallel_size(trainer: Trainer) -> int:
    """Return the number of ranks that share the experts of a layer."""
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
    """Return whether `torch.compile` was applied to a module, to a part of it or to a method."""
    return module._compiler_ctx is not None or any(map(_is_compiled, module.modules()))


def _is_compiled(module: torch.nn.Module) -> bool:
    if isinstance(module, OptimizedModule) or module._compiled_call_impl is not None:
        return True
    attributes = itertools.chain(vars(module).values(), vars(type(module)).values())
    return any(hasattr(each, "_torchdynamo_orig_callable") for each in attributes if callable(each))
