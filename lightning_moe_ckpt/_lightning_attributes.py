"""Find state in attributes of the user's objects: values that change in training, and random generators.

A value is a callback's counter, a data set's difficulty, or the mode, dropout or temperature of a part of the model.
Nothing says which attributes are part of a run. Attributes that have not changed since training began are not: the
user's code makes them again. A changed attribute that is a number, a text, a flag or `None` goes into the
journal and is set again after a restart, once all hooks of training's start have run. Objects with a
`state_dict` of their own are left to it. A changed attribute of another type is named in the log once.

A data set may hold a numpy `Generator`, a transform a `random.Random`, a module or callback a `torch.Generator`. Their
draws are part of the run, and only attributes lead to them. The search is bounded: attributes, and items of
small lists, tuples and dicts among them, a few levels deep. A generator has the same name in every process of the run,
as long as the code is the same.
"""

from __future__ import annotations

import functools
import random
import types
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain
from operator import is_, itemgetter
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from torchmetrics import Metric

from lightning_moe_ckpt._lightning import callbacks_of, datamodule_of
from lightning_moe_ckpt._lightning_data import data_owners, loader_generators, loader_objects
from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt.journal import HeldGenerator

log = rank_logger(__name__)

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

_PLAIN = (bool, int, float, str, type(None))
_CONTAINERS = (list, dict, set, deque)
_MOST_TEXT = 1_000
_LIBRARIES = ("lightning", "pytorch_lightning", "lightning_moe_ckpt", "torch", "torchdata")
_UNKNOWN = object()
_SAY_HOOKED = frozenset({"_output_capturing_hooks_installed", "_is_hooked"})
"""Flags of transformers that say that a module has its hooks. Hooks are not restored: a new process has to install its own."""


class MovedAttributes:
    """Track changes of attributes of one run's module, data module, callbacks and data sets.

    Callbacks in `skip` are not the user's; attributes of modules in `kept` are recorded elsewhere.
    """

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        skip: tuple[type[Callback], ...],
        kept: Collection[str] = (),
    ) -> None:
        self._trainer, self._module, self._skip, self._kept = trainer, module, skip, kept
        self._owners: dict[str, object] = {}
        self._own: dict[type, frozenset[str]] = {}
        """Names of Lightning's or torch's own attributes, by class of their owner."""
        self._parts = _Parts({}, {})
        self._others: dict[str, object] = {}
        self._first: dict[str, Any] | None = None
        self._insane: dict[str, Any] = {}
        """Values that a sanity check has changed, before it."""
        self._sizes: dict[str, int] = {}
        self._named: set[str] = set()

    def look(self) -> None:
        """Find the objects when an epoch begins; the values at the first epoch's start are the reference."""
        self._owners = self._others = dict(self._roots())
        if self._first is None:
            self._sizes = {name: len(value) for name, value in self._attributes() if isinstance(value, _CONTAINERS)}
            self._first = {name: value for name, value in self._attributes() if _is_plain(value)} | self._insane
            plain = {
                name: [attribute for attribute, value in self._of(owner) if _is_plain(value)]
                for name, owner in self._owners.items()
                if isinstance(owner, nn.Module) and owner is not self._module
            }
            self._parts = _Parts({name: names for name, names in plain.items() if names}, self._owners)
        self._others = self._parts.others(self._owners)

    def sanity_check_begins(self) -> None:
        """Remember values: a run that resumes has no sanity check, so what that changes has changed in training."""
        self._others = dict(self._roots())
        self._insane = {name: value for name, value in self._attributes() if _is_plain(value)}

    def sanity_check_ends(self) -> None:
        """Keep what it has changed."""
        now = {name: value for name, value in self._attributes() if _is_plain(value)}
        self._insane = {name: value for name, value in self._insane.items() if now.get(name, value) != value}

    def take(self, of: tuple[str, ...] | None = None) -> dict[str, Any]:
        """Return the values of changed attributes, by name; only those of owners whose names begin with one `of` these, if given."""
        moved = {}
        for name, value in self._attributes():
            if of is not None and not name.startswith(of):
                continue
            if _is_plain(value):
                first = (self._first or {}).get(name, _UNKNOWN)
                if first is not value and (type(first) is not type(value) or first != value):
                    moved[name] = value
            elif isinstance(value, _CONTAINERS) and self._sizes.get(name) != len(value) and name not in self._named:
                self._named.add(name)
                log.info(
                    "`%s` changes while training and is not restored after a restart; a `state_dict` would keep it",
                    name,
                )
        return moved

    def restore(self, moved: Mapping[str, Any], of: tuple[str, ...] | None = None, *, forget_new: bool = False) -> None:
        """Set attributes to what `take` returned.

        Args:
            moved: result of `take`.
            of: beginnings of names of owners; others are left as they are, and `moved` may have more. All, if it is not given.
            forget_new: whether attributes that came into being since then are deleted.
        """
        first = self._first or {}
        if of is not None:
            moved = {name: value for name, value in moved.items() if name.startswith(of)}
        for name in self.take(of) if forget_new else ():
            owner, _, attribute = name.rpartition(".")
            if name not in moved and name not in first and owner in self._owners:
                delattr(self._owners[owner], attribute)
        back = {name: first[name] for name in self.take(of) if name not in moved and name in first}
        for name, value in {**back, **moved}.items():
            owner, _, attribute = name.rpartition(".")
            if owner in self._owners and attribute not in _SAY_HOOKED:
                setattr(self._owners[owner], attribute, value)

    def _attributes(self) -> Iterator[tuple[str, Any]]:
        for name, owner in {**self._others, **self._parts.moved()}.items():
            for attribute, value in self._of(owner):
                yield f"{name}.{attribute}", value

    def _of(self, owner: object) -> Iterator[tuple[str, Any]]:
        own = self._own.get(type(owner))
        if own is None:
            own = self._own[type(owner)] = _not_users(owner)
        return ((name, value) for name, value in getattr(owner, "__dict__", {}).items() if name not in own)

    def _roots(self) -> Iterator[tuple[str, object]]:
        yield "module", self._module
        for name, part in self._module.named_modules():
            if (
                name
                and name not in self._kept
                and not isinstance(part, Metric)
                and not _is_of(part, "lightning_moe_ckpt")
            ):
                yield f"module.{name}", part
        datamodule = datamodule_of(self._trainer)
        if datamodule is not None and not is_overridden("state_dict", datamodule):
            yield "datamodule", datamodule
        for name, callback in user_callbacks(self._trainer, self._skip):
            if not is_overridden("state_dict", callback, Callback) and not _is_of(callback, *_LIBRARIES):
                yield name, callback
        for name, each in data_owners(self._trainer):
            if not hasattr(each, "state_dict") and (isinstance(each, DataLoader) or not _is_of(each, *_LIBRARIES)):
                yield name, each


