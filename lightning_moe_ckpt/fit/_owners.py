"""Follow the attributes of a run's own objects: module, data module, callbacks, loaders and data sets.

Examples are a callback's counter, a data set's difficulty, or the mode, dropout or temperature of a part of the model.
Nothing says which attributes are part of a run. Attributes unchanged since training began are not: the user's code
makes them again. Changed attributes go into the journal and are set again after a restart, once all hooks of training's
start have run, see `objects._values`. Attributes that cannot be stored are named in the log once.
"""

from __future__ import annotations

import dis
import functools
import re
import types
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics import Metric

from lightning_moe_ckpt.fit.loaders._loaders import data_owners, loader_generators, loader_objects, loads_again
from lightning_moe_ckpt.fit.loops._trainer import callbacks_of, datamodule_of
from lightning_moe_ckpt.fit.objects._kinds import CONTENT, metrics_own
from lightning_moe_ckpt.fit.objects._users import (
    GeneratorPlaces,
    generators_at,
    in_state,
    is_library,
    names_of_loaders,
    places_of,
)
from lightning_moe_ckpt.fit.objects._values import Values, is_of_values, unnumbered
from lightning_moe_ckpt.journal import HeldGenerator

_OF_DATA = ("loader", "validation")
"""First parts of the names of loaders and their parts."""
OF_OTHERS = ("module", "datamodule", "callback")
"""First parts of all other names."""


class MovedAttributes:
    """Track changed attributes of one run's user objects; make before hooks of the fit's start run.

    Callbacks in `skip` are not the user's, attributes in `kept`, as (module, attribute), are recorded elsewhere.
    `carried` are entries changed by earlier fits of this process, absent where a later process begins; extended here.
    For the rest see `Values`.
    """

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        skip: tuple[type[Callback], ...],
        kept: Collection[tuple[str, str]] = (),
        *,
        most_nbytes: int = 64 * 2**20,
        untouched: Sequence[str] = (),
        speaks: bool = True,
        carried: set[str] | None = None,
    ) -> None:
        self._trainer, self._module, self._skip = trainer, module, skip
        self._carried = set() if carried is None else carried
        self._kept = defaultdict[str, set[str]](set)
        for fqn, name in kept:
            self._kept[f"module.{fqn}"].add(name)
        self._limits: dict[str, Any] = {"most_nbytes": most_nbytes, "untouched": untouched}
        self._values = Values(**self._limits, speaks=speaks)
        self.others: tuple[str, ...] = ()
        """First parts of names that the resumed run did not have: these objects keep their values."""
        self._held: dict[str, object] = {}
        self._in_states: dict[str, frozenset[str]] = {}
        """Names of attributes that are part of owners' own states."""
        self._always = {*self._carried}
        """Entries that may differ in each process as its first epoch begins."""
        self._before: Values | None = self._probe()

    @property
    def begun(self) -> bool:
        """Whether an epoch has begun in this process."""
        return self._before is None

    def look(self) -> None:
        """Find the objects when an epoch begins; their state at the first epoch's start is the reference."""
        if self._before is not None:
            # A later process would derive other values in hooks, from restored weights or owners' states.
            # All other values every process makes alike.
            loaded = tuple(f"{name}." for name, each in self._roots() if _loads_state(each))
            for name, text in self._before.take().items():
                if is_of_values(text) or name.startswith(loaded):
                    self._always.add(unnumbered(name))
            self._before.close()
            self._before = None
            self._in_states = {}
        self._held = {**dict(self._roots()), **dict(self._data_roots())}
        self._hold()

    def look_at_data(self) -> None:
        """Find Lightning's newly loaded data; its state before any use is the reference."""
        kept = {name: each for name, each in self._held.items() if not name.startswith(_OF_DATA)}
        self._held = {**kept, **dict(self._data_roots())}
        self._hold()

    def sanity_check_begins(self) -> None:
        """Remember values: a resumed run has no sanity check, so its changes count as training's."""
        self._insane = self._probe()

    def sanity_check_ends(self) -> None:
        """Keep the sanity check's changes, and objects made by it."""
        self._always |= _always_of(self._insane.take())
        self._insane.close()

    def take(self, of: tuple[str, ...] | None = None) -> dict[str, Any]:
        """Return changed attributes by name; with `of`, only of owners with names that begin with one of its items.

        Loaders that Lightning is about to replace are left out.
        """
        if (taken := self._values.take(of)) and loads_again(self._trainer):
            return {name: text for name, text in taken.items() if not name.startswith("loader")}
        return taken

    def restore(self, moved: Mapping[str, Any], of: tuple[str, ...] | None = None, *, forget_new: bool = False) -> None:
        """Set attributes to the result of `take`, see `Values.restore`."""
        self._values.restore(moved, of, forget_new=forget_new, but=self.others)

    def close(self) -> None:
        """Stop watching objects."""
        if self.begun:
            self._carried |= _always_of(self._values.take())
        for each in (self._values, self._before):
            if each is not None:
                each.close()

    def _probe(self) -> Values:
        values = Values(**self._limits, speaks=False)
        self._hold(values, dict(self._roots()))
        return values

    def _hold(self, values: Values | None = None, roots: Mapping[str, object] | None = None) -> None:
        owners = {}
        for name, each in (self._held if roots is None else roots).items():
            if name not in self._in_states:
                self._in_states[name] = (
                    in_state(each) if _loads_state(each) and each is not self._module else frozenset()
                )
            owners[name] = each, _not_users(each) | self._in_states[name] | self._kept.get(name, set())
        module = self._module
        elsewhere: dict[str, object] = {f"module.{name}": each for name, each in module.named_modules() if name}
        elsewhere |= {f"module.{name}": each for name, each in chain(module.named_parameters(), module.named_buffers())}
        elsewhere |= {f"optimizer{at}": each for at, each in enumerate(self._trainer.optimizers)} | dict(self._roots())
        (values or self._values).hold(owners, elsewhere, always=self._always)

    def _roots(self) -> Iterator[tuple[str, object]]:
        yield "module", self._module
        for name, part in self._module.named_modules():
            if name and not type(part).__module__.startswith("lightning_moe_ckpt."):
                yield f"module.{name}", part
        if (datamodule := datamodule_of(self._trainer)) is not None:
            yield "datamodule", datamodule
        for name, callback in user_callbacks(self._trainer, self._skip):
            if not is_library(type(callback)):
                yield name, callback

    def _data_roots(self) -> Iterator[tuple[str, object]]:
        for name, owner in data_owners(self._trainer):
            if type(owner) is DataLoader or not type(owner).__module__.startswith(
                ("torch", "lightning.", "streaming.")
            ):
                yield name, owner


