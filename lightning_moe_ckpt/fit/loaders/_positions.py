"""Reload loaders, ask loaders for their positions, look at the next batch, and avoid iterators that nobody reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from lightning.fabric.utilities.data import sized_len
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.fabric.utilities.types import _Stateful
from lightning.pytorch import Trainer
from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher
from lightning.pytorch.utilities.combined_loader import _SUPPORTED_MODES, CombinedLoader
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)
from typing_extensions import Self, override

from lightning_moe_ckpt.fit.loaders._loaders import Resized, described, loaders_of
from lightning_moe_ckpt.fit.objects._users import is_library


def settings_of(trainer: Trainer) -> list[dict[str, Any]]:
    """Return each loader's settings that a user may change between two starts and on which its batches depend."""
    found = []
    for loader in loaders_of(trainer):
        dataset = getattr(loader, "dataset", None)
        settings = {"loader": type(loader).__qualname__, "length": sized_len(loader if dataset is None else dataset)}
        if isinstance(dataset, IterableDataset):  # each worker reads a part of a stream
            settings["num_workers"] = getattr(loader, "num_workers", 0)
        found.append({name: value if isinstance(value, str | int) else None for name, value in settings.items()})
    return found


def spread_of(trainer: Trainer) -> list[dict[str, Any]]:
    """Return each loader's batch `size`, number of `replicas` sharing an epoch, and `order` in words.

    Samples chosen by users' code or another package have `own` instead: its name, in words.
    """
    return [_spread(loader) for loader in loaders_of(trainer)]


def _spread(loader: Any) -> dict[str, Any]:
    if not isinstance(loader, DataLoader):
        return {"own": f"the loader `{type(loader).__qualname__}`"}
    sampler, batches = loader.sampler, loader.batch_sampler
    if isinstance(sampler, DistributedSamplerWrapper):
        sampler = sampler.dataset._sampler  # type: ignore[attr-defined]  # no longer one of torch's alone
        return {"own": f"the sampler `{type(sampler).__qualname__}`"}
    for what, each, known in (
        ("iterable data set", loader.dataset if isinstance(loader.dataset, IterableDataset) else None, _NONE),
        ("batch sampler", batches, (BatchSampler, Resized, *_NONE)),
        ("sampler", sampler, _ORDERS),
    ):
        if type(each) not in known:
            return {"own": f"the {what} `{type(each).__qualname__}`"}
    order = _ORDERS[type(sampler) if getattr(sampler, "shuffle", True) else SequentialSampler]
    spread = {"size": described(loader)["batch_size"] or 1, "replicas": getattr(sampler, "num_replicas", 1)}
    return {**spread, "order": order}


_NONE = (type(None),)
_ORDERS: dict[type, str] = {
    SequentialSampler: "in order",
    RandomSampler: "shuffled by RandomSampler",
    DistributedSampler: "shuffled by DistributedSampler",
}


def know_position(trainer: Trainer) -> bool:
    """Return whether each loader can be asked for its position, and told a position.

    Loaders of torch's own, or made from them, are fetched again instead: after being told, litdata's begins no later
    epoch right. MosaicML's is asked, since its data sets keep their place in shared memory.
    """
    loaders = loaders_of(trainer)
    asked = [not isinstance(each, DataLoader) or type(each).__module__.startswith("streaming.") for each in loaders]
    return all(asked) and all(isinstance(loader, _Stateful) for loader in loaders)


def epochs_of(trainer: Trainer) -> list[int | None]:
    """Return the epochs told to data sets of other packages, whose attributes are not followed."""
    found = [getattr(loader, "dataset", None) for loader in loaders_of(trainer)]
    known = [each if hasattr(each, "set_epoch") and is_library(type(each)) else None for each in found]
    told = [getattr(each, "epoch", None) for each in known]
    return [epoch if type(epoch) is int else None for epoch in told]


def set_epochs(trainer: Trainer, epochs: Sequence[int | None]) -> None:
    """Tell data sets of other packages the epochs returned by `epochs_of`."""
    for loader, epoch in zip(loaders_of(trainer), epochs, strict=False):  # the user may have other loaders now
        if epoch is not None and hasattr(loader.dataset, "set_epoch"):
            loader.dataset.set_epoch(epoch)


def make_iterator(trainer: Trainer) -> None:
    """Make the fetcher's iterator anew."""
    fetcher = trainer.fit_loop._data_fetcher
    assert fetcher is not None
    iter(fetcher)


def loops_of(trainer: Trainer) -> dict[str, Any]:
    """Return the loops that ask for loaders, by purpose."""
    return {"training": trainer.fit_loop, "validation": trainer.fit_loop.epoch_loop.val_loop}


