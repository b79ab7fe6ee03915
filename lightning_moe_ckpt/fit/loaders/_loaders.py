"""Find a run's position in its data, and bring new loaders there."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from operator import is_
from typing import Any

import torch
from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.fabric.utilities.types import _Stateful
from lightning.pytorch import Trainer
from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher
from torch.utils import _pytree as pytree
from torch.utils.data import (
    BatchSampler,
    ChainDataset,
    ConcatDataset,
    DataLoader,
    IterableDataset,
    Subset,
    default_collate,
    default_convert,
)

from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt.data import SeededItems

log = rank_logger(__name__)

_KNOWN_SAMPLERS = ("torch", "torchdata", "lightning", "lightning_moe_ckpt")
"""Packages whose samplers draw only when their iterator is made or first used, and share no generator later."""


def skip_batches(
    trainer: Trainer,
    num_batches: int,
    *,
    before_iter: Callable[[], None],
    before_fetch: Callable[[int], None],
    restarts: Mapping[int, int] | None = None,
    own: Sequence[Any] | None = None,
) -> None:
    """Make the fetcher's iterator, with the state of this epoch's start, and skip the `num_batches` completed in it.

    Unless items are known to draw nothing, batches are fetched and dropped, not skipped by index: only then is the
    random state inside loader workers (augmentation) right. An unsized loader is fetched one batch ahead: the last
    fetch has already drawn for the next batch. Nothing is fetched with `restarts`, each loader's last fetch in which it
    started over, if all `can_advance`, and with `own`, the states of loaders that know their position.

    `before_iter` is called before samplers and workers draw their seeds; `before_fetch` before each fetch, with its
    index in the epoch, and once if there is no fetch.
    """
    fit_loop = trainer.fit_loop
    fetcher, loader = fit_loop._data_fetcher, fit_loop._combined_loader
    assert fetcher is not None
    assert loader is not None
    epoch = _epoch(trainer)
    for each in loader.flattened:
        _set_sampler_epoch(each, epoch)
    if epoch == 0:
        # Persistent workers draw a seed in the first epoch only; this process may have made its workers already.
        loader.reset()
    before_iter()
    if own is not None:
        for each, state in zip(loader.flattened, own, strict=True):
            each.load_state_dict(state)
        fetcher._start_profiler = lambda: before_fetch(num_batches - 1)  # if it fetches ahead
        iter(fetcher)
        loader._iterator._idx = max(num_batches, loader._iterator._idx)  # type: ignore[union-attr]
    elif restarts is not None:
        with ExitStack() as places:
            for index, each in enumerate(loader.flattened):
                places.enter_context(_beginning_at(each, 0 if index in restarts else num_batches))
            iter(fetcher)
        before_fetch(0)
        _advance(loader, num_batches, restarts, before_fetch)
    else:
        iter(fetcher)
        before_fetch(0)
        if (length := fetcher.length) is not None:
            fetcher.length = max(length, num_batches + 1)  # with batches of another size, an epoch may have had more
        for index in range(num_batches):
            if index:
                before_fetch(index)
            if next(fetcher, None) is None:
                break  # there are fewer batches now
        if length is not None:
            fetcher.length, fetcher.done = length, fit_loop.epoch_loop.batch_progress.current.ready >= length
    fetcher.fetched = 0  # the epoch loop adds the consumed batches itself


def counted_before(trainer: Trainer) -> int:
    """Return the number of batches that an epoch counts before its first fetch; warn if loaders were told to begin behind them.

    These batches are another run's: `ckpt_path` was saved in mid-epoch.
    """
    done = int(trainer.fit_loop.epoch_loop.batch_progress.current.completed)
    if done and any(isinstance(loader, _Stateful) for loader in loaders_of(trainer)):
        log.warning(
            "`ckpt_path` is of a step in mid-epoch, %d batches in, and gives its loader that place: a restart of this run in the "
            "same epoch is not exact. Begin from a checkpoint of an epoch's end, or let this epoch end before relying on restarts.",
            done,
        )
    return done


def begin_epoch(trainer: Trainer) -> None:
    """Tell data sets that seed their items the epoch for which an iterator is about to be made."""
    for loader in loaders_of(trainer):
        for each in _seeded_items(getattr(loader, "dataset", None)):
            each.set_epoch(_epoch(trainer))


def _epoch(trainer: Trainer) -> int:
    """Return the epoch to train. `current_epoch` differs while loaders are made after a restart."""
    progress: Any = trainer.fit_loop.epoch_progress.current
    return int(progress.processed)


def are_of_this_epoch(trainer: Trainer) -> bool:
    """Return whether `trainer.current_epoch`, which users' code reads as it makes loaders, is the epoch to train."""
    return _epoch(trainer) == trainer.current_epoch


