"""A training run with every dimension that a user may vary, as one value that a generator draws and a line spells.

`Drawn` adds to `Variant` what only the random campaign varies: samplers and generators of their own, several
validation loaders, Lightning's own callbacks, loggers, compiled models. The generator is `_draw`.
"""

from __future__ import annotations

import csv
import itertools
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from door import bits, digest
from lightning.pytorch import Callback, LightningDataModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    WeightedRandomSampler,
    default_collate,
    get_worker_info,
)
from torchdata.stateful_dataloader import StatefulDataLoader
from typing_extensions import Self, override

from campaign._data import VOCABULARY, Tokens
from campaign._drawn_hooks import EDITS, Hook, with_hooks
from campaign._drawn_values import Place, Remembering, Remembers, Stated
from campaign._optimizers import make_other
from campaign._training import Module, make_averaging, make_scheduler
from campaign._variants import Item, Stream, Variant, VariantModule
from lightning_moe_ckpt.data import SeededItems
from lightning_moe_ckpt.fit.loaders._loaders import begin_epoch
from lightning_moe_ckpt.testing import Attempt

Data = Literal["map", "sized_stream", "stream", "shuffled_stream", "combined", "by_epoch"]
"""Kinds of training data. Streams are iterable, `sized` ones with a length; `by_epoch` comes from a hook of the module."""
Holds = Literal["nothing", "numpy", "random", "torch"]
"""Which generator of its own the data set draws from."""
UserCallback = Literal["early_stopping", "best", "every_two_steps", "every_two_epochs", "exception", "learning_rate"]
Counts = Literal["nothing", "items", "passes", "sampler", "batch_sampler", "collate", "worker", "asked"]
"""Where data counts: as items or a pass are read, in a sampler, a batch sampler or a collate function, as a worker begins, or as the data module is asked."""
BatchOf = Literal["list", "dict", "class", "random"]
"""What a batch is; or whether the function that makes it draws numbers."""
FurtherScheduler = Literal["none", "sequential", "chained", "restarts", "cyclic"]
Changed = Literal["callbacks", "detect_anomaly", "log_every_n_steps", "num_workers"]
"""Settings that no bit depends on."""
FurtherOptimizer = Literal["none", "tensor_lr", "nesterov", "no_momentum", "maximize"]


