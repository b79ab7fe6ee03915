"""A model with parameters of every odd kind, and trainings of it with whole and with sharded optimizers in one process."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import BaseFinetuning
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

from lightning_moe_ckpt.moe import MoELayer
from lightning_moe_ckpt.parallel import stepped_of
from lightning_moe_ckpt.strategy import MoEStrategy
from strategy.conftest import QUIET

D = 10
Groups = list[dict[str, Any]]
OPTIMIZERS: dict[str, Callable[[Groups], Optimizer]] = {
    "adamw": lambda groups: torch.optim.AdamW(groups, 1e-2),
    "foreach": lambda groups: torch.optim.AdamW(groups, 1e-2, foreach=True, amsgrad=True),
    "fused": lambda groups: torch.optim.AdamW(groups, 1e-2, fused=True),
    "sgd": lambda groups: torch.optim.SGD(groups, 1e-2, momentum=0.9, nesterov=True),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, 1e-2, initial_accumulator_value=0.1),
    "nadam": lambda groups: torch.optim.NAdam(groups, 1e-2),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, 1e-3, centered=True),
    "adadelta": torch.optim.Adadelta,
}


@dataclass(frozen=True, kw_only=True)
class Training:
    """A short training."""

    optimizer: str = "adamw"
    module: type[Odd] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    """Of the Trainer."""
    strategy: dict[str, Any] = field(default_factory=dict)
    callbacks: Callable[[], list[pl.Callback]] = list
    plugins: Callable[[], Any] | None = None
    steps: int = 5


class Odd(pl.LightningModule):
    """Experts between dense layers of which no rank has an equal part; two groups of parameters with rates of their own.

    The embedding is the head too, one parameter is transposed in memory, one has no elements, one has one and one never a gradient.
    """

    def __init__(self, training: Training) -> None:
        super().__init__()
        self.training_ = training
        self.embedding, self.head = nn.Embedding(23, D), nn.Linear(D, 23)
        self.head.weight = self.embedding.weight
        self.norm, self.wide, self.narrow = nn.BatchNorm1d(D), nn.Linear(D, 77), nn.Linear(77, D)
        self.across = nn.Parameter(torch.randn(D, 7).t())
        self.nothing, self.scale = nn.Parameter(torch.zeros(0)), nn.Parameter(torch.ones(()))
        self.unused = nn.Parameter(torch.ones(50))
        self.moe: MoELayer | None = None
        self.losses: list[Tensor] = []

    def configure_model(self) -> None:
        if self.moe is None:
            self.moe = MoELayer(D, 9, 12)

    def loss(self, batch: Sequence[Tensor]) -> Tensor:
        assert self.moe is not None
        h = self.norm(self.embedding(batch[0]))
        h = h + self.narrow(functional.gelu(self.wide(h)))
        h = h + self.moe(h) * self.scale
        h = h + functional.pad(h @ self.across.t(), (0, D - 7))
        assert self.moe.l_aux is not None
        loss: Tensor = functional.cross_entropy(self.head(h).float(), batch[1]) + 0.01 * self.moe.l_aux
        self.losses.append(loss.detach())
        return loss

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        return self.loss(batch)

    def groups(self) -> Groups:
        """Vectors with a smaller rate."""
        vectors = [p for p in self.parameters() if p.ndim < 2]
        return [{"params": [p for p in self.parameters() if p.ndim > 1]}, {"params": vectors, "lr": 1e-3}]

    def configure_optimizers(self) -> Any:
        optimizer = OPTIMIZERS[self.training_.optimizer](self.groups())
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)]

    def train_dataloader(self) -> DataLoader[Any]:
        tokens = torch.randint(23, (160,), generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(tokens, tokens.roll(1)), batch_size=4)


class Reads(Odd):
    """Remembers and edits gradients before the step."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        found = {name: p.grad for name, p in self.named_parameters() if p.grad is not None}
        self.losses += [grad.sum() for grad in found.values()]
        found["wide.weight"][::3].mul_(0.5)


class Keeps(Odd):
    """Adds gradients of two steps."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
        if batch_idx % 2 == 0:
            optimizer.zero_grad()


class ByHand(Odd):
    """Two optimizers, of which the second steps every other time."""

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        first, second = cast("list[Any]", self.optimizers())
        loss = self.loss(batch)
        first.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(first, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        first.step()
        if batch_idx % 2:
            second.step()
            second.zero_grad()
        return loss

    def configure_optimizers(self) -> Any:
        matrices, vectors = self.groups()
        return [OPTIMIZERS["adamw"]([matrices]), OPTIMIZERS["sgd"]([vectors])]


class Toggles(ByHand):
    """Two optimizers, each of which steps with gradients of its own parameters only."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        for optimizer in cast("list[Any]", self.optimizers()):
            self.toggle_optimizer(optimizer)
            loss = self.loss(batch)
            self.manual_backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)
        return loss


