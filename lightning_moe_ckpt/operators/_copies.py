"""Copy state without a place in records to the journal and back, and whole optimizers for trials.

A model has thousands of parameters with equal keys in their state. Their names and keys are written once, and each key's
values are a column: numbers as an array, other values as a list. Columns are chosen again only when keys or recorded tensors change.

Some classes keep tensors made of others: quantised elements, scales, a map. Such a wrapper is taken apart by torch's protocol
for tensor subclasses (`__tensor_flatten__`), and its inner tensors are state with the keys `key:name`. It is put together as a
class that a copy of the optimizer has kept: nothing stored chooses a class to import.
"""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import repeat
from operator import eq, is_, itemgetter
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_moe_ckpt.errors import IdentityMismatch, UnsupportedOptimizer
from lightning_moe_ckpt.journal import Constant

State = Mapping[str, Any]
"""State of one parameter."""
Recorded = Callable[[Tensor], Collection[str]]
"""Returns the keys of a parameter's state that its record has: all of them or none."""
Stored = list[dict[str, Any]]
"""State beyond records in types of the journal: a dict for all parameters with equal keys."""

_NUMBERS: dict[type, np.dtype[Any]] = {int: np.dtype(np.int64), float: np.dtype(np.float64)}
_PLAIN = {*_NUMBERS, bool, str, type(None)}


def copied_state(value: object, device: torch.device | None = None) -> Any:
    """Copy tensors, also those in lists, tuples and dicts; to a device if one is given."""
    if type(value) in _PLAIN:
        return value
    if type(value) is dict:
        return {key: copied_state(item, device) for key, item in value.items()}
    if isinstance(value, list | tuple) and type(value) in {list, tuple}:
        return type(value)(copied_state(item, device) for item in value)
    if is_wrapper(value):
        return _put_together(type(value), _wrapping(value), {k: copied_state(v) for k, v in _inner(value).items()})
    if isinstance(value, Tensor):
        return value.detach().clone() if device is None else value.detach().to(device, copy=True)
    return value


def fits(live: object, value: object) -> TypeGuard[Tensor]:
    """Return whether a value can be written into a live tensor, in place."""
    if not (isinstance(live, Tensor) and isinstance(value, Tensor)):
        return False
    return live.shape == value.shape and live.dtype == value.dtype


def is_wrapper(value: object) -> bool:
    """Return whether a value is a tensor of other tensors that torch can take apart."""
    flat = type(value) is Tensor or isinstance(value, DTensor)  # a DTensor is in shards, like its parameter
    return not flat and isinstance(value, Tensor) and hasattr(value, "__tensor_flatten__")


def wrapper_name(cls: type) -> str:
    """Return a wrapper class's name in journals."""
    return f"{cls.__module__}.{cls.__qualname__}"


def opened(state: State) -> dict[str, Any]:
    """Return a state in which wrappers are replaced by their inner tensors, `key:name` each."""
    made: dict[str, Any] = {}
    for key, value in state.items():
        made |= {f"{key}:{name}": each for name, each in _inner(value).items()} if is_wrapper(value) else {key: value}
    return made


def wrappings(state: State) -> dict[str, list[Any]]:
    """Return all that `closed` needs besides inner tensors: class, inner names, context, shape and strides of each wrapper, by key."""
    return {key: _wrapping(value) for key, value in state.items() if is_wrapper(value)}


def closed(state: State, wrapped: Mapping[str, list[Any]], classes: Mapping[str, type]) -> dict[str, Any]:
    """Return an opened state with wrappers from `wrappings`, except those with a record that is not loaded yet. Raises
    `IdentityMismatch` if a wrapper has none of `classes`, kept by a copy.
    """
    keys = {f"{key}:{name}": key for key, (_, names, *_) in wrapped.items() for name in names}
    made: dict[str, Any] = {}
    for inner, value in state.items():
        if (key := keys.get(inner)) is None:
            made[inner] = value
        elif key not in made:
            name, names, *_ = wrapped[key]
            if name not in classes:
                raise IdentityMismatch(f"State `{key}` was of class {name}, which the optimizer does not use here.")
            tensors = {each: state[f"{key}:{each}"] for each in names if f"{key}:{each}" in state}
            if len(tensors) == len(names):
                made[key] = _put_together(classes[name], wrapped[key], tensors)
    return made


def _inner(value: Any) -> dict[str, Tensor]:
    return {name: getattr(value, name) for name in value.__tensor_flatten__()[0]}


def _wrapping(value: Any) -> list[Any]:
    names, context = value.__tensor_flatten__()
    return [wrapper_name(type(value)), list(names), context, value.shape, value.stride()]


def _put_together(cls: Any, wrapping: list[Any], inner: Mapping[str, Tensor]) -> Any:
    _, _, context, shape, stride = wrapping
    return cls.__tensor_unflatten__(inner, context, shape, stride)


