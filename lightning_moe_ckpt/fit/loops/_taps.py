"""Call listeners at moments for which Lightning has no hook, through private attributes.

Such moments are: before an epoch starts, before the loader's iterator is made, before a batch is fetched, when
gradients are clipped. A tap is an instance attribute on one trainer's loops or plugins, and is removed again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial, wraps
from typing import Any, ParamSpec, Protocol, TypeVar

import torch
from lightning.pytorch import Trainer
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt.fit.loaders._positions import ask, loops_of
from lightning_moe_ckpt.fit.loops._port import tap, tap_after_closure, tap_clipping
from lightning_moe_ckpt.journal import Unread
from lightning_moe_ckpt.recovery import ANY_GRADIENT

log = rank_logger(__name__)


class LoopListener(Protocol):
    """Listener for moments without a hook."""

    def before_epoch(self) -> None:
        """Called after all hooks of the previous epoch, before `on_train_epoch_start`."""

    def before_iter(self) -> None:
        """Called before the loader's iterator is made, when samplers and workers draw their seeds."""

    def before_fetch(self) -> None:
        """Called before the next batch is fetched; everything behind the previous batch has run."""

    def after_fetch(self) -> None:
        """Called after a batch was fetched, before any hook has seen the batch."""

    def before_epoch_end(self) -> None:
        """Called after everything behind the epoch's last trained batch, before the epoch-end hooks."""

    def after_run(self) -> None:
        """Called when training has ended by itself, after every `on_train_end`."""

    def after_batch(self) -> None:
        """Called after all `on_train_batch_end` hooks of a batch, the module's included, before validation."""

    def after_hooks(self) -> None:
        """Called after validation, schedulers and epoch-end hooks, before Lightning decides whether to stop."""


class DataListener(Protocol):
    """Listener for further moments of loaders."""

    def after_iter(self) -> None:
        """Called when the iterator of an epoch after the first was made."""

    def before_fetch_ahead(self) -> None:
        """Called before a fetch while such an iterator is made, for loaders without a length."""

    def before_validation(self) -> None:
        """Called before validation's loaders make iterators, the sanity check's included."""

    def load(self, name: str) -> None:
        """Called in place of a loop's `setup_data`: let the loop ask for loaders, see `loops_of`, if necessary."""


class FitLoopTaps:
    """Call listeners from inside one trainer's fit loop, but not while `resting()`, until `remove`."""

    def __init__(
        self, trainer: Trainer, listener: LoopListener, data: DataListener, resting: Callable[[], bool]
    ) -> None:
        self._resting = resting
        fit_loop, epoch_loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
        self._fit_loop, self._epoch_loop, self._val_loop = fit_loop, epoch_loop, epoch_loop.val_loop
        self._restore: list[Callable[[], object]] = []
        self._tap(fit_loop, "on_advance_start", listener.before_epoch)
        # Lightning makes the first epoch's iterator in `setup_data`, right after this call...
        self._tap(fit_loop, "_load_combined_loader_states", listener.before_iter)
        # ... and later epochs' iterators in here. Loaders without a length are fetched from right then, by the fetcher of
        # the previous epoch with its taps in place: making an iterator ahead is a single moment, as in the first epoch.
        self._making_iterator = False
        self._set(epoch_loop, "on_run_start", self._run_start(trainer, listener, data))
        ahead, fetch = data.before_fetch_ahead, listener.before_fetch
        self._tap(epoch_loop, "_on_before_fetch", lambda: ahead() if self._making_iterator else fetch())
        after = listener.after_fetch
        self._tap(epoch_loop, "_on_after_fetch", then=lambda: None if self._making_iterator else after())
        self._tap(self._val_loop, "reset", data.before_validation)
        for name, loop in loops_of(trainer).items():
            self._set(loop, "setup_data", partial(self._load, trainer, data, name))
        self._tap(fit_loop, "on_advance_end", listener.before_epoch_end, then=listener.after_hooks)
        self._tap(fit_loop, "on_run_end", then=listener.after_run)
        self._tap(epoch_loop, "on_advance_end", listener.after_batch, then=listener.after_hooks)

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

    def _tap(
        self, owner: object, name: str, first: Callable[[], None] | None = None, then: Callable[[], None] | None = None
    ) -> None:
        original = getattr(owner, name)

        def tapped(*args: Any, **kwargs: Any) -> Any:
            if first is not None and not self._resting():
                first()
            result = original(*args, **kwargs)
            if then is not None and not self._resting():
                then()
            return result

        self._set(owner, name, tapped)

    def _set(self, owner: object, name: str, method: Callable[..., Any]) -> None:
        setattr(owner, name, method)
        self._restore.append(lambda: owner.__dict__.pop(name, None))

    def remove(self) -> None:
        """Restore the loops' own methods, also after a resume that did not reach its first batch."""
        while self._restore:
            self._restore.pop()()
        self._epoch_loop.__dict__.pop("reset", None)
        self._fit_loop.trainer.__dict__.pop("_run_sanity_check", None)


