"""A model that is cut into pipeline stages, or trained in one piece by the same class."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
from launcher import run_world
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_moe_ckpt.moe import MoELayer
from lightning_moe_ckpt.strategy import MoEStrategy

D, F_, E, BLOCKS, BATCH = 6, 8, 4, 4, 4


class Block(nn.Module):
    """Experts on a residual stream."""

    def __init__(self, dropout: float, *, norm: bool) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(D) if norm else nn.LayerNorm(D)
        self.moe, self.dropout = MoELayer(D, F_, E), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.dropout(self.moe(self.norm(x)))
        return y


class Stage(nn.Module):
    """Some consecutive blocks; the first stage has the way in, the last one the way out.

    Names of blocks are their numbers in the whole model. Weights do not depend on how it is cut.
    """

    def __init__(self, blocks: range, dropout: float, *, norm: bool) -> None:
        super().__init__()
        first, last = blocks.start == 0, blocks.stop == BLOCKS
        self.inp = self._made(0, lambda: nn.Linear(D, D)) if first else None
        self.blocks = nn.ModuleDict({str(i): self._made(1 + i, lambda: Block(dropout, norm=norm)) for i in blocks})
        self.head = self._made(1 + BLOCKS, lambda: nn.Linear(D, 1)) if last else None

    @staticmethod
    def _made(seed: int, make: Callable[[], nn.Module]) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return make()

    def forward(self, x: Tensor) -> Tensor:
        if self.inp is not None:
            x = torch.tanh(self.inp(x))
        for block in self.blocks.values():
            x = block(x)
        return x if self.head is None else self.head(x)


class Staged(pl.LightningModule):
    """Hooks of both kinds.

    Args:
        dropout: after experts.
        norm: whether blocks have a BatchNorm, whose buffers change in forward.
        aux_weight: of the balancing loss; 0 leaves it out.
        batch_size: of both loaders.
    """

    def __init__(
        self, dropout: float = 0.0, *, norm: bool = False, aux_weight: float = 0.01, batch_size: int = BATCH
    ) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.options: dict[str, Any] = {"dropout": dropout, "norm": norm}
        self.aux_weight = aux_weight

    # -- in stages

    def configure_stage(self, stage: int, num_stages: int) -> nn.Module:
        cuts = [BLOCKS * i // num_stages for i in range(num_stages + 1)]
        return Stage(range(cuts[stage], cuts[stage + 1]), **self.options)

    def split_batch(self, batch: list[Tensor]) -> tuple[Tensor, Tensor]:
        return batch[0], batch[1]

    def stage_loss(self, output: Tensor, target: Tensor) -> Tensor:
        loss: Tensor = (output[:, 0] - target).pow(2).mean()
        if self.training:
            self.log("loss", loss, False)  # as users may write it
        else:
            self.log_dict({"val": loss}, sync_dist=True)
        return loss

    def stage_auxiliary_loss(self) -> Tensor | None:
        if not self.aux_weight:
            return None
        found = [module.l_aux for module in self.modules() if isinstance(module, MoELayer)]
        return self.aux_weight * torch.stack([each for each in found if each is not None]).sum()

    # -- in one piece

    def configure_model(self) -> None:
        if not hasattr(self, "stage"):
            self.stage = self.configure_stage(0, 1)

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        loss = self.stage_loss(self.stage(batch[0]), batch[1])
        auxiliary = self.stage_auxiliary_loss()
        return loss if auxiliary is None else loss + auxiliary

    def validation_step(self, batch: list[Tensor], _: int) -> None:
        self.stage_loss(self.stage(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-2)

    def train_dataloader(self) -> DataLoader[Any]:
        return loader(self.batch_size)

    def val_dataloader(self) -> DataLoader[Any]:
        return loader(self.batch_size)


def loader(batch_size: int) -> DataLoader[Any]:
    x = torch.randn(8 * BATCH, D, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(x, x.sum(1).sin()), batch_size=batch_size)


class Watcher(pl.Callback):
    """What callbacks see of losses, norms and gates."""

    def __init__(self) -> None:
        self.losses: list[Tensor] = []
        self.logged: list[Tensor] = []
        self.gates: list[bool] = []

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        gates = [p.grad for name, p in pl_module.named_parameters() if "gate" in name]
        self.gates.append(bool(gates) and all(grad is not None and bool(grad.abs().sum() > 0) for grad in gates))

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.losses.append(outputs["loss"].clone())
        self.logged.append(trainer.callback_metrics["loss"].clone())


@dataclass(frozen=True)
class Trained:
    """What one rank holds at the end."""

    parameters: dict[str, Tensor]
    losses: list[Tensor]
    logged: list[Tensor]
    gates: list[bool]
    norm: Tensor | None
    val: Tensor | None
    value: Any = field(default=None)


QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
    "limit_val_batches": 0,
    "accelerator": "cpu",
    "max_epochs": 1,
}


def train(
    world_size: int,
    *,
    model: Callable[[], pl.LightningModule] = Staged,
    after: Callable[[pl.Trainer], Any] | None = None,
    strategy: dict[str, Any] | None = None,
    ckpt_path: str | None = None,
    **options: Any,
) -> list[Trained]:
    """Train in forked processes as under torchrun; arguments of the Trainer by keyword."""

    def work(_: int) -> Trained:
        os.environ.pop("PL_GLOBAL_SEED", None)
        pl.seed_everything(1, verbose=False)
        watcher = Watcher()
        trainer = pl.Trainer(
            **{**QUIET, "devices": world_size, **{k: v for k, v in options.items() if k != "callbacks"}},
            strategy=MoEStrategy(**(strategy or {})),
            callbacks=[watcher, *(options.get("callbacks") or [])],
        )
        module = model()
        trainer.fit(module, ckpt_path=ckpt_path)
        return Trained(
            {name: parameter.detach() for name, parameter in module.named_parameters()},
            *(watcher.losses, watcher.logged, watcher.gates),
            trainer.strategy.last_grad_norm,  # type: ignore[attr-defined]
            trainer.callback_metrics.get("val"),
            None if after is None else after(trainer),
        )

    return run_world(world_size, work, timeout=timedelta(seconds=60), process_group=False)
