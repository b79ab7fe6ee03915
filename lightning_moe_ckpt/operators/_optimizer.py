"""Access to an optimizer's state by parameter and key, and to the options of its parameter groups.

The layout of the state is known before any state exists, so that space can be reserved. "No state yet" is a state of
its own: capture records it, and restore drops the live state.

An optimizer is supported if the update of an element depends on that element and on scalars only: then a slice of
parameter and state, replayed alone, gives the same bits.

Source: `torch/optim/adam.py` and `sgd.py` (`_init_group`), unchanged from torch 2.6 to 2.13.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from operator import is_, methodcaller
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer
from xxhash import xxh3_128_hexdigest

from lightning_moe_ckpt.errors import IdentityMismatch, UnsupportedOptimizer

Group = Mapping[str, Any]
"""Options of a parameter group."""


@dataclass(frozen=True, slots=True)
class StateEntry:
    """One tensor of a parameter's optimizer state."""

    key: str
    dtype: torch.dtype
    per_element: bool
    """Whether the tensor has the parameter's shape; else it is one scalar for the whole parameter."""


_IDENTITY = ("params", "param_names")
_NOT_PROBED = {*_IDENTITY, "lr", "initial_lr", "weight_decay"}
Layout = Callable[[Group, torch.dtype, torch.dtype], tuple[StateEntry, ...]]
"""All entries that a parameter of a dtype can have with a group's options, and torch's default type where the optimizer steps."""


@cache
def _adam_entries(dtype: torch.dtype, step_dtype: torch.dtype, amsgrad: bool) -> tuple[StateEntry, ...]:
    keys = ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if amsgrad else ()))
    moments = (StateEntry(key, dtype, per_element=True) for key in keys)
    return (StateEntry("step", step_dtype, per_element=False), *moments)


def _adam(group: Group, dtype: torch.dtype, default: torch.dtype) -> tuple[StateEntry, ...]:
    """Return the step count and the moments of Adam and AdamW: single, foreach and fused, with or without amsgrad."""
    # Same as torch.optim.optimizer._get_scalar_dtype, which is private.
    wide = not group.get("fused") and default is torch.float64
    return _adam_entries(dtype, torch.float64 if wide else torch.float32, bool(group.get("amsgrad")))


def _sgd(group: Group, dtype: torch.dtype, _default: torch.dtype) -> tuple[StateEntry, ...]:
    """Return the momentum buffer, if there is momentum.

    Before the first step there is no buffer. That differs from a zero buffer: the first step ignores dampening.
    """
    momentum = StateEntry("momentum_buffer", dtype, per_element=True)
    return (momentum,) if group.get("momentum", 0) != 0 else ()


_layouts: dict[type[Optimizer], Layout] = {Adam: _adam, AdamW: _adam, SGD: _sgd}

_REFUSED_OPTIONS = {
    "capturable": "a captured CUDA graph keeps the addresses of state that a restore may replace",
    "differentiable": "the state is part of an autograd graph",
}

_REASONS = {
    "ZeroRedundancyOptimizer": "each parameter's state lives on one rank only",
    "Adafactor": "its row and column statistics and its clipping are shared by all slices of a parameter",
    "LBFGS": "its history runs over all parameters at once",
    "Muon": "it orthogonalises whole matrices, so a slice cannot be updated alone",
    "SparseAdam": "its state has the shape of sparse gradients",
    "DistributedOptimizer": "its flat shards cut through operators",
    "Optimizer8bit": "its blocks of quantised state straddle slices",
}


