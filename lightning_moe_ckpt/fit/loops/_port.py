"""Reach Lightning's and torch's private parts for a strategy: the only way from `MoEStrategy` to them.

Each function names the private attribute in use. Taps are instance attributes, so that any precision plugin keeps its
class, and are removed at teardown, by the function that each `tap_` returns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim import Optimizer

IGNORED = "_ddp_params_and_buffers_to_ignore"


def is_accumulating(trainer: Trainer) -> bool:
    """Return whether more micro-batches follow before the optimizer steps. Uses `_should_accumulate`."""
    return trainer.fit_loop._should_accumulate()


def may_validate(trainer: Trainer) -> bool:
    """Return whether a fit has validation data, or this is no fit. Uses `_data_source` of the validation loop."""
    return trainer.state.fn != TrainerFn.FITTING or trainer.fit_loop.epoch_loop.val_loop._data_source.is_defined()


def ignored_names(module: LightningModule) -> set[str]:
    """Return parameters and buffers that the user excludes from DistributedDataParallel, by its convention."""
    return set(getattr(module, IGNORED, ()))


def ignore_names(module: LightningModule, names: set[str]) -> None:
    """Keep `names` out of Lightning's own broadcast of module states, which follows DDP's convention."""
    setattr(module, IGNORED, sorted(names))


def named_states(module: LightningModule) -> list[tuple[str, Tensor]]:
    """Return parameters and buffers by name."""
    return [*module.named_parameters(), *module.named_buffers()]


class OneProcess(_SubprocessScriptLauncher):
    """Launcher of this process alone, without a script to start again: it may be a notebook's."""

    @property
    def is_interactive_compatible(self) -> bool:
        """Whether the launcher works in a notebook or an interactive interpreter."""
        return True


def keep_threads(launcher: object) -> None:
    """Keep torch's threads at most at their number when a Trainer function is called. Uses `_SubprocessScriptLauncher`.

    Lightning gives each process its share of the cores, whatever number the script has set, and whether or not torch
    counts two threads of a core as two: a small model's step then takes many times as long.
    """
    if not isinstance(launcher, _SubprocessScriptLauncher):
        return  # other launchers' processes have threads of their own
    original = launcher.launch

    def launch(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        threads = torch.get_num_threads()

        def begin(*args: Any, **kwargs: Any) -> Any:
            torch.set_num_threads(min(threads, torch.get_num_threads()))
            return function(*args, **kwargs)

        return original(begin, *args, **kwargs)

    tap(launcher, "launch", launch)


def tap_clipping(
    precision: Precision, clip: Callable[[Optimizer, int | float], None], by: Literal["norm", "value"] = "norm"
) -> Callable[[], None]:
    """Route clipping by norm or value through `clip`: every plugin ends in `clip_grad_by_norm` or `clip_grad_by_value`."""
    return tap(precision, f"clip_grad_by_{by}", clip)


def tap_zero_grad(trainer: Trainer, hold: Callable[[Callable[[], None] | None], None]) -> Callable[[], None]:
    """Give `hold` the function that zeroes gradients before a batch's backward, and let Lightning call nothing there.
    Uses `_AutomaticOptimization._make_zero_grad_fn`.
    """
    loop = trainer.fit_loop.epoch_loop.automatic_optimization
    original = loop._make_zero_grad_fn
    return tap(loop, "_make_zero_grad_fn", lambda batch_idx, optimizer: hold(original(batch_idx, optimizer)))


def tap_finetuning(callback: BaseFinetuning, stepped: Callable[[Any], Any]) -> Callable[[], None]:
    """Let a finetuning callback find, and name, what an optimizer has of each parameter. Uses `_apply_mapping_to_param_groups`."""
    original = callback._apply_mapping_to_param_groups

    def apply(groups: list[dict[str, Any]], mapping: dict[Any, Any]) -> list[dict[str, Any]]:
        return original(groups, {stepped(key): stepped(value) for key, value in mapping.items()})

    return tap(callback, "_apply_mapping_to_param_groups", apply)


def tap_toggling(module: LightningModule, follow: Callable[[Callable[[], None]], None]) -> list[Callable[[], None]]:
    """Let `follow` call what `toggle_optimizer` and `untoggle_optimizer` do. Return functions to remove the taps."""

    def tapped(original: Callable[[Any], None]) -> Callable[[Any], None]:
        return lambda optimizer: follow(lambda: original(optimizer))

    return [tap(module, name, tapped(getattr(module, name))) for name in ("toggle_optimizer", "untoggle_optimizer")]


def tap_after_closure(precision: Precision, then: Callable[[], object]) -> Callable[[], None]:
    """Call `then` when gradients are clipped, right before the optimizer steps. Uses `_after_closure`."""
    original = precision._after_closure

    def after_closure(*args: Any) -> None:
        original(*args)
        then()

    return tap(precision, "_after_closure", after_closure)


def tap_found_inf(precision: Precision, combine: Callable[[Tensor], None], device: torch.device) -> Callable[[], None]:
    """Call `combine` on every scaler verdict before it is read; do nothing if the plugin has no scaler. Uses
    `GradScaler._unscale_grads_`, shared by `unscale_` and the check for fused optimizers.
    """
    if (scaler := getattr(precision, "scaler", None)) is None:
        return lambda: None
    original: Callable[..., dict[torch.device, Tensor]] = scaler._unscale_grads_

    def unscale_and_combine(*args: Any, **kwargs: Any) -> dict[torch.device, Tensor]:
        # A rank without gradients has no verdict of its own, but must take part, and take other ranks'.
        verdicts = original(*args, **kwargs) or {device: torch.zeros((), device=device)}
        for verdict in verdicts.values():
            combine(verdict)
        return verdicts

    return tap(scaler, "_unscale_grads_", unscale_and_combine)


def tap(owner: object, name: str, value: object) -> Callable[[], None]:
    """Set an attribute on an instance, over a method of its class; return the function to restore what was there."""
    before = vars(owner).get(name)
    setattr(owner, name, value)

    def remove() -> None:
        if vars(owner).get(name) is value:
            if before is None:
                delattr(owner, name)
            else:
                setattr(owner, name, before)

    return remove
