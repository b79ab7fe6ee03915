"""Attributes that move while training are found, kept and set again; the others are left to the user's code."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset
from torchmetrics import MeanMetric
from typing_extensions import override

from lightning_moe_ckpt.fit._owners import MovedAttributes
from lightning_moe_ckpt.fit.loggers._metrics import take_metrics
from lightning_moe_ckpt.journal import decode, differs, encode


class Counting(Callback):
    def __init__(self, limit: int = 9) -> None:
        self.limit, self.count, self.history = limit, 0, [0.0]
        self.lines: Any = None
        self.way: Any = None


class Stateful(Callback):
    def __init__(self) -> None:
        self.count = 0

    @override
    def state_dict(self) -> dict[str, Any]:
        return {}


class Averaging(Stateful):
    """Has its averages in its own state, and what it has counted nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.averages = {"weight": torch.ones(2)}
        self.seen: Any = None

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"ema": self.averages}


class Items(Dataset[int]):
    def __len__(self) -> int:
        return 4


def anything(make: Callable[[], Any]) -> Any:
    """An object that is given attributes which its class does not know."""
    return make()


class Run:
    """What a life has when its first epoch begins."""

    def __init__(self, limit: int = 9, *, checks: bool = False) -> None:
        self.counting, self.stateful, self.stopping = Counting(limit), Averaging(), EarlyStopping("loss")
        self.module, self.datamodule, self.items = (
            anything(LightningModule),
            anything(LightningDataModule),
            anything(Items),
        )
        self.items.level = 1
        self.module.temperature = 1.0
        callbacks = [self.counting, self.stateful, self.stopping]
        combined = SimpleNamespace(flattened=[DataLoader(Subset(self.items, [0, 1]))])
        fit_loop = SimpleNamespace(_combined_loader=combined, _should_reload_train_dl=False)
        trainer: Any = SimpleNamespace(
            optimizers=[], callbacks=callbacks, datamodule=self.datamodule, fit_loop=fit_loop, val_dataloaders=None
        )
        self.moved = MovedAttributes(trainer, self.module, ())
        if checks:  # a run that resumes has no sanity check
            self.moved.sanity_check_begins()
            self.stateful.seen, self.counting.way = defaultdict(list, {"loss": [0.1]}), deque([Counter("a")], maxlen=2)
            self.moved.sanity_check_ends()
        self.moved.look()

    def train(self) -> None:
        self.counting.count, self.stateful.count, self.stopping.wait_count = 3, 3, 3
        self.module.temperature, self.datamodule.seen, self.items.level = 0.5, "all", None
        self.module.training = False


def test_what_has_moved_is_as_it_was_in_the_next_life() -> None:
    """What did not move is as the user says now, and what a state of its own has is restored by that."""
    first, second = Run(), Run(limit=5)
    assert first.moved.take() == {}
    first.train()
    first.stateful.averages["weight"].mul_(2)
    moved = first.moved.take()
    second.moved.restore(moved)
    assert second.stateful.averages["weight"].tolist() == [1, 1]
    assert (second.counting.count, second.counting.limit) == (3, 5)
    assert (second.module.temperature, second.datamodule.seen, second.items.level) == (0.5, "all", None)
    assert (second.stateful.count, second.stopping.wait_count, second.module.training) == (3, 0, True)
    assert second.moved.take() == moved, "and in the one after it"


def test_what_the_sanity_check_has_made_is_made_again() -> None:
    """A process that resumes has no sanity check."""
    first, second = Run(checks=True), Run()
    kept = first.moved.take()
    first.stateful.seen["loss"].append(0.2)
    first.counting.way[0].update("ab")
    for moved in (kept, first.moved.take()):
        second.moved.restore(decode(encode(moved)))
        assert second.stateful.seen.default_factory is list
        assert second.counting.way.maxlen == 2
    assert (second.stateful.seen, second.counting.way) == (first.stateful.seen, first.counting.way)
    assert type(second.counting.way[0]) is Counter
    assert differs(first.moved.take(), second.moved.take()) is False, "and in the one after it"


def test_what_moved_elsewhere_goes_back() -> None:
    """A replay has hooks that see other values than those of the original run."""
    run = Run()
    run.train()
    run.moved.restore({"callback.Counting.count": 1})
    assert (run.counting.count, run.module.temperature) == (1, 1.0)


