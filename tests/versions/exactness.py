"""Whether a killed run ends with the same bits under the versions of torch and Lightning that are installed here.

`make versions` runs it with the lowest ones that pyproject.toml declares and with the newest; it needs none of the
packages that tests need.
"""

from __future__ import annotations

import logging
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

from lightning_moe_ckpt.callbacks import DenseCheckpoint, SparseCheckpoint
from lightning_moe_ckpt.moe import MoELayer
from lightning_moe_ckpt.testing import Attempt, Kill, assert_same_end, run_attempts

FEATURES = 8
STEPS = (2, 5, 7, 12)
"""In the first epoch of five, at its end, and in later ones."""
POLICIES: dict[str, Callable[[str], Any]] = {
    "dense": partial(DenseCheckpoint, every_n_steps=2),
    "sparse": partial(SparseCheckpoint, window=3),
}
SHARDINGS = ["", "tp", *(["fsdp2"] if hasattr(torch.cpu.Stream, "record_event") else [])]
"""None in one process, the others in two. FSDP2 trains on CPUs from torch 2.7 on."""


class Net(LightningModule):
    """Experts, dropout, validation in mid-epoch, and a learning rate that changes."""

    def __init__(self, sharding: str) -> None:
        super().__init__()
        self.sharding = sharding
        self.first, self.moe = nn.Linear(FEATURES, FEATURES), MoELayer(FEATURES, 16, 4)

    def configure_model(self) -> None:
        mesh = self.device_mesh
        if mesh is not None and self.sharding == "tp":
            parallelize_module(self.first, mesh["tensor_parallel"], ColwiseParallel(output_layouts=Replicate()))
        elif mesh is not None:
            for layer in (self.first, self.moe):
                fully_shard(layer, mesh=mesh["data_parallel"])

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.moe(nn.functional.dropout(self.first(batch[0]), 0.1)).pow(2).mean()
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.first(batch[0]).pow(2).mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def fit(policy: str | None, sharding: str, life: Attempt) -> Mapping[str, Any]:
    """Three epochs of five steps."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    seed_everything(life.seed)
    own = [] if policy is None else [POLICIES[policy](life.url)]
    items = TensorDataset(torch.arange(40.0 * FEATURES).view(-1, FEATURES).sin())
    tensor = life.world_size if sharding == "tp" else 1
    trainer = Trainer(
        accelerator="cpu",
        devices=life.world_size,
        strategy=ModelParallelStrategy(life.world_size // tensor, tensor) if sharding else "auto",
        max_epochs=3,
        val_check_interval=2,
        gradient_clip_val=None if sharding == "tp" else 0.5,  # torch has no norm of plain tensors and DTensors
        callbacks=life.callbacks(*own),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Net(sharding), DataLoader(items, batch_size=8, shuffle=True), DataLoader(items, batch_size=20))
    return {}


def main() -> int:
    """Kill a run at several steps, under each policy; how many ended with other bits."""
    wrong = total = 0
    with tempfile.TemporaryDirectory() as folder:
        for sharding in SHARDINGS:
            workdir, ranks = Path(folder, sharding or "plain"), 2 if sharding else 1
            run = partial(run_attempts, world_size=ranks)
            reference = run(partial(fit, None, sharding), url="", workdir=workdir / "reference")
            for policy, step in product(POLICIES, STEPS[2:3] if sharding else STEPS):
                url = workdir / f"{policy}-{step}"
                kill = Kill(phase="after_batch_end", step=step, rank=ranks - 1, settle=10.0)
                lives = run(partial(fit, policy, sharding), url=str(url / "run"), workdir=url, kills=[kill])
                total += 1
                try:
                    assert_same_end(reference, lives)
                except AssertionError as error:
                    wrong += 1
                    print(f"{policy}, {sharding or 'not sharded'}, killed in step {step}: {error}")
    versions = f"lightning {lightning.__version__}, torch {torch.__version__}"
    print(
        f"{versions}, {' '.join(filter(None, SHARDINGS))}: {total - wrong} of {total} killed runs end with the same bits"
    )
    return wrong


if __name__ == "__main__":
    sys.exit(main())
