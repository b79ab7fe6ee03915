"""Find random generators that the objects of a run hold as attributes.

A data set may hold a numpy `Generator`, a transform a `random.Random`, a module or callback a `torch.Generator`. Their
draws are part of the run, and only attributes lead to them. The search is bounded: attributes, and items of
small lists, tuples and dicts among them, a few levels deep.

Invariant: a generator has the same name in every process of the run, as long as the code is the same.
"""

from __future__ import annotations

import functools
import random
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lightning_moe_ckpt import _lightning, _lightning_data
from lightning_moe_ckpt.journal import HeldGenerator

_KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_DEPTH = 6
"""Levels of the search, enough for subset, data set, transform, list of transforms, transform, generator."""
_MOST_ITEMS = 100
"""Most items of a list that is searched; longer lists hold data."""
_MOST_OBJECTS = 200_000
_OPAQUE = (
    *(str, bytes, int, float, complex, type(None), type, types.ModuleType, types.FunctionType, Tensor, np.ndarray),
    *(Trainer, LightningModule, LightningDataModule, Callback, DataLoader, Optimizer),
)
"""Types that are not searched: they hold no generator, or are searched under a name of their own."""


class HeldGenerators:
    """Random generators held by the objects of one run.

    Args:
        trainer: the trainer whose callbacks, data module and loaders are searched.
        module: the module that it trains.
        skip: callbacks that are not the user's.
    """

    def __init__(self, trainer: Trainer, module: LightningModule, skip: tuple[type[Callback], ...]) -> None:
        self._trainer, self._module, self._skip = trainer, module, skip
        self._places: dict[str, tuple[Any, Any]] = {}

    def look(self) -> None:
        """Search for generators; call again after loaders were made."""
        seen = {id(each) for each in _lightning_data.loader_generators(self._trainer).values()}
        self._places = {}
        for name, root in self._roots():
            self._places.update(_places(name, root, seen, _DEPTH))

    def now(self) -> dict[str, HeldGenerator]:
        """Return the generators that are still in their places, by name."""
        return _there(self._places)

    def _roots(self) -> Iterator[tuple[str, object]]:
        for fqn, module in self._module.named_modules():
            yield f"module.{fqn}" if fqn else "module", module
        datamodule = _lightning.datamodule_of(self._trainer)
        if datamodule is not None:
            yield "datamodule", datamodule
        yield from user_callbacks(self._trainer, self._skip)
        yield from _lightning_data.loader_objects(self._trainer)


def user_callbacks(trainer: Trainer, skip: tuple[type[Callback], ...]) -> Iterator[tuple[str, Callback]]:
    """Yield the user's callbacks, by a name that is the same in every process."""
    count: dict[str, int] = {}
    for callback in trainer.callbacks:  # type: ignore[attr-defined]  # untyped in Lightning
        if not isinstance(callback, skip):
            name = f"callback.{type(callback).__qualname__}"
            count[name] = count.get(name, 0) + 1
            yield name if count[name] == 1 else f"{name}#{count[name]}", callback


def held_by(objects: Mapping[str, object]) -> dict[str, HeldGenerator]:
    """Return the generators that some objects hold, by names that begin with the objects' names."""
    seen: set[int] = set()
    found = {place: at for name, each in objects.items() for place, at in _places(name, each, seen, _DEPTH)}
    return _there(found)


def _there(places: Mapping[str, tuple[Any, Any]]) -> dict[str, HeldGenerator]:
    found = {}
    for name, (namespace, key) in places.items():
        value = _get(namespace, key)
        if isinstance(value, _KINDS) and not isinstance(value, random.SystemRandom):
            found[name] = value
    return found


def _places(name: str, owner: object, seen: set[int], depth: int) -> Iterator[tuple[str, tuple[Any, Any]]]:
    if id(owner) in seen or len(seen) > _MOST_OBJECTS:
        return
    seen.add(id(owner))
    namespace, keys = _inside(owner)
    for key in keys:
        value = _get(namespace, key)
        if isinstance(value, _KINDS):
            if id(value) not in seen:
                seen.add(id(value))
                yield f"{name}.{key}", (namespace, key)
        elif depth and not isinstance(value, _OPAQUE):
            yield from _places(f"{name}.{key}", value, seen, depth - 1)


def _inside(owner: object) -> tuple[Any, Sequence[Any]]:
    """Return the container of an object's parts, and its keys."""
    if isinstance(owner, types.MethodType):
        return [owner.__self__], [0]
    if isinstance(owner, functools.partial):
        return {"func": owner.func, "args": owner.args, "keywords": owner.keywords}, ["func", "args", "keywords"]
    if isinstance(owner, dict):
        return owner, [key for key in owner if isinstance(key, str | int)] if len(owner) <= _MOST_ITEMS else []
    if isinstance(owner, list | tuple):
        return owner, range(len(owner)) if len(owner) <= _MOST_ITEMS else []
    namespace = getattr(owner, "__dict__", {})
    return namespace, list(namespace)


def _get(namespace: Any, key: Any) -> object:
    try:
        value: object = namespace[key]
    except LookupError:
        return None  # it was there when looked for
    return value
