"""Progress bars on a real terminal: log lines stand above them, and a run that resumes within an epoch shows its length."""

from __future__ import annotations

import fcntl
import logging
import os
import pty
import re
import signal
import struct
import sys
import termios
import warnings
from pathlib import Path

import pytest
import torch
from launcher import exit_after
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ProgressBar, RichProgressBar, TQDMProgressBar
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_moe_ckpt.callbacks import DenseCheckpoint

NUM_BATCHES = 12


class Killed(LightningModule):
    """Gets a SIGKILL in one of its steps, if it is told to."""

    def __init__(self, dies_at: int | None) -> None:
        super().__init__()
        self.linear, self.dies_at = nn.Linear(4, 2), dies_at

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if self.global_step == self.dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.linear(batch[0]).pow(2).mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())


def train(url: Path, bar: ProgressBar, dies_at: int | None, **length: int) -> None:
    seed_everything(1, verbose=False)
    data = DataLoader(TensorDataset(torch.randn(NUM_BATCHES, 4)), batch_size=1, shuffle=True)
    quiet = {"logger": False, "enable_model_summary": False, "accelerator": "cpu", "devices": 1}
    checkpoint = DenseCheckpoint(url, every_n_steps=2, overhead_target=None)
    Trainer(**quiet, **length, callbacks=[bar, checkpoint]).fit(Killed(dies_at), data)  # type: ignore[arg-type]


def shown(url: Path, kind: type[ProgressBar], dies_at: int | None = None, **length: int) -> str:
    """What a training in a forked process writes to its terminal of 200 columns."""
    child, terminal = pty.fork()
    if child == 0:
        fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 200, 0, 0))
        sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1) for number in (1, 2))
        os.environ |= {"TERM": "xterm-256color"}
        logging.getLogger().handlers.clear()  # pytest's
        logging.basicConfig(format="%(message)s")
        logging.getLogger("lightning_moe_ckpt").setLevel(logging.INFO)
        warnings.simplefilter("ignore")
        exit_after(lambda: train(url, kind(refresh_rate=1), dies_at, **length))  # type: ignore[call-arg]
    said = b""
    while True:
        try:
            said += (more := os.read(terminal, 2**16))
        except OSError:  # how Linux says that nobody has the terminal open any more
            break
        if not more:
            break
    os.close(terminal)
    os.waitpid(child, 0)
    return said.decode()


@pytest.mark.parametrize(
    ("kind", "length"), [(TQDMProgressBar, {"max_epochs": 1}), (RichProgressBar, {"max_steps": 10})]
)
def test_lines_stand_above_the_bar_and_it_knows_the_epoch_it_resumes_in(
    kind: type[ProgressBar], length: dict[str, int], tmp_path: Path
) -> None:
    """A line begins where the cursor was sent to the beginning of one. The bar counts on from what is not trained again."""
    said = shown(tmp_path, kind, dies_at=7, **length) + shown(tmp_path, kind, **length)
    lines = [found.start() for found in re.finditer(r"step \d+ \(incarnation \d\) is durable", said)]
    assert lines
    for at in lines:
        assert re.search(r"(\r|\n|\x1b\[2K|\x1b\[1A)$", said[:at]), repr(said[at - 80 : at + 40])
    resumed = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", said[said.index("resumes from step") :])
    (step,) = re.findall(r"resumes from step (\d+)", said)
    total = length.get("max_steps", NUM_BATCHES)
    assert f" {step}/{total}" in resumed or kind is RichProgressBar, "which shows itself ten times a second"
    assert f" {total}/{total}" in resumed
    assert not re.search(r"[1-9]/\?", resumed)