def _makes_iterator(trainer: Trainer) -> bool:
    """Return whether the epoch loop is about to make an iterator; in the first epoch `setup_data` has made it."""
    fit_loop = trainer.fit_loop
    resuming = getattr(fit_loop, "is_resuming", False)  # Lightning has it from 2.5.3 on
    return trainer.current_epoch > 0 and not resuming and not fit_loop.epoch_loop.restarting


def _by_mesh(parameters: Iterable[torch.nn.Parameter]) -> list[list[torch.nn.Parameter]]:
    """Return the parameters with a gradient by their gradient's mesh, in order; torch takes one mesh at a time."""
    found = defaultdict[Any, list[torch.nn.Parameter]](list)
    for parameter in parameters:
        if parameter.grad is not None:
            found[getattr(parameter.grad, "device_mesh", None)].append(parameter)
    return list(found.values())


def _total_norm(parameters: list[torch.nn.Parameter]) -> Tensor:
    """Return torch's own norm, plain; of gradients on several meshes, where torch has none, the norm of each mesh's norms.

    Shards' norms are added by one all-reduce per mesh dimension, whose order depends on the ranks' places, as it does where
    gradients are reduced, and on no clock.
    """
    norms = [torch.nn.utils.get_total_norm([p.grad for p in g if p.grad is not None]) for g in _by_mesh(parameters)]
    plain = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    return plain[0] if len(plain) == 1 else torch.nn.utils.get_total_norm(plain)


def tap_batches(trainer: Trainer, fetched: Callable[[Any], Any], resting: Callable[[], bool]) -> Callable[[], object]:
    """Train on the result of `fetched` for each batch as loaded, but not while `resting()`; return the function that ends this."""
    plugin = trainer.precision_plugin  # the first to get a batch
    convert = plugin.convert_input

    def tapped(batch: Any) -> Any:
        return convert(fetched(batch) if trainer.training and not resting() else batch)

    return tap(plugin, "convert_input", tapped)


def tap_step(trainer: Trainer, around: Callable[..., Any]) -> Callable[[], object]:
    """Let `around` run every training step with a batch; return the function that ends this."""
    step = trainer.strategy.training_step
    return tap(trainer.strategy, "training_step", lambda *args, **kwargs: around(partial(step, *args, **kwargs), args))


_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