def test_parts_of_the_model_have_attributes_too() -> None:
    """Their mode, which hooks set to freeze norms, is one; attributes of a layer that are kept elsewhere are left out."""
    runs = []
    for _ in range(2):
        module: Any = LightningModule()
        module.drop, module.kept, module.mean = nn.Dropout(0.1), nn.Dropout(0.1), MeanMetric()
        loops = SimpleNamespace(_combined_loader=None)
        trainer: Any = SimpleNamespace(
            callbacks=[], datamodule=None, fit_loop=loops, val_dataloaders=None, optimizers=[]
        )
        runs.append((module, MovedAttributes(trainer, module, (), kept={("kept", "p")})))
        runs[-1][1].look()
    (first, moved), (second, other) = runs
    first.drop.eval()
    first.drop.p = first.kept.p = 0.5
    first.mean.update(1.0)
    first.drop.register_forward_hook(print)
    taken = moved.take()
    assert taken == {"module.drop.training": False, "module.drop.p": 0.5}
    other.restore(taken)
    assert (second.drop.training, second.drop.p, second.kept.p) == (False, 0.5, 0.1)


def test_data_without_attributes_is_no_owner_of_any() -> None:
    """A list of items, and a range as its sampler."""
    loops = SimpleNamespace(_combined_loader=CombinedLoader(DataLoader[Any]([1.0, 2.0], sampler=range(2))))  # type: ignore[arg-type]
    trainer: Any = SimpleNamespace(callbacks=[], datamodule=None, fit_loop=loops, val_dataloaders=None, optimizers=[])
    trainer.train_dataloader = loops._combined_loader.iterables
    moved = MovedAttributes(trainer, LightningModule(), ())
    moved.look()
    assert moved.take() == {}


def test_a_later_fit_of_a_process_takes_what_earlier_ones_have_changed() -> None:
    """A process that restarts it begins with what the first fit began with."""
    loops = SimpleNamespace(_combined_loader=None)
    trainer: Any = SimpleNamespace(callbacks=[], datamodule=None, fit_loop=loops, val_dataloaders=None, optimizers=[])
    module: Any = LightningModule()
    fresh: Any = LightningModule()
    for each in (module, fresh):
        each.best, each.history = None, []
    carried = set[str]()
    first = MovedAttributes(trainer, module, (), carried=carried)
    first.look()
    module.best = 0.5
    module.history.append(1.0)
    first.close()
    later, other = (MovedAttributes(trainer, each, (), carried=carried) for each in (module, fresh))
    later.look()
    other.look()
    other.restore(later.take())
    assert (fresh.best, fresh.history) == (0.5, [1.0])


def test_metrics_are_those_of_the_parts_that_are_there_now() -> None:
    """One that comes later, takes another's place, or goes. Metrics are equal to anything: only identity tells them apart."""
    module: Any = LightningModule()
    module.inner = nn.Sequential(nn.Linear(2, 2))
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)

    def taken() -> dict[str, float]:
        found = take_metrics(trainer, module)["module"]
        return {name: state["values"]["mean_value"].item() for name, state in found.items()}

    assert taken() == {}
    for value in (1.0, 2.0):
        module.inner[0].mean = MeanMetric()
        module.inner[0].mean.update(value)
        assert taken() == {"inner.0.mean": value}
    module.inner[0].other = module.inner[0].mean
    del module.inner[0].mean
    assert taken() == {"inner.0.other": 2.0}


def test_what_cannot_be_kept_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    """An iterator as training begins, a function without a name when it comes into being."""
    run = Run()
    run.counting.lines = iter([1])
    with caplog.at_level("WARNING", logger="lightning_moe_ckpt"):
        for _ in range(3):
            run.moved.look()
            run.counting.way = lambda: None
            run.moved.take()
    named = [record.getMessage().split("`")[1] for record in caplog.records]
    assert named == ["callback.Counting.lines", "callback.Counting.way"]


def test_a_flag_that_says_that_hooks_are_there_is_not_set_where_they_are_not() -> None:
    """Hugging Face installs hooks that capture outputs at the first forward of a process, and leaves a flag on the module."""
    before, after = Run(), Run()
    before.module._output_capturing_hooks_installed = True
    assert not before.moved.take()
    after.moved.restore({"module._output_capturing_hooks_installed": True})  # as versions before this one wrote
    assert not hasattr(after.module, "_output_capturing_hooks_installed")
