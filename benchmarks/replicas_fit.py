"""Run a replica of a training with torchft, for `replicas`, which starts it by torchrun.

python -m benchmarks.replicas_fit FOLDER MEMORY

Source: torchft's `train_ddp.py` at version 0.2.0, with the defaults of that script.
"""

from __future__ import annotations

import importlib
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from benchmarks.killed_fit import NUM_BATCHES, SIZE, await_turn
from benchmarks.steps import write_line
from lightning_moe_ckpt.benchmarks._fits import BenchModel, own_memory, quiet_lightning
from lightning_moe_ckpt.benchmarks._fits import random_tokens as tokens_of
from lightning_moe_ckpt.testing._records import JsonLines

# Shape suffixes: B samples, T tokens of a sample.

REPLICA = "REPLICA_GROUP_ID"
"""Environment variable with the rank, as torchft's script has it."""


class _Loss(nn.Module):
    """The same loss, as a function of a module that DistributedDataParallel can wrap."""

    def __init__(self) -> None:
        super().__init__()
        self.model = BenchModel(SIZE)

    @override
    def forward(self, tokens_BT: Tensor) -> Tensor:
        loss = self.model.cross_entropy(tokens_BT)
        balance = [layer.l_aux for layer in self.model.moe_layers() if layer.l_aux is not None]
        return loss + SIZE.balance * torch.stack(balance).sum()


def train_with_torchft(folder: Path) -> None:
    """Train as torchft's own script does until somebody ends it; each rank is a replica."""
    torchft: Any = importlib.import_module("torchft")
    rank = int(os.environ[REPLICA])
    lines = JsonLines(folder / f"rank{rank}")
    torch.manual_seed(0)
    inner = _Loss()

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optim"])

    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=5)),
        min_replica_size=1,
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optim": optimizer.state_dict()},
        replica_id=f"bench_{rank}",
        timeout=timedelta(seconds=30),
    )
    model: Any = torchft.DistributedDataParallel(manager, inner)
    optimizer: Any = torchft.Optimizer(manager, torch.optim.AdamW(model.parameters(), lr=1e-3))
    write_line(lines, "begin", pid=os.getpid(), step=manager.current_step())
    while True:
        for (tokens_BT,) in tokens_of(SIZE, NUM_BATCHES):
            await_turn(folder)
            before = manager.current_step()
            optimizer.zero_grad()
            model(tokens_BT).backward()
            optimizer.step()
            if manager.current_step() > before:
                write_line(lines, "step", step=manager.current_step(), ranks=manager.num_participants())


def main() -> None:
    """Train in this process."""
    folder, memory = sys.argv[1:]
    torch.set_num_threads(1)
    own_memory(memory, lost=False)
    with quiet_lightning():
        train_with_torchft(Path(folder))


if __name__ == "__main__":
    main()
