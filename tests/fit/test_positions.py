"""Loaders that go to their places without fetching give the batches of those that fetch again."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Subset,
    WeightedRandomSampler,
)
from torchdata.stateful_dataloader import StatefulDataLoader
from typing_extensions import override

from lightning_moe_ckpt.data import SeededItems
from lightning_moe_ckpt.fit.loaders._loaders import (
    begin_epoch,
    can_advance,
    loader_generators,
    restarted_loaders,
    skip_batches,
)
from lightning_moe_ckpt.journal import RngState, capture_rng, differs, restore_rng

# torchdata calls what torch deprecates
pytestmark = pytest.mark.filterwarnings("ignore:.*set_vital")

ITEMS = 24


class Counted(Dataset[int]):
    """Its index is the item; counts what is asked for in this process."""

    def __init__(self, length: int = ITEMS) -> None:
        self.length, self.asked = length, 0

    def __len__(self) -> int:
        return self.length

    @override
    def __getitem__(self, index: int) -> int:
        self.asked += 1
        return index


class Drawing(Counted):
    """Items that draw from whatever there is."""

    @override
    def __getitem__(self, index: int) -> int:
        drawn = float(torch.rand(())) + random.random() + np.random.rand()  # noqa: NPY002  # what data sets draw from
        return super().__getitem__(index) + int(1e6 * drawn)


class Stream(IterableDataset[int]):
    @override
    def __iter__(self) -> Iterator[int]:
        return iter(range(ITEMS))


class Lazy(RandomSampler):
    """A user's own, which draws whenever it is asked."""

    @override
    def __iter__(self) -> Iterator[int]:
        return (int(torch.randint(ITEMS, ())) for _ in range(ITEMS))


def _combined(mode: Any, **options: Any) -> Callable[[], Any]:
    return lambda: CombinedLoader([_shuffled(Counted(length), **options) for length in (ITEMS, 12, 8)], mode)


def _shuffled(dataset: Counted, *, kind: Any = DataLoader, **options: Any) -> Any:
    return kind(dataset, **{"batch_size": 4, "shuffle": True, **options})


def _seeded(**options: Any) -> Any:
    return DataLoader(SeededItems(Drawing()), **{"batch_size": 4, "shuffle": True, **options})


LOADERS: dict[str, Callable[[], Any]] = {
    "seeded": _seeded,
    "seeded_workers": lambda: _seeded(num_workers=2),
    "seeded_persistent": lambda: _seeded(num_workers=1, persistent_workers=True),
    "seeded_parts": lambda: DataLoader(
        ConcatDataset([Subset(SeededItems(Drawing(), seed=part), range(3, 15)) for part in range(2)]), 4, shuffle=True
    ),
    "shuffled": lambda: _shuffled(Counted()),
    "single_items": lambda: _shuffled(Counted(8), batch_size=None),
    "generator": lambda: _shuffled(Counted(), generator=torch.Generator().manual_seed(3)),
    "weighted": lambda: DataLoader(Counted(), batch_size=4, sampler=WeightedRandomSampler([1.0] * ITEMS, ITEMS)),
    "batch_sampler": lambda: DataLoader(
        Counted(), batch_sampler=BatchSampler(RandomSampler(range(ITEMS)), 4, drop_last=False)
    ),
    "stateful": lambda: _shuffled(Counted(), kind=StatefulDataLoader),
    "cycle": _combined("max_size_cycle"),
    "max_size": _combined("max_size"),
    "min_size": _combined("min_size"),
    "workers": lambda: _shuffled(Counted(), num_workers=2),
    "persistent": lambda: _shuffled(Counted(), num_workers=1, persistent_workers=True),
    "cycle_workers": _combined("max_size_cycle", num_workers=1),
}
PROCESSES = ("workers", "persistent", "cycle_workers", "seeded_workers", "seeded_persistent")


