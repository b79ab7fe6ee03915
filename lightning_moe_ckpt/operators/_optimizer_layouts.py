"""State that each supported optimizer keeps per parameter, and reasons why others cannot be captured by slice.

An optimizer is supported if the update of an element depends on that element and on scalars only: then a slice of
parameter and state, replayed alone, gives the same bits.

Source: `torch/optim/adam.py` and `sgd.py` (`_init_group`), unchanged from torch 2.6 to 2.13.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from lightning_moe_ckpt.errors import UnsupportedOptimizer

Group = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class StateEntry:
    """One tensor of a parameter's optimizer state."""

    key: str
    dtype: torch.dtype
    per_element: bool
    """Whether the tensor has the parameter's shape; else it is one scalar for the whole parameter."""


class StateLayout(Protocol):
    """The state of one optimizer class."""

    def refusal(self, group: Group) -> str | None:
        """Return why a group with these options cannot be captured exactly; `None` if it can."""

    def entries(self, group: Group, param: Tensor) -> tuple[StateEntry, ...]:
        """Return all entries that `param` can have with these options."""

    def create(self, group: Group, param: Tensor) -> dict[str, Tensor]:
        """Create zero state, laid out as the optimizer does."""


class AdamLayout:
    """Adam and AdamW: single, foreach and fused, with or without amsgrad."""

    def refusal(self, group: Group) -> str | None:
        """Refuse `capturable` and `differentiable`."""
        if group["capturable"]:
            return "`capturable=True`: a captured CUDA graph keeps the addresses of state that a restore may replace"
        return "`differentiable=True`: the state is part of an autograd graph" if group["differentiable"] else None

    def entries(self, group: Group, param: Tensor) -> tuple[StateEntry, ...]:
        """Return the step count and the moments."""
        return _adam_entries(param.dtype, _step_dtype(group), bool(group["amsgrad"]))

    def create(self, group: Group, param: Tensor) -> dict[str, Tensor]:
        """Create zero state; the step count is on the CPU unless the optimizer is fused."""
        device = param.device if group["fused"] else torch.device("cpu")
        step = torch.zeros((), dtype=_step_dtype(group), device=device)
        moments = self.entries(group, param)[1:]
        zeros = {e.key: torch.zeros_like(param, memory_format=torch.preserve_format) for e in moments}
        return {"step": step, **zeros}


class SGDLayout:
    """SGD with or without momentum.

    Before the first step there is no buffer. That differs from a zero buffer: the first step ignores dampening.
    """

    def refusal(self, group: Group) -> str | None:
        """Refuse `differentiable`."""
        return "`differentiable=True`: the state is part of an autograd graph" if group["differentiable"] else None

    def entries(self, group: Group, param: Tensor) -> tuple[StateEntry, ...]:
        """Return the momentum buffer, if there is momentum."""
        return _sgd_entries(param.dtype) if group["momentum"] != 0 else ()

    def create(self, group: Group, param: Tensor) -> dict[str, Tensor]:
        """Create a zero buffer, which the caller overwrites."""
        return {e.key: torch.zeros_like(param, memory_format=torch.preserve_format) for e in self.entries(group, param)}


_layouts: dict[type[Optimizer], StateLayout] = {Adam: AdamLayout(), AdamW: AdamLayout(), SGD: SGDLayout()}

_REASONS = {
    "ZeroRedundancyOptimizer": "each parameter's state lives on one rank only",
    "Adafactor": "its row and column statistics and its clipping are shared by all slices of a parameter",
    "LBFGS": "its history runs over all parameters at once",
    "Muon": "it orthogonalises whole matrices, so a slice cannot be updated alone",
    "SparseAdam": "its state has the shape of sparse gradients",
    "DistributedOptimizer": "its flat shards cut through operators",
    "Optimizer8bit": "its blocks of quantised state straddle slices",
}


def register_optimizer(cls: type[Optimizer], *, like: type[Optimizer]) -> None:
    """Support a subclass that keeps exactly the state of `like` and updates each element alone.

    Args:
        cls: the subclass; its own subclasses are not included.
        like: `Adam`, `AdamW` or `SGD`, or a class registered before.

    Raises:
        UnsupportedOptimizer: `like` is not supported itself.
    """
    if like not in _layouts:
        raise UnsupportedOptimizer(
            f"`register_optimizer(like={like.__qualname__})`: that class is not supported itself."
        )
    _layouts[cls] = _layouts[like]


def layout_of(optimizer: Optimizer) -> StateLayout:
    """Return the layout registered for exactly this optimizer class.

    Raises:
        UnsupportedOptimizer: the class has no layout, or an option prevents exact capture; the message says why.
    """
    cls = type(optimizer)
    layout = _layouts.get(cls)
    if layout is None:
        known = (_REASONS[base.__name__] for base in cls.__mro__ if base.__name__ in _REASONS)
        reason = next(known, "it is not known whether its state can be captured slice by slice")
        raise UnsupportedOptimizer(
            f"`{cls.__qualname__}` cannot be captured exactly: {reason}. Use Adam, AdamW or SGD; a subclass that keeps "
            "their state as it is can be added with `register_optimizer(cls, like=...)`."
        )
    for i, group in enumerate(optimizer.param_groups):
        refusal = layout.refusal(group)
        if refusal is not None:
            raise UnsupportedOptimizer(f"`{cls.__qualname__}`, group {i}, cannot be captured exactly: {refusal}.")
    return layout


@cache
def _adam_entries(dtype: torch.dtype, step_dtype: torch.dtype, amsgrad: bool) -> tuple[StateEntry, ...]:
    keys = ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if amsgrad else ()))
    moments = (StateEntry(key, dtype, per_element=True) for key in keys)
    return (StateEntry("step", step_dtype, per_element=False), *moments)


@cache
def _sgd_entries(dtype: torch.dtype) -> tuple[StateEntry, ...]:
    return (StateEntry("momentum_buffer", dtype, per_element=True),)


def _step_dtype(group: Group) -> torch.dtype:
    # Same as torch.optim.optimizer._get_scalar_dtype, which is private.
    if group["fused"]:
        return torch.float32
    return torch.float64 if torch.get_default_dtype() is torch.float64 else torch.float32
