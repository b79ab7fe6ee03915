"""Runs whose user freezes, unfreezes, clips by value or looks for settings: what callbacks and hooks do beside training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import BaseFinetuning, BatchSizeFinder, LambdaCallback, LearningRateFinder
from lightning.pytorch.tuner.tuning import Tuner
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from campaign._data import make_loader
from campaign._training import Module, Setup, make_optimizer, make_scheduler
from lightning_moe_ckpt.testing import Attempt

Freezes = Literal["epochs", "steps", "start", "all but experts"]
"""When the module freezes or unfreezes parameters: each epoch, each step, or when training starts and in epoch 1; or what."""


@dataclass(frozen=True, kw_only=True)
class Habit(Setup):
    """A training run in which hooks change what is trained."""

    trainer: tuple[tuple[str, Any], ...] = ()
    """Arguments of the Trainer, over those that the setup implies."""
    freezes: Freezes | None = None
    finds: Literal["lr", "batch_size"] | None = None
    """What a callback of Lightning's looks for by trial steps, before training."""
    tunes: Literal["lr", "batch_size"] | None = None
    """What a `Tuner` looks for, before the fit."""
    manual: int = 0
    """Optimizer steps that the module itself takes for each batch; 0 for automatic optimization."""
    from_file: bool = False
    """Whether the fit begins from a file of Lightning's, at step 3."""
    inside: bool = False
    """Whether the file is written in the middle of an epoch, by a callback."""
    unfreezes_at: int | None = None
    """The epoch in which a finetuning callback adds experts to the optimizer, as a group of their own."""

    @override
    def make_module(self, life: Attempt) -> Module:
        return HabitModule(self, life)

    @override
    def callbacks(self, life: Attempt) -> Sequence[Callback]:
        found: list[Callback] = [] if self.unfreezes_at is None else [Unfreezing(self.unfreezes_at)]
        if self.finds == "lr":
            found.append(LearningRateFinder(num_training_steps=6, early_stop_threshold=None))
        elif self.finds == "batch_size":
            found.append(BatchSizeFinder(max_trials=1, init_val=4))
        return found

    @override
    def loaders(self, life: Attempt) -> tuple[Any, Any]:
        by_module = "batch_size" in {self.finds, self.tunes}
        training, validation = super().loaders(life)
        return None if by_module else training, validation

    @override
    def fit_options(self, life: Attempt) -> dict[str, Any]:
        return {"ckpt_path": life.workdir / "begin.ckpt", "weights_only": False} if self.from_file else {}

    @override
    def before_fit(self, trainer: Trainer, module: LightningModule) -> None:
        if self.from_file and not (module._life.workdir / "begin.ckpt").exists():  # type: ignore[operator, union-attr]
            self._write_file(module._life)  # type: ignore[arg-type]
        if self.tunes == "lr":
            training, _ = super().loaders(module._life)  # type: ignore[arg-type]
            Tuner(trainer).lr_find(module, training, num_training=6, early_stop_threshold=None)
        elif self.tunes == "batch_size":
            _, validation = self.loaders(module._life)  # type: ignore[arg-type]
            Tuner(trainer).scale_batch_size(module, val_dataloaders=validation, max_trials=1, init_val=4)

    @override
    def trainer_options(self, life: Attempt) -> dict[str, Any]:
        return {**super().trainer_options(life), "default_root_dir": life.workdir, **dict(self.trainer)}

    def _write_file(self, life: Attempt) -> None:
        """What another program has trained before: the same file, whichever life of the run writes it."""
        life = replace(life, seed=5)
        with isolate_rng():
            seed_everything(5, verbose=False)
            path = life.workdir / "begin.ckpt"
            if self.inside:  # where `ModelCheckpoint` saves
                saves = LambdaCallback(on_train_batch_end=lambda trainer, *_: trainer.save_checkpoint(path))
                options = {**self.trainer_options(life), "max_steps": 3, "callbacks": [saves]}
                Trainer(**options).fit(self.make_module(life), *super().loaders(life))
                return
            first = Trainer(**{**self.trainer_options(life), "max_steps": 3})
            first.fit(self.make_module(life), *super().loaders(life))
            first.save_checkpoint(path)


def toggled(module: LightningModule, *, on: bool) -> None:
    """Let the first expert and the head train, or not."""
    for name, parameter in module.named_parameters():
        if "experts.0." in name or "head" in name:
            parameter.requires_grad_(on)


class HabitModule(Module):
    """Freezes by the epoch, by the step, or at the start."""

    def __init__(self, setup: Habit, life: Attempt) -> None:
        super().__init__(setup, life)
        self._habit, self._life = setup, life
        self.lr, self.batch_size = 3e-3, setup.batch_size
        self.automatic_optimization = not setup.manual

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if not self._habit.manual:
            return super().training_step(batch, batch_idx)
        optimizer: Any = self.optimizers()
        scheduler: Any = self.lr_schedulers()
        for _ in range(self._habit.manual):
            optimizer.zero_grad()
            loss = self._loss(batch)
            self.manual_backward(loss)
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            optimizer.step()
        scheduler.step()
        return loss

    @override
    def train_dataloader(self) -> Any:
        length = self._habit.batches * self._habit.batch_size * 2
        return make_loader("plain", length=length, batch_size=self.batch_size, workers=0, augment=True)

    @override
    def configure_model(self) -> None:
        super().configure_model()
        if self._habit.freezes == "all but experts":
            for name, parameter in self.named_parameters():
                parameter.requires_grad_("experts" in name)

    @override
    def on_train_start(self) -> None:
        if self._habit.freezes == "start":
            toggled(self, on=False)

    @override
    def on_train_epoch_start(self) -> None:
        if self._habit.freezes == "epochs":
            toggled(self, on=self.current_epoch % 2 == 0)
        elif self._habit.freezes == "start" and self.current_epoch == 1:
            toggled(self, on=True)

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self._habit.freezes == "steps" and self.trainer.global_step % 3 == 2:
            toggled(self, on=self.trainer.global_step % 2 == 0)

    @override
    def configure_optimizers(self) -> Any:
        optimizer = make_optimizer(self._habit.optimizer, self, only_trained=self._habit.unfreezes_at is not None)
        for group in optimizer.param_groups:
            group["lr"] = self.lr
        return {"optimizer": optimizer, "lr_scheduler": make_scheduler(self._habit, optimizer)}


class Unfreezing(BaseFinetuning):
    """Freezes an expert and the dense layer before training, and adds them to the optimizer later."""

    def __init__(self, epoch: int) -> None:
        super().__init__()
        self._epoch = epoch

    def _modules(self, module: LightningModule) -> list[Any]:
        return [module.model.moe.experts[1], module.model.dense]  # type: ignore[index, union-attr]

    @override
    def freeze_before_training(self, pl_module: LightningModule) -> None:
        pl_module.configure_model()  # `setup` comes before it
        self.freeze(self._modules(pl_module))

    @override
    def finetune_function(self, pl_module: LightningModule, epoch: int, optimizer: Optimizer) -> None:
        if epoch == self._epoch:
            self.unfreeze_and_add_param_group(self._modules(pl_module), optimizer)