@dataclass(frozen=True, slots=True)
class _Alike:
    """Live states of parameters with equal keys."""

    states: list[State]
    names: Constant
    """Names of the parameters, keys in the optimizer's order, and wrappers."""
    recorded: dict[str, list[Tensor]]
    """Tensors that records have, by key."""

    def rows(self) -> Iterable[State]:
        """Return the states without wrappers."""
        return list(map(opened, self.states)) if self.names["wrapped"] else self.states

    def holds(self, rows: Iterable[State]) -> bool:
        """Return whether keys and recorded tensors are still the same."""
        return all(map(eq, map(tuple, rows), repeat(tuple(self.names["keys"])))) and all(
            all(map(is_, map(itemgetter(key), rows), tensors)) for key, tensors in self.recorded.items()
        )

    def take(self, rows: Iterable[State]) -> dict[str, Any]:
        """Return copies of the values beyond records."""
        columns, on_device, strides = {}, {}, {}
        for key in self.names["keys"]:
            if key not in self.recorded:
                columns[key] = _column(list(map(itemgetter(key), rows)))
                if type(columns[key]) is list:
                    on_device[key] = [i for i, each in enumerate(columns[key]) if _device_of(each) not in {None, "cpu"}]
                    strides[key] = {str(i): each for i, v in enumerate(columns[key]) if (each := _strides_of(v))}
        return {"names": self.names, "columns": columns, "on_device": on_device, "strides": strides}


class Beyond:
    """State of an optimizer beyond its parameters' records, with the keys `recorded`."""

    def __init__(self, optimizer: Optimizer, recorded: Recorded = lambda _: ()) -> None:
        self._optimizer, self._recorded = optimizer, recorded
        self._keys: list[Any] = []
        self._states: list[State] = []
        self._alike: list[_Alike] | None = None

    def take(self, params: Mapping[str, Tensor]) -> Stored:
        """Return copies of the state of these parameters, the same ones in every call."""
        state = self._optimizer.state
        same = self._alike is not None and is_same(state, self._keys) and is_same(state.values(), self._states)
        alike = self._alike if same and self._alike is not None else self._sort(params)
        rows = [each.rows() for each in alike]
        if not all(each.holds(these) for each, these in zip(alike, rows, strict=True)):
            alike = self._sort(params)
            rows = [each.rows() for each in alike]
        pairs = zip(alike, rows, strict=True)
        kept = [row for row in pairs if row[0].names["wrapped"] or list(row[0].recorded) != row[0].names["keys"]]
        return [each.take(these) for each, these in kept]

    def _sort(self, params: Mapping[str, Tensor]) -> list[_Alike]:
        state = self._optimizer.state
        self._keys, self._states = list(state), list(state.values())
        members: dict[str, tuple[tuple[Any, ...], list[tuple[str, State, State]]]] = {}
        for fqn, param in params.items():
            if own := state.get(param):
                flat = opened(own)
                kind = list(flat), list(self._recorded(param)), wrappings(own)
                members.setdefault(repr(kind), (kind, []))[1].append((fqn, own, flat))
        self._alike = [
            _Alike(
                [own for _, own, _ in found],
                Constant(params=[fqn for fqn, _, _ in found], keys=keys, wrapped=wrapped),
                {key: [flat[key] for _, _, flat in found] for key in recorded},
            )
            for (keys, recorded, wrapped), found in members.values()
        ]
        return self._alike


def by_parameter(stored: Stored) -> dict[str, tuple[State, Collection[str], Mapping[str, list[Any]]]]:
    """Return each parameter's state, with `Ellipsis` for values in its record, the keys of values on a device, and its `wrappings`."""
    found: dict[str, tuple[State, Collection[str], Mapping[str, list[Any]]]] = {}
    for each in stored:
        names, columns = each["names"], dict(each["columns"])
        columns |= {key: column.tolist() for key, column in columns.items() if isinstance(column, np.ndarray)}
        moved = {key: set(places) for key, places in each["on_device"].items()}
        for key, strides in each["strides"].items():
            for i, own in strides.items():
                columns[key][int(i)] = _laid_out(columns[key][int(i)], own)
        for i, fqn in enumerate(names["params"]):
            values = {key: columns[key][i] if key in columns else ... for key in names["keys"]}
            found[fqn] = values, [key for key, places in moved.items() if i in places], names["wrapped"]
    return found


