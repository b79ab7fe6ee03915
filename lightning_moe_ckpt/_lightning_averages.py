"""Averaged weights that Lightning's callbacks keep: `WeightAveraging` and `EMAWeightAveraging`.

Like `_lightning`, it touches what Lightning has no public name for.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule, Trainer, callbacks
from torch.optim.swa_utils import AveragedModel

from lightning_moe_ckpt.session import Averages


def averages_of(trainer: Trainer) -> Averages:
    """The averaged copies of the module being trained, in the order of the callbacks; call in `on_fit_start`."""
    models: list[AveragedModel] = [each._average_model for each in averaging_callbacks(trainer)]
    return Averages(models, consumed=bool(models) and bool(trainer.enable_validation))


def finish_with_averages(trainer: Trainer, module: LightningModule) -> None:
    """Do what the callbacks do at the end of training: put the averages into the module.

    For a run that was found finished, in which that hook is not called.
    """
    for each in averaging_callbacks(trainer):
        each._copy_average_to_current(module)


def averaging_callbacks(trainer: Trainer) -> list[Any]:
    """Lightning's callbacks that average weights."""
    kind = getattr(callbacks, "WeightAveraging", None)  # Lightning has it from 2.6 on
    found: list[Any] = trainer.callbacks  # type: ignore[attr-defined]  # untyped in Lightning
    return [each for each in found if kind is not None and isinstance(each, kind)]
