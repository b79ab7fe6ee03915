"""Loaders and data sets that draw where others do not: a restart gives the batches of the fault-free run all the same."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, default_collate
from typing_extensions import override

from campaign._campaign import Campaigns
from campaign._data import SEQUENCE, VOCABULARY, Tokens, make_validation_loader
from campaign._training import Checkpointing, Module
from campaign._variants import Item, Variant, VariantModule
from lightning_moe_ckpt.testing import Attempt, AttemptFailed, Kill

SPARSE = Checkpointing(policy="sparse", window=3)


@dataclass(frozen=True, kw_only=True)
class Fed(Variant):
    """A run on one of `FEEDS`, eight steps per epoch."""

    feed: str
    batches: int = 8
    validate_every: int | None = 3
    early: bool = False
    """Whether Lightning makes the first iterator while optimizers are configured."""

    @override
    def make_module(self, life: Attempt) -> Module:
        return Drawing(self, life)

    @override
    def callbacks(self, life: Attempt) -> Sequence[Callback]:
        own: dict[str, list[Callback]] = {"held": [Smudging()], "moved": [Moving()], "asked": [Judging()]}
        return own.get(self.feed, [])

    @override
    def fit_options(self, life: Attempt) -> dict[str, Any]:
        return {"datamodule": CountingData(self)} if self.feed == "asked" else {}

    @override
    def loaders(self, life: Attempt) -> tuple[Any, Any]:
        if self.feed == "asked":
            return None, None
        return FEEDS[self.feed](self), make_validation_loader(self.batch_size)


class Drawing(VariantModule):
    """Draws in every step, so that what fetches draw is not what they would draw one after the other."""

    difficulty: float

    def __init__(self, setup: Fed, life: Attempt) -> None:
        super().__init__(setup, life)
        self.noise = {"loss": [torch.Generator().manual_seed(5)]}
        self.difficulty, self._fed = 0.0, setup

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        torch.rand(3)
        random.random()
        if isinstance(batch, dict):
            batch = {name: part for name, part in batch.items() if part is not None}
        scale = 1 + self.difficulty + torch.rand((), generator=self.noise["loss"][0])
        return super().training_step(batch, batch_idx) * scale

    @override
    def configure_optimizers(self) -> Any:
        configured = super().configure_optimizers()
        if self._fed.early:
            optimizer, steps = configured["optimizer"], int(self.trainer.estimated_stepping_batches)
            cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=max(40, steps))
            configured["lr_scheduler"] = {"scheduler": cycle, "interval": "step"}
        return configured


class CountingData(LightningDataModule):
    """Counts how often it is asked for loaders, once in state of its own, and gives other ones each time."""

    def __init__(self, setup: Fed) -> None:
        super().__init__()
        self._setup, self.validations, self._counts = setup, [0], {"asked": 0}
        self.state_dict = lambda: dict(self._counts)  # type: ignore[method-assign]
        self.load_state_dict = self._counts.update  # type: ignore[method-assign, assignment]

    @override
    def train_dataloader(self) -> Any:
        self._counts["asked"] += 1
        order = torch.randperm(32, generator=torch.Generator().manual_seed(self._counts["asked"]))
        return _loader(self._setup, Subset(_tokens(self._setup), order.tolist()))

    @override
    def val_dataloader(self) -> Any:
        self.validations[0] += 1
        return _loader(self._setup, Subset(_tokens(self._setup), range(self.validations[0], 8)))


class Judging(Callback):
    """Lets training depend on each validation."""

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, Drawing)
        pl_module.difficulty += float(trainer.callback_metrics["validation_loss"])


class Smudging(Callback):
    """Changes batches by a generator of its own."""

    def __init__(self) -> None:
        self._legacy = np.random.RandomState(7)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        batch[0][0, 0] = self._legacy.randint(VOCABULARY)


class Moving(Callback):
    """Makes the data harder as training goes on, and keeps count."""

    def __init__(self) -> None:
        self._count, self.best, self.begun = 0, float("inf"), -1.0

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._count, self.begun = 0, random.random()

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: object) -> None:
        assert isinstance(pl_module, Drawing)
        self._count += 1
        pl_module.difficulty = 0.1 * self._count
        assert trainer.train_dataloader is not None
        trainer.train_dataloader.dataset.replaced = self._count // 4

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, Drawing)
        self.best = min(self.best, float(trainer.callback_metrics["validation_loss"]))
        pl_module.difficulty += self.best


class Harder(Tokens):
    """The harder, the more tokens are the same."""

    def __init__(self, length: int) -> None:
        super().__init__(length, augment=True)
        self.replaced = 0

    @override
    def __getitem__(self, index: int) -> Item:
        item = super().__getitem__(index)
        item[0][: self.replaced] = 1
        return item


class Noisy(Tokens):
    """Augments by generators of its own, one of them in a transform."""

    def __init__(self, length: int) -> None:
        super().__init__(length, augment=False)
        self._numpy = np.random.default_rng(3)
        self.transforms = [partial(_replace_one, drawing=random.Random(5))]

    @override
    def __getitem__(self, index: int) -> Item:
        item = super().__getitem__(index)
        item[0][int(self._numpy.integers(SEQUENCE))] = 1
        for transform in self.transforms:
            item = transform(item)
        return item


def _replace_one(item: Item, *, drawing: random.Random) -> Item:
    item[0][drawing.randrange(SEQUENCE)] = drawing.randrange(VOCABULARY)
    return item


class Shuffled(IterableDataset[Item]):
    """A stream through a shuffle buffer: what a fetch gives depends on what all before it have drawn."""

    def __init__(self, length: int, draw: Callable[[int], int]) -> None:
        self._items, self._draw = Tokens(length, augment=True), draw

    @override
    def __iter__(self) -> Iterator[Item]:
        buffer: list[Item] = []
        for index in range(len(self._items)):
            buffer.append(self._items[index])
            if len(buffer) > 5:
                yield buffer.pop(self._draw(len(buffer)))
        while buffer:
            yield buffer.pop(self._draw(len(buffer)))


class Passes(IterableDataset[Item]):
    """A stream that begins elsewhere in each pass, and counts passes in a list."""

    def __init__(self, length: int) -> None:
        self._items, self.passes = Tokens(length, augment=False), [0]

    @override
    def __iter__(self) -> Iterator[Item]:
        first, length = 7 * self.passes[0], len(self._items)
        self.passes[0] += 1
        return iter([self._items[(first + index) % length] for index in range(length)])


class Counted(Tokens):
    """Items that change as they are counted."""

    served = 0

    @override
    def __getitem__(self, index: int) -> Item:
        self.served += 1
        tokens, targets = super().__getitem__(index)
        return (tokens + self.served) % VOCABULARY, targets


class Knowing:
    """A loader that nobody can look into, and that knows its position."""

    def __init__(self, setup: Fed) -> None:
        items, place = _tokens(setup), {"epoch": -1, "index": 0, "told": False}
        self.state_dict, self.load_state_dict = lambda: dict(place), lambda state: place.update(state, told=True)

        def batches() -> Iterator[list[Tensor]]:
            if not place["told"]:
                place.update(epoch=place["epoch"] + 1, index=0)
            place["told"] = False
            order = torch.randperm(len(items), generator=torch.Generator().manual_seed(place["epoch"])).tolist()
            while place["index"] < setup.batches:
                place["index"] += 1
                chosen = order[(place["index"] - 1) * setup.batch_size :][: setup.batch_size]
                yield default_collate([items[index] for index in chosen])

        self._batches = batches

    def __iter__(self) -> Iterator[list[Tensor]]:
        return self._batches()


def _by_torch(bound: int) -> int:
    return int(torch.randint(bound, ()))


def _tokens(setup: Fed, *, part: float = 1.0) -> Tokens:
    return Tokens(int(setup.batches * setup.batch_size * part), augment=setup.augment)


def _loader(setup: Fed, dataset: Dataset[Any], **options: Any) -> Any:
    return DataLoader(dataset, batch_size=setup.batch_size, num_workers=setup.workers, **options)


def _shuffle_buffer(draw: Callable[[int], int]) -> Callable[[Fed], Any]:
    return lambda setup: _loader(setup, Shuffled(setup.batches * setup.batch_size, draw))


def _combined(mode: Any, *parts: float, **options: Any) -> Callable[[Fed], Any]:
    def make(setup: Fed) -> Any:
        loaders = {f"{part}": _loader(setup, _tokens(setup, part=part), shuffle=True, **options) for part in parts}
        return CombinedLoader(loaders, mode)

    return make


FEEDS: dict[str, Callable[[Fed], Any]] = {
    "cycle": _combined("max_size_cycle", 1.0, 0.5, 0.25),
    "min_size": _combined("min_size", 1.0, 2.0),
    "max_size": _combined("max_size", 1.0, 0.5),
    "buffer_torch": _shuffle_buffer(_by_torch),
    "buffer_python": _shuffle_buffer(random.randrange),
    "held": lambda setup: _loader(setup, Subset(Noisy(40), range(32)), shuffle=True),
    "moved": lambda setup: _loader(setup, Harder(32), shuffle=True),
    "persistent_held": lambda setup: _loader(setup, Noisy(40), shuffle=True, persistent_workers=True),
    "persistent_stream": lambda setup: _loader(
        setup, Shuffled(setup.batches * setup.batch_size // 2, _by_torch), persistent_workers=True
    ),
    "persistent_cycle": _combined("max_size_cycle", 1.0, 0.5, persistent_workers=True),
    "persistent": lambda setup: _loader(setup, _tokens(setup), shuffle=True, persistent_workers=True),
    "passes": lambda setup: _loader(setup, Passes(setup.batches * setup.batch_size)),
    "counted": lambda setup: _loader(setup, Counted(32, augment=False), shuffle=True),
    "persistent_counted": lambda setup: _loader(
        setup, Counted(32, augment=False), shuffle=True, persistent_workers=True
    ),
    "knowing": Knowing,
}


KILLS = [Kill(phase="after_batch_end", step=step, settle=10.0) for step in (8, 15)]
"""In each of two epochs, behind fetches in which a loader starts over."""


CASES = {
    "cycle": Fed(feed="cycle"),
    "cycle_workers": Fed(feed="cycle", workers=1),
    "min_size": Fed(feed="min_size"),
    "max_size": Fed(feed="max_size"),
    "buffer_torch": Fed(feed="buffer_torch"),
    "buffer_python": Fed(feed="buffer_python"),
    "buffer_workers": Fed(feed="buffer_torch", workers=1),
    "held": Fed(feed="held"),
    "moved": Fed(feed="moved"),
    "persistent": Fed(feed="persistent", workers=2),
    "persistent_held": Fed(feed="persistent_held", workers=2),
    "persistent_stream": Fed(feed="persistent_stream", workers=2),
    "persistent_cycle": Fed(feed="persistent_cycle", workers=1),
    "passes": Fed(feed="passes"),
    "counted": Fed(feed="counted"),
    "persistent_counted": Fed(feed="persistent_counted", workers=2),
    "knowing": Fed(feed="knowing"),
    "asked": Fed(feed="asked", trainer=(("reload_dataloaders_every_n_epochs", 1), ("num_sanity_val_steps", 1))),
    "early": Fed(feed="passes", early=True, logged=True),
    "early_persistent": Fed(feed="persistent_counted", workers=2, early=True),
}


QUICK = ("cycle", "held", "moved", "persistent_held", "passes", "knowing", "asked", "early")
"""One for each thing that can go wrong; the others differ little from these or from drawn runs, as streams through a
buffer do, and only `make soak` has them."""


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.soak) for name in CASES]
)
def test_killed_in_any_feed_the_run_ends_the_same(campaigns: Campaigns, name: str) -> None:
    """Batches go on as if nothing had happened."""
    campaigns.check(replace(CASES[name], checkpointing=SPARSE), *KILLS)


DETERMINISTIC = replace(SPARSE, arguments=(("deterministic_dataset", True),))


@pytest.mark.parametrize(
    "case",
    [pytest.param(Fed(feed="cycle", workers=1), marks=pytest.mark.soak), Fed(feed="persistent", workers=2)],
    ids=["cycle", "persistent"],
)
def test_killed_on_data_that_draws_nothing_the_run_ends_the_same(campaigns: Campaigns, case: Fed) -> None:
    """Loaders go to their places without fetching; in the second epoch, where they have started over before."""
    campaigns.check(replace(case, augment=False, checkpointing=DETERMINISTIC), *KILLS[1:])


@pytest.mark.parametrize("on_mismatch", ["stop", "warn"])
def test_data_that_is_said_to_draw_nothing_and_does_is_noticed(campaigns: Campaigns, on_mismatch: str) -> None:
    """By the digest of the batch with which the original run went on, before a step is taken with another."""
    arguments = (("deterministic_dataset", True), ("on_mismatch", on_mismatch))
    dense = Checkpointing(policy="dense", every_n_steps=2, arguments=arguments)
    setup = Fed(feed="persistent", workers=2, checkpointing=dense)
    if on_mismatch == "warn":
        _, second = campaigns.run(setup, KILLS[0])
        assert "is not the one of the original run: this restart is not bit-exact" in second.log()
    else:
        with pytest.raises(
            AttemptFailed, match=r"OtherData: the batch that follows step 6 is not the one of the original run"
        ):
            campaigns.run(setup, KILLS[0])
