"""Progress bars on a real terminal: log lines stand above them, and a run that resumes within an epoch shows its length."""

from __future__ import annotations

import fcntl
import logging
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time
import warnings
from contextlib import suppress
from pathlib import Path
from select import select

import pytest
import tiny
import torch
from launcher import exit_after
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import ProgressBar, RichProgressBar, TQDMProgressBar
from torch import Tensor, nn
from typing_extensions import override

from lightning_moe_ckpt.callbacks import DenseCheckpoint

NUM_BATCHES = 12
LENGTHS: dict[type[ProgressBar], dict[str, int]] = {
    TQDMProgressBar: {"max_epochs": 1},
    RichProgressBar: {"max_steps": 10},
}
NEXT = "\f"
"""Behind what is shown with each bar."""
PATIENCE = 120.0
"""Seconds for all trainings."""


class Killed(tiny.ToZero):
    """Gets a SIGKILL in one of its steps, if it is told to."""

    def __init__(self, dies_at: int | None) -> None:
        super().__init__(nn.Linear(4, 2))
        self.dies_at = dies_at

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if self.global_step == self.dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch, batch_idx)


def train(url: Path, bar: ProgressBar, dies_at: int | None, **length: int) -> None:
    seed_everything(1, verbose=False)
    data = tiny.rows(torch.randn(NUM_BATCHES, 4), shuffle=True)
    checkpoint = DenseCheckpoint(url, every_n_steps=2, overhead_target=None)
    tiny.fit(Killed(dies_at), data, bar, checkpoint, enable_progress_bar=True, **length)


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> dict[type[ProgressBar], str]:
    """What two trainings with each bar, of which the first is killed, write to their terminal of 200 columns.

    They descend from a new process: this one has threads, whose locks nobody would release in its fork.
    """
    terminal, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 200, 0, 0))
    process = subprocess.Popen(
        [sys.executable, __file__, str(tmp_path_factory.mktemp("bars"))],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=os.environ | {"TERM": "xterm-256color", "PYTHONPATH": os.pathsep.join(sys.path)},
        start_new_session=True,
    )
    os.close(theirs)
    said, deadline = b"", time.monotonic() + PATIENCE
    try:
        with suppress(OSError):  # how Linux says that nobody has the terminal open any more
            while select([terminal], [], [], max(0.0, deadline - time.monotonic()))[0]:
                said += os.read(terminal, 2**16)
            pytest.fail(f"no end after {PATIENCE} s; this is what was shown: {said.decode()}")
        return dict(zip(LENGTHS, said.decode().split(NEXT), strict=False))
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # and those that it has forked
        process.wait()
        os.close(terminal)


@pytest.mark.parametrize("kind", LENGTHS)
def test_lines_stand_above_the_bar_and_it_knows_the_epoch_it_resumes_in(
    kind: type[ProgressBar], shown: dict[type[ProgressBar], str]
) -> None:
    """A line begins where the cursor was sent to the beginning of one. The bar counts on from what is not trained again."""
    said = shown[kind]
    lines = [found.start() for found in re.finditer(r"step \d+ \(incarnation \d\) is durable", said)]
    assert lines
    for at in lines:
        assert re.search(r"(\r|\n|\x1b\[2K|\x1b\[1A)$", said[:at]), repr(said[at - 80 : at + 40])
    resumed = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", said[said.index("resumes from step") :])
    (step,) = re.findall(r"resumes from step (\d+)", said)
    total = LENGTHS[kind].get("max_steps", NUM_BATCHES)
    assert f" {step}/{total}" in resumed or kind is RichProgressBar, "which shows itself ten times a second"
    assert f" {total}/{total}" in resumed
    assert not re.search(r"[1-9]/\?", resumed)


if __name__ == "__main__":
    logging.basicConfig(format="%(message)s")
    logging.getLogger("lightning_moe_ckpt").setLevel(logging.INFO)
    warnings.simplefilter("ignore")
    for kind, length in LENGTHS.items():
        url = Path(sys.argv[1]) / kind.__name__
        for dies_at in (7, None):
            if os.fork() == 0:
                exit_after(lambda: train(url, kind(refresh_rate=1), dies_at, **length))  # type: ignore[call-arg]  # noqa: B023
            os.wait()
        print(end=NEXT, flush=True)
