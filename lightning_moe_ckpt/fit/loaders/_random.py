"""Record and restore the random state with which batches are fetched: in this process, and in workers.

*Fetches.* A resumed run repeats its epoch's consumed fetches, without training's draws from the same generators in
between. Most fetches do not need these draws: an item depends on its own draws only, and is thrown away. Two kinds do.
The first is a fetch in which one of several loaders starts over: its sampler and workers draw seeds in mid-epoch. The
second is every fetch of a loader that keeps drawn items for later, such as a stream through a shuffle buffer. The state
before a fetch is kept if it differs from the state after the previous fetch.

*Workers.* Workers made anew in every epoch are seeded by this process, and follow from its state. Persistent workers
(`persistent_workers=True`) are seeded once, and go on drawing from epoch to epoch. They send their state with every
batch, and a restart in a later epoch makes workers with the state at that epoch's start. Batches on their way when an
epoch ends count too: loaders wait for these before the next epoch, and throw them away. The random state goes with
plain counts in attributes of the workers' data set copies.

*Moments.* Random state is taken at five moments of an epoch before its fetches, see `BoundaryRecorder` for their order.

Validation's loaders are treated alike, except for the moment: their state is taken at a boundary of training.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torch.utils.data._utils.pin_memory import pin_memory
from torch.utils.data._utils.worker import _generate_state

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt.fit.loaders._loaders import (
    counted_before,
    data_sets,
    draws_as_it_goes,
    fetches_are_independent,
    loaders_of,
    loads_again,
    restarted_loaders,
    validation_loaders,
)
from lightning_moe_ckpt.fit.objects._users import held_by
from lightning_moe_ckpt.journal import RngState, capture_rng, decode, differs, encode, restore_rng

log = rank_logger(__name__)

States = dict[str, Any]
"""`seed` from which the workers were made, and `states`: an encoded array per worker, `None` until it sent one."""

STATE_NBYTES = 2**14
"""Bytes that a worker's state may take in a journal."""


class PersistentWorkers:
    """Track the state of the persistent workers of one run's training and validation loaders."""

    def __init__(self, trainer: Trainer, *, deterministic: bool) -> None:
        self._trainer, self._deterministic = trainer, deterministic
        self._taps: dict[int, _LoaderTap] = {}
        self._refused = False
        self._restored: Mapping[int, States] = {}

    @property
    def num_workers(self) -> int:
        """Number of workers with state in journals."""
        return sum(tap.loader.num_workers for tap in self._taps.values())

    def look(self) -> None:
        """Find loaders with persistent workers, when loaders have been made and nobody has used them."""
        training = {} if self._deterministic else dict(enumerate(loaders_of(self._trainer)))
        validation = {-1 - index: each for index, each in enumerate(validation_loaders(self._trainer))}
        for index, loader in {**training, **validation}.items():
            known = index in self._taps and self._taps[index].loader is loader
            if getattr(loader, "persistent_workers", False) and not known and self._can_tell(loader):
                self._taps[index] = _LoaderTap(loader)

    def before_iter(self, restored: Mapping[int, States] | None) -> None:
        """Prepare the loaders for a new epoch's iterators; in a restart with the workers' first state, by index of their loader."""
        self._begin(restored or {}, training=True)

    def resume(self, restored: Mapping[int, States]) -> None:
        """Let validation's workers begin with this state when validation is next run for training."""
        self._restored = restored

    def before_validation(self) -> None:
        """Prepare validation's loaders for new iterators."""
        self.look()
        if self._trainer.sanity_checking:
            self._begin({}, training=False)
        else:
            self._begin(self._restored, training=False)
            self._restored = {}

    def _begin(self, restored: Mapping[int, States], *, training: bool) -> None:
        for index, tap in self._taps.items():
            if (index >= 0) is training:
                tap.begin_epoch(restored.get(index))

    def take(self) -> dict[int, States]:
        """Return workers' state at the epoch's start, or validation's newest; none of workers made in this epoch."""
        states = {index: tap.begun if index >= 0 else tap.newest for index, tap in self._taps.items()}
        return {index: state for index, state in states.items() if state is not None}

    def end(self) -> dict[int, States]:
        """Return the state for the next epoch's begin; call between epochs. Ends the present iterators' use."""
        new = loads_again(self._trainer)  # new loaders have new workers
        ends = {index: tap.newest if index < 0 else None if new else tap.end() for index, tap in self._taps.items()}
        return {index: state for index, state in ends.items() if state is not None}

    def remove(self) -> None:
        """Restore the loaders' own functions."""
        for tap in self._taps.values():
            tap.remove()

    def _can_tell(self, loader: Any) -> bool:
        ragged = isinstance(loader.dataset, IterableDataset) and loader.drop_last
        can = type(loader).__iter__ is DataLoader.__iter__ and not ragged
        if not can and not self._refused:
            self._refused = True
            log.warning(
                "restarts are not exact if items draw random numbers: `%s(persistent_workers=True%s)` keeps their state to "
                "itself. Leave persistent_workers out, or say deterministic_dataset=True where they draw none.",
                type(loader).__name__,
                ", drop_last=True" if ragged else "",
            )
        return can