def _seeded_items(dataset: Any) -> Iterator[SeededItems[Any]]:
    if isinstance(dataset, SeededItems):
        yield dataset
    else:
        for part in _parts_of(dataset):
            yield from _seeded_items(part)


def _parts_of(dataset: Any) -> Sequence[Any]:
    """Return the data sets inside one of torch's own that passes their items on unchanged; none for any other."""
    if type(dataset) is Subset:
        return [dataset.dataset]
    return dataset.datasets if type(dataset) is ConcatDataset else []


def can_advance(trainer: Trainer, *, draw_nothing: bool = True) -> bool:
    """Return whether every loader can be brought to its position by its sampler alone.

    With `draw_nothing` the user promises that items, and their processing in workers, draw no random numbers. Otherwise
    only data seeded item by item and collated by torch is known to draw none.
    """
    return all(_can_advance(loader) and (draw_nothing or _draws_nothing(loader)) for loader in loaders_of(trainer))


def _draws_nothing(loader: Any) -> bool:
    collate = getattr(loader.collate_fn, "collate", loader.collate_fn)  # ours wraps it where workers persist
    return collate in (default_collate, default_convert) and _is_seeded(loader.dataset)


def _is_seeded(dataset: Any) -> bool:
    parts = _parts_of(dataset)
    return isinstance(dataset, SeededItems) or (len(parts) > 0 and all(map(_is_seeded, parts)))


def _can_advance(loader: Any) -> bool:
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset) or draws_as_it_goes(loader):
        return False
    # A loader with state of its own counts what its workers give.
    return type(loader).__iter__ is DataLoader.__iter__ or loader.num_workers == 0


def _advance(combined: Any, num_batches: int, restarts: Mapping[int, int], before_fetch: Callable[[int], None]) -> None:
    """Move new iterators of a combined loader past `num_batches`; samplers draw in the original run's order."""
    mode = combined._iterator
    for index, iterator in enumerate(mode.iterators):
        # Before a loader started over, only its sampler's draws matter.
        _pass_over(iterator, min(1, num_batches) if index in restarts else num_batches)
    for at in sorted({*restarts.values()}):
        before_fetch(at)
        for index in sorted(index for index, place in restarts.items() if place == at):
            with _beginning_at(mode.iterables[index], num_batches - at):
                mode.iterators[index] = iter(mode.iterables[index])
            _pass_over(mode.iterators[index], num_batches - at)
            mode._consumed[index] = True
    mode._idx = num_batches


def _pass_over(iterator: Any, num_batches: int) -> None:
    if iterator._num_workers == 0:
        with suppress(StopIteration):  # the shorter of several loaders
            for _ in range(num_batches):
                iterator._next_index()
    iterator._num_yielded += num_batches


@contextmanager
def _beginning_at(loader: Any, num_batches: int) -> Iterator[None]:
    """Let iterators made in this context begin after `num_batches`, if workers fetch for them.

    Making the iterator sends the first indices to the workers, so the sampler has to be in position before.
    """
    if loader.num_workers == 0:
        yield
        return
    sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    behind = _Behind(sampler, num_batches)
    _give_sampler(loader, behind)
    try:
        yield
    finally:
        _give_sampler(loader, sampler, running=False)
        behind.num_batches = 0


