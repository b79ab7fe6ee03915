"""One rank of the training that `make demo` kills and resumes; a launcher starts it, and starts it again.

Nothing here knows about failures: the checkpoint callback is the only line that a script without them would not have.
Every rank writes a line per step, which survives its death, and its whole training state at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from typing_extensions import override

from corpus import TextCrops
from lightning_moe_ckpt import MoEStrategy
from lightning_moe_ckpt.callbacks import SparseCheckpoint
from lightning_moe_ckpt.session import Report
from lightning_moe_ckpt.testing import capture_end
from moe_gpt import Architecture, MoEGPT, Recipe


class Records(Callback):
    """Appends to `out/steps.rank<r>.jsonl` what happens when; each line is one write, so a SIGKILL loses none.

    Args:
        out: folder of this run.
    """

    def __init__(self, out: Path) -> None:
        self._out = out
        self._file = -1

    def write(self, event: str, **values: Any) -> None:
        line = {"event": event, "time": time.time(), **values}
        os.write(self._file, (json.dumps(line) + "\n").encode())

    def write_report(self, figures: Report) -> None:
        means = {"stall_seconds_per_step": figures.stall_seconds_per_step, "hooks_share": figures.overhead.hooks}
        self.write("report", **asdict(figures), **means)

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        path = self._out / f"steps.rank{trainer.global_rank}.jsonl"
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.write("begin", pid=os.getpid(), step=trainer.global_step)  # a process that recovers in place begins again

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        loss = outputs["loss"] if isinstance(outputs, Mapping) else outputs
        self.write(
            "step",
            step=trainer.global_step,
            loss=float(loss).hex(),
            nats_per_byte=float(trainer.callback_metrics["train/loss"]),
        )

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        bits = float(trainer.callback_metrics["val/bits_per_byte"])
        self.write("validation", step=trainer.global_step, bits_per_byte=bits.hex())

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        torch.save(capture_end(trainer, pl_module), self._out / f"end.rank{trainer.global_rank}.pt")


def main(argv: Sequence[str] | None = None) -> None:
    args = _parse(argv)
    torch.set_num_threads(1)  # ranks share this machine's cores
    seed_everything(args.seed, verbose=False)
    if args.accelerator != "cpu":  # fused attention adds up its gradients in any order
        torch.backends.cuda.enable_flash_sdp(False)
        torch.backends.cuda.enable_mem_efficient_sdp(False)
    model = MoEGPT(Architecture(num_blocks=args.blocks), Recipe(total_steps=args.steps))
    records = Records(args.out)
    # Without a target storage gets windows from the first one on: the demo ends before their cost would be known.
    checkpoint = (
        SparseCheckpoint(args.checkpoints, window=args.window, overhead_target=None) if args.checkpoints else None
    )
    trainer = Trainer(
        accelerator=args.accelerator,
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        strategy=MoEStrategy(expert_parallel=int(os.environ.get("WORLD_SIZE", "1"))),
        callbacks=[records, checkpoint] if checkpoint else [records],
        max_steps=args.steps,
        gradient_clip_val=1.0,
        num_sanity_val_steps=0,
        # Kernels that add in any order would give other bits in every run, failures or not.
        deterministic="warn" if args.accelerator != "cpu" else None,
        logger=False,
        enable_checkpointing=checkpoint is not None,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, TextCrops(train_crops=args.crops))
    if checkpoint is not None:
        records.write_report(checkpoint.report)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for records and the end state")
    parser.add_argument("--checkpoints", help="URL for checkpoints; without it none are taken")
    # A model this small would fit into one step whole, and `window="auto"` would find W = 1.
    parser.add_argument("--window", type=int, default=6, help="steps over which a checkpoint is spread")
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--crops", type=int, default=1920, help="per epoch, over all ranks")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--accelerator", choices=["cpu", "gpu", "auto"], default="cpu", help="gpu: one for each rank")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
