"""Run a fit again inside its process, from `on_fit_start` on, through Lightning's private attributes.

A new process resumes in `on_fit_start`. What Lightning does before (setting up the strategy, configuring model and
optimizers) is done and stays; what it does from there on is done again, so that all ranks, new and old, go the same way.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from lightning.pytorch.loggers import Logger
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer import call
from torch import Tensor

from lightning_moe_ckpt._lightning import callbacks_of, datamodule_of
from lightning_moe_ckpt._lightning_callbacks import averaging_callbacks

APART: tuple[type, ...] = (Trainer, Strategy, Logger, Profiler)
"""What is not reset: rows that a logger has are dropped when they come again, and a strategy gets other groups."""


def tap_run(
    trainer: Trainer, meet: Callable[[Callable[[], Any]], Any], stage: Callable[[Callable[[], Any]], Any]
) -> Callable[[], None]:
    """Let `meet` run the meeting of all ranks behind `on_fit_start`, once, and `stage` all that follows, from the sanity check on.

    Returns:
        A function that undoes this.
    """
    connector = trainer._checkpoint_connector
    original, resume_end = trainer._run_stage, connector.resume_end
    trainer._run_stage = lambda: stage(original)  # type: ignore[method-assign]

    def meet_once() -> None:
        del connector.resume_end
        meet(resume_end)

    connector.resume_end = meet_once  # type: ignore[method-assign]

    def remove() -> None:
        vars(trainer).pop("_run_stage", None)
        vars(connector).pop("resume_end", None)

    return remove


def objects_of(trainer: Trainer, module: LightningModule, skip: tuple[type[Callback], ...]) -> list[object]:
    """Return the objects that lead to all that training may change; call in `on_fit_start`."""
    strategy = trainer.strategy
    return [
        *(module, datamodule_of(trainer), [each for each in callbacks_of(trainer) if not isinstance(each, skip)]),
        *(strategy.optimizers, strategy._lightning_optimizers, strategy.lr_scheduler_configs),
        *(trainer.precision_plugin, trainer.fit_loop, trainer._logger_connector, trainer.state),
    ]


def weights_of(trainer: Trainer, module: LightningModule) -> list[Tensor]:
    """Return the parameters and buffers of the module and of its averages, each once."""
    models = [module, *(each._average_model for each in averaging_callbacks(trainer))]
    found = [tensor for model in models for tensor in (*model.parameters(), *model.buffers())]
    return list({id(tensor): tensor for tensor in found}.values())


def end_iterators(trainer: Trainer) -> None:
    """End what the aborted run has under way: workers of loaders, bars on the screen."""
    trainer.fit_loop.teardown()
    for each in callbacks_of(trainer):
        if isinstance(each, RichProgressBar):
            each._stop_progress()
        elif isinstance(each, TQDMProgressBar):
            for bar in (each._train_progress_bar, each._val_progress_bar):
                if bar is not None:
                    bar.close()


def start_again(trainer: Trainer) -> None:
    """Do what `Trainer._run` does from `on_fit_start` to the run's own stage."""
    connector = trainer._signal_connector
    before = connector._original_handlers.get(signal.SIGTERM)
    if before is not None:  # the handler of the aborted run leads to a listener that is gone
        connector._register_signal(signal.SIGTERM, before)
    call._call_callback_hooks(trainer, "on_fit_start")
    call._call_lightning_module_hook(trainer, "on_fit_start")
    trainer._checkpoint_connector.resume_end()  # all ranks meet there
    connector.register_signal_handlers()