@dataclass(frozen=True, kw_only=True)
class Drawn(Variant):
    """A training run of the random campaign. Every field is JSON."""

    data: Data = "map"
    combined: Literal["min_size", "max_size_cycle", "max_size"] = "max_size_cycle"
    sampler: Literal["shuffle", "own_generator", "sequential", "replacement", "weighted", "by_epoch", "varying"] = (
        "shuffle"
    )
    persistent: bool = False
    drop_last: bool = False
    ragged: int = 0
    """Items beyond whole batches."""
    holds: Holds = "nothing"
    validation_loaders: int = 1
    amsgrad: bool = False
    one_cycle: bool = False
    groups: int = 2
    user_callbacks: tuple[UserCallback, ...] = ()
    logger: bool = False
    compiled: bool = False
    seeded: bool = False
    """Whether each item of a map-style data set has a seed of its own, so that restarts do not read items again."""
    toggled: bool = False
    """Whether the module switches `requires_grad` of its embedding by the epoch."""
    hooks: tuple[Hook, ...] = ()
    batch_of: BatchOf = "list"
    datamodule: bool = False
    further_scheduler: FurtherScheduler = "none"
    """In the place of all others."""
    frequency: int = 1
    """How many steps make one of the further scheduler."""
    further_optimizer: FurtherOptimizer = "none"
    """In the place of all others."""
    tensorboard: bool = False
    remembers: tuple[tuple[str, Place], ...] = field(default=(), repr=False)
    """Kinds of values that training moves and reads, with their places. Not in its text, from which hooks are drawn."""
    counts: Counts = field(default="nothing", repr=False)
    early: bool = field(default=False, repr=False)
    """Whether Lightning makes the first iterator while optimizers are configured."""
    other: str = field(default="", repr=False)
    """Optimizer of `_optimizers.py`, in the place of all others."""
    changed: tuple[Changed, ...] = field(default=(), repr=False)
    """What lives with an odd number set otherwise."""

    @override
    def fault_free(self) -> Self:
        """Compiled models count their tokens in the program that is compiled, so bits are those of a run that counts."""
        counts = self.checkpointing is not None and self.checkpointing.order == "popularity"
        return self if self.compiled and counts else super().fault_free()

    @property
    def edits_weights(self) -> bool:  # type: ignore[override]
        return self.model == "counting" or not EDITS.isdisjoint(self.hooks)

    @property
    def complaints(self) -> tuple[str, ...]:
        """What lives may complain of."""
        if "replaces" not in self.hooks:
            return ()
        return ("the module or its optimizer has other parameters than when `fit` began", ", was not stored after 0.")

    @override
    def make_module(self, life: Attempt) -> Module:
        return self.module_of(DrawnModule, life)

    def module_of(self, base: type[DrawnModule], life: Attempt) -> Module:
        """A module of a class, with hooks and what is to be remembered."""
        made = with_hooks(base, self.hooks)
        if self.remembers:
            made = type(f"Remembers{made.__name__}", (Remembers, made), {"remembered": self.remembers})
        module: Module = made(self, life)
        return module

    @override
    def callbacks(self, life: Attempt) -> Sequence[Callback]:
        made: dict[UserCallback, Callback] = {}
        if "early_stopping" in self.user_callbacks:
            made["early_stopping"] = EarlyStopping("loss_of_epoch", patience=1, check_on_train_epoch_end=True)
        if "best" in self.user_callbacks:
            made["best"] = ModelCheckpoint(
                _files(self, life) / "best",
                monitor="loss_of_epoch",
                save_top_k=2,
                save_last=True,
                save_on_train_epoch_end=True,
            )
        if "every_two_steps" in self.user_callbacks:
            made["every_two_steps"] = ModelCheckpoint(
                _files(self, life) / "steps", every_n_train_steps=2, save_top_k=-1, filename="{step}"
            )
        if "every_two_epochs" in self.user_callbacks:
            made["every_two_epochs"] = ModelCheckpoint(_files(self, life) / "epochs", every_n_epochs=2, save_top_k=-1)
        if "exception" in self.user_callbacks:
            made["exception"] = OnExceptionCheckpoint(_files(self, life) / "exception")
        if "learning_rate" in self.user_callbacks:
            made["learning_rate"] = LearningRateMonitor("step", log_momentum=True)
        remembering = [Remembering(), Stated()] if self.remembers else []
        more = [Idle()] if self.is_changed("callbacks", life) else []
        return [*super().callbacks(life), *remembering, *make_averaging(self.averaged), *made.values(), *more]

    def is_changed(self, name: Changed, life: Attempt) -> bool:
        """Whether a life sets something otherwise than the one before."""
        return name in self.changed and life.index % 2 == 1

    @override
    def trainer_options(self, life: Attempt) -> dict[str, Any]:
        options = super().trainer_options(life)
        if self.logger:
            options |= {
                "logger": CSVLogger(str(_files(self, life)), name="csv", version="mine"),
                "log_every_n_steps": 1,
            }
        if self.tensorboard:
            options |= {"logger": TensorBoardLogger(str(_files(self, life)), name="board", version="mine")}
        if self.is_changed("log_every_n_steps", life):
            options["log_every_n_steps"] = 7
        if self.is_changed("detect_anomaly", life):
            options["detect_anomaly"] = True
        return options

    @override
    def fit_options(self, life: Attempt) -> dict[str, Any]:
        return {"datamodule": DrawnData(self, life)} if self.datamodule else {}

    @override
    def loaders(self, life: Attempt) -> tuple[Any, Any]:
        return (None, None) if self.datamodule else self.made_loaders(life)

    def made_loaders(self, life: Attempt) -> tuple[Any, Any]:
        """Training and validation data, whoever gives it to the Trainer."""
        training = None if self.data == "by_epoch" else make_training(self, life, first=0)
        if not self.validate_every:
            return training, None
        validation = [
            DataLoader(Tokens(self.batch_size * 2 + index, augment=False), batch_size=self.batch_size)
            for index in range(self.validation_loaders)
        ]
        return training, validation if len(validation) > 1 else validation[0]

    @override
    def returned(self, life: Attempt, trainer: Trainer) -> dict[str, Any]:
        batches = trainer.fit_loop.epoch_loop.batch_progress.total
        found: dict[str, Any] = {
            **super().returned(life, trainer),
            "batches": [batches.ready, batches.completed],
            "stopped": trainer.should_stop,
            "epoch_end/metrics": {name: bits(value) for name, value in sorted(trainer.callback_metrics.items())},
        }
        for callback in trainer.callbacks:  # type: ignore[attr-defined]  # untyped in Lightning
            if isinstance(callback, EarlyStopping | ModelCheckpoint):
                found[f"epoch_end/{type(callback).__name__} {callback.monitor}"] = _plain(callback.state_dict())
        if life.rank == 0:
            root = _files(self, life)
            found["epoch_end/files"] = sorted(str(path.relative_to(root)) for path in root.rglob("*.ckpt"))
            found["epoch_end/rows"] = sorted(_rows(root))
        return found


