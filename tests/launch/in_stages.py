"""A training in pipeline stages, one process each, for `moe-ckpt run`: in_stages.py FOLDER STEPS STAGES.

Each rank writes its steps with its process id to a file, and its weights at the end.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from lightning_moe_ckpt.callbacks import SparseCheckpoint
from lightning_moe_ckpt.strategy import MoEStrategy

FOLDER, STEPS, STAGES = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
WIDTH = 16


class Blocks(nn.Module):
    """Blocks of one stage, by their number in the whole model."""

    def __init__(self, numbers: range) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict(
            {str(i): nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.2)) for i in numbers}
        )

    @override
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks.values():
            x = x + block(x)
        return x


class Model(LightningModule):
    """Two blocks a stage."""

    def configure_stage(self, stage: int, num_stages: int) -> nn.Module:
        torch.manual_seed(stage)
        return Blocks(range(2 * stage, 2 * stage + 2))

    def stage_loss(self, output: Tensor, target: Tensor) -> Tensor:
        loss = functional.mse_loss(output, target)
        self.log("loss", loss)
        return loss

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-2)


class Writes(Callback):
    """Writes down each step, and the end."""

    @override
    def on_train_batch_end(self, trainer: Trainer, *args: object) -> None:
        with (FOLDER / f"steps{trainer.global_rank}").open("a") as file:
            file.write(f"{trainer.global_step} {os.getpid()}\n")
        time.sleep(0.02)  # for somebody to look

    @override
    def on_train_batch_start(self, trainer: Trainer, *args: object) -> None:
        """Take as long as somebody has written down, once if for ever."""
        path = FOLDER / f"slow{trainer.global_rank}"
        if path.exists():
            seconds = float(path.read_text())
            if seconds > 60:
                path.unlink()
            time.sleep(seconds)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        end: dict[str, Any] = {**pl_module.state_dict(), "random": torch.get_rng_state()}
        torch.save(end, FOLDER / f"end{trainer.global_rank}")


def main() -> None:
    """Train."""
    logging.basicConfig(level=logging.INFO)
    torch.set_num_threads(1)
    samples = torch.randn(8 * STEPS, WIDTH, generator=torch.Generator().manual_seed(0))
    here = int(os.environ["LOCAL_WORLD_SIZE"])
    trainer = Trainer(
        accelerator="cpu",
        devices=here,
        num_nodes=STAGES // here,
        strategy=MoEStrategy(pipeline_parallel=STAGES, micro_batches=4),
        callbacks=[SparseCheckpoint((FOLDER / "run").as_uri(), window=3), Writes()],
        max_epochs=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(), DataLoader(TensorDataset(samples, samples.flip(1)), batch_size=8))


if __name__ == "__main__":
    main()
