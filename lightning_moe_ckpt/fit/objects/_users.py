"""Tell the user's objects from libraries' objects, and find random generators and state that cannot be stored in them.

A data set may hold a NumPy `Generator`, a transform a `random.Random`, a module or callback a `torch.Generator`. Their
draws are part of the run, and only attributes lead to them. The search is bounded: attributes, and items of small
lists, tuples and dicts in attributes, a few levels deep. A generator has the same name in every process of the run, as
long as the code is the same.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import inspect
import io
import random
import sys
import types
from array import array
from collections import ChainMap, OrderedDict, UserDict, UserList, UserString, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import Strategy
from torch import Tensor
from torch.optim import Optimizer
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Dataset, Sampler

from lightning_moe_ckpt.journal import NATIVE, HeldGenerator, differs

GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
"""Types of random generators."""
MOST_ITEMS, MOST_PLAIN_ITEMS = 10_000, 100_000
"""Longest searched container, in items, of objects and of plain values; longer containers hold data."""
MOST_ITEMS_IN_A_STEP, MOST_ITEMS_FOR_GENERATORS = 1_000, 100
"""Longest container that is looked into in every step, and in the search for random generators."""
_LIBRARIES = frozenset(
    {
        *("lightning", "lightning_fabric", "pytorch_lightning", "lightning_utilities"),
        *("torch", "torchdata", "torchmetrics", "torchvision", "torchaudio", "torchao", "triton", "transformer_engine"),
        *("transformers", "tokenizers", "datasets", "accelerate", "peft", "huggingface_hub", "safetensors", "timm"),
        *("numpy", "pandas", "pyarrow", "PIL", "scipy", "sklearn", "matplotlib", "fsspec", "h5py", "zarr", "xarray"),
        *("litdata", "streaming", "webdataset"),
        *("tqdm", "rich", "wandb", "mlflow", "tensorboard", "tensorboardX", "omegaconf", "jsonargparse", "pydantic"),
    }
)
"""Packages whose objects are not searched, except containers and objects with a `state_dict`."""
SEARCHED = (types.SimpleNamespace, argparse.Namespace, Dataset, Sampler, UserDict, UserList, UserString, ChainMap)
"""Library types with attributes that are searched all the same."""
MADE_BY_LIGHTNING = (
    *(Trainer, LightningModule, LightningDataModule, Callback, DataLoader),
    *(Optimizer, Strategy, Logger, LightningOptimizer),
)
"""Types of objects that are restored elsewhere, or made by every process."""
_STATE: dict[str, str] = {
    **dict.fromkeys(("queue", "_queue", "multiprocessing.queues", "asyncio.queues"), "state of a queue"),
    **dict.fromkeys(("_thread", "threading", "multiprocessing.synchronize"), "state of a lock or thread"),
    **dict.fromkeys(
        ("socket", "sqlite3", "mmap", "subprocess", "multiprocessing.sharedctypes"), "state that the system holds"
    ),
}
"""Modules of the standard library whose objects have state that no journal can hold."""


def has_base(kind: type, bases: Iterable[type]) -> bool:
    """Return whether one of `bases` is among a class's own. `issubclass` lets an abstract base ask all of its subclasses, a thousand."""
    return not set(kind.__mro__).isdisjoint(bases)


def is_library(kind: type) -> bool:
    """Return whether a class is a library's, and not of the user's own package with the same name."""
    return _is_library(kind.__module__.partition(".")[0])


@functools.cache
def _is_library(root: str) -> bool:
    if root in sys.stdlib_module_names or root == "lightning_moe_ckpt":
        return True
    return root in _LIBRARIES and "-packages" in str(getattr(sys.modules.get(root), "__file__", ""))


@functools.cache
def names_of_loaders() -> frozenset[str]:
    """Return names of attributes that torch gives every loader."""
    return frozenset(vars(DataLoader[Any](range(1)))) | {"_get_iterator"}  # type: ignore[arg-type]


def has_state(value: object) -> bool:
    """Return whether an object has a `state_dict` without arguments, and can load its result."""
    try:
        own = getattr(value, "state_dict", None)
        if not callable(own) or not callable(getattr(value, "load_state_dict", None)):
            return False
        needed = [each for each in inspect.signature(own).parameters.values() if each.default is each.empty]
    except Exception:  # noqa: BLE001  # a foreign object may raise anything; its attributes are searched then
        return False
    return all(each.kind in {each.VAR_POSITIONAL, each.VAR_KEYWORD} for each in needed)


def why_not(value: object) -> str:
    """Return a description of an object that cannot be stored; "state of ..." if it certainly has state of its own."""
    home = type(value).__module__
    if isinstance(value, io.IOBase):
        return "state of an open file"
    if home in _STATE or home.partition(".")[0] in {"multiprocessing", "socket", "sqlite3"}:
        return _STATE.get(home, "state that the system holds")
    if isinstance(value, Iterator):
        return "state of an iterator"
    if not is_library(type(value)) and not callable(value):
        return f"state of a {home}.{type(value).__qualname__}, whose parts cannot be read"
    return f"an object of {home}.{type(value).__qualname__}"


def _slots_of(kind: type) -> Collection[str]:
    """Return names of slots of a class and its bases."""
    names = set[str]()
    for base in kind.__mro__[:-1]:
        own = vars(base).get("__slots__", ())
        private = f"_{base.__name__.lstrip('_')}"
        for name in [own] if isinstance(own, str) else own:
            names.add(f"{private}{name}" if name.startswith("__") and not name.endswith("__") else name)
    return sorted(names - {"__dict__", "__weakref__"}) if kind.__module__ != "builtins" else ()


