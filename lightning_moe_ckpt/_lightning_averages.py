"""Find the averaged weights of Lightning's callbacks `WeightAveraging` and `EMAWeightAveraging`.

Like `_lightning`, it uses private attributes of Lightning.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule, Trainer, callbacks
from torch.optim.swa_utils import AveragedModel

from lightning_moe_ckpt.snapshot import Averages


def averages_of(trainer: Trainer) -> Averages:
    """Return the averaged copies of the trained module, in the order of the callbacks; call in `on_fit_start`."""
    models: list[AveragedModel] = [each._average_model for each in averaging_callbacks(trainer)]
    return Averages(models, consumed=bool(models) and bool(trainer.enable_validation))


def finish_with_averages(trainer: Trainer, module: LightningModule) -> None:
    """Put the averages into the module, as the callbacks do at the end of training.

    It is for a run that had ended before: the callbacks' hook is not called then.
    """
    for each in averaging_callbacks(trainer):
        each._copy_average_to_current(module)


def averaging_callbacks(trainer: Trainer) -> list[Any]:
    """Return Lightning's callbacks that average weights."""
    kind = getattr(callbacks, "WeightAveraging", None)  # Lightning has it from 2.6 on
    found: list[Any] = trainer.callbacks  # type: ignore[attr-defined]  # untyped in Lightning
    return [each for each in found if kind is not None and isinstance(each, kind)]
