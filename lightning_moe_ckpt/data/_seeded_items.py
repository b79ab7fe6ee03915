"""Data sets whose random augmentation allows a fast restart in mid-epoch."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
import torch
import xxhash
from torch.utils.data import Dataset, IterableDataset
from typing_extensions import override

ItemT_co = TypeVar("ItemT_co", covariant=True)


class SeededItems(Dataset[ItemT_co]):
    """A map-style data set in which each item draws random numbers from its own seed.

    Usually the random numbers of an item depend on the items read before it, so a run that resumes in mid-epoch has to
    read all of them again. Here they depend on `seed`, epoch and index only, in any order and in any worker. A
    checkpoint callback of this package then skips the items before its place in the data, if loader and sampler are
    torch's or torchdata's own and `collate_fn` is the default. The callback also sets the epoch; without it, call
    `set_epoch`.

    The class covers the default generators of `torch`, `random` and `numpy.random` and restores them after each item,
    which takes about 0.1 ms. A data set with its own generator keeps drawing from that, and restarts read it again. A
    loader that starts over within an epoch (`CombinedLoader("max_size_cycle")`) gives the same items again.

    Args:
        dataset: the data set to read; `dataset[index]` may draw random numbers.
        seed: seed of the run, the same in every start.

    Raises:
        TypeError: `dataset` is iterable, so its items have no index.
    """

    def __init__(self, dataset: Dataset[ItemT_co], seed: int = 0) -> None:
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
            raise TypeError(
                f"SeededItems takes a data set with `__getitem__`, and found {type(dataset).__name__}: items of a "
                "stream have no index that a seed could follow from. Give it to the loader as it is."
            )
        self.dataset, self.seed = dataset, seed
        # Shared with workers, also with those that live on from epoch to epoch.
        self._epoch = torch.zeros((), dtype=torch.int64)
        self._epoch.share_memory_()  # type: ignore[no-untyped-call]  # torch leaves it untyped

    def set_epoch(self, epoch: int) -> None:
        """Draw the numbers of `epoch` from now on, also in workers; call it before making the loader's iterator."""
        self._epoch.fill_(epoch)

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]  # as torch's own `Subset`

    @override
    def __getitem__(self, index: int) -> ItemT_co:
        with _seeded(xxhash.xxh3_64_intdigest(repr((self.seed, int(self._epoch), index)).encode())):
            return self.dataset[index]


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed the default generators of this process with 64 bits within this context, then restore them."""
    before = torch.default_generator.get_state(), random.getstate(), np.random.get_state(legacy=False)  # noqa: NPY002
    try:
        torch.default_generator.manual_seed(seed)  # of the CPU alone: items are made there
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002  # what data sets draw from
        yield
    finally:
        torch.default_generator.set_state(before[0])
        random.setstate(before[1])
        np.random.set_state(before[2])  # noqa: NPY002
