"""`moe-ckpt export URL x.ckpt`: what is written is what Lightning itself would have saved."""

from __future__ import annotations

import enum
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from inspection._runs import FEATURES
from lightning_moe_ckpt.callbacks import DenseCheckpoint
from lightning_moe_ckpt.cli import main


class Kind(enum.Enum):
    """Something that only this program knows."""

    GOOD = 1


class Rich(LightningModule):
    """All that makes a checkpoint hard to load: tied weights, both kinds of buffers, hyper-parameters, a scheduler."""

    def __init__(
        self, width: int, betas: tuple[float, float] = (0.9, 0.99), extras: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.inp = nn.Linear(FEATURES, width, bias=False)
        self.out = nn.Linear(FEATURES, width, bias=False)
        self.out.weight = self.inp.weight
        self.norm = nn.BatchNorm1d(width)
        shared = torch.arange(3.0)
        self.register_buffer("kept", shared)
        self.register_buffer("kept_too", shared)
        self.register_buffer("scratch", torch.zeros(5), persistent=False)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x = batch[0]
        loss: Tensor = (self.norm(self.inp(x)) + self.out(x)).pow(2).mean()
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val", self.inp(batch[0]).mean())

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": self.norm.parameters(), "weight_decay": 0.0},
            {"params": [self.inp.weight], "weight_decay": 0.1},
        ]
        optimizer = torch.optim.AdamW(groups, 1e-2, betas=self.hparams["betas"])
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2), "interval": "step"},
        }


class Data(LightningDataModule):
    """Keeps hyper-parameters and state of its own."""

    def __init__(self, batch_size: int = 2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.restored: dict[str, Any] | None = None

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(
            TensorDataset(torch.arange(24.0).view(6, FEATURES).sin()), batch_size=self.hparams["batch_size"]
        )

    val_dataloader = train_dataloader

    def state_dict(self) -> dict[str, Any]:
        return {"cursor": 7}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.restored = state_dict


class Counter(Callback):
    """A callback with state."""

    def __init__(self) -> None:
        self.steps = 0

    def on_train_batch_end(self, *_: object) -> None:
        self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.steps = state_dict["steps"]


def trainer_for(steps: int, *callbacks: Callback) -> Trainer:
    return Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=steps,
        logger=False,
        enable_checkpointing=any(isinstance(callback, DenseCheckpoint) for callback in callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        callbacks=list(callbacks),
    )


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's advice about these tiny runs
        yield


def run(url: Path, **arguments: Any) -> tuple[Trainer, Rich, Path]:
    """Two epochs of three steps, and what Lightning saves at their end."""
    module = Rich(3, **arguments)
    trainer = trainer_for(6, Counter(), DenseCheckpoint(str(url)))
    trainer.fit(module, datamodule=Data())
    trainer.save_checkpoint(url.parent / "theirs.ckpt")
    return trainer, module, url.parent / "theirs.ckpt"


def same(left: Any, right: Any) -> bool:
    """Equal in type and bits, however nested."""
    if isinstance(left, Tensor):
        return isinstance(right, Tensor) and left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, Mapping):
        return isinstance(right, Mapping) and left.keys() == right.keys() and all(same(left[k], right[k]) for k in left)
    if isinstance(left, list | tuple):
        return type(left) is type(right) and len(left) == len(right) and all(map(same, left, right))
    return type(left) is type(right) and bool(left == right)


def test_the_content_is_what_lightning_saves(tmp_path: Path) -> None:
    """Key by key; loops apart, which we take one moment later than Lightning does."""
    *_, path = run(tmp_path / "run")
    out = tmp_path / "ours.ckpt"
    assert main(["export", str(tmp_path / "run"), str(out)]) == 0
    ours, theirs = torch.load(out, weights_only=True), torch.load(path, weights_only=False)
    assert ours.keys() == theirs.keys()
    theirs["callbacks"] = {key: value for key, value in theirs["callbacks"].items() if "Checkpoint" not in key}
    differing = [key for key in ours if key != "loops" and not same(ours[key], theirs[key])]
    assert differing == []
    assert ours["loops"].keys() == theirs["loops"].keys()
    assert "scratch" not in ours["state_dict"]
    assert {"out.weight", "kept_too"} <= ours["state_dict"].keys()


def test_load_from_checkpoint_needs_no_arguments(tmp_path: Path) -> None:
    """Hyper-parameters come along, and loading is strict."""
    _, module, _ = run(tmp_path / "run", betas=(0.8, 0.9))
    out = tmp_path / "m.ckpt"
    assert main(["export", str(tmp_path / "run"), str(out)]) == 0
    loaded = Rich.load_from_checkpoint(out, strict=True)
    assert dict(loaded.hparams) == dict(module.hparams)
    assert same(loaded.state_dict(), module.state_dict())
    assert Data.load_from_checkpoint(out).hparams["batch_size"] == 2