def _always_of(found: Mapping[str, Any]) -> set[str]:
    """Return names of changed entries, and of entries with newly made objects."""
    made = {f"{unnumbered(name.removesuffix(CONTENT))}#" for name in found if re.search(r"#\d+\{\}$", name)}
    return {*map(unnumbered, found), *made}


@functools.cache
def _own_names() -> dict[type, frozenset[str]]:
    bare = (LightningModule(), LightningDataModule(), Callback(), nn.Module())
    names = {type(each): frozenset(vars(each)) for each in bare}
    return {**names, nn.Module: names[nn.Module] - {"training"}, DataLoader: names_of_loaders()}


def _not_users(owner: object) -> frozenset[str]:
    """Return names that belong to the library. A module's `training` is the user's: frozen norms are set to `eval`."""
    names, bases = _own_names(), type(owner).__mro__
    # Not `isinstance`: abstract classes ask all of their subclasses.
    own = {name for kind in bases for name in names.get(kind, ())}
    if Callback in bases or LightningDataModule in bases:
        kind: Any = type(owner)
        return frozenset(own | _set_by_library(kind))
    if is_library(type(owner)) and not isinstance(owner, nn.Module) and type(owner) is not DataLoader:
        # Other packages' data sets count in numbers, and build all else themselves. Lists and ranges have no attributes.
        held = getattr(owner, "__dict__", {})
        return frozenset(own | {name for name, value in held.items() if type(value) not in (bool, int, float)})
    metric: Any = owner
    return frozenset(own if Metric not in bases else own | metrics_own() | metric._defaults.keys())


@functools.cache
def _set_by_library(kind: type) -> frozenset[str]:
    """Return attributes set in a user's subclass by library base classes that have a `state_dict`."""
    bases = [each for each in kind.__mro__ if is_library(each) and each not in (Callback, LightningDataModule)]
    if not any("state_dict" in vars(base) for base in bases):
        return frozenset()
    codes = [value.__code__ for base in bases for value in vars(base).values() if isinstance(value, types.FunctionType)]
    return frozenset(i.argval for code in codes for i in dis.get_instructions(code) if i.opname == "STORE_ATTR")


def _loads_state(owner: object) -> bool:
    """Return whether a module, data module or callback has a state of its own beside the journal."""
    if isinstance(owner, Callback | LightningDataModule):
        return bool(is_overridden("state_dict", owner))
    return isinstance(owner, LightningModule) and bool(is_overridden("on_load_checkpoint", owner))


class HeldGenerators:
    """Find generators held by one run's module, data module, loaders and callbacks, except callbacks in `skip`."""

    def __init__(self, trainer: Trainer, module: LightningModule, skip: tuple[type[Callback], ...]) -> None:
        self._trainer, self._module, self._skip = trainer, module, skip
        self._places: GeneratorPlaces = {}

    def look(self) -> None:
        """Search for generators; call again after loaders were made."""
        seen = {id(generator) for generator in loader_generators(self._trainer).values()}
        self._places = places_of(self._roots(), seen)

    def now(self) -> dict[str, HeldGenerator]:
        """Return generators that are still in their places, by name."""
        return generators_at(self._places)

    def _roots(self) -> Iterator[tuple[str, object]]:
        for fqn, module in self._module.named_modules():
            yield f"module.{fqn}" if fqn else "module", module
        if (datamodule := datamodule_of(self._trainer)) is not None:
            yield "datamodule", datamodule
        yield from user_callbacks(self._trainer, self._skip)
        yield from loader_objects(self._trainer)
        yield from ((name, owner) for name, owner in data_owners(self._trainer) if isinstance(owner, DataLoader))


def user_callbacks(trainer: Trainer, skip: tuple[type[Callback], ...]) -> Iterator[tuple[str, Callback]]:
    """Yield the user's callbacks, by a name that is the same in every process."""
    count: dict[str, int] = {}
    for callback in callbacks_of(trainer):
        if not isinstance(callback, skip):
            name = f"callback.{type(callback).__qualname__}"
            count[name] = count.get(name, 0) + 1
            yield name if count[name] == 1 else f"{name}#{count[name]}", callback