class Idle(Callback):
    """Does nothing."""


def _files(setup: Drawn, life: Attempt) -> Path:
    """Where the run's own files go; fault-free runs share a work folder."""
    return life.workdir / ("files" if setup.checkpointing is not None else f"files{life.index}")


def _plain(state: Any) -> Any:
    """A callback's state without the folder it writes to, floats by their bits."""
    if isinstance(state, dict):
        return {Path(str(key)).name: _plain(each) for key, each in state.items() if key != "dirpath"}
    if isinstance(state, Tensor):
        return digest(state)
    return Path(state).name if isinstance(state, str) else repr(state)


def _rows(root: Path) -> Iterator[str]:
    for path in root.glob("csv/mine/metrics.csv"):
        with path.open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                yield str(sorted((key, value) for key, value in row.items() if value))


# -- data


class DrawnData(LightningDataModule):
    """The data of a `Drawn`; draws numbers whenever it is asked to prepare something."""

    def __init__(self, setup: Drawn, life: Attempt) -> None:
        super().__init__()
        self._setup, self._life, self._asked = setup, life, 0

    @override
    def prepare_data(self) -> None:
        random.random()

    @override
    def setup(self, stage: str) -> None:
        torch.rand(2)

    @override
    def train_dataloader(self) -> Any:
        self._asked += 1
        if self._setup.counts == "asked":
            return make_training(self._setup, self._life, first=self._asked)
        return self._setup.made_loaders(self._life)[0]

    @override
    def val_dataloader(self) -> Any:
        return self._setup.made_loaders(self._life)[1] or []


class ByEpoch(Sampler[int]):
    """An order that depends on nothing but the epoch, which Lightning says."""

    def __init__(self, length: int) -> None:
        self._length, self._epoch = length, 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __len__(self) -> int:
        return self._length

    @override
    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(self._length, generator=torch.Generator().manual_seed(self._epoch)).tolist())


class Varying(Sampler[list[int]]):
    """Batches of different sizes."""

    def __init__(self, length: int, batch_size: int) -> None:
        self._length, self._sizes = length, (batch_size - 1, batch_size + 1)

    def __len__(self) -> int:
        return len(list(self._batches(range(self._length))))

    @override
    def __iter__(self) -> Iterator[list[int]]:
        return self._batches(torch.randperm(self._length).tolist())

    def _batches(self, order: Sequence[int]) -> Iterator[list[int]]:
        for size in itertools.cycle(self._sizes):
            if not order:
                return
            yield list(order[:size])
            order = order[size:]


@dataclass
class Batch:
    """Tokens and targets."""

    tokens: Tensor
    targets: Tensor


def _as_dict(items: Sequence[Item]) -> dict[str, Tensor]:
    tokens, targets = default_collate(list(items))
    return {"tokens": tokens, "targets": targets}


def _as_class(items: Sequence[Item]) -> Batch:
    return Batch(*default_collate(list(items)))