def register_optimizer(
    cls: type[Optimizer], *, like: type[Optimizer], dtypes: Mapping[str, torch.dtype] | None = None
) -> None:
    """Support a class that keeps exactly the state of `like` and updates each element alone.

    Args:
        cls: the class; its own subclasses are not included.
        like: `Adam`, `AdamW` or `SGD`, or a class registered before.
        dtypes: types of state by key, where they are others than in `like`, e.g. moments in `torch.float8_e4m3fn`.

    A run whose policy stores a model in parts tries at its start whether each element is updated alone.

    Raises:
        UnsupportedOptimizer: `like` is not supported itself.
    """
    if like not in _layouts:
        raise UnsupportedOptimizer(
            f"`register_optimizer(like={like.__qualname__})`: that class is not supported itself."
        )
    layout, others = _layouts[like], dict(dtypes or {})
    # Once for all parameters alike, which share the list.
    typed = cache(lambda found: tuple(replace(each, dtype=others.get(each.key, each.dtype)) for each in found))
    _layouts[cls] = (lambda *facts: typed(layout(*facts))) if others else layout


_PROBE_SHAPE = (3, 4)
_PROBE_TURNS = 200
"""So many steps with small gradients bring moments to where a large one is clipped by whoever clips updates."""


def why_not_elementwise(optimizer: Optimizer) -> str:
    """Return why the update of an element may depend on other elements, or an empty string if the trial shows no dependence.

    Classes of torch are known. A copy of any other optimizer steps small tensors twice, and one element of the last gradient
    differs: then no other element and no other tensor may differ. The optimizer, its state and all generators stay as they are.
    """
    if type(optimizer) in {Adam, AdamW, SGD}:
        return ""
    groups = {repr([(k, v) for k, v in each.items() if k not in _NOT_PROBED]): each for each in optimizer.param_groups}
    with torch.random.fork_rng(
        devices=[]
    ):  # of the CPU, where it runs: asking devices for theirs would initialise them
        for group in groups.values():
            try:
                one, other = (_probed(optimizer, group, nudge=nudge) for nudge in (0.0, 1.0))
            except Exception as error:  # noqa: BLE001  # whatever a stranger's class raises of tensors that it does not know
                return f"it could not be tried on a small tensor ({type(error).__name__}: {error})"
            reached = [int((a != b).sum()) for a, b in zip(one, other, strict=True)]
            if reached[0] > 1 or any(reached[1:]):
                return (
                    f"of two small tensors, a gradient that differed in 1 element made {sum(reached)} elements differ, as a norm "
                    "over a whole tensor does"
                )
    return ""


def _probed(optimizer: Optimizer, group: Group, *, nudge: float) -> list[Tensor]:
    """Return two tensors after steps of a copy of an optimizer with the options of one group."""
    numbers = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(_PROBE_SHAPE, generator=numbers)) for _ in range(2)]
    memo: dict[int, Any] = {id(p): params[0] for each in optimizer.param_groups for p in each["params"]}
    copied = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        if "hook" in name and isinstance(value, OrderedDict):
            vars(copied)[name] = OrderedDict()
        elif name not in {"state", "param_groups", "step"}:  # a scheduler binds `step` to the optimizer in use
            vars(copied)[name] = copy.deepcopy(value, memo)
    fields = {key: copy.deepcopy(value) for key, value in group.items() if key not in _IDENTITY}
    if not fields.get("lr", 1.0):
        fields["lr"] = 1e-3  # of a warm-up that begins at zero
    copied.state, copied.param_groups = defaultdict(dict), [{"params": params, **fields}]
    for turn in reversed(range(_PROBE_TURNS)):
        for param in params:
            param.grad = torch.randn(_PROBE_SHAPE, generator=numbers) * (1e-3 if turn else 1.0)
        if not turn:
            assert params[0].grad is not None
            params[0].grad[0, 0] += nudge
        type(optimizer).step(copied, lambda: 0.0)  # some recipes take the closure for granted
    return [param.detach() for param in params]