def needs_loaders(trainer: Trainer, name: str) -> bool:
    """Return whether a loop is about to ask for loaders."""
    loop = loops_of(trainer)[name]
    again = loop._should_reload_train_dl if name == "training" else loop._should_reload_val_dl
    return loop._combined_loader is None or again


def ask_for_loaders(trainer: Trainer, name: str, epoch: int, *, again: bool = False, iterate: bool = False) -> None:
    """Let a loop ask for loaders as in `epoch`, if there are none or `again`; make its iterator only on `iterate`."""
    loop = loops_of(trainer)[name]
    progress: Any = trainer.fit_loop.epoch_progress.current
    iterate = iterate and progress.processed == 0  # in later epochs, the loop makes the iterator itself
    if not again and loop._combined_loader is not None:  # loaded when optimizers were configured
        if name == "training":
            loop._load_combined_loader_states()
            if iterate:
                loop._combined_loader.reset()
                iter(loop._data_fetcher)
        return
    had, loop._combined_loader = loop._combined_loader, None
    here, progress.completed = progress.completed, epoch
    stage = trainer.state.stage
    if name == "validation":
        trainer.validating = True
    try:
        with nullcontext() if iterate or name == "validation" else making_no_iterator(loop):
            ask(trainer, name)
    finally:
        progress.completed, trainer.state.stage = here, stage
        if loop._combined_loader is None:
            loop._combined_loader = had


def ask(trainer: Trainer, name: str) -> None:
    """Let a loop ask for loaders, if necessary."""
    loop = loops_of(trainer)[name]
    type(loop).setup_data(loop)


def before_iterator(trainer: Trainer, begins: Callable[[], None]) -> Callable[[], object]:
    """Call `begins` before training's iterator is made; return a function to undo this."""
    loop = trainer.fit_loop
    original = loop._load_combined_loader_states

    def tapped() -> None:
        begins()
        original()

    loop._load_combined_loader_states = tapped  # type: ignore[method-assign]
    return lambda: vars(loop).pop("_load_combined_loader_states", None)


def say_when_loaded(trainer: Trainer, settings: Mapping[str, Any]) -> None:
    """Set the epochs in which loops have loaded their loaders to those of the original run."""
    trainer.fit_loop._last_train_dl_reload_epoch = settings["train_loader_epoch"]
    trainer.fit_loop.epoch_loop.val_loop._last_val_dl_reload_epoch = settings["validation_loader_epoch"]


def fetches_ahead(trainer: Trainer) -> bool:
    """Return whether the fetcher already has the next batch, since it does not know the length."""
    fetcher = trainer.fit_loop._data_fetcher
    return isinstance(fetcher, _PrefetchDataFetcher) and fetcher.length is None


def next_batch(trainer: Trainer) -> list[Any]:
    """Return the fetcher's next batch without consuming it; an empty list at the end."""
    fetcher: Any = trainer.fit_loop._data_fetcher
    if fetches_ahead(trainer):
        return [batch for batch, _, _ in fetcher.batches[:1]]
    try:
        item = next(fetcher.iterator)
    except StopIteration:
        return []
    fetcher.iterator = _Again(fetcher, item)
    return [item[0]]


class _Again:
    """A fetcher's iterator that gives an item once more before going on."""

    def __init__(self, fetcher: Any, item: Any) -> None:
        self._fetcher, self._iterator, self._item = fetcher, fetcher.iterator, item

    def __next__(self) -> Any:
        self._fetcher.iterator = self._iterator
        return self._item


class _Unread(CombinedLoader):
    """Loader with its length, but without iterators, unless for their workers, and without batches."""

    @override
    def __iter__(self) -> Self:
        for loader in self.flattened:
            if getattr(loader, "persistent_workers", False):
                iter(loader)  # makes workers, which draw a seed, as the original run did before this epoch
        self._iterator = _SUPPORTED_MODES[self._mode]["iterator"](self.flattened, self._limits)
        return self

    @override
    def __next__(self) -> Any:
        raise StopIteration


@contextmanager
def making_no_iterator(loop: Any) -> Iterator[None]:
    """Let `setup_data` make no iterator, which nobody would read: data may count iterators, even out of our reach."""
    tapped = loop._load_combined_loader_states  # called when the loader has been made, right before its iterator

    def made() -> None:
        tapped()
        kind = type(loop._combined_loader)
        loop._combined_loader.__class__ = type(kind.__name__, (_Unread, kind), {"_made": kind})

    loop._load_combined_loader_states = made
    try:
        yield
    finally:
        loop._load_combined_loader_states = tapped
        if isinstance(loop._combined_loader, _Unread):
            loop._combined_loader.__class__ = type(loop._combined_loader)._made  # type: ignore[attr-defined]
