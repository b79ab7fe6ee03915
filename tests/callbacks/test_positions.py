"""Loaders that go to their places without fetching give the batches of those that fetch again."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, WeightedRandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from typing_extensions import override

from lightning_moe_ckpt._lightning_data import can_advance, loader_generators, restarted_loaders, skip_batches
from lightning_moe_ckpt.session import RngState, capture_rng, restore_rng

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


LOADERS: dict[str, Callable[[], Any]] = {
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
PROCESSES = ("workers", "persistent", "cycle_workers")


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
        return sum(each.dataset.asked for each in self.loader.flattened)

    def begin(self) -> None:
        """An iterator is made, under the random state it is made in."""
        self.begun, self.restarts, self.states = self.random(), [], []
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
    original.begin()
    following = original.rest()
    places = range(len(batches)) if name not in PROCESSES else (1, len(batches) - 2)
    for place in places:
        resumed = Feed(LOADERS[name])
        iter(resumed.fetcher)  # as Lightning does before anybody can stop it
        before = resumed.asked
        assert can_advance(resumed.trainer)
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
