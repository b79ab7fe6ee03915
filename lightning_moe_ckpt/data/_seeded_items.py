"""Data whose random augmentation does not stand in the way of a restart late in a long epoch."""

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
    """A map-style data set whose items draw their random numbers from a seed of their own.

    An augmentation usually draws what the items before it have left, so a run that resumes in mid-epoch has to read all of
    them again. Here the numbers of an item depend on `seed`, the epoch and its index alone, whoever reads it, in which order and
    in which worker. A checkpoint callback of this package then goes to its place in the data without reading what
    lies before, if loader and sampler are torch's or torchdata's own, and `collate_fn` is the default. It also tells the
    epoch; without one of these callbacks, call `set_epoch`.

    Covered are the generators that `torch`, `random` and `numpy.random` draw from unless given one; they are left as they were
    found, which takes about 0.1 ms per item. A data set that holds a generator of its own goes on drawing from that, and restarts read it again, as before. A loader that
    starts over within an epoch (`CombinedLoader("max_size_cycle")`) gives the same items again.

    Args:
        dataset: what is read; `dataset[index]` may draw.
        seed: the same in every start of a run.

    Raises:
        TypeError: `dataset` is iterable, so its items have no index.
    """

    def __init__(self, dataset: Dataset[ItemT_co], seed: int = 0) -> None:
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
            raise TypeError(
                f"SeededItems takes a data set with `__getitem__`, and found {type(dataset).__name__}: items of a stream have no "
                "index that a seed could follow from. Give it to the loader as it is."
            )
        self.dataset, self.seed = dataset, seed
        # Shared with workers, also with those that live on from epoch to epoch.
        self._epoch = torch.zeros((), dtype=torch.int64)
        self._epoch.share_memory_()  # type: ignore[no-untyped-call]  # torch leaves it untyped

    def set_epoch(self, epoch: int) -> None:
        """Draw what belongs to `epoch` from now on, in every worker too; call before the loader's iterator is made."""
        self._epoch.fill_(epoch)

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]  # as torch's own `Subset`

    @override
    def __getitem__(self, index: int) -> ItemT_co:
        with _seeded(xxhash.xxh3_64_intdigest(repr((self.seed, int(self._epoch), index)).encode())):
            return self.dataset[index]


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Let the generators of this process that everybody draws from start from a seed of 64 bits, for a while."""
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