def _augmented(items: Sequence[Item]) -> list[Tensor]:
    tokens, targets = default_collate(list(items))
    return [(tokens + random.randrange(3) + torch.randint(3, (1,))) % VOCABULARY, targets]


class Holding(Dataset[Item]):
    """Items that also depend on a generator that the data set holds."""

    def __init__(self, items: Dataset[Item], kind: Holds, seed: int) -> None:
        self._items = items
        makers: dict[Holds, Any] = {
            "numpy": np.random.default_rng,
            "random": random.Random,
            "torch": torch.Generator().manual_seed,
        }
        self.own = makers[kind](seed)

    def __len__(self) -> int:
        return len(self._items)  # type: ignore[arg-type]

    @override
    def __getitem__(self, index: int) -> Item:
        tokens, targets = self._items[index]
        if isinstance(self.own, np.random.Generator):
            number = int(self.own.integers(VOCABULARY))
        elif isinstance(self.own, random.Random):
            number = self.own.randrange(VOCABULARY)
        else:
            number = int(torch.randint(VOCABULARY, (), generator=self.own))
        return (tokens + number) % VOCABULARY, targets


class SizedStream(Stream):
    """A stream that knows its length on one rank, which torch divides by the workers itself."""

    def __init__(self, length: int, ranks: int, *, augment: bool) -> None:
        super().__init__(length, augment=augment)
        self._own_length = length // ranks

    def __len__(self) -> int:
        return self._own_length


class ShuffledStream(IterableDataset[Item]):
    """A stream that keeps a few items back and gives one of them at random."""

    def __init__(self, stream: Stream, keep: int = 5) -> None:
        self._stream, self._keep = stream, keep

    @override
    def __iter__(self) -> Iterator[Item]:
        kept: list[Item] = []
        for item in self._stream:
            kept.append(item)
            if len(kept) > self._keep:
                yield kept.pop(random.randrange(len(kept)))
        random.shuffle(kept)
        yield from kept