def _give_sampler(loader: Any, sampler: Any, *, running: bool = True) -> None:
    """Let iterators get indices from `sampler`; with `running`, also persistent workers' from their next epoch on."""
    object.__setattr__(
        loader, "sampler" if loader.batch_sampler is None else "batch_sampler", sampler
    )  # torch guards both
    if running and loader._iterator is not None:  # persistent workers have an iterator already
        loader._iterator._index_sampler = sampler


class _Behind:
    """Sampler that leaves out the first `num_batches` batches, consumed ones."""

    def __init__(self, sampler: Any, num_batches: int) -> None:
        self._sampler, self.num_batches = sampler, num_batches

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(iter(self._sampler), self.num_batches, None)

    def __len__(self) -> int:
        return len(self._sampler)


def described(loader: Any) -> dict[str, object]:
    """Return the user's settings that decide which items a loader gives in which batch."""
    dataset, batch_sampler = getattr(loader, "dataset", None), getattr(loader, "batch_sampler", None)
    size = getattr(loader, "batch_size", None) or getattr(
        batch_sampler, "own_size", getattr(batch_sampler, "batch_size", None)
    )
    sized = hasattr(dataset, "__len__") and not isinstance(dataset, IterableDataset)
    return {
        "batch_size": size if isinstance(size, int) else None,
        "num_workers": getattr(loader, "num_workers", None),
        "sampler": type(getattr(loader, "sampler", None)).__qualname__,
        "items": len(dataset) if sized else None,  # type: ignore[arg-type]
    }


def can_resize(trainer: Trainer) -> bool:
    """Return whether the training loader can change batch sizes: one loader, all batches, torch's class, from indices."""
    loaders, limit = loaders_of(trainer), trainer.limit_train_batches
    if len(loaders) != 1 or type(limit) is not float or limit != 1.0 or getattr(trainer, "overfit_batches", False):
        return False
    (loader,) = loaders
    indices = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
    return indices and type(loader.batch_sampler) is BatchSampler and hasattr(loader.batch_sampler.sampler, "__len__")


