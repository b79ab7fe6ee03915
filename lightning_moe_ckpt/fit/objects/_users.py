"""Tell the user's objects from libraries' objects, and find state that cannot be stored."""

from __future__ import annotations

import argparse
import contextlib
import functools
import inspect
import io
import sys
import types
from collections import ChainMap, UserDict, UserList, UserString
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import Strategy
from torch import Tensor
from torch.optim import Optimizer
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Dataset, Sampler

from lightning_moe_ckpt.journal import NATIVE, differs

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
    Trainer,
    LightningModule,
    LightningDataModule,
    Callback,
    DataLoader,
    Optimizer,
    Strategy,
    Logger,
    LightningOptimizer,
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
        needed = [
            parameter
            for parameter in inspect.signature(own).parameters.values()
            if parameter.default is parameter.empty
        ]
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
