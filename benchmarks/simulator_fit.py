"""Run a training under random SIGKILLs, for `simulator`, which starts it by `moe-ckpt run`.

python -m benchmarks.simulator_fit FOLDER MEMORY CELL

CELL is JSON, see `Cell`. FOLDER/lines gets a line when the process begins, when training begins, and after each step.
"""

from __future__ import annotations

import time

_BEGAN = time.monotonic()

import json  # noqa: E402  # the clock comes before imports, which are most of a start
import os  # noqa: E402
import sys  # noqa: E402
from dataclasses import dataclass  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
from lightning.pytorch import Callback, LightningModule, Trainer  # noqa: E402
from typing_extensions import override  # noqa: E402

from benchmarks.steps import StepLines, write_line  # noqa: E402
from lightning_moe_ckpt.benchmarks._fits import (  # noqa: E402
    BenchModel,
    ModelSize,
    bench_trainer,
    own_memory,
    patient_storage,
    quiet_lightning,
    random_tokens,
)
from lightning_moe_ckpt.callbacks import (  # noqa: E402
    CheckpointArguments,
    DenseCheckpoint,
    DifferentialCheckpoint,
    SparseCheckpoint,
)
from lightning_moe_ckpt.callbacks._base import CheckpointCallback  # noqa: E402
from lightning_moe_ckpt.testing import FaultInjector, RandomFaults  # noqa: E402
from lightning_moe_ckpt.testing._records import JsonLines  # noqa: E402

SIZE = ModelSize(batch_size=4)
WINDOW, DENSE_EVERY, FULL_EVERY = 4, 20, 32
_BATCHES = 100_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """A policy under a failure rate."""

    policy: str
    """`sparse`, `dense`, `differential` or `none`."""
    mtbf: float
    """Mean seconds of training between two failures; a failure strikes at its time, whatever the process does."""
    faults: int
    """Failures in all."""
    seed: int
    seconds: float
    """Training ends after so many seconds of it, over all starts."""


def checkpoint_of(policy: str, url: str) -> CheckpointCallback | None:
    """Return a policy's callback; cadences are ours, not the planner's."""
    # `CellLines` counts seconds of its own process, which a restart must not put back.
    shared: CheckpointArguments = {"overhead_target": None, "untouched": ["callback.*"]}
    if policy == "sparse":
        return SparseCheckpoint(url, window=WINDOW, **shared)
    if policy == "dense":
        return DenseCheckpoint(url, every_n_steps=DENSE_EVERY, **shared)
    if policy == "differential":
        return DifferentialCheckpoint(url, every_n_steps=FULL_EVERY, **shared)
    assert policy == "none"
    return None


class CellLines(StepLines):
    """Write lines of events; end training when its seconds are over."""

    def __init__(self, lines: JsonLines, seconds: float, checkpoint: CheckpointCallback | None) -> None:
        self.lines, self._seconds, self._checkpoint = lines, seconds, checkpoint
        self._end, self._first = float("inf"), False

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        write_line(self.lines, "fit")

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end = time.monotonic() + self._seconds

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *args: object) -> None:
        if not self._first:
            self._first = True
            write_line(self.lines, "begin", step=trainer.global_step)

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: object) -> None:
        super().on_train_batch_end(trainer, pl_module, *args)
        if time.monotonic() > self._end:
            trainer.should_stop = True

    @override
    def values(self) -> dict[str, Any]:
        run = self._checkpoint and self._checkpoint._run  # noqa: SLF001  # a report at every step would be work
        return {"hooks": run.session.clock.seconds} if run else {}


def trained_seconds(lines: list[dict[str, Any]]) -> float:
    """Return the seconds of training in earlier starts, as far as lines of steps show them."""
    total, last = 0.0, None
    for line in lines:
        total += line["at"] - last if line["what"] == "step" and last is not None else 0.0
        last = line["at"] if line["what"] in ("begin", "step") else None
    return total


def main() -> None:
    """Train in this process."""
    folder, memory, said = sys.argv[1:]
    cell, where = Cell(**json.loads(said)), Path(folder)
    lines = JsonLines(where / "lines")
    lines.write({"what": "process", "at": _BEGAN, "pid": os.getpid()})
    earlier = [json.loads(line) for line in (where / "lines").read_text().splitlines()]
    torch.set_num_threads(1)
    own_memory(memory, lost=False)
    checkpoint = checkpoint_of(cell.policy, (where / "run").as_uri())
    callbacks: list[Callback] = [CellLines(lines, cell.seconds - trained_seconds(earlier), checkpoint)]
    if cell.faults:
        random = RandomFaults(mtbf=cell.mtbf, seed=cell.seed, most=cell.faults)
        callbacks.insert(0, FaultInjector(random=random, folder=where / "faults"))
    with quiet_lightning(), patient_storage():
        trainer = bench_trainer(
            accelerator="cpu",
            callbacks=[*callbacks, *([checkpoint] if checkpoint else [])],
            max_epochs=-1,
            default_root_dir=where,
        )
        torch.manual_seed(0)
        trainer.fit(BenchModel(SIZE), random_tokens(SIZE, 3000))


if __name__ == "__main__":
    main()
