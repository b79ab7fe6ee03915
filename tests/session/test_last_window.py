"""The newest window as training ends: where one rank could not take it, storage on another waits for no marker."""

from __future__ import annotations

import logging
import time
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import tiny
import torch
from launcher import run_world
from lightning.pytorch import seed_everything
from torch import nn

from lightning_moe_ckpt.callbacks import DenseCheckpoint
from lightning_moe_ckpt.session._sealing import Sealing
from lightning_moe_ckpt.strategy import MoEStrategy


def test_training_ends_at_once_although_one_rank_could_not_take_the_newest_window(tmp_path: Path) -> None:
    """Without that, rank 0 would wait for the other's marker as long as for a commit, 120 s; the last step is stored all the same."""
    take = Sealing.take

    def work(rank: int) -> tuple[float, list[str], int]:
        said: list[str] = []
        handler = logging.Handler(logging.ERROR)
        handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("lightning_moe_ckpt").addHandler(handler)

        def taken(sealing: Sealing, window: Any, start: Any, *, step: int, disturbed: bool) -> None:
            take(sealing, window, start, step=step, disturbed=disturbed)
            if step == 4 and rank == 1:
                sealing.spoil(window, "spoiled by a test")

        seed_everything(1, verbose=False)
        checkpoint = DenseCheckpoint(tmp_path, every_n_steps=4)
        with patch.object(Sealing, "take", taken):
            module, data = tiny.ToZero(nn.Linear(4, 1)), tiny.rows(torch.ones(12, 4))
            tiny.fit(module, data, checkpoint, max_steps=6, devices=2, strategy=MoEStrategy())
        report = checkpoint.report
        return report.overhead.end_seconds, said, report.generations["storage"]

    began = time.monotonic()
    results = run_world(2, work, timeout=timedelta(seconds=100), process_group=False)
    assert time.monotonic() - began < 60
    for rank, (seconds, said, stored) in enumerate(results):
        assert seconds < 20
        assert stored == 6, "the last step"
        assert any("spoiled by a test" in line for line in said) == (rank == 1), said
