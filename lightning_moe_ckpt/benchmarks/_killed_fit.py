"""Run a rank of a training to be killed, for `_in_place`, which starts the rank by a launcher.

python -m lightning_moe_ckpt.benchmarks._killed_fit FOLDER MEMORY {lightning,torchft}

Steps are taken while FOLDER/turn is there.

Source of the training with torchft: its `train_ddp.py` at version 0.2.0, with the defaults of that script.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from typing_extensions import override

from lightning_moe_ckpt.benchmarks._fits import (
    BenchModel,
    ModelSize,
    StepLines,
    bench_trainer,
    own_memory,
    quiet_lightning,
    write_line,
)
from lightning_moe_ckpt.benchmarks._fits import random_tokens as tokens_of
from lightning_moe_ckpt.callbacks import SparseCheckpoint
from lightning_moe_ckpt.launch._supervised import SPARE
from lightning_moe_ckpt.testing._records import JsonLines

# Shape suffixes: B samples, T tokens of a sample.

SIZE = ModelSize(batch_size=4)
WINDOW = 4
REPLICA = "REPLICA_GROUP_ID"
"""Environment variable with the rank, as torchft's script has it."""
NUM_BATCHES = 500
_LOOK_SECONDS = 0.002


class TurnLines(StepLines):
    """Write lines of events, and take steps in turns only; turn and lines are in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.lines = JsonLines(self._folder / f"rank{trainer.global_rank}")
        heard = _Heard(self.lines)
        logging.getLogger("lightning_moe_ckpt.fit.in_place._survivor").handlers = [heard]

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *args: object) -> None:
        await_turn(self._folder)


class _Heard(logging.Handler):
    """Note the time at which this process logs that training goes on in place."""

    def __init__(self, lines: JsonLines) -> None:
        super().__init__(logging.WARNING)
        self._lines = lines

    @override
    def emit(self, record: logging.LogRecord) -> None:
        write_line(self._lines, "noticed")


def await_turn(folder: Path) -> None:
    """Return when it is this training's turn."""
    while not (folder / "turn").exists():
        time.sleep(_LOOK_SECONDS)


def note_spare(folder: Path) -> None:
    """Write a line if this process is a spare: everything is imported, and the strategy asks for the rank."""
    if SPARE in os.environ:
        write_line(JsonLines(folder / "spares"), "ready", pid=os.getpid())


def train(folder: Path) -> None:
    """Train with Lightning until somebody ends it."""
    note_spare(folder)
    world_size = int(os.environ["WORLD_SIZE"])
    callbacks = [SparseCheckpoint((folder / "run").as_uri(), window=WINDOW), TurnLines(folder)]
    trainer = bench_trainer(accelerator="cpu", devices=world_size, callbacks=callbacks, max_epochs=-1)
    torch.manual_seed(0)
    trainer.fit(BenchModel(SIZE), tokens_of(SIZE, world_size * NUM_BATCHES))


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
    folder, memory, system = sys.argv[1:]
    torch.set_num_threads(1)
    own_memory(memory, lost=False)
    with quiet_lightning():
        {"lightning": train, "torchft": train_with_torchft}[system](Path(folder))


if __name__ == "__main__":
    main()
