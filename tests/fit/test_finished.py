"""What a start finds that trains nothing, and what callbacks hold that the stored run did not have."""

from __future__ import annotations

import warnings
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import EarlyStopping
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from lightning_moe_ckpt.callbacks import DenseCheckpoint, SparseCheckpoint


class Model(LightningModule):
    """Logs means of epochs, and has groups of its optimizer get their states at different steps."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def loss(self, batch: list[Tensor], uses: int) -> Tensor:
        found: Tensor = sum(self.parts[at](batch[0]) for at in range(uses, 3))
        return found.square().mean()

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch, max(0, 2 - self.global_step))
        self.log("mean", loss, on_step=True, on_epoch=True)
        return loss

    @override
    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("seen", self.loss(batch, 0))

    @override
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), 0.01, amsgrad=True)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class History(Callback):
    """Counts steps, and what happens at the ends of epochs and validations, the sanity check included."""

    def __init__(self) -> None:
        self.steps, self.ends, self.seen = 0, 0, defaultdict[str, list[float]](list)

    @override
    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self.steps += 1

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.seen["seen"].append(float(trainer.callback_metrics["seen"]))

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.ends += 1


class Late(History):
    """Another one of that kind."""


class Ends(Exception):
    """Training is interrupted."""


class Interrupts(Callback):
    @override
    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == 7:
            raise Ends


def fit(*callbacks: Callback, max_steps: int) -> dict[str, Any]:
    """Train, and return what there is at the end."""
    seed_everything(1, verbose=False)
    items = TensorDataset(torch.randn(16, 4))
    model = Model()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = Trainer(
            accelerator="cpu",
            max_steps=max_steps,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=True,
            callbacks=list(callbacks),
        )
        trainer.fit(model, DataLoader(items, 4, shuffle=True), DataLoader(items, 8))
    state = trainer.optimizers[0].state_dict()
    loops = trainer.fit_loop.state_dict()
    return {
        "logged": {name: float(metric) for name, metric in trainer.callback_metrics.items()},
        "loops": {name: loop for name, loop in loops.items() if name != "epoch_loop.state_dict"},
        "epoch": (trainer.current_epoch, trainer.should_stop),
        "keys": [list(state["state"]), *(list(each) for each in (*state["state"].values(), *state["param_groups"]))],
        "rates": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
        "callbacks": [
            (callback.steps, callback.ends, callback.seen) for callback in callbacks if isinstance(callback, History)
        ],
        "waits": [callback.state_dict() for callback in callbacks if isinstance(callback, EarlyStopping)],
    }


@pytest.mark.parametrize("max_steps", [6, 8], ids=["mid_epoch", "epoch"])
def test_a_finished_run_that_is_started_again_has_what_training_ended_with(max_steps: int, tmp_path: Path) -> None:
    """Where `max_steps` ends it in mid-epoch too, whose hooks then run behind what a longer run goes on from."""
    ends = []
    for _ in range(2):
        callbacks = History(), EarlyStopping("seen", min_delta=1.0, patience=9), DenseCheckpoint(str(tmp_path / "run"))
        ends.append(fit(*callbacks, max_steps=max_steps))
    assert ends[0] == ends[1]
    assert ends[0]["keys"][0] == [4, 5, 2, 3, 0, 1]
    longer, whole = (
        fit(History(), DenseCheckpoint(str(tmp_path / url), overhead_target=None), max_steps=12)
        for url in ("run", "whole")
    )
    assert longer == whole


def test_a_callback_that_is_new_at_a_restart_counts_on_in_a_replay(tmp_path: Path) -> None:
    """It sees the steps that are trained again; others are put where they were."""
    url = str(tmp_path)
    with pytest.raises(Ends):
        fit(History(), Interrupts(), SparseCheckpoint(url, window=3, overhead_target=None), max_steps=12)
    old, late = History(), Late()
    fit(old, late, SparseCheckpoint(url, window=3, overhead_target=None), max_steps=12)
    assert old.steps == 12
    assert late.steps > 5
