"""What all trainings that are measured have in common: a Trainer that says little, one thread, and folders of their own."""

from __future__ import annotations

import logging
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer

from lightning_moe_ckpt.strategy import MoEStrategy
from lightning_moe_ckpt.tiers import shared_directory

_ADVICE = (
    r".*does not have many workers.*",
    r".*assuming the intent is to (save|load) in a single process.*",
    r".*your dataloader is not resumable.*",
    r".*isinstance\(treespec, LeafSpec\).*",
)


def bench_trainer(**options: Any) -> Trainer:
    """A Trainer without loggers and bars, with clipped gradients; `options` come on top."""
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return Trainer(**{"devices": 1, "strategy": MoEStrategy(), "gradient_clip_val": 1.0, **quiet, **options})


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch with one thread: copies and digests run beside training, as they do where training has a device."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def quiet_lightning() -> Iterator[None]:
    """Lines about devices, and advice on loaders and on other checkpoints, would bury the table."""
    with at_level("lightning.pytorch", logging.WARNING), warnings.catch_warnings():
        for message in _ADVICE:
            warnings.filterwarnings("ignore", message=message)
        yield


@contextmanager
def at_level(name: str, level: int) -> Iterator[None]:
    """The logger `name` with another level."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.setLevel(before)


@contextmanager
def bench_folders(parent: Path | None = None) -> Iterator[tuple[Path, Path]]:
    """A folder for checkpoints and one on the tmpfs, both gone afterwards, whatever killed processes left there."""
    with (
        tempfile.TemporaryDirectory(prefix="moe-ckpt-bench-", dir=parent) as folder,
        tempfile.TemporaryDirectory(prefix="moe-ckpt-bench-", dir=shared_directory()) as memory,
    ):
        yield Path(folder), Path(memory)