class _Parts:
    """First values of plain attributes of the parts of a model. There may be thousands of parts, and most never change.

    Args:
        plain: names of plain attributes, one or more, of each part by its name.
        owners: the parts.
    """

    def __init__(self, plain: Mapping[str, Sequence[str]], owners: Mapping[str, object]) -> None:
        self._names, self._owners = list(plain), [owners[name] for name in plain]
        self._values = list(map(vars, self._owners))
        self._lengths = list(map(len, self._values))
        # Twice, since the getter of one name gives no tuple.
        self._get = [itemgetter(*names, *names) for names in plain.values()]
        self._first = list(map(_GET, self._get, self._values))

    def others(self, owners: Mapping[str, object]) -> dict[str, object]:
        """Return those that are none of these parts."""
        own = dict(zip(self._names, self._owners, strict=True))
        return {name: owner for name, owner in owners.items() if own.get(name) is not owner}

    def moved(self) -> dict[str, object]:
        """Return parts of which an attribute is new or another object; if there are none, nothing is done for each part."""
        return dict(self._moved(0, len(self._names)))

    def _moved(self, start: int, stop: int) -> Iterator[tuple[str, object]]:
        if self._have_moved(slice(start, stop)):
            if stop - start == 1:
                yield self._names[start], self._owners[start]
            else:
                middle = (start + stop) // 2
                yield from self._moved(start, middle)
                yield from self._moved(middle, stop)

    def _have_moved(self, own: slice) -> bool:
        values = self._values[own]
        if list(map(len, values)) != self._lengths[own] or not all(map(is_, map(vars, self._owners[own]), values)):
            return True
        now, first = map(_GET, self._get[own], values), self._first[own]
        try:
            return not all(map(is_, chain.from_iterable(now), chain.from_iterable(first)))
        except KeyError:  # one is gone and another new
            return True


_GET = itemgetter.__call__


def _is_plain(value: object) -> bool:
    return type(value) in _PLAIN and not (isinstance(value, str) and len(value) > _MOST_TEXT)


def _is_of(owner: object, *packages: str) -> bool:
    return type(owner).__module__.split(".")[0] in packages


def _not_users(owner: object) -> frozenset[str]:
    """Return names that belong to the library. A module's `training` is the user's: frozen norms are set to `eval`."""
    kinds: dict[type, Any] = {LightningModule: LightningModule(), LightningDataModule: LightningDataModule()}
    kinds[Callback] = Callback()
    own = {name for kind, bare in kinds.items() if isinstance(owner, kind) for name in vars(bare)}
    if isinstance(owner, DataLoader):
        own |= vars(DataLoader([0])).keys() | {"_get_iterator"}
    if isinstance(owner, nn.Module):
        own |= (vars(nn.Module()).keys() - {"training"}) | _SAY_HOOKED
    return frozenset(own)


class HeldGenerators:
    """Find the generators that the module, data module, loaders and callbacks of one run hold, those in `skip` apart."""

    def __init__(self, trainer: Trainer, module: LightningModule, skip: tuple[type[Callback], ...]) -> None:
        self._trainer, self._module, self._skip = trainer, module, skip
        self._places: dict[str, tuple[Any, Any]] = {}

    def look(self) -> None:
        """Search for generators; call again after loaders were made."""
        seen = {id(each) for each in loader_generators(self._trainer).values()}
        self._places = {}
        for name, root in self._roots():
            self._places.update(_places(name, root, seen, _DEPTH))

    def now(self) -> dict[str, HeldGenerator]:
        """Return the generators that are still in their places, by name."""
        return _there(self._places)

    def _roots(self) -> Iterator[tuple[str, object]]:
        for fqn, module in self._module.named_modules():
            yield f"module.{fqn}" if fqn else "module", module
        datamodule = datamodule_of(self._trainer)
        if datamodule is not None:
            yield "datamodule", datamodule
        yield from user_callbacks(self._trainer, self._skip)
        yield from loader_objects(self._trainer)


def user_callbacks(trainer: Trainer, skip: tuple[type[Callback], ...]) -> Iterator[tuple[str, Callback]]:
    """Yield the user's callbacks, by a name that is the same in every process."""
    count: dict[str, int] = {}
    for callback in callbacks_of(trainer):
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
