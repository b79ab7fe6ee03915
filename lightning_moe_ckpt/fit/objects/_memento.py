"""Remember objects as a fit begins, and restore them in place.

A new process begins with the objects built by the user's script. A process that goes on in place has traces of steps
that will be trained again, anywhere in the user's objects and in Lightning's. The journal restores its own entries;
everything else has to be as at the fit's start. So that state is remembered, once, before anything was restored.

The search begins at a few objects and follows attributes, items and bound methods. All objects keep their identity,
since they refer to each other: an attribute gets its former object back, and this object its own attributes. Large
tensors are not copied, unless asked for: the model's are restored from a generation, and others, such as data, must not
have changed.

Out of reach: closures, iterators, and content of the standard library's objects; class attributes and globals unless asked for.
"""

from __future__ import annotations

import random
import sys
import types
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from enum import Enum
from functools import lru_cache
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_moe_ckpt.errors import CheckpointError
from lightning_moe_ckpt.fit.objects._users import (
    GENERATORS,
    MOST_ITEMS,
    is_library,
    refill,
    restore_values,
    slots_of,
    why_not,
)
from lightning_moe_ckpt.journal import HeldGenerator, capture_rng, restore_rng

_FILLED = (list, bytearray, set, deque)
"""Containers whose items are remembered, besides dictionaries."""
_READ = (tuple, frozenset)
_OPAQUE = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, Enum, PurePath, BaseException)
_ATOMS = {type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size}
_FOREIGN = {*sys.stdlib_module_names, "fsspec", "tqdm", "rich", "tensorboard"}
"""Packages whose objects are not searched: connections, files, threads, windows."""
_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_USED_UP = {"state of an iterator", "state of a queue", "state of an open file", "state that the system holds"}
_STREAMS = {"stdin", "stdout", "stderr", "__stdin__", "__stdout__", "__stderr__"}
_PLAIN = (list, dict, set, deque, bytearray, np.ndarray, Tensor)
_MISSING = object()
_is_any: Callable[[type, tuple[type, ...]], bool] = lru_cache(maxsize=4096)(issubclass)


def _ways(kind: type) -> tuple[Any, bool, Collection[str]]:
    """Return how objects of a type are remembered, whether their attributes are, and their slots. Asked once: steps have many objects."""
    ways = (Tensor, np.ndarray, GENERATORS, types.MethodType, dict, _FILLED, _READ)
    how: Any = next((way for way in ways if issubclass(kind, way)), None)
    is_whole = how in (GENERATORS, types.MethodType) or kind.__module__.partition(".")[0] in _FOREIGN
    return how, not is_whole, slots_of(kind)


_ways_of: Callable[[type], tuple[Any, bool, Collection[str]]] = lru_cache(maxsize=4096)(_ways)


def _is_at_work(each: object) -> bool:
    """Return whether an object is our own: other threads may be at work in it."""
    return type(each).__module__.partition(".")[0] == "lightning_moe_ckpt" and not isinstance(each, torch.nn.Module)


def is_small(each: Any, most_nbytes: int = 2**20) -> bool:
    """Return whether a tensor, if dense, or an array is small enough to be copied."""
    return (not isinstance(each, Tensor) or each.layout is torch.strided) and bool(each.nbytes <= most_nbytes)


