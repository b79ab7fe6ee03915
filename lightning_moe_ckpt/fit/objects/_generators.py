"""Find random generators held by the user's objects.

A data set may hold a NumPy `Generator`, a transform a `random.Random`, a module or callback a `torch.Generator`. Their
draws are part of the run, and only attributes lead to them. The search is bounded: attributes, and items of small
lists, tuples and dicts in attributes, a few levels deep. A generator has the same name in every process of the run, as
long as the code is the same.
"""

from __future__ import annotations

import contextlib
import functools
import random
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lightning_moe_ckpt.fit.objects._users import names_of_loaders
from lightning_moe_ckpt.journal import HeldGenerator

GeneratorPlaces: TypeAlias = "dict[str, tuple[Any, Any]]"

_KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_DEPTH = 6
"""Levels of the search, enough for subset, data set, transform, list of transforms, transform, generator."""
_MOST_ITEMS = 100
"""Longest list, tuple or dict that the search looks into; longer ones are taken for data."""
_MOST_OBJECTS = 200_000
_OPAQUE = (
    *(str, bytes, int, float, complex, type(None), type, types.ModuleType, types.FunctionType, Tensor, np.ndarray),
    *(Trainer, LightningModule, LightningDataModule, Callback, DataLoader, Optimizer),
)
"""Types that are not searched: they hold no generator, or are searched under a name of their own."""


def held_by(objects: Mapping[str, object]) -> dict[str, HeldGenerator]:
    """Return generators held by some objects, by names that begin with the objects' names."""
    return generators_at(places_of(objects.items(), set()))


def places_of(roots: Iterable[tuple[str, object]], seen: set[int]) -> GeneratorPlaces:
    """Return where objects hold generators: containers and keys, by names that begin with the objects' names.

    Args:
        roots: objects by name.
        seen: identities of objects to pass over; searched objects are added.
    """
    return {place: at for name, each in roots for place, at in _places(name, each, seen, _DEPTH)}


def generators_at(places: GeneratorPlaces) -> dict[str, HeldGenerator]:
    """Return generators that are still in their places."""
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
        with contextlib.suppress(Exception):  # a foreign object may raise anything, and `Values` names it
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
    namespace, left_out = getattr(owner, "__dict__", {}), names_of_loaders() if isinstance(owner, DataLoader) else ()
    return namespace, [key for key in namespace if key not in left_out]


def _get(namespace: Any, key: Any) -> object:
    try:
        value: object = namespace[key]
    except LookupError:
        return None  # removed since the search
    return value