class Edits(Odd):
    """Changes weights behind a step, in place, through `.data`, and by other memory."""

    def on_train_batch_end(self, *args: Any) -> None:
        with torch.no_grad():
            self.wide.weight.mul_(0.99)
        self.narrow.weight.data.mul_(0.98)
        self.narrow.bias.data = self.narrow.bias.data * 0.97


class Thaws(BaseFinetuning):
    """Adds a layer to the optimizer in the second epoch."""

    def freeze_before_training(self, pl_module: pl.LightningModule) -> None:
        self.freeze([pl_module.wide])

    def finetune_function(self, pl_module: pl.LightningModule, epoch: int, optimizer: Optimizer) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group([pl_module.wide], optimizer)


class Freezable(Odd):
    """Leaves out what does not train when the optimizer is made."""

    def groups(self) -> Groups:
        return [
            {**group, "params": [p for p in group["params"] if p.requires_grad or p is self.unused]}
            for group in super().groups()
        ]


class Norms(pl.Callback):
    """Norms that the strategy gives, of whole parameters and of what the optimizer steps, on the way to the next step."""

    def __init__(self) -> None:
        self.of_whole: list[Tensor] = []
        self.of_stepped: list[Tensor] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        strategy: Any = trainer.strategy
        stepped = [stepped_of(p) for p in pl_module.parameters()]
        self.of_whole.append(strategy.grad_norm(pl_module.parameters()))
        self.of_stepped.append(strategy.grad_norm(stepped))


def trainer_of(training: Training, world_size: int, *, shard: bool) -> pl.Trainer:
    """Both ways of one training differ in nothing else."""
    os.environ.pop("PL_GLOBAL_SEED", None)
    pl.seed_everything(1, verbose=False)
    return pl.Trainer(
        **{**QUIET, "max_steps": training.steps, **training.options},
        accelerator="cpu",
        devices=world_size,
        strategy=MoEStrategy(shard_optimizer=shard, **{"bucket_nbytes": 2000, **training.strategy}),
        callbacks=training.callbacks(),
        plugins=None if training.plugins is None else training.plugins(),
    )


def train(training: Training, world_size: int, *, shard: bool, ckpt_path: str | None = None) -> tuple[pl.Trainer, Odd]:
    """Train in this process, one of `world_size` that do the same."""
    trainer = trainer_of(training, world_size, shard=shard)
    module = (training.module or Odd)(training)
    trainer.fit(module, ckpt_path=ckpt_path)
    return trainer, module


def end_of(trainer: pl.Trainer, module: Odd) -> dict[str, Any]:
    """All that both ways must have in common, by bits."""
    return {
        **{f"param/{name}": param.detach().clone() for name, param in module.named_parameters()},
        **{f"buffer/{name}": buffer.clone() for name, buffer in module.named_buffers()},
        **{f"loss/{at}": loss for at, loss in enumerate(module.losses)},
        "norm": getattr(trainer.strategy, "last_grad_norm", None),
    }


def differences(left: Any, right: Any, at: str = "") -> list[str]:
    """Return the paths at which two nested values differ, tensors by bits."""
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return [] if left.dtype == right.dtype and torch.equal(left, right) else [at]
    if isinstance(left, dict) and isinstance(right, dict):
        lone = [f"{at}/{key}: in one" for key in left.keys() ^ right.keys()]
        return lone + [
            line for key in left.keys() & right.keys() for line in differences(left[key], right[key], f"{at}/{key}")
        ]
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)) and len(left) == len(right):
        return [
            line for i, pair in enumerate(zip(left, right, strict=True)) for line in differences(*pair, f"{at}/{i}")
        ]
    return [] if type(left) is type(right) and left == right else [at]


def state_nbytes(trainer: pl.Trainer) -> int:
    """Bytes of tensors with several elements that this rank's optimizers keep."""
    states = [state for optimizer in trainer.optimizers for state in optimizer.state.values()]
    return sum(v.nbytes for state in states for v in state.values() if isinstance(v, Tensor) and v.ndim)
