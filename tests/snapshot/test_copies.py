"""Parameters that differ by rank where ranks should hold copies: refused at start, told of where training makes them differ."""

from __future__ import annotations

import logging
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from launcher import run_world
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from lightning_moe_ckpt.callbacks import DenseCheckpoint
from lightning_moe_ckpt.errors import ConfigurationError
from lightning_moe_ckpt.moe import MoELayer
from lightning_moe_ckpt.strategy import MoEStrategy

WORLD, WIDTH = 3, 6


class Owned(LightningModule):
    """Shared layers, a BatchNorm whose statistics differ by rank, and an adapter that is each rank's own.

    Args:
        rank: this one.
        differs: when adapters do: from the `start`, by `training`, beside `shards`, or `never`.
        experts: in a layer of them; or 0 for none.
    """

    def __init__(self, rank: int, differs: str, experts: int = 0) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.rank, self.differs = rank, differs
        self.shared, self.norm, self.adapter = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 1)
        self.experts, self.moe = experts, None
        if differs == "training":
            self._ddp_params_and_buffers_to_ignore = ["adapter.weight"]

    def configure_model(self) -> None:
        if self.experts and self.moe is None:
            self.moe = MoELayer(WIDTH, 8, self.experts)  # type: ignore[assignment]
        if self.differs == "shards":
            assert self.device_mesh is not None
            fully_shard(self.shared, mesh=self.device_mesh["data_parallel"])

    def on_train_start(self) -> None:
        if self.differs == "start" and self.rank == 1:
            with torch.no_grad():
                self.adapter.weight += 1

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        hidden = self.norm(self.shared(batch[0]))
        loss: Tensor = self.adapter(hidden if self.moe is None else hidden + self.moe(hidden)).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-2)


def fit(url: Path, rank: int, strategy: Any, differs: str, experts: int = 0) -> tuple[str, list[str]]:
    """Train three steps; return the reason of a refusal, and the messages of errors."""
    told: list[str] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("lightning_moe_ckpt").addHandler(handler)
    options: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    trainer = Trainer(
        accelerator="cpu",
        devices=WORLD,
        strategy=strategy,
        max_steps=3,
        callbacks=[DenseCheckpoint(str(url))],
        **options,
    )
    data = TensorDataset(torch.randn(36, WIDTH, generator=torch.Generator().manual_seed(0)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's advice about this tiny run
        try:
            trainer.fit(Owned(rank, differs, experts), DataLoader(data, batch_size=3))
        except ConfigurationError as error:
            return str(error), told
    return "", told


def strategy_of(name: str) -> Any:
    if name == "ddp":
        return DDPStrategy(process_group_backend="gloo", broadcast_buffers=False)
    return MoEStrategy(expert_parallel=WORLD if name == "experts" else 1)


@pytest.mark.parametrize("name", ["ddp", "moe"])
def test_a_parameter_that_differs_by_rank_is_refused_by_name(tmp_path: Path, name: str) -> None:
    """Before anything is stored: one of the copies would be all that a restart has."""

    def work(rank: int) -> tuple[str, list[str]]:
        return fit(tmp_path, rank, strategy_of(name), "start")

    for refused, _ in run_world(WORLD, work, timeout=timedelta(seconds=120), process_group=False):
        assert refused.startswith("`adapter.weight` (ranks [0, 2] and [1] have different ones): ranks should hold")
    assert not list(tmp_path.rglob("*.safetensors"))


@pytest.mark.parametrize(("name", "differs"), [("ddp", "training"), ("ddp", "never"), ("experts", "never")])
def test_only_what_training_makes_differ_is_told_of(tmp_path: Path, name: str, differs: str) -> None:
    """Once, by the first rank. Buffers are each rank's own, and experts belong to the ranks that have them."""

    def work(rank: int) -> tuple[str, list[str]]:
        return fit(tmp_path, rank, strategy_of(name), differs, experts=WORLD * (name == "experts"))

    results = run_world(WORLD, work, timeout=timedelta(seconds=120), process_group=False)
    assert [refused for refused, _ in results] == [""] * WORLD
    told = [line for _, lines in results for line in lines]
    assert len(told) == (differs == "training"), told
    assert all("`adapter.weight` (ranks [0] and [1] and [2] have different ones)" in line for line in told)


def test_who_reduces_gradients_beside_shards_is_said(tmp_path: Path) -> None:
    """FSDP2 does so for what it shards, and Lightning's strategy for nothing."""

    def work(rank: int) -> tuple[str, list[str]]:
        return fit(tmp_path, rank, ModelParallelStrategy(WORLD, 1), "shards")

    results = run_world(WORLD, work, timeout=timedelta(seconds=120), process_group=False)
    assert [refused for refused, _ in results] == [""] * WORLD
    (told,) = (line for _, lines in results for line in lines)
    assert "`adapter.weight` (ranks [0] and [1] and [2] have different ones)" in told
    assert "`shared" not in told
    assert "Nobody reduces gradients of plain parameters beside shards" in told
    assert told.endswith("`fully_shard` on the module that has them, or reduce their gradients in `on_after_backward`.")
