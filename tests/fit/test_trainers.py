"""Trainers and fits of every kind: what works with the callbacks, and what says why not."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from lightning.fabric import Fabric
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_moe_ckpt.callbacks import DenseCheckpoint, SparseCheckpoint
from lightning_moe_ckpt.errors import ConfigurationError
from lightning_moe_ckpt.fit.loops import _trainer
from lightning_moe_ckpt.fit.loops._trainer import LoopProgress
from lightning_moe_ckpt.journal import encode

pytestmark = pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning")


class Net(tiny.ToZero):
    """Something to train, to validate and to test."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val", self.net(batch[0]).mean())

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("test", self.net(batch[0]).mean())


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(24.0).view(6, 4) / 24), batch_size=1, shuffle=True)


def trainer_with(*callbacks: Callback, **options: Any) -> Trainer:
    fixed = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "max_steps": 4}
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    return Trainer(accelerator="cpu", devices=1, max_epochs=-1, callbacks=list(callbacks), **{**fixed, **options})


@pytest.mark.parametrize(
    "options",
    [
        {"enable_checkpointing": False},
        {"barebones": True, "logger": None, "enable_progress_bar": None, "enable_model_summary": None},
    ],
    ids=["enable_checkpointing", "barebones"],
)
def test_without_checkpoints_lightning_refuses_ours_too(tmp_path: Path, options: dict[str, Any]) -> None:
    """When the Trainer is made: both switch off all callbacks that keep checkpoints."""
    with pytest.raises(MisconfigurationException, match="`enable_checkpointing=False` but found"):
        trainer_with(DenseCheckpoint(str(tmp_path)), **options)


STOPS = (4, 6, 13)
"""Steps at which fits end: in an epoch of six, at its end, and in a later one."""


def fits(url: Path | None, *, anew: bool = False, evaluated: bool = False) -> dict[str, Tensor]:
    """Fits of one module with one callback, each of which goes on where the one before has ended; or one fit without it."""
    seed_everything(3, verbose=False)
    module, checkpoint = Net(), DenseCheckpoint(str(url), every_n_steps=1) if url is not None else None
    callbacks = [] if checkpoint is None else [checkpoint]
    before, options = None, {"max_steps": STOPS[-1], "enable_checkpointing": bool(callbacks)}
    trainer = trainer_with(*callbacks, **options)
    for steps in STOPS if callbacks else STOPS[-1:]:
        if anew:
            trainer = trainer_with(*callbacks)
        if evaluated and before is not None:
            trainer.validate(module, loader(), verbose=False)
            trainer.test(module, loader(), verbose=False)
        trainer.fit_loop.epoch_loop.max_steps = steps
        trainer.fit(module, loader())
        assert trainer.global_step == steps
        assert checkpoint is None or checkpoint.report.resumed_from == before
        before = steps
    state = {
        **module.state_dict(),
        **{str(k): v["exp_avg"] for k, v in trainer.optimizers[0].state_dict()["state"].items()},
    }
    return {name: value.clone() for name, value in state.items()}


@pytest.mark.parametrize("options", [{}, {"evaluated": True}, {"anew": True}], ids=["plain", "evaluated", "anew"])
def test_fits_with_one_callback_are_one_training(tmp_path: Path, options: dict[str, bool]) -> None:
    """The same Trainer twice, with validation and tests in between, or another one: as one long fit without it."""
    whole, parts = fits(None), fits(tmp_path, **options)
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


@pytest.mark.parametrize("first", ["ours", "theirs"])
def test_the_best_weights_are_those_of_model_checkpoint(tmp_path: Path, first: str) -> None:
    """Whichever callback is named first."""
    theirs = ModelCheckpoint(tmp_path / "best", monitor="val")
    ours = DenseCheckpoint(str(tmp_path / "run"), every_n_steps=1)
    trainer = trainer_with(*((ours, theirs) if first == "ours" else (theirs, ours)), max_steps=6)
    trainer.fit(Net(), loader(), loader())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning says that it takes the first one
        assert "test" in trainer.test(ckpt_path="best", dataloaders=loader(), verbose=False)[0]
    assert theirs.best_model_path


