"""The layout of optimizers' state, as a class is known beforehand or as copies have shown, and how far an update reaches.

A copy of a large parameter is small, and its state's sizes foretell those of the parameter's own state.

Classes of torch in the table are believed, since tests try them as everything else is tried at start. What a caller registers is a
claim: copies that show a wider coupling refute it.

Source: `torch/optim/adam.py` and `sgd.py` (`_init_group`), unchanged from torch 2.6 to 2.13.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from typing import NamedTuple, TypeVar, get_args

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt.errors import UnsupportedOptimizer
from lightning_moe_ckpt.journal import refusals
from lightning_moe_ckpt.operators._copies import copied_state, opened, wrapper_name, wrappings
from lightning_moe_ckpt.operators._coupling import (
    Coupling,
    Group,
    Kind,
    Reach,
    attributes_of,
    coupling_of,
    first_states,
    marks_of,
    options_of,
    shape_tried,
    wideness,
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
        if (entries := self._find(group, param)) is None:
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
        if (entries := self._entries.get(kind)) is None or kind.shape == tuple(param.shape):
            return entries
        if (sized := Kind(options, tuple(param.shape), param.dtype, param.device)) not in self._sized:
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


log = rank_logger(__name__)

Layout = Callable[[Group, Tensor, torch.dtype], tuple[StateEntry, ...]]
"""All entries that a parameter can have with a group's options, and torch's default type where the optimizer steps."""


@cache
def _adam_entries(dtype: torch.dtype, step_dtype: torch.dtype, amsgrad: bool) -> tuple[StateEntry, ...]:
    keys = ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if amsgrad else ()))
    moments = (StateEntry(key, dtype, per_element=True) for key in keys)
    return (StateEntry("step", step_dtype, per_element=False), *moments)


def _adam(group: Group, param: Tensor, default: torch.dtype) -> tuple[StateEntry, ...]:
    """Return the step count and the moments of Adam and AdamW: single, foreach and fused, with or without amsgrad."""
    # Same as torch.optim.optimizer._get_scalar_dtype, which is private.
    wide = not group.get("fused") and default is torch.float64
    return _adam_entries(param.dtype, torch.float64 if wide else torch.float32, bool(group.get("amsgrad")))


def _sgd(group: Group, param: Tensor, _default: torch.dtype) -> tuple[StateEntry, ...]:
    """Return the momentum buffer, if there is momentum.

    Before the first step there is no buffer. That differs from a zero buffer: the first step ignores dampening.
    """
    return (StateEntry("momentum_buffer", param.dtype, per_element=True),) if group.get("momentum", 0) != 0 else ()


class _Known(NamedTuple):
    layout: Layout | None
    """`None` if a copy has to show it."""
    coupling: Coupling


_TABLE: Mapping[type[Optimizer], _Known] = {
    Adam: _Known(_adam, "element"),
    AdamW: _Known(_adam, "element"),
    SGD: _Known(_sgd, "element"),
}
_known = dict(_TABLE)
"""The table, and what callers have registered."""

_REFUSED_OPTIONS = {
    "capturable": "a captured CUDA graph keeps the addresses of state that a restore may replace",
    "differentiable": "the state is part of an autograd graph",
}

_REASONS = {
    "ZeroRedundancyOptimizer": "each parameter's state lives on one rank only",
    "DistributedOptimizer": "its flat shards cut through operators",
    "DeepSpeedZeroOptimizer": "its flat shards cut through operators",
    "DeepSpeedZeroOptimizer_Stage3": "its flat shards cut through operators",
}


def register_optimizer(
    cls: type[Optimizer],
    *,
    like: type[Optimizer] | None = None,
    coupling: Coupling | None = None,
    dtypes: Mapping[str, torch.dtype] | None = None,
) -> None:
    """Declare what a class keeps, how far an element's update reaches, or both. No class has to be registered.

    Args:
        cls: the class; its own subclasses are not included.
        like: `Adam`, `AdamW` or `SGD`, or a class registered with `like`, whose state the class keeps exactly; `None`: a copy of
            the optimizer shows at start what it keeps.
        coupling: on what an element's update depends: `"element"` (itself and scalars), `"matrix"` (the last two dimensions),
            `"parameter"` or `"global"`; `None` for the coupling of `like`.
        dtypes: types of state by key, where they are others than in `like`, e.g. moments in `torch.float8_e4m3fn`.

    A run whose policy stores a model in parts tries copies at its start. If an update reaches farther than declared, it is refused,
    with the elements that showed it. If it is declared to reach farther than copies show, the declaration holds.

    Raises:
        UnsupportedOptimizer: neither `like` nor `coupling` is given, `like` has no layout to copy, `dtypes` comes without `like`, or
            there is no such coupling.
    """
    name, base = cls.__qualname__, _Known(None, "element") if like is None else _known.get(like)
    if like is None and (coupling is None or dtypes):
        given = "`dtypes`, which needs `like`" if dtypes else "neither `like` nor `coupling`"
        raise UnsupportedOptimizer(
            f"`register_optimizer({name})` is given {given}. Give the class whose state it keeps as `like`, or how far an update "
            "reaches as `coupling`."
        )
    if like is not None and (base is None or base.layout is None):
        raise UnsupportedOptimizer(
            f"`register_optimizer(like={like.__qualname__})`: that class is not supported itself."
        )
    if coupling is not None and coupling not in get_args(Coupling):
        raise UnsupportedOptimizer(
            f"`register_optimizer(coupling={coupling!r})` must be one of {', '.join(map(repr, get_args(Coupling)))}."
        )
    assert base is not None
    _known[cls] = _Known(_with_dtypes(base.layout, dtypes or {}), coupling or base.coupling)


def _with_dtypes(layout: Layout | None, dtypes: Mapping[str, torch.dtype]) -> Layout | None:
    if layout is None or not dtypes:
        return layout
    # Once for all parameters alike, which share the list.
    typed = cache(lambda found: tuple(replace(each, dtype=dtypes.get(each.key, each.dtype)) for each in found))
    return lambda *facts: typed(layout(*facts))


def layout_of(optimizer: Optimizer) -> Layout | None:
    """Return the layout registered for exactly this optimizer class; `None` if it has to be found out. Raises `UnsupportedOptimizer` if
    state is distributed among ranks, or an option prevents exact capture; the message says why.
    """
    cls = type(optimizer)
    for i, group in enumerate(optimizer.param_groups):
        for option, reason in _REFUSED_OPTIONS.items():
            if group.get(option):
                raise UnsupportedOptimizer(
                    f"`{cls.__qualname__}`, group {i}, cannot be captured exactly: `{option}=True`: {reason}."
                )
    distributed = next((_REASONS[base.__name__] for base in cls.__mro__ if base.__name__ in _REASONS), None)
    if cls not in _known and distributed is not None:
        raise UnsupportedOptimizer(
            f"`{cls.__qualname__}` cannot be captured exactly: {distributed}. Use an optimizer that keeps all state on each "
            "rank, or `fully_shard` under `ModelParallelStrategy`, where state is in shards like its parameter."
        )
    return _known[cls].layout if cls in _known else None


def reach_of(optimizer: Optimizer) -> Reach:
    """Return how far an element's update reaches: what copies show, or what was registered if that is farther.

    Classes of torch in the table are not tried, and what cannot be tried counts as `global`. Raises `UnsupportedOptimizer` if copies show
    more than was registered, or communicate.
    """
    cls, known = type(optimizer), _known.get(type(optimizer))
    if cls in _TABLE:
        return Reach("element")
    declared = None if known is None else Reach(known.coupling, f"it was registered with `coupling={known.coupling!r}`")
    if declared is not None and declared.coupling == "global":
        return declared
    try:
        found = coupling_of(optimizer)
    except UnsupportedOptimizer:
        raise
    except Exception as error:  # noqa: BLE001  # whatever a stranger's class raises of tensors that it does not know
        found = Reach("global", f"it could not be tried on small tensors ({type(error).__name__}: {error})")
    reach = found if declared is None else max(declared, found, key=wideness)
    if declared is not None and reach is found:
        raise UnsupportedOptimizer(
            f"`{cls.__qualname__}` was registered with `coupling={declared.coupling!r}`, and {found.shown}. Use `DenseCheckpoint`, "
            f"which takes everything at once, or register what it does: `coupling={found.coupling!r}`."
        )
    how = "found by trying" if declared is None or declared.coupling == found.coupling else "as registered"
    what = "all parameters together" if reach.coupling == "global" else f"each {reach.coupling} alone"
    log.info("`%s`: %s, %s", cls.__qualname__, what, how, alike=True)
    return reach