class Feed:
    """What `skip_batches` needs of a trainer, and an epoch of training on it."""

    def __init__(self, make: Callable[[], Any]) -> None:
        torch.manual_seed(5)
        made = make()
        self.loader = made if isinstance(made, CombinedLoader) else CombinedLoader(made, "max_size_cycle")
        self.fetcher = _PrefetchDataFetcher()
        self.fetcher.setup(self.loader)
        progress = SimpleNamespace(current=SimpleNamespace(processed=0))
        loop = SimpleNamespace(_data_fetcher=self.fetcher, _combined_loader=self.loader, epoch_progress=progress)
        self.trainer: Any = SimpleNamespace(fit_loop=loop)
        self.restarts: list[dict[int, int]] = []
        """Before each fetch, see `skip_batches`."""
        self.states: list[RngState] = []
        """Random state before each fetch."""

    @property
    def asked(self) -> int:
        """Items that were fetched in this process."""
        return sum(each.asked for loader in self.loader.flattened for each in _counted(loader.dataset))

    def begin(self) -> None:
        """An iterator is made, under the random state it is made in."""
        self.begun, self.restarts, self.states = self.random(), [], []
        begin_epoch(self.trainer)
        iter(self.fetcher)

    def random(self) -> RngState:
        return capture_rng(loader_generators(self.trainer))

    def restore(self, state: RngState) -> None:
        restore_rng(state, loader_generators(self.trainer))

    def restoring(self, states: Sequence[RngState]) -> Callable[[int], None]:
        return lambda index: self.restore(states[index])

    def rest(self) -> list[Any]:
        """Train to the end of the epoch; the batches."""
        found, restarts = [], dict(self.restarts[-1]) if self.restarts else {}
        while not self.fetcher.done:
            self.states.append(self.random())
            self.restarts.append(dict(restarts))
            found.append(_plain(next(self.fetcher)[0]))
            if len(found) > 1:
                restarts |= dict.fromkeys(restarted_loaders(self.trainer), len(found) - 1)
            torch.rand(3)  # training draws too
        return found


def _counted(dataset: Any) -> Iterator[Counted]:
    if isinstance(dataset, Counted):
        yield dataset
    for each in getattr(dataset, "datasets", [dataset.dataset] if hasattr(dataset, "dataset") else []):
        yield from _counted(each)


def _plain(batch: Any) -> Any:
    if isinstance(batch, list | tuple):
        return [_plain(each) for each in batch]
    return batch.tolist() if isinstance(batch, Tensor) else batch


@pytest.mark.parametrize("name", LOADERS)
def test_the_rest_of_the_epoch_and_the_next_one_are_those_of_the_original(name: str) -> None:
    """From every place, or some if there are processes to start; no item before it is fetched."""
    original = Feed(LOADERS[name])
    original.begin()
    batches = original.rest()
    states, restarts, begun = original.states, original.restarts, original.begun
    original.trainer.fit_loop.epoch_progress.current.processed = 1
    original.begin()
    following = original.rest()
    assert following != batches
    places = range(len(batches)) if name not in PROCESSES else (1, len(batches) - 2)
    for place in places:
        resumed = Feed(LOADERS[name])
        iter(resumed.fetcher)  # as Lightning does before anybody can stop it
        before = resumed.asked
        assert can_advance(resumed.trainer, draw_nothing="seeded" not in name)
        begin_epoch(resumed.trainer)
        skip_batches(
            resumed.trainer,
            place,
            before_iter=partial(resumed.restore, begun),
            before_fetch=resumed.restoring(states),
            restarts=restarts[place],
        )
        assert resumed.asked == before, "nothing is fetched"
        resumed.fetcher.fetched = place
        resumed.restore(states[place])
        assert resumed.rest() == batches[place:], f"from batch {place}"
        resumed.trainer.fit_loop.epoch_progress.current.processed = 1
        resumed.begin()
        assert resumed.rest() == following, f"the epoch after one resumed at batch {place}"


@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(Stream(), batch_size=4),
        lambda: DataLoader(Counted(), batch_size=4, sampler=Lazy(range(ITEMS))),
        lambda: _shuffled(Counted(), kind=StatefulDataLoader, num_workers=1),
        lambda: itertools.repeat(1),
    ],
    ids=["stream", "own_sampler", "stateful_workers", "no_loader"],
)
def test_other_loaders_have_to_fetch(make: Callable[[], Any]) -> None:
    """A stream has no index, and a sampler of the user's own may draw in every step."""
    assert not can_advance(Feed(make).trainer)


@pytest.mark.parametrize(
    "make",
    [
        lambda: _shuffled(Counted()),
        lambda: _seeded(collate_fn=list),
        lambda: DataLoader(ConcatDataset([SeededItems(Drawing()), Drawing()]), batch_size=4),
    ],
    ids=["items", "collation", "a_part"],
)
def test_what_nobody_vouches_for_is_fetched(make: Callable[[], Any]) -> None:
    """Only items that are all seeded, and collated by torch, are known to draw nothing that training sees."""
    assert not can_advance(Feed(make).trainer, draw_nothing=False)


def test_seeded_items_depend_on_seed_epoch_and_index_alone() -> None:
    """And what this process draws goes on as if they had not been read."""
    items = SeededItems(Drawing(), seed=1)
    before = capture_rng()
    first = [items[index] for index in (5, 3, 5)]
    assert not differs(capture_rng(), before)
    assert first[0] == first[2]
    assert SeededItems(Drawing(), seed=1)[3] == first[1] != SeededItems(Drawing(), seed=2)[3]
    items.set_epoch(1)
    assert items[3] != first[1]
    with pytest.raises(TypeError, match="items of a stream have no index"):
        SeededItems(Stream())
