"""A disk that is full, a real one: a tmpfs of some MiB that only a child process sees.

Run as a program, this file is that child: it trains, fills the disk, trains on, and makes room again.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_moe_ckpt.callbacks import DenseCheckpoint
from lightning_moe_ckpt.inspection import verify
from lightning_moe_ckpt.storage import open_backend

FEATURES = 200
DISK = "4m"
FULL, FREED, END = 10, 25, 35
"""Steps."""


class Linear(LightningModule):
    """Half a MiB with its optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(FEATURES, FEATURES)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch[0]).pow(2).mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-2)


class Filler(Callback):
    """Fills the disk to its last byte, and makes room later; writes down what is stored at these moments."""

    def __init__(self, disk: Path, checkpoint: DenseCheckpoint) -> None:
        self.ballast, self.checkpoint = disk / "ballast", checkpoint
        self.newest: list[int] = []
        self.good: list[bool] = []

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        step = trainer.global_step
        assert self.checkpoint.wait_committed(60)
        if step in {FULL, FREED, END - 1}:
            self.newest.append(self.checkpoint.report.generations["storage"])
            self.good.append(verify(open_backend(self.checkpoint.url)).sound)
        if step == FULL:
            with self.ballast.open("wb", buffering=0) as file, suppress(OSError):
                while True:
                    file.write(bytes(4096))
        if step == FREED:
            self.ballast.unlink()


def fit(checkpoint: DenseCheckpoint, *others: Callback, steps: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's advice about this tiny run
        trainer = Trainer(
            accelerator="cpu", devices=1, max_steps=steps, max_epochs=-1, logger=False, enable_progress_bar=False,
            enable_model_summary=False, callbacks=[*others, checkpoint],
        )  # fmt: skip
        trainer.fit(Linear(), DataLoader(TensorDataset(torch.ones(6, FEATURES))))


class Errors(logging.Handler):
    """Messages of errors."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def main(disk: Path) -> None:
    errors = Errors()
    logging.getLogger("lightning_moe_ckpt").addHandler(errors)
    checkpoint = DenseCheckpoint(str(disk / "run"), every_n_steps=1, keep=2)
    filler = Filler(disk, checkpoint)
    fit(checkpoint, filler, steps=END)
    resumed = DenseCheckpoint(str(disk / "run"))
    fit(resumed, steps=END)
    unfinished = [str(path) for path in disk.rglob("*.tmp")]
    facts = {
        "newest": filler.newest, "good": filler.good, "errors": errors.messages, "leftovers": unfinished,
        "steps": checkpoint.report.steps, "resumed": resumed.report.resumed_from,
    }  # fmt: skip
    sys.stdout.write("FACTS " + json.dumps(facts) + "\n")


def test_a_full_disk_is_reported_and_recovered_from(tmp_path: Path) -> None:
    """Training goes on, the generations stored before stay whole, and saving goes on when there is room again."""
    mount = f'mount -t tmpfs -o size={DISK} tmpfs "$0"'
    if subprocess.run(
        ["unshare", "-rm", "sh", "-c", mount, str(tmp_path)], check=False, capture_output=True
    ).returncode:
        pytest.skip("this machine lets no user mount a tmpfs")
    command = ["unshare", "-rm", "sh", "-c", f'{mount} && exec "$@"', str(tmp_path), sys.executable, __file__]
    ran = subprocess.run([*command, str(tmp_path)], check=False, capture_output=True, text=True, timeout=200)
    assert ran.returncode == 0, ran.stderr[-3000:]
    facts = json.loads(ran.stdout.rpartition("FACTS ")[2])
    before, full, after = facts["newest"]
    assert (facts["steps"], facts["resumed"]) == (END, END)
    assert facts["good"] == [True, True, True]
    assert FULL - 2 <= before <= FULL
    assert before <= full <= before + 1  # one may have been captured before the disk was full
    assert after >= FREED
    assert len(facts["errors"]) >= FREED - FULL - 2
    assert all("No space left on device" in error for error in facts["errors"])
    assert facts["leftovers"] == []


if __name__ == "__main__":
    main(Path(sys.argv[1]))
