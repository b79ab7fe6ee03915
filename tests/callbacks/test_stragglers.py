"""A rank that is slower than its peers is named, where it computes more, is stopped again and again, or shares its core."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from fit.test_departed import Heard
from launcher import run_world
from lightning.pytorch import Trainer
from strategy._staged import Staged
from tiny import ToZero, fit, rows, waves
from torch import Tensor, nn
from typing_extensions import override

from lightning_moe_ckpt.callbacks import ExpertLoadMonitor, SparseCheckpoint
from lightning_moe_ckpt.inspection._progress_views import figures
from lightning_moe_ckpt.inspection._run_progress import Follower
from lightning_moe_ckpt.moe import MoELayer
from lightning_moe_ckpt.process import StragglerFigures, _stragglers
from lightning_moe_ckpt.storage import RunView, open_backend
from lightning_moe_ckpt.strategy import MoEStrategy

WIDTH = 256
STOPPER = "import os, sys, time\npid = int(sys.argv[1])\nwhile True:\n for number in (19, 18):\n  time.sleep(0.08)\n  os.kill(pid, number)"
"""Stops a process half of the time."""
BUSY = "while True: pass"


class Work(nn.Module):
    """Computes, and more where it is told to."""

    times = 1

    @override
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            y: Tensor = x @ x.T @ x
        return y.tanh()


class Model(ToZero):
    """Work in front of experts, that are spread where there is expert parallelism."""

    def __init__(self) -> None:
        super().__init__(nn.Identity())

    @override
    def configure_model(self) -> None:
        if len(self.net) == 1:
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(8, WIDTH), Work(), MoELayer(WIDTH, 8, 4), nn.Linear(WIDTH, 8))


@contextmanager
def slowed(how: str, *, usual: bool) -> Iterator[None]:
    """Slow this rank down meanwhile; each has more to do than a scheduler's slice unless `usual`."""
    Work.times = 300 if how == "computes" else 1 if usual else 100
    command = {"stopped": [STOPPER, str(os.getpid())], "shares": [BUSY]}.get(how)
    if how == "shares":
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # of the busy loop too
        os.nice(10)
    if command is None:
        yield
        return
    with subprocess.Popen([sys.executable, "-c", *command]) as beside:
        try:
            yield
        finally:
            beside.kill()


class Seen(ExpertLoadMonitor):
    """Notes the step in which a rank is first called slow, and stops a while after."""

    step = 0

    @override
    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        super().on_train_batch_end(trainer, *args)
        report = self._checkpoint.report if self._checkpoint is not None else None
        if report is not None and report.stragglers is not None and report.stragglers.slow and not self.step:
            self.step = trainer.global_step
        trainer.should_stop = bool(self.step) and trainer.global_step >= self.step + 12


Found = tuple[int, StragglerFigures, list[str], dict[str, float]]


def train(
    path: Path, ranks: int, slow: int, how: str, *, steps: int, strategy: Any = None, model: Any = Model, quick: bool
) -> list[Found]:
    """Return each rank's step, figures, lines and newest row."""

    def work(rank: int) -> Found:
        heard = Heard.of_all()
        logging.getLogger("lightning_moe_ckpt").setLevel(logging.WARNING)
        if quick:
            _stragglers._LOOK_STEPS, _stragglers._LOOK_SECONDS = 16, 0.2
        checkpoint = SparseCheckpoint(str(path), window=2, keep=1, overhead_target=None)
        seen = Seen(every_n_steps=2)
        data = None if model is Staged else rows(waves(32 * ranks, 8), batch_size=32)
        with slowed(how if rank == slow else "", usual=quick):
            fit(model(), data, checkpoint, seen, max_steps=steps, devices=ranks, strategy=strategy or MoEStrategy())
        assert checkpoint.report.stragglers is not None
        return seen.step, checkpoint.report.stragglers, heard.lines, seen.latest

    return run_world(ranks, work, timeout=timedelta(seconds=60 if quick else 280))


def require_named(path: Path, found: list[Found], slow: int, *, by: int) -> None:
    """All that shows a slow rank shows it, once."""
    host = socket.gethostname()
    steps, figures_, lines, rows_ = zip(*found, strict=True)
    assert 0 < steps[0] <= by, steps
    assert all(each == figures_[0] for each in figures_)
    assert figures_[0].slow[slow] >= 1.2
    named = [[line for line in each if f"rank {slow} on {host} is slow" in line] for each in lines]
    assert list(map(len, named)) == [1] + [0] * (len(found) - 1), lines
    assert rows_[0][f"moe/straggler/{slow}"] == rows_[0]["moe/straggler/factor"] == figures_[0].slow[slow]
    shown = figures(Follower(RunView.open(open_backend(str(path)))).look())
    assert f"rank {slow} on {host} (" in shown["slow"]


@pytest.mark.parametrize(("ranks", "expert_parallel"), [(3, 1), (4, 2)])
def test_a_rank_that_computes_more_is_named(ranks: int, expert_parallel: int, tmp_path: Path) -> None:
    """Within four looks, in log, report, metric and `moe-ckpt top`; with experts spread it is seen in front of them."""
    strategy = MoEStrategy(expert_parallel=expert_parallel)
    found = train(tmp_path, ranks, ranks - 1, "computes", steps=160, strategy=strategy, quick=True)
    require_named(tmp_path, found, ranks - 1, by=5 + 5 * 16)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("how", "ranks", "strategy"),
    [("stopped", 4, "moe"), ("shares", 3, "ddp"), ("stopped", 3, "ddp"), ("shares", 4, "moe")],
)
def test_a_rank_that_gets_less_time_is_named(how: str, ranks: int, strategy: str, tmp_path: Path) -> None:
    """With looks as they are: three of ten seconds, and what had begun before."""
    found = train(tmp_path, ranks, 1, how, steps=6000, strategy=strategy, quick=False)
    require_named(tmp_path, found, 1, by=5999)


@pytest.mark.soak
def test_a_rank_of_a_stage_is_compared_with_its_peers(tmp_path: Path) -> None:
    """Of two stages with two ranks each."""
    strategy = MoEStrategy(pipeline_parallel=2, micro_batches=2)
    found = train(tmp_path, 4, 3, "stopped", steps=6000, strategy=strategy, model=Staged, quick=False)
    require_named(tmp_path, found, 3, by=5999)


@pytest.mark.soak
@pytest.mark.parametrize("strategy", ["moe", "ddp"])
def test_nobody_is_named_in_a_thousand_steps(strategy: str, tmp_path: Path) -> None:
    """Four ranks on however few cores there are."""
    found = train(tmp_path, 4, -1, "", steps=1200, strategy=strategy, quick=False)
    assert all(len(figures.factors) == 4 for _, figures, *_ in found), "there was a look"
    assert [step for step, *_ in found] == [0] * 4
    assert not any("is slow" in line for _, _, lines, _ in found for line in lines)