class _LoaderTap:
    """A loader, with its iterator and its workers' state."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.begun: States | None = None
        """Workers' state at this epoch's start; `None` in the epoch in which they were made."""
        self._newest: States = {"seed": 0, "states": []}
        self._begins = False
        self._original = (loader.collate_fn, loader.worker_init_fn)
        self._beginning = _Beginning(loader.worker_init_fn, _counted(loader.dataset))
        loader.collate_fn = _Telling(loader.collate_fn, self._beginning.first)
        loader.worker_init_fn = self._beginning
        self._make = loader._get_iterator
        loader._get_iterator = self._make_iterator

    @property
    def newest(self) -> States | None:
        """Workers' newest state; `None` if there are none."""
        return None if self.loader._iterator is None else _copy(self._newest)

    def end(self) -> States | None:
        """Return the newest state, after receiving batches for which the loader would wait before the next epoch."""
        iterator = self.loader._iterator
        try:
            while iterator is not None and any(len(task) == 1 for task in iterator._task_info.values()):
                index, batch = iterator._get_data()
                iterator._task_info[index] += (batch,)
        except RuntimeError as error:  # torch reports dead workers
            log.warning("a restart from here is not exact if items draw random numbers: %s", error)
        return self.newest

    def begin_epoch(self, restored: States | None) -> None:
        self._begins, self._beginning.begun = True, restored
        iterator = self.loader._iterator
        if restored is not None and iterator is not None:
            iterator._shutdown_workers()
            self.loader._iterator = None

    def remove(self) -> None:
        self.loader.__dict__.pop("_get_iterator", None)
        self.loader.collate_fn, self.loader.worker_init_fn = self._original

    def _make_restored(self) -> Any:
        generator = self.loader.generator
        # The original run drew no seed for workers in this epoch.
        self.loader.generator = torch.Generator()
        try:
            return self._make()
        finally:
            self.loader.generator, self._beginning.begun = generator, None

    def _make_iterator(self) -> Any:
        self.begun = self._beginning.begun
        iterator = self._make() if self.begun is None else self._make_restored()
        fresh = {"seed": iterator._base_seed, "states": [None] * self.loader.num_workers}
        self._newest, self._begins = _copy(self.begun or fresh), False
        get_data, reset = iterator._get_data, iterator._reset

        def told_data() -> Any:
            index, value = get_data()
            if isinstance(value, _Told):
                self._newest["states"][value.worker] = value.state
                value = value.batch
            return index, value

        def told_reset(*args: Any) -> None:
            reset(*args)
            if self._begins:  # not where the loader starts over within an epoch
                self.begun, self._begins = _copy(self._newest), False

        iterator._get_data, iterator._reset = told_data, told_reset
        return iterator


def _copy(states: States) -> States:
    return {**states, "states": list(states["states"])}


