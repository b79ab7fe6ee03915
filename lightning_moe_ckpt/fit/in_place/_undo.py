"""Undo the changes of an attempt at a step, so that the step can be repeated in the same process.

An attempt runs inside `optimizer_step`, up to the moment at which the optimizer steps. It counts in the loop, logs into
results of the epoch, and unscales gradients. Effects of the user's hooks in an attempt come twice where they are not in
attributes: `never_alone` names such hooks unless the user allows them.

Weights are too large for copies. An attempt ends before the optimizer steps, so nothing changes weights, except passes
that do so themselves, such as `nn.Embedding(max_norm=...)`. `StepUndo.edits` notices these changes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset
from torch.utils.weak import WeakTensorKeyDictionary
from torchmetrics import Metric

from lightning_moe_ckpt.errors import CheckpointError
from lightning_moe_ckpt.fit._run import FitSession
from lightning_moe_ckpt.fit.in_place._plays import Operations
from lightning_moe_ckpt.fit.loggers._metrics import gather_in_stage, hold_metrics, module_metrics, modules_of
from lightning_moe_ckpt.fit.loops._trainer import callbacks_of, datamodule_of
from lightning_moe_ckpt.fit.objects._memento import Memento, is_small
from lightning_moe_ckpt.fit.objects._users import MOST_ITEMS_IN_A_STEP, is_library
from lightning_moe_ckpt.parallel import stepped_of
from lightning_moe_ckpt.snapshot import DataAccess, versions


class Watch:
    """Changes by attempts to large buffers and batches: each is copied three times, and then only if it had changed.

    Without a copy torch's count of changes is trusted; writes through `.data` do not raise the count.
    """

    def __init__(self, module: LightningModule) -> None:
        self.accesses, self._calm_batches = DataAccess(module.parameters()), 0.0
        self._calm: MutableMapping[Tensor, float] = WeakTensorKeyDictionary()
        """Attempts that left a large buffer alone, as for batches; -inf once one has not."""

    def hold(self, module: LightningModule, others: Iterable[object]) -> Memento:
        """Return the memento of buffers and other objects as an attempt begins; a step may replace buffers."""
        spaces = [each._buffers for each in modules_of(module)]
        for buffer in (each for space in spaces for each in space.values()):
            if buffer is not None and not _is_small(buffer):
                self._calm.setdefault(buffer, 0.0)
        return Memento([*others, *spaces], apart=APART, copies=self._copies)

    def learn(self, held: Memento) -> None:
        """Note changes by a whole attempt since `hold`; small tensors are copied each time."""
        changed = {
            id(each): each
            for each, kept in held.tensors
            if not _is_small(each) and self._calm.get(each, self._calm_batches) >= 0
            if not (torch.equal(each, kept.to(each.dtype)) if isinstance(kept, Tensor) else each._version == kept)
        }
        self._calm_batches += float("-inf") if any(each not in self._calm for each in changed.values()) else 1
        for buffer in list(self._calm):
            self._calm[buffer] += float("-inf") if id(buffer) in changed else 1

    def _copies(self, each: Any) -> bool:
        if not isinstance(each, Tensor) or each.is_inference():
            return True
        return _is_small(each) or (each.layout is torch.strided and self._calm.get(each, self._calm_batches) < 3)


class StepUndo:
    """State that a step may change, held at its begin; with `whole` all that `hold_reachable` finds."""

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        run: FitSession,
        batch: Any,
        watch: Watch,
        *,
        whole: bool = False,
    ) -> None:
        held = watch.hold(module, [batch, *run.generators()])
        users = hold_reachable(trainer, module) if whole else [_hold_users(trainer, module)]
        self._put_back = [*_hold_loops(trainer, module, run), held.restore, *(each.restore for each in users)]
        self.learn = functools.partial(watch.learn, held)
        """Call to note this attempt's changes, at its end."""
        self._uncopied = [pair for each in (held, *users) for pair in each.tensors if isinstance(pair[1], int)]
        self.incomplete = users[0].incomplete
        """Whether the module has containers not looked into."""
        self.accesses, self._count = watch.accesses, watch.accesses.count
        """Accesses to `.data` of weights, and their number at the begin."""
        spaces = [part._parameters for part in modules_of(module)]
        self._module, self._weights = module, [each for space in spaces for each in space.values() if each is not None]
        self._versions = versions(self._weights)
        self._gradients = [*_unzeroed(trainer, self._weights)]

    def edits(self) -> str:
        """Return how weights have changed since, or may have changed; empty if they have not."""
        if self.accesses.count != self._count:
            return "a step uses `.data` of weights"
        pairs = zip(self._versions, versions(self._weights), strict=True)
        changed = {id(each) for each, (was, now) in zip(self._weights, pairs, strict=True) if was != now}
        names = (name for name, each in self._module.named_parameters() if id(each) in changed)
        return f"a step changes `{next(names, 'a former weight')}` before the optimizer does" if changed else ""

    def lost(self) -> str:
        """Return a change by the attempt beyond undoing; empty if there is none."""
        lost = next((each for each, kept in self._uncopied if each._version != kept), None)
        return self.edits() or ("" if lost is None else f"a step changes a tensor of shape {tuple(lost.shape)}")

    def undo(self) -> None:
        """Restore everything as it was when the step began; may be called repeatedly. Raises `CheckpointError` after a change of `lost`."""
        if lost := self.lost():
            raise CheckpointError(
                f"A step that has begun cannot be done again here: {lost}. When this process ends, another one takes its place."
            )
        self.put_back()

    def put_back(self) -> None:
        """Restore everything as `undo` does, where nothing is lost."""
        for put_back in self._put_back:
            put_back()
        for weight, gradient in self._gradients:
            weight.grad = None if gradient is None else gradient.clone()


