"""What cannot be exact is said once, with its remedy; a run that is exact says nothing."""

from __future__ import annotations

import logging
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import tiny
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging, LambdaCallback, ModelCheckpoint
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

from lightning_moe_ckpt.callbacks import DenseCheckpoint, SparseCheckpoint
from lightning_moe_ckpt.fit._limits import gradients_are_seen

BEGINS = "this run cannot be reproduced bit for bit"


class Plain(LightningModule):
    """Nothing about it is inexact."""

    loader: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x_BD = batch[0]
        for block in self.blocks:
            x_BD = block(x_BD).tanh()
        return x_BD.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Clips(Plain):
    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1)


class Measures(Plain):
    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1)


class Averages(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.ema = AveragedModel(self.blocks)
        self.ema.requires_grad_(requires_grad=False)


class Unordered(Plain):
    loader: ClassVar[dict[str, Any]] = {"num_workers": 2, "in_order": False}


class Teacher(Callback):
    """Keeps a copy of the weights, which is restored."""

    def __init__(self) -> None:
        self.teacher = nn.Linear(4, 4)


def _librarys() -> Callback:
    """A callback of a library, whose attributes nobody looks at, with weights."""
    callback: Any = LambdaCallback()
    callback.teacher = nn.Linear(4, 4)
    return callback  # type: ignore[no-any-return]


def _said(module: Plain, callbacks: list[Callback], caplog: pytest.LogCaptureFixture) -> list[str]:
    trainer = Trainer(
        accelerator="cpu",
        max_steps=4,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
    )
    with caplog.at_level(logging.WARNING, logger="lightning_moe_ckpt"):
        trainer.fit(module, DataLoader(TensorDataset(torch.randn(8, 4)), batch_size=2, **module.loader))
    return [record.getMessage() for record in caplog.records if record.getMessage().startswith(BEGINS)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("module", "own", "words"),
    [
        (Averages, None, "WeightAveraging"),
        (Unordered, None, "in_order=False"),
        (Plain, _librarys, "`LambdaCallback` keeps weights in ['teacher']"),
        (Plain, partial(ModelCheckpoint, train_time_interval=timedelta(hours=1)), "saves by the clock"),
    ],
    ids=["averages", "order", "copies", "clock"],
)
def test_each_reason_is_said_once(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    *,
    module: Any,
    own: Any,
    words: str,
) -> None:
    """Under sparse windows, by the name of what is to blame."""
    monkeypatch.chdir(tmp_path)  # where ModelCheckpoint writes
    callbacks = [*([own()] if own else []), SparseCheckpoint(str(tmp_path), window=2)]
    said = _said(module(), callbacks, caplog)
    assert len(said) == 1, said
    assert words in said[0]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("module", "make"),
    [(Plain, SparseCheckpoint), (Clips, SparseCheckpoint), (Measures, SparseCheckpoint), (Averages, DenseCheckpoint)],
    ids=["plain", "clipping", "gradients", "averages-dense"],
)
def test_an_exact_run_says_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture, module: Any, make: Any) -> None:
    """Who looks at gradients in replay finds all of them; what matters there only is no matter for dense checkpoints."""
    assert _said(module(), [EMAWeightAveraging(), Teacher(), make(str(tmp_path))], caplog) == []


@pytest.mark.parametrize(
    ("callback", "sees"),
    [
        (LambdaCallback(on_after_backward=lambda *_: None), True),
        (LambdaCallback(on_train_start=lambda *_: None), False),
        (ModelCheckpoint(), False),
    ],
    ids=["lambda", "other_lambda", "library"],
)
def test_who_looks_at_gradients_is_known(callback: Callback, sees: bool) -> None:
    """A function of the user's in a callback of Lightning's is the user's."""
    trainer = Trainer(accelerator="cpu", logger=False, callbacks=[callback])
    assert gradients_are_seen(trainer, Plain(), ()) is sees


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("deterministic", "times"), [(None, 1), (True, 0)])
def test_kernels_that_may_differ_are_named_on_cuda(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, deterministic: bool | None, times: int
) -> None:
    """With the remedy, which silences it."""
    trainer = Trainer(
        accelerator="gpu",
        devices=1,
        max_steps=2,
        logger=False,
        enable_progress_bar=False,
        deterministic=deterministic,
        callbacks=[DenseCheckpoint(str(tmp_path))],
    )
    try:
        with caplog.at_level(logging.WARNING, logger="lightning_moe_ckpt"):
            trainer.fit(Plain(), DataLoader(TensorDataset(torch.randn(8, 4)), batch_size=2))
    finally:
        torch.use_deterministic_algorithms(mode=False)
    said = [record.getMessage() for record in caplog.records if "deterministic=True" in record.getMessage()]
    assert len(said) == times


def test_state_that_cannot_be_stored_any_more_costs_checkpoints_and_not_the_run(tmp_path: Path) -> None:
    """From the first step on, where journals are measured: what it held at the start could be stored."""

    class Turns(Callback):
        held: ClassVar[list[object]] = []

        def on_train_batch_end(self, *_: Any, **__: Any) -> None:
            vars(self)["held"] = [object()]

        def state_dict(self) -> dict[str, Any]:
            return {"held": self.held}

    data = tiny.rows(tiny.waves(40, 4), 4)
    trainer = tiny.fit(tiny.with_dropout(), data, DenseCheckpoint(tmp_path, every_n_steps=2), Turns(), max_steps=4)
    assert trainer.global_step == 4