class _Told:
    """A batch with its worker's state."""

    def __init__(self, worker: int, state: np.ndarray[Any, Any], batch: Any) -> None:
        self.worker, self.state, self.batch = worker, state, batch

    def pin_memory(self) -> _Told:
        """Pin the batch; called by the loader's thread."""
        return _Told(self.worker, self.state, pin_memory(self.batch))  # type: ignore[no-untyped-call]


class _Telling:
    """Collate function that adds the worker's state to each batch."""

    def __init__(self, collate: Callable[[Any], Any], first: Mapping[str, Any]) -> None:
        self.collate, self._first = collate, first

    def __call__(self, items: Any) -> Any:
        batch, info = self.collate(items), get_worker_info()
        if info is None:
            return batch
        first, now = self._first, _counted(info.dataset)
        moved = {name: value for name, value in now.items() if name not in first or first[name] != value}
        random_state = capture_rng(held=held_by({"dataset": info.dataset, "collate_fn": self.collate}))
        state = encode({"random": random_state, "attributes": moved})
        return _Told(info.id, np.frombuffer(state, dtype=np.uint8), batch)


class _Beginning:
    """`worker_init_fn` to begin in a recorded state."""

    def __init__(self, then: Callable[[int], None] | None, first: Mapping[str, Any]) -> None:
        self.then, self.begun, self.first = then, None, first

    begun: States | None

    def __call__(self, worker: int) -> None:
        info = get_worker_info()
        assert info is not None
        if self.begun is not None:
            seed = self.begun["seed"] + worker
            object.__setattr__(info, "seed", seed)  # torch guards it; data sets may read it
            random.seed(seed)
            torch.manual_seed(seed)
            words: list[int] = _generate_state(self.begun["seed"], worker)  # type: ignore[no-untyped-call]
            np.random.seed(words)  # noqa: NPY002  # as torch does
        if self.then is not None:
            self.then(worker)
        state = self.begun["states"][worker] if self.begun is not None else None
        if state is not None:
            found = decode(state.tobytes())
            restore_rng(found["random"], held=held_by({"dataset": info.dataset}))
            held = {**self.first, **found["attributes"]}
            for name, owner in data_sets("dataset", info.dataset):
                for attribute in _counted(info.dataset).keys() | held.keys():
                    if attribute.rpartition(".")[0] == name:
                        _set(owner, attribute.rpartition(".")[2], held.get(attribute, _NOT_HELD))


_NOT_HELD = object()


def _set(owner: object, attribute: str, value: object) -> None:
    if value is not _NOT_HELD:
        setattr(owner, attribute, value)
    elif hasattr(owner, attribute):
        delattr(owner, attribute)  # copied from the training process with the worker


def _counted(dataset: Any) -> dict[str, Any]:
    """Return plain values in attributes of a data set and of data sets inside torch's own."""
    parts = [(name, getattr(each, "__dict__", {})) for name, each in data_sets("dataset", dataset)]
    found = {f"{name}.{key}": value for name, own in parts for key, value in own.items()}
    return {name: value for name, value in found.items() if type(value) in (bool, int, float, type(None))}


_MOST = 1_000
"""Largest number of states kept per epoch; each takes several KB of every journal."""

_STATE_NBYTES = 2**13

NO_FETCHES: dict[str, Any] = {"states": {}, "restarts": {}}
"""Default for journals without an entry of fetches."""


def _apart(last: RngState | None, before: RngState, after: RngState) -> RngState:
    """Return the state of generators from which the fetch drew and which have moved since the previous fetch."""
    moved = {name: state for name, state in before.items() if differs(after[name], state)}
    return {name: state for name, state in moved.items() if last is None or differs(last[name], state)}


MOMENTS = ("epoch", "iter", "first_fetch", "last_fetch", "fetch")
"""Moments of an epoch at which random state is taken, except after a batch's fetch."""