class PlayUndo:
    """State before a play apart from training, whose tensors are restored by its `operations`."""

    def __init__(self, trainer: Trainer, module: LightningModule, run: FitSession, batch: Any) -> None:
        held = [*hold_reachable(trainer, module), Memento([batch, *run.generators()], apart=APART)]
        self._put_back = [*_hold_loops(trainer, module, run), *(each.restore for each in held)]
        self.unheld = sorted(held[0].used_up)
        """Why a play could not be undone, in words."""
        if held[0].incomplete:
            self.unheld.append("containers that are not looked into")
        weights = [*module.parameters(), *module.buffers()]
        found = {id(each): each for each in weights} | {id(each): each for own in held for each, _ in own.tensors}
        dense = [each for each in found.values() if each.layout is torch.strided and not each.is_inference()]
        self._tensors = [(each, each.detach(), each._version) for each in dense]
        self._weights = {*map(id, weights)}
        for each in held:
            each.tensors.clear()  # without copies

    def undo(self, *operations: Operations) -> None:
        """Restore everything as it was before the play, and before other operations, the last ones first."""
        for each in operations:
            each.restore()
        for tensor, was, version in self._tensors:
            place = was.data_ptr(), was.dtype, was.shape, was.stride()
            if (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()) != place:
                tensor.data = was
            if tensor._version == version:
                continue
            if id(tensor) in self._weights:  # what another thread has copied of them meanwhile does not count
                torch.autograd.graph.increment_version(tensor)
            else:
                torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))
        for put_back in self._put_back:
            put_back()


def _hold_loops(trainer: Trainer, module: LightningModule, run: FitSession) -> list[Callable[[], None]]:
    own = [each.hold_attempt() for each in callbacks_of(trainer) if hasattr(each, "hold_attempt")]
    return [run.hold_attempt(), hold(trainer, module), *own]


def hold_reachable(trainer: Trainer, module: LightningModule) -> list[Memento]:
    """Return mementos of what a step's code may reach but weights, buffers and the optimizer's tensors: the module's, and others'."""
    states = [value for own in trainer.optimizers for each in own.state.values() for value in each.values()]
    weights = [*module.parameters(), *module.buffers(), *(each for each in states if isinstance(each, Tensor))]
    loaders = getattr(trainer.fit_loop._combined_loader, "flattened", [])
    callbacks = [each for each in callbacks_of(trainer) if not is_library(type(each))]
    others = [datamodule_of(trainer), trainer.optimizers, trainer.lr_scheduler_configs, callbacks]
    others += [each.dataset for each in loaders if hasattr(each, "dataset")]
    make = functools.partial(Memento, restored=weights, apart=_FAR, most_items=MOST_ITEMS_IN_A_STEP, code=True)
    return [make([module]), make(others)]


def _unzeroed(trainer: Trainer, weights: Iterable[nn.Parameter]) -> Iterator[tuple[nn.Parameter, Tensor | None]]:
    """Yield the weights whose gradients no optimizer zeroes in the next attempt, with their gradients.

    Backward has begun to add up gradients of whole parameters, where an optimizer has pieces of them and zeroes these.
    """
    stepped = {id(each) for own in trainer.optimizers for group in own.param_groups for each in group["params"]}
    for weight in weights:
        if stepped_of(weight) is not weight:
            yield weight, None
        elif id(weight) not in stepped:
            yield weight, None if weight.grad is None else weight.grad.clone()


def _hold_users(trainer: Trainer, module: LightningModule) -> Memento:
    """Return the memento of random state and of values in the user's attributes, callbacks with hooks in an attempt included.

    Values that only a step needs, such as a list of losses emptied by a hook behind the step, are in no journal.
    """
    parts, values = parts_of(module)
    hooked = [each for each in callbacks_of(trainer) if any(_is_users(each, hook) for hook in _HOOKS)]
    values += [value for each in hooked for value in vars(each).values()]
    return Memento(values, shallow=[*parts, *hooked], apart=APART, most_items=MOST_ITEMS_IN_A_STEP)