def test_without_model_checkpoint_there_are_no_best_weights(tmp_path: Path) -> None:
    """Which Lightning says as it does without ours."""
    trainer = trainer_with(DenseCheckpoint(str(tmp_path)))
    trainer.fit(Net(), loader())
    with pytest.raises(ValueError, match="`ModelCheckpoint` is not configured to save the best model"):
        trainer.test(ckpt_path="best", dataloaders=loader(), verbose=False)


def test_steps_that_the_module_takes_by_itself_are_not_replayed(tmp_path: Path) -> None:
    """Said at start, with what to use."""
    module = Net()
    module.automatic_optimization = False
    with pytest.raises(ConfigurationError, match=r"manual optimization.*Use DenseCheckpoint"):
        trainer_with(SparseCheckpoint(str(tmp_path))).fit(module, loader())


def test_other_trainers_are_refused(tmp_path: Path) -> None:
    """Fabric has no fit loop that a run could be resumed in."""
    checkpoint: Any = DenseCheckpoint(str(tmp_path))
    fabric = Fabric(accelerator="cpu", devices=1, callbacks=[checkpoint])
    with pytest.raises(ConfigurationError, match=r"`lightning.pytorch.Trainer`, and found a lightning.fabric.*Fabric"):
        fabric.call("setup", fabric, Net(), "fit")


def test_the_other_lightning_is_named(tmp_path: Path) -> None:
    """Before its Trainer trains; its modules are refused by Lightning itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        other = pytest.importorskip("pytorch_lightning")
    hooks = {"training_step": lambda *_: None, "configure_optimizers": lambda _: None}
    theirs: Any = type("Theirs", (other.LightningModule,), hooks)()
    trainer = other.Trainer(accelerator="cpu", max_epochs=1, callbacks=[DenseCheckpoint(str(tmp_path))], logger=False)
    with pytest.raises(ConfigurationError, match=r"found a pytorch_lightning.*Write `import lightning.pytorch as pl`"):
        trainer.fit(theirs, loader())
    with pytest.raises(TypeError, match="must be a `LightningModule`"):
        trainer_with(DenseCheckpoint(str(tmp_path))).fit(theirs, loader())


class _MethodCompiled(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.forward = torch.compile(self.forward, backend="eager")  # type: ignore[method-assign]


def _in_place() -> nn.Module:
    layer = nn.Linear(2, 2)
    layer.compile(backend="eager")
    return layer


@pytest.mark.parametrize(
    ("part", "compiled"),
    [
        (lambda: nn.Linear(2, 2), False),
        (lambda: torch.compile(nn.Linear(2, 2), backend="eager"), True),
        (_in_place, True),
        (_MethodCompiled, True),
    ],
)
def test_compiled_parts_are_recognised(part: Callable[[], nn.Module], compiled: bool) -> None:
    """However the compiler was asked for, in any submodule."""
    module = LightningModule()
    module.inner = nn.Sequential(nn.Identity(), part())
    assert (module.inner[1] in _trainer.compiled_modules(module)) == compiled
    assert module not in _trainer.compiled_modules(module)


class _Compared(Callback):
    """Compares what is taken of loops with what Lightning gives, where values, and in the end a part, are others."""

    def __init__(self) -> None:
        self.num_compared = 0
        self._progress: LoopProgress | None = None

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == 6:
            trainer.fit_loop.epoch_loop.scheduler_progress = type(trainer.fit_loop.epoch_loop.scheduler_progress)()
        self._compare(trainer)

    def on_validation_end(self, trainer: Trainer, *args: Any) -> None:
        self._compare(trainer)

    def _compare(self, trainer: Trainer) -> None:
        self._progress = self._progress or LoopProgress(trainer)
        wanted = trainer.fit_loop.state_dict()
        settings = {
            "accumulate_grad_batches": trainer.accumulate_grad_batches,
            "train_loader_epoch": trainer.fit_loop._last_train_dl_reload_epoch,
            "validation_loader_epoch": trainer.fit_loop.epoch_loop.val_loop._last_val_dl_reload_epoch,
        }
        assert encode(self._progress.take()) == encode({**wanted, "settings": settings})
        self.num_compared += 1


def test_progress_of_loops_is_taken_as_lightning_has_it() -> None:
    """Every count and flag, over epochs and validations, in as many bytes."""
    compared = _Compared()
    trainer = trainer_with(
        compared, max_steps=8, limit_train_batches=3, enable_checkpointing=False, num_sanity_val_steps=0
    )
    trainer.fit(Net(), loader(), loader())
    assert compared.num_compared == 10
