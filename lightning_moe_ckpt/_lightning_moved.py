"""Record plain attributes of the user's objects that change in training,
such as a callback's counter, a data set's difficulty, or the mode, dropout or temperature of a part of the model.

Nothing says which attributes are part of a run. Attributes that have not changed since training began are not: the
user's code makes them again. A changed attribute that is a number, a text, a flag or `None` goes into the
journal and is set again after a restart, once all hooks of training's start have run. Objects with a
`state_dict` of their own are left to it. A changed attribute of another type is named in the log once.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from operator import is_, itemgetter
from typing import Any

from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torchmetrics import Metric

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
    """Track changes of attributes of one run's module, data module, callbacks and data sets.

    Args:
        trainer: the trainer whose callbacks, data module and loaders are tracked.
        module: the module that it trains.
        skip: callbacks that are not the user's.
        kept: names of modules whose attributes are recorded elsewhere.
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
        self._parts: dict[str, _Part] = {}
        self._first: dict[str, Any] | None = None
        self._sizes: dict[str, int] = {}
        self._named: set[str] = set()

    def look(self) -> None:
        """Find the objects when an epoch begins; the values at the first epoch's start are the reference."""
        self._owners = dict(self._roots())
        if self._first is None:
            self._sizes = {name: len(value) for name, value in self._attributes() if isinstance(value, _CONTAINERS)}
            self._first = {name: value for name, value in self._attributes() if _is_plain(value)}
            self._parts = {
                name: _Part(owner, [attribute for attribute, value in self._of(owner) if _is_plain(value)])
                for name, owner in self._owners.items()
                if isinstance(owner, nn.Module) and owner is not self._module
            }

    def take(self) -> dict[str, Any]:
        """Return the values of changed attributes, by name."""
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
        """Set the attributes in `moved`."""
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
            if name not in self._parts or self._parts[name].may_have_moved(owner):
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
        datamodule = _lightning.datamodule_of(self._trainer)
        if datamodule is not None and not is_overridden("state_dict", datamodule):
            yield "datamodule", datamodule
        for name, callback in user_callbacks(self._trainer, self._skip):
            if not is_overridden("state_dict", callback, Callback) and not _is_of(callback, *_LIBRARIES):
                yield name, callback
        for index, loader in enumerate(loaders_of(self._trainer)):
            name, dataset = f"loader{index}.dataset", getattr(loader, "dataset", None)
            for _ in range(3):  # a subset of a subset
                if dataset is not None and not hasattr(dataset, "state_dict") and not _is_of(dataset, *_LIBRARIES):
                    yield name, dataset
                name, dataset = f"{name}.dataset", getattr(dataset, "dataset", None)


class _Part:
    """First values of one part of the model. There may be thousands of parts, and most never change."""

    def __init__(self, owner: nn.Module, plain: Sequence[str]) -> None:
        self._values, self._length = vars(owner), len(vars(owner))
        # Twice, since the getter of one name gives no tuple.
        self._get = itemgetter(*plain, *plain) if plain else None
        self._first = self._get(self._values) if self._get is not None else ()

    def may_have_moved(self, owner: object) -> bool:
        """Return quickly whether an attribute is new or another object."""
        values = vars(owner)
        if values is not self._values or len(values) != self._length or self._get is None:
            return True
        try:
            return not all(map(is_, self._get(values), self._first))
        except KeyError:  # one is gone and another new
            return True


def _is_plain(value: object) -> bool:
    return type(value) in _PLAIN and not (isinstance(value, str) and len(value) > _MOST_TEXT)


def _is_of(owner: object, *packages: str) -> bool:
    return type(owner).__module__.split(".")[0] in packages


def _not_users(owner: object) -> frozenset[str]:
    """Return names that belong to the library. A module's `training` is the user's: frozen norms are set to `eval`."""
    kinds: dict[type, Any] = {LightningModule: LightningModule(), LightningDataModule: LightningDataModule()}
    kinds[Callback] = Callback()
    own = {name for kind, bare in kinds.items() if isinstance(owner, kind) for name in vars(bare)}
    if isinstance(owner, nn.Module):
        own |= vars(nn.Module()).keys() - {"training"}
    return frozenset(own)