_is_small = functools.partial(is_small, most_nbytes=2**16)
_HOOKS = ("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step")
"""Hooks called inside an attempt."""
_LIBRARIES = ("lightning", "lightning_moe_ckpt")
_OF_RESULTS = ("value", "cumulated_batch_size", "_forward_cache", "_update_count", "has_reset", "_computed")
"""Attributes of logged results that change in place."""

APART: tuple[type, ...] = (nn.Module, nn.Parameter, Optimizer, Trainer, Strategy, Logger, Callback)
APART += (LightningDataModule, Dataset, DataLoader)
"""Types to which a module's attribute may lead without being part of it."""


_FAR: tuple[type, ...] = (Trainer, Strategy, Logger, DataLoader)


def never_alone(trainer: Trainer, module: LightningModule, own: tuple[type[Callback], ...]) -> list[str]:
    """Return why steps of this run cannot be repeated beside ranks that wait; empty if they can.

    Args:
        trainer: trainer with callbacks and optimizers.
        module: the trained module.
        own: callbacks that take part in recoveries.
    """
    keeps = [type(each).__name__ for each in trainer.optimizers if type(each).zero_grad is not Optimizer.zero_grad]
    kept = [f"gradients that `{name}.zero_grad` leaves would be added up twice" for name in keeps]
    hooks = [] if getattr(trainer.strategy, "localized_recovery", None) else [*_hooks_of(trainer, module)]
    twice = [f"`{hook}` would be called twice in one step, which `localized_recovery=True` allows" for hook in hooks]
    return [*_of_module(module), *kept, *_of_callbacks(trainer, own), *twice]


def _hooks_of(trainer: Trainer, module: LightningModule) -> Iterator[str]:
    for hook in (*_HOOKS, "configure_gradient_clipping"):
        if is_overridden(hook, module):
            yield f"{type(module).__name__}.{hook}"
        yield from (f"{type(each).__name__}.{hook}" for each in callbacks_of(trainer) if _is_users(each, hook))


def _of_module(module: LightningModule) -> Iterator[str]:
    if is_overridden("optimizer_zero_grad", module):
        yield f"gradients that `{type(module).__name__}.optimizer_zero_grad` leaves would be added up twice"
    for name, metric in module_metrics(module):
        if metric.process_group is not None or metric.dist_sync_fn not in (None, gather_in_stage):
            yield f"the metric `{name}` chooses by itself which ranks it asks"


def _of_callbacks(trainer: Trainer, own: tuple[type[Callback], ...]) -> Iterator[str]:
    for callback in callbacks_of(trainer):
        if getattr(callback, "asks_all_ranks", False):
            yield f"`{type(callback).__name__}` asks all ranks by itself"
        elif isinstance(callback, BaseFinetuning) and not isinstance(callback, own):
            yield f"`{type(callback).__name__}` changes what trains"


def _is_users(callback: Callback, hook: str) -> bool:
    home = getattr(getattr(callback, hook, None), "__module__", "")
    return home.partition(".")[0] not in _LIBRARIES and is_overridden(hook, callback, Callback)


def parts_of(module: LightningModule) -> tuple[list[nn.Module], list[object]]:
    """Return the modules run by an attempt, torch's own excluded, and the values of the user's attributes of them."""
    parts = [each for each in modules_of(module) if not type(each).__module__.startswith("torch.")]
    return parts, [value for part in parts for value in _users_values(part)]


def _users_values(part: nn.Module) -> list[object]:
    """Return values of attributes except a metric's states: see `hold_metrics` for these."""
    left_out = _own_names()
    if isinstance(part, Metric):
        left_out |= {*part._defaults, "_defaults"}
    return [value for name, value in vars(part).items() if name not in left_out]


@functools.cache
def _own_names() -> frozenset[str]:
    return frozenset(vars(LightningModule()))


def hold(trainer: Trainer, module: LightningModule) -> Callable[[], None]:
    """Return a function to undo an attempt's changes in the trainer's loops, results and scaler, and in metrics."""
    metrics, results = hold_metrics(module), trainer.fit_loop.epoch_loop._results
    progress = trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress
    steps, name = (progress.optimizer.step, progress.optimizer.zero_grad), module._current_fx_name
    counted = [(vars(each), vars(each).copy()) for both in steps for each in (both.total, both.current)]
    kept = {
        key: (result, {n: _copy(vars(result)[n]) for n in _OF_RESULTS if n in vars(result)})
        for key, result in results.items()
    }
    scaler = getattr(trainer.precision_plugin, "scaler", None)

    def undo() -> None:
        for key in [result for result in results if result not in kept]:
            del results[key]
        for each, values in kept.values():
            vars(each).update({n: _copy(value) for n, value in values.items()})
        for counts, were in counted:
            counts.update(were)
        module._current_fx_name = name
        metrics()
        if scaler is not None:
            scaler._per_optimizer_states.clear()  # which gradients were unscaled

    return undo


def _copy(value: object) -> object:
    return value.detach().clone() if isinstance(value, Tensor) else value
