"""Trainings in processes, and lines that they write as they go, by the clock that the processes of a machine share."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lightning_moe_ckpt.errors import CheckpointError
from lightning_moe_ckpt.testing._records import JsonLines, Record, read_lines


def train_in_ranks(module: str, what: Sequence[str], *, ranks: int, seconds: float, failures: int = 1) -> None:
    """Train by `python -m module what` in so many processes, under `moe-ckpt run`, which waits through slow steps and bears `failures`.

    Raises:
        CheckpointError: the training failed; with what it printed.
    """
    command = [sys.executable, "-m", "lightning_moe_ckpt.cli", "run", "--nproc-per-node", str(ranks)]
    ended = subprocess.run(  # noqa: S603  # our own command
        [*command, "--max-failures", str(failures), "--hang-timeout", "3600", "-m", module, *what],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    if ended.returncode:
        raise CheckpointError(f"A training in {ranks} processes failed.\n{ended.stdout}{ended.stderr}"[-4000:])


class StepLines(Callback):
    """Write down, in `lines`, when a fit begins and when each step is done, by the clock that the processes of a machine share."""

    lines: JsonLines
    first_step = 0
    """Added to `global_step`."""

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        write_line(self.lines, "begin", step=self.first_step + trainer.global_step, pid=os.getpid())

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: object) -> None:
        write_line(self.lines, "step", step=self.first_step + trainer.global_step, **self.values())

    def values(self) -> dict[str, Any]:
        """Return further values of a step's line."""
        return {}


def write_line(lines: JsonLines, what: str, **values: Any) -> None:
    """Append a line with the time."""
    lines.write({"what": what, "at": time.monotonic(), **values})


def lines_of(path: str | Path, *kinds: str) -> list[Record]:
    """Return the lines of some kinds that all attempts so far have written, in order."""
    return [line for line in read_lines(path) if line["what"] in kinds]