class EpochMoments:
    """Random state at moments of the epoch under way, and before fetches that influence later ones: a restart draws from there as
    this process did.
    """

    def __init__(self, trainer: Trainer, take_random: Callable[[], RngState]) -> None:
        self._trainer, self._take_random = trainer, take_random
        self.states: dict[str, RngState | None] = dict.fromkeys(MOMENTS)
        self._index = 0
        """Place of the next fetch in its iterator."""
        self._kept: dict[int, RngState] = {}
        """Random state before fetches that influence later ones, by place."""
        self._restarts: dict[int, int] = {}
        """Place of the last fetch in which a loader started over, by the loader's index."""
        self._after: RngState | None = None
        """Random state after the newest fetch; `None` if no later fetch depends on it."""
        self._said = False
        self.is_first = True
        """Whether the next fetch is the epoch's first in this process."""
        self.independent: bool | None = None
        """Whether no fetch of this epoch can influence a later one; `None` until its iterator is made."""
        self.between_epochs = False
        """Whether nothing of the next epoch has come behind its beginning."""
        self.not_fetched = 0
        """Batches counted by the epoch but never fetched: Lightning resumes in mid-epoch with the first batch."""

    def before_iter(self) -> None:
        """Record the moment before samplers and workers draw their seeds."""
        self.states["iter"] = self._take_random()
        self.is_first, self.independent = True, None
        self._index, self._kept, self._restarts, self._after = 0, {}, {}, None

    def look(self) -> None:
        """Look at the loaders before the first fetch from their iterator."""
        if self.independent is None:
            self.independent = fetches_are_independent(self._trainer)
        if self.is_first:
            self.not_fetched = counted_before(self._trainer)

    def take_fetch(self) -> None:
        """Record the moment before a fetch."""
        fetch, last = self._take_random(), self.states["fetch"]
        if self.is_first:
            self.states["first_fetch"] = fetch
        # Independent fetches accept any state: the first is in every journal, and exact if there is one fetch.
        self.states |= {"last_fetch": self.states["first_fetch"] if self.independent else last, "fetch": fetch}

    def fetched(self) -> None:
        """Record the moment after a fetch that can influence a later one."""
        before, restarted, carries = self.states["fetch"], restarted_loaders(self._trainer), self._carries
        assert before is not None
        index, self._index = self._index, self._index + 1
        last, self._after = self._after, self._take_random() if carries else None
        if index == 0:
            return  # the state before the epoch's first fetch is kept apart
        for loader in restarted:
            self._restarts[loader] = index
        apart = before if restarted else _apart(last, before, self._after) if self._after is not None else {}
        if apart:
            self._keep(index, apart)
        if restarted and not carries:
            self._kept = {at: self._kept[at] for at in sorted({*self._restarts.values()}) if at in self._kept}

    def fetches(self) -> dict[str, Any]:
        """Return what is kept of fetches, for the journal."""
        return {"states": dict(self._kept), "restarts": dict(self._restarts)}

    def resume(self, start: dict[str, Any], num_batches: int) -> None:
        """Continue from a start half in mid-epoch, behind `num_batches` fetches."""
        random = start["random"]
        self.states |= {name: random[name] for name in ("epoch", "iter", "first_fetch")}
        self.states["fetch"], self.is_first, self.independent = random["last_fetch"], False, None
        self.not_fetched = start.get("not_fetched", 0)
        kept = start.get("fetches", NO_FETCHES)
        self._index, self._kept, self._restarts = num_batches, dict(kept["states"]), dict(kept["restarts"])
        self._after = None

    @property
    def room(self) -> int:
        """Most bytes that the states of fetches may grow by within an epoch."""
        most = min(self._trainer.num_training_batches, _MOST) if self._carries else len(loaders_of(self._trainer)) - 1
        return int(most) * _STATE_NBYTES

    def _keep(self, index: int, state: RngState) -> None:
        if len(self._kept) < _MOST:
            self._kept[index] = state
        elif not self._said:
            self._said = True
            log.warning(
                "a restart in the rest of this epoch is not exact: the loader draws random numbers in every fetch, training "
                "does so in between, and the state of only %d fetches is kept. Give the data set a generator of its own.",
                _MOST,
            )

    @property
    def _carries(self) -> bool:
        return any(map(draws_as_it_goes, loaders_of(self._trainer)))