class Memento:
    """State at one moment of the objects that are found from `roots`, and of the attributes of `shallow` objects, not
    searched further.

    Tensors in `restored` get their values elsewhere, objects of types in `apart` are left alone, and of containers
    longer than `most_items` only the items' identities are remembered. `copies` returns whether a tensor or array is
    copied; by default those up to 1 MiB. With `code`, attributes of the user's classes and values in their modules are remembered too.
    """

    def __init__(
        self,
        roots: Iterable[object],
        *,
        shallow: Iterable[object] = (),
        restored: Iterable[Tensor] = (),
        apart: tuple[type, ...] = (),
        most_items: int = MOST_ITEMS,
        copies: Callable[[Any], bool] = is_small,
        code: bool = False,
    ) -> None:
        self._apart, self._most_items, self._copies, self._code = (*_OPAQUE, *apart), most_items, copies, code
        self.incomplete = False
        """Whether there are objects in longer containers, whose content is not remembered."""
        self.used_up: set[str] = set()
        """Found objects whose state changes by use and cannot be remembered, in words."""
        self._owners: dict[int, tuple[Any, dict[str, Any]]] = {}
        """Classes and modules of the user's, with their values."""
        self._restored = {id(tensor): tensor for tensor in restored}
        self._spaces: list[tuple[dict[Any, Any], dict[Any, Any]]] = []
        """Objects' attributes, and dictionaries."""
        self._slots: list[tuple[object, str, object]] = []
        self._containers: list[tuple[Any, list[Any]]] = []
        self._arrays: list[tuple[Any, Any]] = []
        self.tensors: list[tuple[Tensor, Tensor | int | None]] = []
        """Tensors, each with a copy, the version of a tensor not copied, or `None` if restored elsewhere."""
        self._leaves: list[tuple[Tensor, bool, Tensor | None, list[dict[Any, Any] | None]]] = []
        """Tensors with `requires_grad`, gradient and hooks."""
        self._held: dict[str, HeldGenerator] = {}
        self._seen: dict[int, object] = {}
        self._search([*roots, *self._restored.values()])
        for each in shallow:
            self._spaces.append((vars(each), vars(each).copy()))
        self._random = capture_rng(held=self._held)
        self._seen.clear()

    def restore(self) -> None:
        """Restore everything remembered. Raises `CheckpointError` if a large tensor that was not copied has changed."""
        for owner, names in self._owners.values():
            _restore_names(owner, names)
        for space, items in self._spaces:
            _restore_space(space, items)
        for owner, name, value in self._slots:
            if value is not _MISSING:
                object.__setattr__(owner, name, value)
            elif hasattr(owner, name):
                object.__delattr__(owner, name)
        for container, was in self._containers:
            refill(container, was)
        for array, content in self._arrays:
            array[...] = content
        for tensor, kept in self.tensors:
            _restore_tensor(tensor, kept)
        for tensor, trains, gradient, hooks in self._leaves:
            _restore_leaf(tensor, trains, gradient, hooks)
        restore_rng(self._random, held=self._held)

    # -- private

    def _search(self, found: list[object]) -> None:
        while found:
            each = found.pop()
            if type(each) in _ATOMS or id(each) in self._seen or _is_any(each.__class__, self._apart):
                continue
            self._seen[id(each)] = each  # kept alive: no other object may get its identity
            found.extend(self._remember(each))

    def _remember(self, each: Any) -> list[object]:
        """Remember an object, and return objects behind it."""
        how, has_attributes, slots = _ways_of(type(each))
        behind = list[object]()
        if how is _FILLED or how is _READ:
            if how is _FILLED:
                self._containers.append((each, list(each)))
            behind.extend(self._within(each))
        elif how is dict:
            self._remember_space(each, behind)
        elif how is Tensor:
            self._remember_tensor(each)
        elif how is GENERATORS:
            if not isinstance(each, random.SystemRandom):
                self._held[str(len(self._held))] = each
        elif how is types.MethodType:
            behind.append(each.__self__)
        elif how is np.ndarray and each.flags.writeable and self._copies(each):
            self._arrays.append((each, each.copy()))
        if self._code:
            self._remember_code(each, behind, is_whole=not has_attributes)
        if not has_attributes or (self._code and _is_at_work(each)):
            return behind
        space = getattr(each, "__dict__", None)
        if isinstance(space, dict):
            self._remember_space(space, behind)
        for name in slots:
            value = getattr(each, name, _MISSING)
            self._slots.append((each, name, value))
            behind.append(value)
        return behind

    def _remember_code(self, each: Any, behind: list[object], *, is_whole: bool) -> None:
        """Remember values in the user's classes of an object; note an object whose state changes by use, and cannot be remembered."""
        if is_whole and (why := why_not(each)) in _USED_UP and not any(each is getattr(sys, name) for name in _STREAMS):
            self.used_up.add(f"{why} ({type(each).__module__}.{type(each).__qualname__})")
        for owner in type(each).__mro__:
            if id(owner) not in self._owners and not is_library(owner):
                behind.extend(self._remember_names(owner))

    def _remember_space(self, space: dict[Any, Any], behind: list[object]) -> None:
        self._spaces.append((space, space.copy() if type(space) is dict else dict(space.items())))
        behind.extend(self._within(space.values()))

    def _within(self, items: Collection[object]) -> Iterable[object]:
        if len(items) <= self._most_items:
            return items
        self.incomplete |= not _ATOMS.issuperset(map(type, items))
        return ()

    def _remember_names(self, owner: type) -> Iterator[object]:
        """Remember values in a class and in its module; other things than plain containers of the module are not looked into."""
        for each in filter(None, (owner, sys.modules.get(owner.__module__))):
            if id(each) not in self._owners:
                names = {name: value for name, value in vars(each).items() if name[:2] != "__"}
                self._owners[id(each)] = each, names
                yield from (value for value in names.values() if each is owner or isinstance(value, _PLAIN))

    def _remember_tensor(self, tensor: Tensor) -> None:
        if tensor.grad_fn is not None or tensor.is_meta:
            return
        kept: Tensor | int | None = None
        if id(tensor) not in self._restored:
            kept = (
                tensor.detach().clone() if self._copies(tensor) else None if tensor.is_inference() else tensor._version
            )
        self.tensors.append((tensor, kept))
        if tensor.requires_grad or isinstance(tensor, torch.nn.Parameter):
            hooks = [None if (own := getattr(tensor, name)) is None else dict(own) for name in _HOOKS]
            self._leaves.append((tensor, tensor.requires_grad, tensor.grad, hooks))


def _restore_space(space: dict[Any, Any], items: dict[Any, Any]) -> None:
    if [id(each) for pair in space.items() for each in pair] == [id(each) for pair in items.items() for each in pair]:
        return
    refill(space, items.items())


def _restore_names(owner: Any, names: dict[str, Any]) -> None:
    now = {name: value for name, value in vars(owner).items() if name[:2] != "__"}
    for name in now.keys() - names.keys():
        delattr(owner, name)
    for name, value in names.items():
        if now.get(name, _MISSING) is not value:
            setattr(owner, name, value)


def _restore_tensor(tensor: Tensor, kept: Tensor | int | None) -> None:
    if isinstance(kept, Tensor):
        restore_values(tensor, kept)
    elif kept is not None and tensor._version != kept:
        raise CheckpointError(
            f"a tensor of shape {tuple(tensor.shape)} that is no part of the model has changed in training: it cannot be reset in "
            "place, only built anew by a whole restart. Make it a buffer."
        )


def _restore_leaf(tensor: Tensor, trains: bool, gradient: Tensor | None, hooks: list[dict[Any, Any] | None]) -> None:
    if tensor.requires_grad != trains:
        tensor.requires_grad_(trains)
    tensor.grad = gradient
    for name, own in zip(_HOOKS, hooks, strict=True):
        now = getattr(tensor, name)
        if own is None:
            if now:
                setattr(tensor, name, None)
        else:
            _restore_space(now, own)