def unwatched(method: Callable[_Args, _Result]) -> Callable[_Args, _Result]:
    """Hide a method's looks at gradients from `SeenGradients`."""

    @wraps(method)
    def resting(*args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
        before, SeenGradients.rests = SeenGradients.rests, True
        try:
            return method(*args, **kwargs)
        finally:
            SeenGradients.rests = before

    return resting


class LacksGradient(RuntimeError):
    """A step asks for a gradient that replay has left out."""


class SeenGradients(TorchFunctionMode):
    """Note parameters at whose gradients code looks, while entered."""

    rests = False

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self._names = {id(param): name for name, param in module.named_parameters()}
        self._found: set[str] = set()

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _LOOKS and not self.rests:
            self._found.add(self._names.get(id(args[0]), ANY_GRADIENT))
        return func(*args, **(kwargs or {}))

    def run(self, call: Callable[..., Any], *args: Any) -> Any:
        """Call a function while entered."""
        with self:
            return call(*args)

    def ask(self, step: Callable[[], Any], lacking: Collection[int] = ()) -> Any:
        """Run a training step; note parameters for whose gradients it asks autograd. Raises `LacksGradient` for one of
        `lacking`, by identity.
        """
        run: Any = vars(torch.autograd)[_BACKWARD]

        def noted(
            outputs: Any, gradients: Any, retain: Any, create: Any, inputs: Sequence[Any], *more: Any, **kw: Any
        ) -> Any:
            self._found |= {self._names[id(each)] for each in inputs if id(each) in self._names}
            if any(id(each) in lacking for each in inputs):
                raise LacksGradient
            return run(outputs, gradients, retain, create, inputs, *more, **kw)

        setattr(torch.autograd, _BACKWARD, noted)
        try:
            return step()
        finally:
            setattr(torch.autograd, _BACKWARD, run)

    def take(self) -> list[str]:
        """Return the names since the last call."""
        found, self._found = self._found, set()
        return [ANY_GRADIENT] if ANY_GRADIENT in found or len(found) > _MOST_NAMES else sorted(found)


_BACKWARD = "_engine_run_backward"  # under both `grad` and `backward`
_LOOKS = frozenset({Tensor.grad.__get__, Tensor._grad.__get__})  # type: ignore[union-attr]  # getters
_CALLS, _MOST_NAMES = ("post_backward", "_after_closure"), 64  # methods of a plugin that call hooks; names in a journal


def _call(step: Callable[[], Any], lacking: Collection[int] = ()) -> Any:
    return step()


class StepOutcome:
    """Results of the step under way beside the state that it leaves, for the journal: norm, overflow flag and losses.

    In replay, the original step's norm and flag take the place of the repeated step's. A frozen operator has no gradient
    then, so neither can be computed again. The logged norm, and not a coefficient, gives the same bits.
    """

    def __init__(
        self,
        trainer: Trainer,
        norm: Callable[[list[torch.nn.Parameter]], Tensor] | None,
        watched: torch.nn.Module | None = None,
        *,
        hooks: bool = True,
    ) -> None:
        self.losses: list[Tensor] = []
        """Losses of the step's batches, on the device."""
        self._norm: Tensor | None = None
        """Norm used by the newest optimizer step, on the device; `None` if nothing was clipped by norm."""
        self._overflow: float | Unread | None = None
        """Overflow flag of the newest optimizer step; `None` without a scaler."""
        self._original: Mapping[str, Any] | None = None
        """Outcome of the original step; `None` unless it is replayed."""
        self._clipped: Callable[[], None] | None = None
        self._plugin, self._norm_of = trainer.precision_plugin, norm if norm is not None else _total_norm
        # No hook comes behind clipping.
        by_value = tap_clipping(self._plugin, self._clip_by_value, "value")
        self._seen, self._hooks = None if watched is None else SeenGradients(watched), hooks
        self.ask: Callable[..., Any] = _call if self._seen is None else self._seen.ask
        """Runs a training step, see `SeenGradients.ask`."""
        noted = []
        if self._seen is not None and hooks:
            noted = [(name, self._seen.run, getattr(self._plugin, name)) for name in _CALLS]
        looks = [tap(self._plugin, name, partial(run, call)) for name, run, call in noted]
        closed = tap_after_closure(self._plugin, self._closed)  # outside of what is watched
        self._undo = tap_clipping(self._plugin, self._clip), by_value, closed, *looks

    def follow(self, original: Mapping[str, Any] | None, clipped: Callable[[], None] | None) -> None:
        """Use the results of the `original` step, if any; call before the step. `clipped` is called right before the optimizer steps."""
        self._original, self._clipped = original, clipped

    def follow_overflow(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        """Let the scaler act on the original step's overflow flag, if any; call before the optimizer steps."""
        value: float | None = None if self._original is None else self._original["found_inf"]
        found = self._found_inf(optimizer)
        if value is None or found is None:
            return
        for flag in found.values():
            flag.fill_(value)
        if not found:  # no gradient at all: `scaler.step` asserts that something was checked
            found[device] = torch.full((1,), value, device=device)

    def read(self, optimizer: torch.optim.Optimizer) -> None:
        """Read the overflow flag, right before the optimizer steps."""
        found = self._found_inf(optimizer)
        flags = [] if found is None else list(found.values())
        if found is None:
            self._overflow = None
        elif len(flags) == 1 and flags[0].is_cuda:
            self._overflow = Unread(flags[0].clone())
        else:
            self._overflow = float(sum(flag.item() for flag in flags))

    def take(self, step: int, epoch: int, batches: Sequence[Any]) -> dict[str, Any]:
        """Return the outcome of the step that ended at boundary `step`; the next step begins without losses."""
        losses, self.losses = self.losses, []
        results = {"grad_norm": self._norm, "found_inf": self._overflow, "losses": losses, "batches": batches}
        if self._seen is not None and ((found := self._seen.take()) or self._hooks):
            results["seen"] = found
            known = [ANY_GRADIENT] if self._original is None else self._original.get("seen", [ANY_GRADIENT])
            if ANY_GRADIENT not in known and not {*found} <= {*known}:
                log.warning(
                    "step %d: hooks look at gradients of %s, unlike the original run: frozen ones are zero", step, found
                )
        return {"step": step, "epoch": epoch, **results}

    def remove(self) -> None:
        """Restore the precision plugin's own methods."""
        for undo in self._undo:
            undo()

    @unwatched
    def _clip(self, optimizer: Any, clip_val: float) -> None:
        parameters = [p for p in self._plugin.main_params(optimizer) if p.grad is not None]
        original = None if self._original is None else self._original["grad_norm"]
        norm = self._norm_of(parameters) if original is None else original
        if parameters:
            norm = norm.to(parameters[0].device)
            for group in _by_mesh(parameters):
                torch.nn.utils.clip_grads_with_norm_(group, clip_val, norm)
        self._norm = norm

    @unwatched
    def _clip_by_value(self, optimizer: Any, clip_val: float) -> None:
        for group in _by_mesh(self._plugin.main_params(optimizer)):
            torch.nn.utils.clip_grad_value_(group, clip_val)

    def _closed(self) -> None:
        if self._clipped is not None:
            self._clipped()

    def _found_inf(self, optimizer: torch.optim.Optimizer) -> dict[torch.device, Tensor] | None:
        if (scaler := getattr(self._plugin, "scaler", None)) is None:
            return None
        found: dict[torch.device, Tensor] = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        return found
