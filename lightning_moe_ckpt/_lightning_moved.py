"""Plain attributes of the user's objects that move while training: a counter of a callback, the difficulty of a data set.

Nothing says which attributes are part of a run. Those that are as they were when training began are not: they came from the
user's code, which makes them again. What has changed since then, and is a number, a text, a flag or `None`, goes into the
journal and is set again after a restart, once all hooks that run when training starts have run. Objects with a
`state_dict` of their own are left to it. What cannot be kept so is named when it is first seen to change.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_moe_ckpt import _lightning
from lightning_moe_ckpt._lightning_data import loaders_of
from lightning_moe_ckpt._lightning_held import user_callbacks

log = logging.getLogger(__name__)

_PLAIN = (bool, int, float, str, type(None))
_CONTAINERS = (list, dict, set, deque)
_MOST_TEXT = 1_000
_LIBRARIES = ("lightning", "pytorch_lightning", "lightning_moe_ckpt", "torch", "torchdata")
_UNKNOWN = object()


class MovedAttributes:
    """Watches the attributes of one run's module, data module, callbacks and data sets.

    Args:
        trainer: whose callbacks, data module and loaders.
        module: what it trains.
        skip: callbacks that are not the user's.
    """

    def __init__(self, trainer: Trainer, module: LightningModule, skip: tuple[type[Callback], ...]) -> None:
        self._trainer, self._module, self._skip = trainer, module, skip
        self._owners: dict[str, object] = {}
        self._own: dict[str, frozenset[str]] = {}
        """Attributes that are Lightning's."""
        self._first: dict[str, Any] | None = None
        self._sizes: dict[str, int] = {}
        self._named: set[str] = set()

    def look(self) -> None:
        """Find the objects, again when an epoch begins; what they are when the first one does is where they begin."""
        self._owners = dict(self._roots())
        if self._first is None:
            bare = {
                LightningModule: LightningModule(),
                LightningDataModule: LightningDataModule(),
                Callback: Callback(),
            }
            self._own = {
                name: frozenset(
                    attribute for kind, each in bare.items() if isinstance(owner, kind) for attribute in vars(each)
                )
                for name, owner in self._owners.items()
            }
            self._sizes = {name: len(value) for name, value in self._attributes() if isinstance(value, _CONTAINERS)}
            self._first = {name: value for name, value in self._attributes() if _is_plain(value)}

    def take(self) -> dict[str, Any]:
        """What has moved, by name."""
        moved = {}
        for name, value in self._attributes():
            if _is_plain(value):
                first = (self._first or {}).get(name, _UNKNOWN)
                if first is not value and (type(first) is not type(value) or first != value):
                    moved[name] = value
            elif isinstance(value, _CONTAINERS) and self._sizes.get(name) != len(value):
                self._name(name)
        return moved

    def restore(self, moved: Mapping[str, Any]) -> None:
        """Be as then."""
        first = self._first or {}
        back = {name: first[name] for name in self.take() if name not in moved and name in first}
        for name, value in {**back, **moved}.items():
            owner, _, attribute = name.rpartition(".")
            if owner in self._owners:
                setattr(self._owners[owner], attribute, value)

    def _name(self, name: str) -> None:
        if name not in self._named:
            self._named.add(name)
            log.info(
                "`%s` changes while training and is not restored after a restart; a `state_dict` would keep it", name
            )

    def _attributes(self) -> Iterator[tuple[str, Any]]:
        for name, owner in self._owners.items():
            own = self._own.get(name, frozenset())
            for attribute, value in getattr(owner, "__dict__", {}).items():
                if attribute not in own:
                    yield f"{name}.{attribute}", value

    def _roots(self) -> Iterator[tuple[str, object]]:
        yield "module", self._module
        datamodule = _lightning.datamodule_of(self._trainer)
        if datamodule is not None and not is_overridden("state_dict", datamodule):
            yield "datamodule", datamodule
        for name, callback in user_callbacks(self._trainer, self._skip):
            if not is_overridden("state_dict", callback, Callback) and not _is_library(callback):
                yield name, callback
        for index, loader in enumerate(loaders_of(self._trainer)):
            name, dataset = f"loader{index}.dataset", getattr(loader, "dataset", None)
            for _ in range(3):  # a subset of a subset
                if dataset is not None and not hasattr(dataset, "state_dict") and not _is_library(dataset):
                    yield name, dataset
                name, dataset = f"{name}.dataset", getattr(dataset, "dataset", None)


def _is_plain(value: object) -> bool:
    return type(value) in _PLAIN and not (isinstance(value, str) and len(value) > _MOST_TEXT)


def _is_library(owner: object) -> bool:
    return type(owner).__module__.split(".")[0] in _LIBRARIES