class StateSchema:
    """Layout of and access to one optimizer's state. Make it with `StateSchema.of`."""

    def __init__(self, optimizer: Optimizer, layout: Layout, default_dtype: torch.dtype) -> None:
        self.optimizer = optimizer
        self._layout, self._default = layout, default_dtype
        self._groups: dict[int, Group] = {}
        self._grouped: tuple[int, int] | None = None

    @classmethod
    def of(
        cls, optimizer: Optimizer, *, in_parts: bool = False, default_dtype: torch.dtype | None = None
    ) -> StateSchema:
        """Return the schema of a torch optimizer.

        Args:
            optimizer: of a known or registered class.
            in_parts: whether parts of a tensor may be restored from different steps; a registered class is tried then.
            default_dtype: torch's default type where the optimizer steps; `None` for what it is now.

        Raises:
            UnsupportedOptimizer: its state cannot be captured exactly slice by slice; the message says why.
        """
        schema = cls(optimizer, _layout_of(optimizer), default_dtype or torch.get_default_dtype())
        if in_parts:
            schema.expect_elementwise()
        return schema

    def expect_elementwise(self) -> None:
        """Require that the optimizer updates each element alone, so that parts of a parameter can be restored from different steps.

        Raises:
            UnsupportedOptimizer: a registered class updates elements by others, or it could not be tried.
        """
        if why := why_not_elementwise(self.optimizer):
            raise UnsupportedOptimizer(
                f"`{type(self.optimizer).__qualname__}` was registered as a class that updates each element alone, and does not: {why}. "
                "A part of a tensor cannot be restored without the rest of it. Use `DenseCheckpoint`, which takes everything at once."
            )

    def entries(self, param: Tensor) -> tuple[StateEntry, ...]:
        """Return all state entries that `param` can have, in a fixed order; none if it is in no group."""
        group = self._group(param)
        return () if group is None else self._layout(group, param.dtype, self._default)

    def adam_group(self, param: Tensor) -> Group | None:
        """Return the options of the group of `param` if the optimizer is torch's Adam or AdamW, else `None`.

        A registered class keeps the same state, but may step in another way.
        """
        return self._group(param) if type(self.optimizer) in {Adam, AdamW} else None

    def has_state(self, param: Tensor) -> bool:
        """Return whether the optimizer has state of `param` yet.

        Raises:
            UnsupportedOptimizer: the state is not what the schema says.
        """
        # A momentum buffer may be there and be None.
        state = {key for key, value in self.optimizer.state.get(param, {}).items() if value is not None}
        expected = {entry.key for entry in self.entries(param)}
        if not expected or not state:
            return False
        if state != expected:
            raise UnsupportedOptimizer(
                f"`{type(self.optimizer).__qualname__}` keeps {sorted(state)} for a parameter instead of "
                f"{sorted(expected)}; state beyond the schema would be lost. Do not add to `optimizer.state`."
            )
        return True

    def watch(self, params: Iterable[Tensor]) -> StateWatch:
        """Return a watch over the tensors that make up the state of these parameters."""
        return StateWatch(self.optimizer, params)

    def get_state(self, param: Tensor, key: str) -> Tensor | None:
        """Return the live tensor of state `key`, or `None` if there is none yet, or the optimizer does not train the parameter.

        Raises:
            KeyError: the schema has no such entry for this parameter.
            UnsupportedOptimizer: the tensor is not of the schema's dtype or shape.
        """
        entry = next((each for each in self.entries(param) if each.key == key), None)
        if entry is None:
            if self._group(param) is None:
                return None  # it has left the optimizer
            raise KeyError(key)
        # Not `state[param]`, which would create an entry.
        value: Tensor | None = self.optimizer.state.get(param, {}).get(key)
        if value is None:
            return None
        shape = param.shape if entry.per_element else ()
        if value.dtype != entry.dtype or value.shape != shape or not value.is_contiguous():
            raise UnsupportedOptimizer(
                f"State `{key}` is {value.dtype} {tuple(value.shape)}; only {entry.dtype} {tuple(shape)}, contiguous, "
                "can be captured. Leave the optimizer's state as the optimizer makes it."
            )
        return value

    def ensure_state(self, param: Tensor) -> None:
        """Create zero state where there is none, laid out as the optimizer does, before a restore fills slices of it.

        Zero state differs from no state: see `drop_state`.
        """
        group = self._group(param)
        if group is None or self.has_state(param):
            return
        device = param.device if group.get("fused") else torch.device("cpu")
        created = {
            entry.key: torch.zeros_like(param.detach(), dtype=entry.dtype, memory_format=torch.preserve_format)
            if entry.per_element
            else torch.zeros((), dtype=entry.dtype, device=device)
            for entry in self.entries(param)
        }
        if created:
            self.optimizer.state[param] = created

    def drop_state(self, param: Tensor) -> None:
        """Return to "no state yet": the next step is like the first one."""
        self.optimizer.state.pop(param, None)

    def fingerprint(self) -> str:
        """Return a digest of class and layout, without learning rates. With equal digests records can be exchanged."""
        lines = [type(self.optimizer).__qualname__]
        for group in self.optimizer.param_groups:
            lines.append(f"group of {len(group['params'])}")
            lines += [str(self._layout(group, param.dtype, self._default)) for param in group["params"]]
        return xxh3_128_hexdigest("\n".join(lines).encode())

    def _group(self, param: Tensor) -> Group | None:
        """Return the group with `param`. Groups can be added or replaced during training (gradual unfreezing)."""
        groups = self.optimizer.param_groups
        found = id(groups), sum(len(group["params"]) for group in groups)
        if found != self._grouped:
            self._groups = {id(p): group for group in groups for p in group["params"]}
            self._grouped = found
        return self._groups.get(id(param))


