"""Trains for ten steps, with a checkpoint at every second one; a training to audit. Arguments: URL, policy, and a step with a fault."""

from __future__ import annotations

import os
import sys

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from typing_extensions import override

from inspection._runs import SmallMoE, train
from lightning_moe_ckpt.callbacks import DenseCheckpoint, DifferentialCheckpoint, SparseCheckpoint
from lightning_moe_ckpt.strategy import MoEStrategy


class FlippedBit(Callback):
    """Flips a bit in one element of a gradient of the last rank, in one step, or in every step of a process that is a `replay`."""

    def __init__(self, step: str) -> None:
        self.step = step

    @override
    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        again, random = "MOE_CKPT_RERUN" in os.environ, self.step == "random"
        if (random and again) or (not again and self.step == str(trainer.global_step)):
            grad = next(param.grad for name, param in pl_module.named_parameters() if "moe" in name and param.grad is not None)
            grad.view(torch.int32).view(-1)[5] ^= 1 << (os.getpid() % 8 + 12 if random else 22)


def main(url: str, policy: str, step: str = "") -> None:
    seed_everything(1, verbose=False)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    make = {
        "dense": lambda: DenseCheckpoint(url, every_n_steps=2, keep=9),
        "sparse": lambda: SparseCheckpoint(url, window=2, keep=9),
        "differential": lambda: DifferentialCheckpoint(url, every_n_steps=5, batch=2, keep=9),
    }
    strategy = {"strategy": MoEStrategy(expert_parallel=ranks), "devices": ranks}
    train(SmallMoE(), make[policy](), FlippedBit(step), steps=10, **strategy)


if __name__ == "__main__":
    main(*sys.argv[1:])