class Resized(BatchSampler):
    """Batches of another size up to a place in an epoch, then of the loader's own size: same items in the same order.

    Takes the place of the batch sampler of a trainer's loader, which `can_resize`, until `remove`. The place `until` is
    an epoch (`None` for the current one) and a number of batches of that size in it; `replayed` says whether an epoch's
    length counts all its batches with that size.
    """

    # Slots: attributes would be followed like the user's.
    __slots__ = ("_loader", "_original", "_replayed", "_size", "_trainer", "_until", "own_size")

    def __init__(self, trainer: Trainer, size: int, until: tuple[int | None, int], *, replayed: bool) -> None:
        epoch = _epoch(trainer) if until[0] is None else until[0]
        self._trainer, self._size, self._until, self._replayed = trainer, size, (epoch, until[1]), replayed
        (self._loader,) = loaders_of(trainer)
        self._original: BatchSampler = self._loader.batch_sampler
        self.own_size = self._original.batch_size
        super().__init__(self._original.sampler, size if replayed else self.own_size, self._original.drop_last)
        _give_sampler(self._loader, self)
        _use_length(trainer)

    def __iter__(self) -> Iterator[list[int]]:
        (epoch, num_batches), here, items = self._until, _epoch(self._trainer), iter(self.sampler)
        before = num_batches if here == epoch else 0 if here > epoch else None
        for _ in itertools.count() if before is None else range(before):
            batch = [*itertools.islice(items, self._size)]
            if not batch or (self.drop_last and len(batch) < self._size):
                return
            yield batch
        for index in itertools.count():
            batch = [*itertools.islice(items, self.own_size)]
            short = self.drop_last and len(batch) < self.own_size and not (before and index == 0)
            if not batch or short:
                return
            yield batch

    def remove(self) -> None:
        """Give the loader its own batch sampler, from the next iterator on."""
        _give_sampler(self._loader, self._original)
        _use_length(self._trainer)

    def go_on(self, *, mid_epoch: bool, accumulate: int) -> None:
        """Count the remaining batches in the loader's own size, behind a multiple of `accumulate`."""
        left = len(self.sampler) - self._until[1] * self._size  # type: ignore[arg-type]
        left = max(1, left // self.own_size if self.drop_last else -(-left // self.own_size))
        if self._replayed:
            self.remove()
        if mid_epoch:
            done = max(0, len(self._original) - left) // accumulate * accumulate
            use_batches_done(self._trainer, done)
            _use_length(self._trainer, done, done + left)


def _use_length(trainer: Trainer, fetched: int | None = None, length: int | None = None) -> None:
    """Count the loader's batches anew, as `setup_data` does, or give the current epoch `length` with `fetched` done."""
    fit_loop: Any = trainer.fit_loop
    combined, fetcher = fit_loop._combined_loader, fit_loop._data_fetcher
    combined.limits = [len(loader) for loader in combined.flattened] if length is None else [length]
    if fetcher is None:
        return
    fit_loop.max_batches = fetcher.length = combined.limits[0]
    if fetched is not None:
        fetcher.fetched = fetched
    elif isinstance(trainer.val_check_interval, float) and trainer.val_check_batch is not None:
        trainer.val_check_batch = max(1, int(fit_loop.max_batches * trainer.val_check_interval))


def use_batches_done(trainer: Trainer, done: int) -> None:
    """Count `done` batches in the current epoch."""
    current: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    current.ready = current.started = current.processed = current.completed = done


def loaders_of(trainer: Trainer) -> list[Any]:
    """Return the training loaders; several if they are combined."""
    loader = trainer.fit_loop._combined_loader
    return list(loader.flattened) if loader is not None else []


def loads_again(trainer: Trainer) -> bool:
    """Return whether Lightning is about to ask for new training loaders."""
    return trainer.fit_loop._combined_loader is not None and trainer.fit_loop._should_reload_train_dl


def restarted_loaders(trainer: Trainer) -> list[int]:
    """Return indices of loaders that started over in the last fetch: their samplers and workers have drawn seeds."""
    if (loader := trainer.fit_loop._combined_loader) is None or len(loader.flattened) < 2:
        return []  # a single exhausted loader ends the epoch
    iterators = getattr(getattr(loader, "_iterator", None), "iterators", [])
    return [index for index, iterator in enumerate(iterators) if getattr(iterator, "_num_yielded", 0) == 1]


def draws_as_it_goes(loader: Any) -> bool:
    """Return whether later batches may depend on earlier fetches' draws from this process's generators.

    An item of a map-style data set depends on its own draws at most. A shuffle buffer depends on earlier draws, and so
    may a sampler of the user's own.
    """
    if not isinstance(loader, DataLoader):
        return True
    if isinstance(loader.dataset, IterableDataset):
        return loader.num_workers == 0
    samplers = (loader.sampler, loader.batch_sampler)
    return any(type(each).__module__.split(".")[0] not in _KNOWN_SAMPLERS for each in samplers if each is not None)


def fetches_are_independent(trainer: Trainer) -> bool:
    """Return whether no fetch of this epoch can influence a later fetch, by its draws or by fetching ahead."""
    fetcher, loaders = trainer.fit_loop._data_fetcher, loaders_of(trainer)
    # A fetcher with a known length does not fetch ahead.
    plain = type(fetcher) is _PrefetchDataFetcher and fetcher.length is not None
    return plain and len(loaders) == 1 and not draws_as_it_goes(loaders[0])


def loader_generators(trainer: Trainer) -> dict[str, torch.Generator]:
    """Return generators that the user gave to loaders or samplers, by a stable name."""
    return LoaderGenerators(trainer).now()


class LoaderGenerators:
    """Generators that the user gave to one trainer's loaders or samplers."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._loaders: list[Any] = []
        self._owners: list[tuple[str, Any]] = []

    def now(self) -> dict[str, torch.Generator]:
        """Return the generators by a stable name; owners are searched again when there are other loaders."""
        loader = self._trainer.fit_loop._combined_loader
        loaders = loader.flattened if loader is not None else []
        if len(loaders) != len(self._loaders) or not all(map(is_, loaders, self._loaders)):
            self._loaders = list(loaders)
            rows = [(index, *each) for index, loader in enumerate(loaders) for each in _owners(loader)]
            self._owners = [(f"loader{index}.{name}", owner) for index, name, owner in rows if owner is not None]
        found = {}
        for name, owner in self._owners:
            generator = getattr(owner, "generator", None)
            if isinstance(generator, torch.Generator):
                found[name] = generator
        return found


def loader_objects(trainer: Trainer) -> Iterator[tuple[str, object]]:
    """Yield the user's objects in the loaders, perhaps with generators, by a stable name."""
    for index, loader in enumerate(loaders_of(trainer)):
        for name in ("dataset", "collate_fn", "worker_init_fn"):
            yield f"loader{index}.{name}", getattr(loader, name, None)
        for name, owner in _owners(loader):
            if not isinstance(owner, DataLoader):
                yield f"loader{index}.{name}", owner
    for index, loader in enumerate(validation_loaders(trainer)):
        yield f"validation{index}.dataset", getattr(loader, "dataset", None)


def data_owners(trainer: Trainer) -> Iterator[tuple[str, Any]]:
    """Yield loaders and their parts, each object once, by a stable name; also data sets within torch's own."""
    seen = set[int]()
    for name, owner in _data_owners(trainer):
        if owner is not None and id(owner) not in seen:
            seen.add(id(owner))
            yield name, owner


def _data_owners(trainer: Trainer) -> Iterator[tuple[str, Any]]:
    for index, loader in enumerate(loaders_of(trainer)):
        name, collate = f"loader{index}", getattr(loader, "collate_fn", None)
        yield name, loader
        yield from data_sets(f"{name}.dataset", getattr(loader, "dataset", None))
        yield from ((f"{name}.{part}", owner) for part, owner in _owners(loader) if owner is not loader)
        yield f"{name}.collate_fn", getattr(collate, "collate", collate)  # ours is around it where workers persist
    for index, loader in enumerate(validation_loaders(trainer)):
        yield from data_sets(f"validation{index}.dataset", getattr(loader, "dataset", None))


def validation_loaders(trainer: Trainer) -> list[Any]:
    """Return validation's loaders made so far."""
    return [leaf for leaf in pytree.tree_leaves(trainer.val_dataloaders) if leaf is not None]


def data_sets(name: str, dataset: Any, depth: int = 6) -> Iterator[tuple[str, Any]]:
    """Yield a data set and, as far as torch's own contain others, the data sets within, by name."""
    yield name, dataset
    if depth and isinstance(dataset, Subset | SeededItems):
        yield from data_sets(f"{name}.dataset", dataset.dataset, depth - 1)
    elif depth and isinstance(dataset, ConcatDataset | ChainDataset):
        for index, each in enumerate(dataset.datasets):
            yield from data_sets(f"{name}.datasets.{index}", each, depth - 1)


def _owners(loader: Any) -> list[tuple[str, Any]]:
    batch_sampler = getattr(loader, "batch_sampler", None)
    owners = [("loader", loader), ("batch_sampler", batch_sampler)]
    for name, sampler in (
        ("sampler", getattr(loader, "sampler", None)),
        ("batch_sampler.sampler", getattr(batch_sampler, "sampler", None)),
    ):
        owners.append((name, sampler))
        if isinstance(sampler, DistributedSamplerWrapper):
            # Lightning shards foreign samplers by wrapping: torchdata's sampler draws from a generator.
            owners.append((f"{name}.wrapped", sampler.dataset._sampler))  # type: ignore[attr-defined]
    return owners
