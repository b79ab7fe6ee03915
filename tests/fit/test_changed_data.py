"""What a start says and does that has other data than the run that it goes on with, or has other data in every epoch."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, TensorDataset
from typing_extensions import override

from lightning_moe_ckpt.callbacks import DenseCheckpoint
from lightning_moe_ckpt.errors import OtherData


class Model(LightningModule):
    def __init__(self, *, manual: bool = False) -> None:
        super().__init__()
        self.layer, self.automatic_optimization = nn.Linear(4, 4), not manual

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.layer(batch[0]).square().mean()
        if not self.automatic_optimization:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 0.01)


class Growing(LightningDataModule):
    """One batch more in every epoch."""

    def __init__(self, batch_size: int = 4) -> None:
        super().__init__()
        self.batch_size = batch_size

    @override
    def train_dataloader(self) -> Any:
        assert self.trainer is not None
        return DataLoader(items(16 + 4 * self.trainer.current_epoch), self.batch_size)


class Marked(BatchSampler):
    turn: Iterator[int]


class Marks(LightningDataModule):
    """Gives a batch sampler an attribute behind its `__init__`, of which Lightning keeps a note beside it."""

    @override
    def train_dataloader(self) -> Any:
        sampler = Marked(RandomSampler(items()), 4, drop_last=False)
        sampler.turn = itertools.count()
        return DataLoader(items(), batch_sampler=sampler)


class Stream(IterableDataset[list[Tensor]]):
    """Draws its order as it begins."""

    @override
    def __iter__(self) -> Iterator[list[Tensor]]:
        return iter([[each] for each in torch.randn(12, 4)])


class Ends(Exception):
    """Training is interrupted."""


class Interrupts(Callback):
    def __init__(self, step: int) -> None:
        self._step = step

    @override
    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == self._step:
            raise Ends


def items(length: int = 16) -> TensorDataset:
    return TensorDataset(torch.arange(4.0 * length).view(length, 4) / length)


def fit(url: Path, data: Any, *, manual: bool = False, interrupted: int = 0, **options: Any) -> Trainer:
    seed_everything(1, verbose=False)
    callbacks = [
        DenseCheckpoint(url, every_n_steps=2, overhead_target=None),
        *([Interrupts(interrupted)] if interrupted else []),
    ]
    trainer = tiny.quiet_trainer(*callbacks, **options)
    with warnings.catch_warnings(), pytest.raises(Ends) if interrupted else nullcontext():
        warnings.simplefilter("ignore")
        trainer.fit(Model(manual=manual), data)
    return trainer


@pytest.mark.parametrize("step", [8, 9])
def test_data_that_grows_by_the_epoch_has_not_changed(step: int, tmp_path: Path, caplog: Any) -> None:
    """Neither where a start trains nothing nor where it goes on, in mid-epoch and between two; other batches are named there too."""
    options: dict[str, Any] = {"reload_dataloaders_every_n_epochs": 1}
    for more in (0, 0, 2):
        fit(tmp_path / "run", Growing(), max_steps=step + more, **options)
    assert "max_steps" in caplog.text
    assert "items" not in caplog.text
    caplog.clear()
    fit(tmp_path / "run", Growing(2), max_steps=step + 4, **options)
    assert "batch_size" in caplog.text
    assert "items" not in caplog.text


class Shifted(Growing):
    """As many items, all of them other ones."""

    @override
    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(super().train_dataloader().dataset.tensors[0] + 1), self.batch_size)


def test_data_that_grows_by_the_epoch_is_compared_between_two(tmp_path: Path, caplog: Any) -> None:
    """A start asks for the first epoch's loaders too, which are not those that it goes on with."""
    caplog.set_level("INFO", "lightning.pytorch")  # which other tests of this process may have silenced
    options: dict[str, Any] = {"reload_dataloaders_every_n_epochs": 1}
    fit(tmp_path / "run", Growing(), max_steps=8, interrupted=5, **options)
    with pytest.raises(OtherData):
        fit(tmp_path / "run", Shifted(), max_steps=8, **options)
    fit(tmp_path / "run", Growing(), max_steps=8, **options)
    assert "resumed from step 4" in caplog.text
    assert "other settings" not in caplog.text


def test_a_sampler_without_the_generator_of_the_stored_one_is_used(tmp_path: Path, caplog: Any) -> None:
    """In the middle of an epoch, whose batches are other ones then, which the table and a line say."""
    shuffled = RandomSampler(items(), generator=torch.Generator().manual_seed(3))
    fit(tmp_path / "run", DataLoader(items(), 4, sampler=shuffled), max_steps=6, interrupted=3)
    assert fit(tmp_path / "run", DataLoader(items(), 4), max_steps=6).global_step == 6
    assert "RandomSampler  SequentialSampler  yours" in caplog.text
    assert "are not those of the original run: `sampler` was RandomSampler" in caplog.text
    assert "this restart is not exact: the run before had generators ['loader0" in caplog.text


def test_overfitting_on_a_stream_is_named_as_what_makes_other_batches(tmp_path: Path, caplog: Any) -> None:
    """Its epochs end earlier."""
    fit(tmp_path / "run", DataLoader(Stream(), 2), max_steps=8, interrupted=3)
    assert fit(tmp_path / "run", DataLoader(Stream(), 2), max_steps=8, overfit_batches=1).global_step == 8
    assert "are not those of the original run: `limit_train_batches` was 1.0 and is 1, `overfit_batches`" in caplog.text


def test_what_lightning_notes_of_a_batch_sampler_is_not_told_to_the_user(tmp_path: Path, caplog: Any) -> None:
    """What the user has set is, where it cannot be restored."""
    fit(tmp_path / "run", Marks(), max_steps=2)
    assert "`loader0.batch_sampler.turn` (state of an iterator)" in caplog.text
    assert "__pl_" not in caplog.text


def test_manual_optimization_in_64_bits_counts_steps_in_64_bits(tmp_path: Path) -> None:
    """Lightning steps there where torch's default type is `float64`; a restart goes on with the same state."""
    options: dict[str, Any] = {"precision": "64-true", "manual": True}
    ends = [
        fit(tmp_path / url, DataLoader(items(), 4), max_steps=steps, **options)
        for url, steps in (("calm", 6), ("run", 3), ("run", 6))
    ]
    assert isinstance(ends[2].callbacks[0], DenseCheckpoint)  # type: ignore[attr-defined]
    assert ends[2].callbacks[0].report.resumed_from == 3  # type: ignore[attr-defined]
    (was, now) = (end.optimizers[0].state_dict()["state"] for end in ends[::2])
    assert was[0]["step"].dtype == torch.float64
    for at, state in was.items():
        assert all(each.dtype == now[at][key].dtype and torch.equal(each, now[at][key]) for key, each in state.items())
    assert all(map(torch.equal, *(end.lightning_module.parameters() for end in ends[::2])))
