"""A training whose ranks are killed at given steps: to_account.py FOLDER STEPS [plain] [RANK:STEP ...]

Every rank dies once at each of its steps. Rank 0 writes down how long steps take, and at the end its account and the time. A `plain` one
has no checkpoints.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from lightning_moe_ckpt.callbacks import DenseCheckpoint, SparseCheckpoint
from lightning_moe_ckpt.moe import MoELayer
from lightning_moe_ckpt.strategy import MoEStrategy

FOLDER, STEPS, KILLS = Path(sys.argv[1]), int(sys.argv[2]), set(sys.argv[3:])
STEP_SECONDS = 0.1
BEGAN = time.monotonic()


class Net(LightningModule):
    """One layer of experts, behind a pause."""

    def __init__(self) -> None:
        super().__init__()
        self.moe = MoELayer(8, 8, 4)

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        time.sleep(STEP_SECONDS)
        return self.moe(batch[0]).square().mean()  # type: ignore[no-any-return]

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


class Dies(Callback):
    """Kills its process in the midst of the steps that are named for its rank, once each."""

    @override
    def on_before_optimizer_step(self, trainer: Trainer, *args: object) -> None:
        name = f"{trainer.global_rank}:{trainer.global_step}"
        if name in KILLS and not (FOLDER / name).exists():
            (FOLDER / name).touch()
            os.kill(os.getpid(), signal.SIGKILL)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.began = time.monotonic()

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.trained = time.monotonic() - self.began


def main() -> None:
    """Train."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dies, url = Dies(), str(FOLDER / "run")
    sparse = "dense" not in KILLS
    checkpoint = SparseCheckpoint(url, window=2) if sparse else DenseCheckpoint(url, every_n_steps=6)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    trainer = Trainer(
        accelerator="cpu",
        devices=world,
        strategy=MoEStrategy(),
        callbacks=[dies] if "plain" in KILLS else [checkpoint, dies],
        max_steps=STEPS,
        default_root_dir=FOLDER,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Net(), DataLoader(TensorDataset(torch.randn(8 * STEPS * world, 8)), batch_size=4))
    if trainer.is_global_zero:
        said: dict[str, Any] = {"ended": time.monotonic(), "in main": BEGAN, "trained": dies.trained}
        if "plain" not in KILLS:
            said |= asdict(checkpoint.report.goodput)
        (FOLDER / "account").write_text(json.dumps(said))


if __name__ == "__main__":
    main()
