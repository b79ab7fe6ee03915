"""A small Lightning module with experts, and `fit`, which trains it in forked worlds."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

import lightning.pytorch as pl
import pytest
import torch
from launcher import run_world
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_moe_ckpt.moe import MoELayer
from lightning_moe_ckpt.strategy import MoEStrategy

D, F_, E = 6, 8, 12


class ToyMoE(pl.LightningModule):
    """Dense, experts, dense; 28 samples, so that an epoch ends in a ragged way.

    Args:
        optimizer: `"adamw"` or `"sgd"` (with momentum).
        norm: whether there is a BatchNorm, whose buffers change in forward.
        num_experts: over all ranks.
    """

    def __init__(self, optimizer: str = "adamw", norm: bool = False, num_experts: int = E) -> None:
        super().__init__()
        self.optimizer, self.num_experts = optimizer, num_experts
        self.inp = nn.Linear(D, D)
        self.norm = nn.BatchNorm1d(D) if norm else nn.Identity()
        self.register_buffer("scale", torch.ones(1))
        self.moe: MoELayer | None = None
        self.head = nn.Linear(D, 1)

    def configure_model(self) -> None:
        if self.moe is None:
            self.moe = MoELayer(D, F_, self.num_experts)

    def forward(self, x: Tensor) -> Tensor:
        assert self.moe is not None
        h = self.norm(torch.tanh(self.inp(x))) * self.scale
        out: Tensor = self.head(h + self.moe(h))
        return out

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        x, y = batch
        assert self.moe is not None
        loss: Tensor = (self(x)[:, 0] - y).pow(2).mean()
        assert self.moe.l_aux is not None
        return loss + 0.01 * self.moe.l_aux

    def validation_step(self, batch: list[Tensor], _: int) -> None:
        self.log("val", (self(batch[0])[:, 0] - batch[1]).pow(2).mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.optimizer == "sgd":
            return torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)
        return torch.optim.AdamW(self.parameters(), 1e-2)

    def train_dataloader(self) -> DataLoader[Any]:
        return loader()

    def val_dataloader(self) -> DataLoader[Any]:
        return loader()


def loader() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(28, D, generator=generator)
    return DataLoader(TensorDataset(x, x.sum(1).sin()), batch_size=2)


@dataclass(frozen=True)
class Fitted:
    """What one rank holds at the end."""

    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    global_step: int
    norm: Tensor | None
    value: Any = field(default=None)
    """What `after` returned."""


class Fit(Protocol):
    """See `fit`."""

    def __call__(
        self,
        world_size: int,
        ep_size: int = 1,
        *,
        strategy: Callable[[], Strategy | str] | None = None,
        model: dict[str, Any] | None = None,
        callbacks: Callable[[], list[pl.Callback]] = list,
        after: Callable[[pl.Trainer], Any] | None = None,
        ckpt_path: str | None = None,
        plugins: Callable[[], Any] | None = None,
        **options: Any,
    ) -> list[Fitted]: ...


@pytest.fixture
def fit() -> Fit:
    """Train in forked processes as under torchrun; arguments of the Trainer by keyword."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    return _fit


def _fit(
    world_size: int,
    ep_size: int = 1,
    *,
    strategy: Callable[[], Strategy | str] | None = None,
    model: dict[str, Any] | None = None,
    callbacks: Callable[[], list[pl.Callback]] = list,
    after: Callable[[pl.Trainer], Any] | None = None,
    ckpt_path: str | None = None,
    plugins: Callable[[], Any] | None = None,
    **options: Any,
) -> list[Fitted]:
    def work(_: int) -> Fitted:
        os.environ.pop("PL_GLOBAL_SEED", None)
        pl.seed_everything(1, verbose=False)
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=world_size,
            strategy=strategy() if strategy is not None else MoEStrategy(expert_parallel=ep_size),
            callbacks=callbacks(),
            plugins=plugins() if plugins is not None else None,
            **{**QUIET, "max_epochs": 2, **options},
        )
        module = ToyMoE(**(model or {}))
        trainer.fit(module, ckpt_path=ckpt_path)
        return Fitted(
            {name: parameter.detach() for name, parameter in module.named_parameters()},
            dict(module.named_buffers()),
            trainer.global_step,
            getattr(trainer.strategy, "last_grad_norm", None),
            after(trainer) if after is not None else None,
        )

    return run_world(world_size, work, timeout=timedelta(seconds=90), process_group=False)


QUIET = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
    "limit_val_batches": 0,
}


class Tools(Protocol):
    """Functions the tests of this folder share."""

    def is_expert(self, name: str) -> bool: ...
    def whole(self, ranks: list[Fitted], ep_size: int) -> dict[str, Tensor]: ...
    def assert_replicas_agree(self, ranks: list[Fitted], ep_size: int) -> None: ...


class _Tools:
    @staticmethod
    def is_expert(name: str) -> bool:
        return name in {"moe.w1", "moe.b1", "moe.w2", "moe.b2"}

    @classmethod
    def whole(cls, ranks: list[Fitted], ep_size: int) -> dict[str, Tensor]:
        """Parameters of the unsharded model, from the first expert-parallel group."""
        return {
            name: torch.cat([rank.parameters[name] for rank in ranks[:ep_size]]) if cls.is_expert(name) else parameter
            for name, parameter in ranks[0].parameters.items()
        }

    @classmethod
    def assert_replicas_agree(cls, ranks: list[Fitted], ep_size: int) -> None:
        """Every copy of a parameter has the same bits."""
        for position, rank in enumerate(ranks):
            for name, parameter in rank.parameters.items():
                replica = ranks[position % ep_size if cls.is_expert(name) else 0]
                assert torch.equal(parameter, replica.parameters[name]), (position, name)


@pytest.fixture
def tools() -> Tools:
    """See `Tools`."""
    return _Tools()