def put_back(
    optimizer: Optimizer,
    stored: Stored,
    params: Mapping[str, Tensor],
    classes: Mapping[str, type],
    recorded: Recorded = lambda _: (),
) -> None:
    """Replace states by stored values and by the tensors that records have filled. Raises `IdentityMismatch`, see `closed`."""
    found = by_parameter(stored)
    for fqn, param in params.items():
        live = opened(optimizer.state.get(param) or {})
        values, moved, wrapped = found.get(fqn) or (dict.fromkeys(recorded(param), ...), (), {})
        state = {
            key: live[key] if value is ... else copied_state(value, param.device if key in moved else None)
            for key, value in values.items()
            if value is not ... or key in live
        }
        if state:
            optimizer.state[param] = closed(state, wrapped, classes)
        else:
            optimizer.state.pop(param, None)


def is_same(found: Collection[object], known: Collection[object]) -> bool:
    """Return whether two collections have the same objects in the same order."""
    return len(found) == len(known) and all(map(is_, found, known))


def _column(values: list[Any]) -> Any:
    kinds = set(map(type, values))
    if len(kinds) == 1 and (kind := next(iter(kinds))) in _NUMBERS:
        array = np.array(values)
        return array if array.dtype == _NUMBERS[kind] else values  # an integer of more than 64 bits is none
    return values if kinds <= _PLAIN else list(map(copied_state, values))


def _strides_of(value: object) -> Any:
    """Return the strides of tensors that are not contiguous, in lists and dicts as in the value; `None` without such tensors.

    Matrix products of transposed tensors round differently, and the journal stores elements in order.
    """
    if isinstance(value, Tensor) and not is_wrapper(value):
        return None if value.is_contiguous() or value.layout is not torch.strided else list(value.stride())
    if isinstance(value, dict):
        return {key: each for key, item in value.items() if (each := _strides_of(item))}
    items = enumerate(value) if isinstance(value, list | tuple) else ()
    return {str(i): each for i, item in items if (each := _strides_of(item))}


def _laid_out(value: Any, strides: Any) -> Any:
    """Return a value with its tensors laid out by a result of `_strides_of`."""
    if isinstance(value, Tensor):
        return torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device).copy_(value)
    if isinstance(value, dict):
        return {key: _laid_out(item, strides[key]) if key in strides else item for key, item in value.items()}
    return type(value)(_laid_out(item, strides[str(i)]) if str(i) in strides else item for i, item in enumerate(value))


def _device_of(value: object) -> str | None:
    """Return the type of the device of the first tensor in a value; `None` without one."""
    if isinstance(value, Tensor):
        return value.device.type
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return next((found for item in items if (found := _device_of(item))), None)


def inner_optimizers(optimizer: Optimizer) -> dict[str, Optimizer]:
    """Return the optimizers among an optimizer's attributes, if they keep their own state."""
    held = {name: value for name, value in vars(optimizer).items() if isinstance(value, Optimizer)}
    return {name: value for name, value in held.items() if value.state is not optimizer.state}


def twin_of(optimizer: Optimizer, memo: dict[int, Any]) -> Optimizer:
    """Copy an optimizer with all its attributes and the optimizers among these, without hooks.

    `deepcopy` is of no use: torch's optimizers leave their attributes out. A class with a finaliser is made by its constructor, since the
    finaliser may free memory that an attribute stands for. Raises `TypeError` if an attribute cannot be copied, or the constructor needs
    arguments that the optimizer does not keep.
    """
    if hasattr(type(optimizer), "__del__"):
        return _made_anew(optimizer, memo)
    twin = memo[id(optimizer)] = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        if name == "step":  # a scheduler binds it to the optimizer in use
            continue
        if "hook" in name and isinstance(value, OrderedDict):
            vars(twin)[name] = OrderedDict()
        elif isinstance(value, Optimizer) and id(value) not in memo:
            vars(twin)[name] = twin_of(value, memo)
        else:
            vars(twin)[name] = copy.deepcopy(value, memo)
    return twin


def _made_anew(optimizer: Optimizer, memo: dict[int, Any]) -> Optimizer:
    known = {**vars(optimizer), **optimizer.defaults}
    _, *names = inspect.signature(type(optimizer)).parameters
    options = {name: copy.deepcopy(known[name], memo) for name in names if name in known}
    make: Any = type(optimizer)
    twin: Optimizer = make(copy.deepcopy(optimizer.param_groups, memo), **options)
    twin.state = copy.deepcopy(optimizer.state, memo)
    return twin


def communicates(optimizer: Optimizer, operation: str) -> UnsupportedOptimizer:
    """Return the error of an optimizer whose step asks other ranks for something."""
    return UnsupportedOptimizer(
        f"`{type(optimizer).__qualname__}` communicates in its step (`{operation}`), so that one rank cannot try a copy. Use an optimizer that steps on each "
        "rank alone, such as `torch.optim.Muon`, or, if every rank keeps all state of Adam, AdamW or SGD, "
        "`register_optimizer(cls, like=...)` with `DenseCheckpoint`, which does not try it."
    )
