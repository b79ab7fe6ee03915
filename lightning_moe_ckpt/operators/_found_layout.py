"""Layout of an optimizer's state that copies have shown: tensors with a place in records, and their sizes.

A copy of a large parameter is small, and its state's sizes foretell those of the parameter's own state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_moe_ckpt.errors import UnsupportedOptimizer
from lightning_moe_ckpt.journal import refusals
from lightning_moe_ckpt.operators._copies import copied_state, opened, wrapper_name, wrappings
from lightning_moe_ckpt.operators._coupling import (
    Group,
    Kind,
    attributes_of,
    first_states,
    marks_of,
    options_of,
    shape_tried,
)
from lightning_moe_ckpt.operators._parameters import STORED_DTYPES

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class StateEntry:
    """A tensor of a parameter's optimizer state."""

    key: str
    dtype: torch.dtype
    per_element: bool
    """Whether the tensor has the parameter's shape; else it is one tensor for the whole parameter."""
    on_device: bool = field(default=False, repr=False)  # the text is part of fingerprints
    """Whether a tensor for the whole parameter is on the parameter's device, and not on the CPU."""
    shape: tuple[int, ...] = field(default=(), repr=False)
    """Shape of a tensor for the whole parameter: `()` for a scalar, more for statistics of rows, scales or maps."""
    by_row: bool = field(default=False, repr=False)
    """Whether that tensor's first dimension is the parameter's."""


_BLOCKS = tuple(2**i for i in range(4, 13))
"""Elements of a block with a scale of its own, in quantised states."""


def _shape_of_state(found: Sequence[int], tried: Sequence[int], shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of a state of a parameter, given that `found` is that of a copy with the shape `tried`.

    Each dimension is one of the parameter's, or a number of blocks of its elements, or the same for all parameters.
    """
    made: list[int] = []
    before, after = math.prod(tried), math.prod(shape)
    for i, size in enumerate(found):
        same = [j for j in (i, *range(len(tried))) if j < len(tried) and tried[j] == size]
        blocks = [block for block in _BLOCKS if -(-before // block) == size and len(found) == 1]
        if same:
            made.append(shape[same[0]])
        else:
            made.append(-(-after // blocks[0]) if blocks else size)
    return tuple(made)


class FoundLayout:
    """Entries of a class without a table, by kind of parameter; makes and tries another copy for kinds that come later."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._options: dict[int, tuple[Group, str]] = {}
        """Groups, kept alive, with their options at the trial: steps may change options."""
        self._marks: dict[int, str] = {}
        """Marks of these groups' parameters at the trial."""
        self._entries: dict[Kind, tuple[StateEntry, ...]] = {}
        self._sized: dict[Kind, tuple[StateEntry, ...]] = {}
        """Entries of parameters larger than their copies."""
        self.by_parameter = False
        """Whether some state is a tensor for a parameter as a whole that is no scalar."""
        self.others: set[str] = set()
        """Keys of state without a place in records."""
        self.attributes: tuple[str, ...] = ()
        """Attributes of the optimizer that a restart needs."""
        self.wrappers: dict[str, type] = {}
        """Classes of tensors of other tensors in its state, by name."""
        self._learn()

    def __call__(self, group: Group, param: Tensor, _default: torch.dtype) -> tuple[StateEntry, ...]:
        """Return the entries of a parameter in records."""
        entries = self._find(group, param)
        if entries is None:
            # If that fails, all of its state is in the journal, which says what it cannot store.
            with suppress(UnsupportedOptimizer):
                self._learn()
            entries = self._find(group, param)
        return entries or ()

    def _find(self, group: Group, param: Tensor) -> tuple[StateEntry, ...] | None:
        known, options = self._options.get(id(group), (None, ""))
        if known is not group:
            return None
        options += self._marks.get(id(param), "")
        kind = Kind(options, shape_tried(param.shape), param.dtype, param.device)
        entries = self._entries.get(kind)
        if entries is None or kind.shape == tuple(param.shape):
            return entries
        sized = Kind(options, tuple(param.shape), param.dtype, param.device)
        if sized not in self._sized:
            self._sized[sized] = tuple(
                replace(each, shape=_shape_of_state(each.shape, kind.shape, param.shape)) for each in entries
            )
        return self._sized[sized]

    def _learn(self) -> None:
        optimizer, name = self._optimizer, type(self._optimizer).__qualname__
        found = self._try(first_states)
        for group in optimizer.param_groups:
            self._options.setdefault(id(group), (group, options_of(group)))
            for param in group["params"]:
                self._marks.setdefault(id(param), marks_of(param, optimizer.state.get(param) or {}))
        for kind, (param, closed) in found.items():
            state, wrapped = opened(closed), wrappings(closed)
            self.wrappers |= {wrapper_name(type(closed[key])): type(closed[key]) for key in wrapped}
            self._entries[kind] = tuple(entry for key, value in state.items() if (entry := _entry(key, value, param)))
            self.by_parameter |= any(entry.shape for entry in self._entries[kind])
            rest = state.keys() - {entry.key for entry in self._entries[kind]}
            self.others |= rest
            if refused := refusals({key: copied_state(state[key]) for key in rest} | {"wrapped": wrapped}):
                raise UnsupportedOptimizer(f"`{name}` cannot be captured exactly, by its state: {refused[0]}.")
        self.attributes = self._try(attributes_of)

    def _try(self, find: Callable[[Optimizer], _T]) -> _T:
        try:
            return find(self._optimizer)
        except UnsupportedOptimizer:
            raise
        except Exception as error:  # whatever a stranger's class raises of tensors that it does not know
            raise UnsupportedOptimizer(
                f"`{type(self._optimizer).__qualname__}` cannot be captured: it could not be tried on copies of parameters "
                f"({type(error).__name__}: {error}), so that it is not known what it keeps.{_remedy(self._optimizer)}"
            ) from error


def _remedy(optimizer: Optimizer) -> str:
    """Return a sentence about lists with a tensor per parameter, of which copies have others; empty without such lists."""
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    lists = [name for name, each in vars(optimizer).items() if isinstance(each, list | tuple) and len(each) == count]
    lists = [name for name in lists if all(isinstance(each, Tensor) for each in vars(optimizer)[name])]
    return f" Its list `{lists[0]}` has a tensor per parameter: keep these in `state[param]` instead." if lists else ""


def _entry(key: str, value: object, param: Tensor) -> StateEntry | None:
    """Return the entry of a state with a place in records; `None` for all other state."""
    if type(value) not in {Tensor, nn.Parameter} or not isinstance(value, Tensor) or value.dtype not in STORED_DTYPES:
        return None
    if not value.is_contiguous():
        return None
    on_device = value.device == param.device and value.device.type != "cpu"
    if value.shape == param.shape and value.ndim:
        return StateEntry(key, value.dtype, per_element=True, on_device=on_device)
    by_row = value.ndim > 0 and param.ndim > 0 and param.shape.count(len(value)) == 1 and len(value) == len(param)
    return StateEntry(key, value.dtype, per_element=False, on_device=on_device, shape=tuple(value.shape), by_row=by_row)


def recorded_value(entry: StateEntry, value: object, param: Tensor) -> Tensor | None:
    """Return a value if its record has a place for it."""
    fits = type(value) in {Tensor, nn.Parameter, DTensor} and isinstance(value, Tensor) and value.dtype == entry.dtype
    if not fits or not isinstance(value, Tensor) or value.shape != (param.shape if entry.per_element else entry.shape):
        return None
    return value if value.is_contiguous() else None
