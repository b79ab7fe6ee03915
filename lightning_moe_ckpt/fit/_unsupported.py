"""Refuse what no run could resume with, before it trains, and warn of what one hardly can."""

from __future__ import annotations

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import BaseFinetuning, ModelPruning, StochasticWeightAveraging

from lightning_moe_ckpt._lightning import callbacks_of, takes_iterator
from lightning_moe_ckpt._logging import rank_logger
from lightning_moe_ckpt.errors import ConfigurationError
from lightning_moe_ckpt.policies import Policy

log = rank_logger(__name__)

_UNSUPPORTED: dict[type[Callback], str] = {
    StochasticWeightAveraging: "StochasticWeightAveraging puts another scheduler in the place of yours when it begins; a run "
    "that resumes after that has yours again, and other learning rates. Use WeightAveraging, which leaves it alone.",
    ModelPruning: "ModelPruning puts other parameters and masks in the place of the model's while it trains; a run that "
    "resumes after that has none of them. Prune when training has ended.",
}
"""Callbacks of Lightning that no run can resume with, and why."""


def refuse_unsupported(trainer: Trainer, policy: Policy) -> None:
    """Raise `ConfigurationError` for what this trainer has and no run under `policy` can resume with."""
    if len(trainer.optimizers) != 1:
        raise ConfigurationError(
            f"Found {len(trainer.optimizers)} optimizers, can capture exactly one. "
            "Put all parameters into one optimizer with several param groups."
        )
    if type(trainer.optimizers[0]).__name__ == "_MockOptimizer":
        raise ConfigurationError(
            "`configure_optimizers` returned None: nothing is trained, so that there is nothing to resume. Return an optimizer, "
            "or leave the checkpoint callback out."
        )
    for kind, reason in _UNSUPPORTED.items():
        if any(isinstance(each, kind) for each in callbacks_of(trainer)):
            raise ConfigurationError(reason)
    if takes_iterator(trainer):
        raise ConfigurationError(
            "`training_step(self, dataloader_iter)` fetches within the step, where no restart can know what it has fetched. "
            "Write `training_step(self, batch, batch_idx)`: loaders fetch ahead by themselves, with `num_workers` and `prefetch_factor`."
        )
    if policy.replays and not trainer.lightning_module.automatic_optimization:
        raise ConfigurationError(
            "SparseCheckpoint replays steps that Lightning takes, one for each batch or more; with manual optimization the "
            "module takes them itself. Use DenseCheckpoint, or set `automatic_optimization = True`."
        )
    finetuning = [each for each in callbacks_of(trainer) if isinstance(each, BaseFinetuning)]
    if finetuning and not policy.exact:
        raise ConfigurationError(
            f"{type(finetuning[0]).__name__} adds parameters to the optimizer while training, and a generation of "
            "experts from before and after that has no meaning. Use SparseCheckpoint or DenseCheckpoint."
        )


def warn_if_short(trainer: Trainer, least_steps: int) -> None:
    """Warn where training ends before there is any checkpoint but those of its start and end."""
    if 0 < trainer.max_steps < least_steps:
        log.warning(
            "checkpoints need %d steps and this fit ends at step %d: only its start and its end are stored, and what "
            "fails in between starts again. Shorten the window or interval, or train longer.",
            least_steps,
            trainer.max_steps,
            alike=True,
        )
