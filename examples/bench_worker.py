"""One rank of the throughput measurement of `make bench`; torchrun starts it.

The variants take turns in one job, so that what else the machine does hits all alike. What is measured is the time
from the end of one optimizer step to the end of the next, whatever happens in between.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from typing_extensions import override

from corpus import TextCrops
from lightning_moe_ckpt import MoEStrategy
from lightning_moe_ckpt.callbacks import DenseCheckpoint, SparseCheckpoint
from moe_gpt import Architecture, MoEGPT, Recipe

VARIANTS = ("none", "dense", "sparse")


class StepTimes(Callback):
    """Seconds between the ends of consecutive steps.

    Args:
        warm_up: steps that are left out: generation 0 is written in the first, the window is planned in the next.
    """

    def __init__(self, warm_up: int) -> None:
        self._warm_up = warm_up
        self._last = 0.0
        self.seconds: list[float] = []

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        now = time.perf_counter()
        if trainer.global_step > self._warm_up:
            self.seconds.append(now - self._last)
        self._last = now


def _checkpoint(variant: str, folder: Path, window: int) -> DenseCheckpoint | SparseCheckpoint | None:
    if variant == "dense":
        return DenseCheckpoint(folder.as_uri(), every_n_steps=1)
    if variant == "sparse":
        return SparseCheckpoint(folder.as_uri(), window=window)
    return None


def _measure(variant: str, turn: int, args: argparse.Namespace) -> dict[str, Any]:
    """Train from scratch for some steps; figures of this rank."""
    seed_everything(1, verbose=False)
    checkpoint = _checkpoint(variant, args.out / f"{variant}{turn}", args.window)
    times = StepTimes(args.warm_up)
    trainer = Trainer(
        accelerator="cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        strategy=MoEStrategy(expert_parallel=int(os.environ.get("WORLD_SIZE", "1"))),
        callbacks=[times, checkpoint] if checkpoint else [times],
        max_steps=args.warm_up + args.steps,
        gradient_clip_val=1.0,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=checkpoint is not None,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(MoEGPT(Architecture(num_blocks=args.blocks), Recipe()), TextCrops())
    figures: dict[str, Any] = {"variant": variant, "seconds": times.seconds}
    if checkpoint is not None:
        report = checkpoint.report
        figures["stall"] = report.stall_seconds_per_step
        figures["nbytes"], figures["dense_nbytes"] = report.nbytes_per_step, report.dense_nbytes
        figures["window"] = report.window
    return figures


def main(argv: Sequence[str] | None = None) -> None:
    """Measure every variant in every turn; rank 0 writes `throughput.json`."""
    args = _parse(argv)
    torch.set_num_threads(1)  # ranks share this machine's cores
    figures = [_measure(variant, turn, args) for turn in range(args.turns) for variant in VARIANTS]
    if os.environ.get("RANK", "0") == "0":
        (args.out / "throughput.json").write_text(json.dumps(figures))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20, help="measured steps per turn and variant")
    parser.add_argument("--warm-up", type=int, default=8)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--window", type=int, default=6)
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