slots_of: Callable[[type], Collection[str]] = functools.lru_cache(maxsize=1024)(_slots_of)


def space_of(each: Any) -> Mapping[str, Any]:
    """Return an object's own attributes."""
    space = getattr(each, "__dict__", {})
    slots = slots_of(type(each))
    return space if not slots else {**space, **{name: getattr(each, name) for name in slots if hasattr(each, name)}}


def in_state(owner: Any) -> frozenset[str]:
    """Return names of attributes that are part of the object's own state, and need no other place."""
    found = set[str]()
    with contextlib.suppress(Exception):  # the user's code may raise anything; all attributes are followed then
        state: Any = owner.state_dict()
        leaves = pytree.tree_leaves(state)
        ids = {*map(id, state.values()), *map(id, leaves)}
        places = {leaf.data_ptr() for leaf in leaves if isinstance(leaf, Tensor)}
        for name, value in space_of(owner).items():
            if value is not None and type(value) in NATIVE:
                continue
            parts = pytree.tree_leaves(value.state_dict() if has_state(value) else value)
            same = bool(parts) and all(isinstance(part, Tensor) and part.data_ptr() in places for part in parts)
            key = next((key for key in (name, name.strip("_")) if key in state), None)
            if same or (value is not None and id(value) in ids) or (key and not differs(state[key], value)):
                found.add(name)
    return frozenset(found)


GeneratorPlaces: TypeAlias = "dict[str, tuple[Any, Any]]"

_DEPTH = 6
"""Levels of the search, enough for subset, data set, transform, list of transforms, transform, generator."""
_MOST_OBJECTS = 200_000
_OPAQUE = (
    *(str, bytes, int, float, complex, type(None), type, types.ModuleType, types.FunctionType, Tensor, np.ndarray),
    *(Trainer, LightningModule, LightningDataModule, Callback, DataLoader, Optimizer),
)
"""Types not searched: they hold no generator, or are searched under a name of their own."""
_CONTAINERS = {dict, OrderedDict, list, tuple}
"""Types of which an empty object is not searched: a module has ten."""


def held_by(objects: Mapping[str, object]) -> dict[str, HeldGenerator]:
    """Return generators held by some objects, by names that begin with the objects' names."""
    return generators_at(places_of(objects.items(), set()))


def places_of(roots: Iterable[tuple[str, object]], seen: set[int]) -> GeneratorPlaces:
    """Return where objects hold generators: containers and keys, by names that begin with the objects'. Searched objects are added
    to `seen`.
    """
    return {place: at for name, each in roots for place, at in _places(name, each, seen, _DEPTH)}


def generators_at(places: GeneratorPlaces) -> dict[str, HeldGenerator]:
    """Return generators that are still in their places."""
    found = {}
    for name, (namespace, key) in places.items():
        value = _get(namespace, key)
        if isinstance(value, GENERATORS) and not isinstance(value, random.SystemRandom):
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
            kind: Any = type(value)
            if (holds := _may_hold(kind)) is None:
                if id(value) not in seen:
                    seen.add(id(value))
                    yield f"{name}.{key}", (namespace, key)
            elif depth and holds and (kind not in _CONTAINERS or value):
                yield from _places(f"{name}.{key}", value, seen, depth - 1)


@functools.cache
def _may_hold(kind: type) -> bool | None:
    """Return whether objects of a class may hold generators; `None` for a generator."""
    return None if has_base(kind, GENERATORS) else not has_base(kind, _OPAQUE)


def _inside(owner: object) -> tuple[Any, Sequence[Any]]:
    """Return the container of an object's parts, and its keys."""
    if isinstance(owner, types.MethodType):
        return [owner.__self__], [0]
    if isinstance(owner, functools.partial):
        return {"func": owner.func, "args": owner.args, "keywords": owner.keywords}, ["func", "args", "keywords"]
    if isinstance(owner, dict):
        return owner, [k for k in owner if isinstance(k, str | int)] if len(owner) <= MOST_ITEMS_FOR_GENERATORS else []
    if isinstance(owner, list | tuple):
        return owner, range(len(owner)) if len(owner) <= MOST_ITEMS_FOR_GENERATORS else []
    namespace, left_out = getattr(owner, "__dict__", {}), names_of_loaders() if isinstance(owner, DataLoader) else ()
    return namespace, [key for key in namespace if key not in left_out]


def _get(namespace: Any, key: Any) -> object:
    try:
        value: object = namespace[key]
    except LookupError:
        return None  # removed since the search
    return value


def refill(container: Any, items: Any) -> None:
    """Give a list, array, set, deque or dictionary (pairs) other items, past a subclass's own item methods where they matter."""
    if isinstance(container, dict):
        kind = OrderedDict if isinstance(container, OrderedDict) else dict
        kind.clear(container)
        for key, value in items:
            kind.__setitem__(container, key, value)
    elif isinstance(container, list | bytearray | array):
        container[:] = array(container.typecode, items) if isinstance(container, array) else items
    else:
        container.clear()
        (container.extend if isinstance(container, deque) else container.update)(items)


def restore_values(tensor: Tensor, kept: Tensor) -> None:
    """Make a tensor equal to an earlier copy, perhaps on the host."""
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        if tensor.shape != kept.shape or tensor.dtype != kept.dtype:
            tensor.data = kept.to(tensor.device, copy=True)
        elif not torch.equal(tensor, kept.to(tensor.device)):
            tensor.copy_(kept)