def make_training(setup: Drawn, life: Attempt, *, first: int) -> Any:
    """The training data of one epoch, or of all.

    Args:
        setup: the run.
        life: whose seed the data's own generators start from.
        first: items before these are left out.
    """
    length = setup.batches * setup.batch_size * life.world_size + setup.ragged
    if setup.data == "combined":
        loaders = {"first": _loader(setup, life, _items(setup, life, length, first))}
        loaders["second"] = _loader(setup, life, _items(setup, life, max(1, length // 2), first))
        return CombinedLoader(loaders, setup.combined)
    return _loader(setup, life, _items(setup, life, length, first))


def _items(setup: Drawn, life: Attempt, length: int, first: int) -> Any:
    if setup.data == "sized_stream":
        return SizedStream(length, life.world_size, augment=setup.augment)
    if setup.data == "stream":
        return Stream(length, augment=setup.augment)
    if setup.data == "shuffled_stream":
        return ShuffledStream(Stream(length, augment=setup.augment))
    tokens = Tokens(first + length, augment=setup.augment)
    items: Dataset[Item] = Subset(tokens, range(first, first + length)) if first else tokens
    if setup.seeded:
        items = SeededItems(items)
    return items if setup.holds == "nothing" else Holding(items, setup.holds, _own_seed(setup, life))


class Counting:
    """Counts in an attribute how often it is called or iterated, and lets what it gives depend on that."""

    def __init__(self, inner: Any) -> None:
        self._inner, self.count = inner, 0

    def __len__(self) -> int:
        return len(self._inner)

    def __iter__(self) -> Iterator[Any]:
        self.count += 1
        given = list(self._inner)
        return iter(given[self.count % len(given) :] + given[: self.count % len(given)])

    def __call__(self, items: Any) -> Any:
        self.count += 1
        batch = self._inner(items)
        return [(batch[0] + self.count) % VOCABULARY, *batch[1:]]


class CountingItems(Dataset[Item]):
    """Items that depend on how many have been read."""

    def __init__(self, items: Dataset[Item]) -> None:
        self._items, self.count = items, 0

    def __len__(self) -> int:
        return len(self._items)  # type: ignore[arg-type]

    @override
    def __getitem__(self, index: int) -> Item:
        self.count += 1
        tokens, targets = self._items[index]
        return (tokens + self.count) % VOCABULARY, targets

    def begins(self, worker: int) -> None:
        """Count a worker that begins."""
        self.count += 7 + worker


class CountingPasses(IterableDataset[Item]):
    """A stream that begins elsewhere in each pass."""

    def __init__(self, stream: IterableDataset[Item]) -> None:
        self._stream, self.passes = stream, 0

    @override
    def __iter__(self) -> Iterator[Item]:
        self.passes += 1
        return iter([((tokens + self.passes) % VOCABULARY, targets) for tokens, targets in self._stream])


def _begins(worker: int) -> None:
    get_worker_info().dataset.begins(worker)  # type: ignore[union-attr]


def _own_seed(setup: Drawn, life: Attempt) -> int:
    """Of a generator that the user makes: another in each life, unless data is made again while a life runs."""
    return 7 if setup.data == "by_epoch" or setup.datamodule else life.seed + 7


def _loader(setup: Drawn, life: Attempt, items: Any) -> Any:
    options: dict[str, Any] = {
        "batch_size": setup.batch_size,
        # Not more than there are cores, of which torch warns.
        "num_workers": 3 - setup.workers if setup.is_changed("num_workers", life) else setup.workers,
        "persistent_workers": setup.persistent and setup.workers > 0,
        "drop_last": setup.drop_last,
    }
    collated = {"dict": _as_dict, "class": _as_class, "random": _augmented}
    if setup.batch_of in collated:
        options["collate_fn"] = collated[setup.batch_of]
    make = StatefulDataLoader if setup.loader == "stateful" else DataLoader
    if setup.counts == "passes":
        items = CountingPasses(items)
    elif setup.counts in {"items", "worker"}:
        items = CountingItems(items)
        options |= {"worker_init_fn": _begins} if setup.counts == "worker" else {}
    elif setup.counts == "collate":
        options["collate_fn"] = Counting(default_collate)
    elif setup.counts == "sampler":
        return make(items, sampler=Counting(SequentialSampler(items)), **options)
    elif setup.counts == "batch_sampler":
        inner = BatchSampler(RandomSampler(items), setup.batch_size, setup.drop_last)
        del options["batch_size"], options["drop_last"]
        return make(items, batch_sampler=Counting(inner), **options)
    if isinstance(items, IterableDataset):
        return make(items, **options)
    samplers: dict[str, Callable[[], Sampler[int]]] = {
        "weighted": lambda: WeightedRandomSampler(range(1, len(items) + 1), len(items)),
        "by_epoch": lambda: ByEpoch(len(items)),
        "sequential": lambda: SequentialSampler(items),
        "replacement": lambda: RandomSampler(items, replacement=True),
    }
    if setup.sampler in samplers:
        return make(items, sampler=samplers[setup.sampler](), **options)
    if setup.sampler == "varying":
        del options["batch_size"], options["drop_last"]
        return make(items, batch_sampler=Varying(len(items), setup.batch_size), **options)
    if setup.sampler == "own_generator":
        options["generator"] = torch.Generator().manual_seed(_own_seed(setup, life))
    return make(items, shuffle=True, **options)


# -- module


class DrawnModule(VariantModule):
    """The module of a `Drawn`."""

    def __init__(self, setup: Drawn, life: Attempt) -> None:
        super().__init__(setup, life)
        self._drawn = setup

    @override
    def configure_model(self) -> None:
        fresh = self.model is None
        super().configure_model()
        if fresh and self._drawn.compiled:
            let_compile()
            self.model = torch.compile(self.model, backend="aot_eager")  # type: ignore[assignment]

    @override
    def train_dataloader(self) -> Any:
        return make_training(self._drawn, self._life, first=self.current_epoch)

    def _loss(self, batch: Any) -> Tensor:
        if isinstance(batch, Batch):
            return super()._loss([batch.tokens, batch.targets])
        if isinstance(batch, dict) and "tokens" in batch:
            return super()._loss([batch["tokens"], batch["targets"]])
        if isinstance(batch, dict):  # of a combined loader, one of whose loaders may have ended
            return super()._loss({name: each for name, each in batch.items() if each is not None})
        return super()._loss(batch)

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss_of_epoch", loss, on_step=False, on_epoch=True, batch_size=self._drawn.batch_size, sync_dist=True)
        return loss

    @override
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        return super().validation_step(batch, batch_idx)

    @override
    def on_train_epoch_start(self) -> None:
        super().on_train_epoch_start()
        if self._drawn.toggled:
            names = [name for name, _ in self.named_parameters() if "embedding" in name or "tokens" in name]
            self.get_parameter(names[0]).requires_grad_(self.current_epoch % 2 == 0)
        if self._drawn.checkpointing is None:  # else the callback does
            begin_epoch(self.trainer)

    @override
    def configure_optimizers(self) -> Any:
        setup = self._drawn
        if setup.early:
            _ = self.trainer.estimated_stepping_batches
        optimizer = _optimizer(setup, list(self.parameters()))
        schedulers = torch.optim.lr_scheduler
        if setup.further_scheduler != "none":
            further = {"scheduler": _further_scheduler(setup, optimizer), "interval": "step"}
            return {"optimizer": optimizer, "lr_scheduler": {**further, "frequency": setup.frequency}}
        if setup.one_cycle:
            cycle = schedulers.OneCycleLR(optimizer, max_lr=0.01, total_steps=200)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": cycle, "interval": "step"}}
        if setup.plateau is not None:
            interval, frequency = setup.plateau
            plateau = schedulers.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=1.0)
            monitor = "loss_of_epoch" if interval == "epoch" else "validation_loss"
            configured = {"scheduler": plateau, "interval": interval, "frequency": frequency, "monitor": monitor}
            return {"optimizer": optimizer, "lr_scheduler": {**configured, "strict": False}}
        if setup.scheduler == "none":
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": make_scheduler(setup, optimizer)}


def let_compile() -> None:
    """Ignore a warning: torch's compiler looks at the gradient of whatever tensor it meets."""
    warnings.filterwarnings("ignore", r"The \.grad attribute of a Tensor that is not a leaf", UserWarning)


def _optimizer(setup: Drawn, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    groups = [
        {"params": parameters[index :: setup.groups], "weight_decay": 0.05 * index} for index in range(setup.groups)
    ]
    if setup.other:
        return make_other(setup.other, groups)
    if setup.further_optimizer != "none":
        return _further_optimizer(setup, groups)
    if setup.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=0.05, momentum=0.9)
    if setup.optimizer == "adam":
        return torch.optim.Adam(groups, lr=3e-3, foreach=False, amsgrad=setup.amsgrad)
    foreach, fused = setup.optimizer == "adamw_foreach", setup.optimizer == "adamw_fused"
    return torch.optim.AdamW(groups, lr=3e-3, foreach=foreach, fused=fused, amsgrad=setup.amsgrad)


def _further_optimizer(setup: Drawn, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    if setup.further_optimizer == "tensor_lr":
        return torch.optim.AdamW(groups, lr=torch.tensor(3e-3), foreach=False)
    if setup.further_optimizer == "maximize":
        return torch.optim.AdamW([{**group, "maximize": index % 2 == 1} for index, group in enumerate(groups)], lr=1e-3)
    if setup.further_optimizer == "nesterov":
        return torch.optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=True, foreach=True)
    return torch.optim.SGD(groups, lr=0.05)


def _further_scheduler(setup: Drawn, optimizer: torch.optim.Optimizer) -> Any:
    schedulers = torch.optim.lr_scheduler
    warm = schedulers.LinearLR(optimizer, 0.1, total_iters=3)
    if setup.further_scheduler == "sequential":
        return schedulers.SequentialLR(optimizer, [warm, schedulers.CosineAnnealingLR(optimizer, 10)], [3])
    if setup.further_scheduler == "chained":
        return schedulers.ChainedScheduler([warm, schedulers.ExponentialLR(optimizer, 0.9)])
    if setup.further_scheduler == "restarts":
        return schedulers.CosineAnnealingWarmRestarts(optimizer, 3)
    return schedulers.CyclicLR(optimizer, 1e-4, 1e-2, step_size_up=2, cycle_momentum=False)