def test_a_fit_goes_on_from_it(tmp_path: Path) -> None:
    """`ckpt_path` restores optimizer, schedulers, loops, callbacks and data, and the next steps are those of a fit that
    goes on from Lightning's own file."""
    *_, theirs = run(tmp_path / "run")
    out = tmp_path / "m.ckpt"
    assert main(["export", str(tmp_path / "run"), str(out)]) == 0
    ends = []
    for path in (out, theirs):
        module, counter, data = Rich(3), Counter(), Data()
        trainer = trainer_for(9, counter)
        trainer.fit(module, datamodule=data, ckpt_path=path, weights_only=path is out)
        assert (trainer.global_step, counter.steps, data.restored) == (9, 9, {"cursor": 7})
        ends.append((module.state_dict(), trainer.optimizers[0].state_dict(), trainer.current_epoch))
    assert same(*ends)


def test_validate_and_weights_only(tmp_path: Path) -> None:
    """Other loops start from it too; without training state it is smaller, and loads as well."""
    _, module, _ = run(tmp_path / "run")
    whole, small = tmp_path / "whole.ckpt", tmp_path / "small.ckpt"
    assert main(["export", str(tmp_path / "run"), str(whole)]) == 0
    assert main(["export", str(tmp_path / "run"), str(small), "--weights-only"]) == 0
    assert small.stat().st_size < whole.stat().st_size
    for path in (whole, small):
        trainer_for(1).validate(Rich(3), datamodule=Data(), ckpt_path=path, verbose=False, weights_only=True)
        assert same(Rich.load_from_checkpoint(path).state_dict(), module.state_dict())
    assert "optimizer_states" not in torch.load(small, weights_only=True)


def test_what_cannot_be_written_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A hyper-parameter that no file can hold, and one that `torch.load(weights_only=True)` refuses."""
    run(tmp_path / "run", extras={"where": Path("/data"), "ok": 1})
    out = tmp_path / "m.ckpt"
    assert main(["export", str(tmp_path / "run"), str(out)]) == 0
    assert "extras of hyper_parameters left out" in capsys.readouterr().out
    assert "extras" not in torch.load(out, weights_only=True)["hyper_parameters"]
    run(tmp_path / "run2", extras={"kind": Kind.GOOD})
    assert main(["export", str(tmp_path / "run2"), str(out), "--force"]) == 0
    assert "hyper_parameters['extras']" in capsys.readouterr().out
    assert Rich.load_from_checkpoint(out).hparams["width"] == 3


def test_options_that_do_not_fit_are_refused(
    capsys: pytest.CaptureFixture[str], dense_run: tuple[str, Any], tmp_path: Path
) -> None:
    """`--optimizer` is for safetensors, and sizes are bytes."""
    assert main(["export", dense_run[0], str(tmp_path / "m.ckpt"), "--optimizer"]) == 2
    assert "leave it out" in capsys.readouterr().err
    for size in ("0", "many", "inf"):
        with pytest.raises(SystemExit):
            main(["export", dense_run[0], str(tmp_path / "hf"), "--max-shard-size", size])
    assert list(tmp_path.iterdir()) == []


class Late(LightningModule):
    """Its second layer is added to the optimizer in step 2."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, 3), nn.Linear(3, 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.second(self.first(batch[0])).pow(2).mean()
        return loss

    def on_train_batch_start(self, *args: object) -> None:
        if self.trainer.global_step == 2:
            self.trainer.optimizers[0].add_param_group({"params": self.second.parameters(), "weight_decay": 0.5})

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.first.parameters(), 1e-2)


class Counting(torch.optim.SGD):
    """Keeps numbers, `None` and a tensor of a shape of its own."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                state.update(calls=state.get("calls", 0) + 1, mean=param.detach().mean(-1), best=None)
        return loss


class Other(Late):
    """Its optimizer is in no table."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return Counting(self.first.parameters(), 1e-2, momentum=0.9)


@pytest.mark.parametrize("kind", [Late, Other])
def test_groups_that_were_added_while_training_are_exported(kind: type[Late], tmp_path: Path) -> None:
    """Their parameters follow those of the groups that were configured, as in the optimizer's own state, whatever that keeps."""
    module = kind()
    trainer = Trainer(
        accelerator="cpu",
        max_steps=5,
        max_epochs=-1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[DenseCheckpoint(str(tmp_path / "run"))],
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, DataLoader(TensorDataset(torch.randn(6, FEATURES)), batch_size=1))
    out = tmp_path / "m.ckpt"
    assert main(["export", str(tmp_path / "run"), str(out)]) == 0
    exported = torch.load(out, weights_only=True)["optimizer_states"][0]
    assert same(exported, trainer.optimizers[0].state_dict())
