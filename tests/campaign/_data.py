"""Data whose batches betray every mistake: items depend on the index and on each generator of the process that loads them."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

VOCABULARY = 32
SEQUENCE = 6


class Tokens(Dataset[tuple[Tensor, Tensor]]):
    """Item `i`: tokens that follow a rule of their own, and targets; both augmented at random if asked."""

    def __init__(self, length: int, *, augment: bool) -> None:
        self._length = length
        self._augment = augment

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        places = torch.arange(SEQUENCE + 1)
        tokens = (index * 7 + places * (3 + index % 5)) % VOCABULARY
        if self._augment:
            # One draw from each generator: a worker that lost any of the three is noticed.
            noise = torch.randint(0, VOCABULARY, (1,)).item() + random.randrange(VOCABULARY)
            tokens[int(np.random.randint(SEQUENCE))] = noise % VOCABULARY  # noqa: NPY002  # the legacy generator, as users do
        return tokens[:-1], tokens[1:]


LOADERS: dict[str, Callable[..., Any]] = {
    "plain": partial(DataLoader, shuffle=True),
    "stateful": partial(StatefulDataLoader, shuffle=True),
}


def make_loader(kind: str, *, length: int, batch_size: int, workers: int, augment: bool) -> Any:
    """A shuffling loader over `Tokens`."""
    return LOADERS[kind](Tokens(length, augment=augment), batch_size=batch_size, num_workers=workers)


def make_validation_loader(batch_size: int, replicas: int = 1) -> Any:
    """A batch in fixed order for each replica, two at least: half of one cannot be cut into four micro-batches."""
    return DataLoader(Tokens(max(2, replicas) * batch_size, augment=False), batch_size=batch_size)
