"""Run a rank of a training to be killed, for `in_place`, which starts the rank by a launcher.

python -m benchmarks.killed_fit FOLDER MEMORY

Steps are taken while FOLDER/turn is there.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from typing_extensions import override

from benchmarks.steps import StepLines, write_line
from lightning_moe_ckpt.benchmarks._fits import (
    BenchModel,
    ModelSize,
    bench_trainer,
    own_memory,
    quiet_lightning,
)
from lightning_moe_ckpt.benchmarks._fits import random_tokens as tokens_of
from lightning_moe_ckpt.callbacks import SparseCheckpoint
from lightning_moe_ckpt.launch._supervised import SPARE
from lightning_moe_ckpt.testing._records import JsonLines

SIZE = ModelSize(batch_size=4)
WINDOW = 4
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


def main() -> None:
    """Train in this process."""
    folder, memory = sys.argv[1:]
    torch.set_num_threads(1)
    own_memory(memory, lost=False)
    with quiet_lightning():
        train(Path(folder))


if __name__ == "__main__":
    main()