_VALUES = methodcaller("values")


class StateWatch:
    """Tells whether an optimizer's state of some parameters is still made of the same tensors.

    Built-in functions loop over the optimizer's state, without bytecode per parameter, because every step asks.
    """

    def __init__(self, optimizer: Optimizer, params: Iterable[Tensor]) -> None:
        self._optimizer, state = optimizer, optimizer.state
        self._keys, self._states = list(state), list(state.values())
        self._own = [state[param] for param in params if param in state]
        self._values = list(chain.from_iterable(map(_VALUES, self._own)))

    @property
    def tensors(self) -> list[Tensor]:
        """The state's tensors, unchecked; a momentum buffer may be there and be None."""
        return [value for value in self._values if value is not None]

    @property
    def holds(self) -> bool:
        """Return whether the tensors are still the same. New or lost state counts as a change, also of other parameters."""
        state = self._optimizer.state
        return (
            _same(state, self._keys)
            and _same(state.values(), self._states)
            and _same(list(chain.from_iterable(map(_VALUES, self._own))), self._values)
        )


def _same(found: Collection[object], known: Collection[object]) -> bool:
    return len(found) == len(known) and all(map(is_, found, known))


def _layout_of(optimizer: Optimizer) -> Layout:
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
        for option, reason in _REFUSED_OPTIONS.items():
            if group.get(option):
                raise UnsupportedOptimizer(
                    f"`{cls.__qualname__}`, group {i}, cannot be captured exactly: `{option}=True`: {reason}."
                )
    return layout


def groups_state(optimizer: Optimizer) -> list[dict[str, object]]:
    """Return all fields except the parameters, one mapping per group; tensors are copied."""
    return [{k: _copy(v) for k, v in group.items() if k not in _IDENTITY} for group in optimizer.param_groups]


def load_groups_state(optimizer: Optimizer, state: Sequence[dict[str, object]]) -> None:
    """Set the fields that `groups_state` returned. Live tensors are written in place.

    Raises:
        IdentityMismatch: the optimizer has another number of groups.
    """
    groups = optimizer.param_groups
    if len(groups) != len(state):
        raise IdentityMismatch(f"The optimizer has {len(groups)} parameter groups, the checkpoint {len(state)}.")
    for group, fields in zip(groups, state, strict=True):
        for key, value in fields.items():
            group[key] = _restore(group.get(key), value)


def _copy(value: object) -> object:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if type(value) is tuple:
        return tuple(_copy(item) for item in value)
    return [_copy(item) for item in value] if type(value) is list else value


def _restore(live: object, value: object) -> object:
    if (
        isinstance(live, Tensor)
        and isinstance(value, Tensor)
        and live.shape == value.shape
        and live.dtype == value.dtype
    ):
        with torch.no_grad():
            live.copy_(value)
        return live
    return _copy(value)
