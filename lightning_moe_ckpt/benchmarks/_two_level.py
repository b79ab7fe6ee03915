"""What the loss of nodes costs with partial checkpoints, with what surviving nodes' memory has and without.

Real processes, each a node with shared memory of its own, train with experts spread over them, and take a generation
after every step. At each fault all are killed, and one node's memory is gone; in the run beside it every node's is, so
that all comes from storage. There are no copies on other nodes, as in the paper: they would make up for lost nodes.

Source: PEC (2024), Sec. 4.2, Figure 7.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from rich.table import Table
from typing_extensions import override

from lightning_moe_ckpt.benchmarks._benchmark import Accelerator, Progress, accelerator_for, table_of
from lightning_moe_ckpt.benchmarks._fits import quiet_lightning
from lightning_moe_ckpt.benchmarks._model import ModelSize, ShardedBenchModel, random_tokens
from lightning_moe_ckpt.callbacks import PartialExpertCheckpoint
from lightning_moe_ckpt.errors import CheckpointError
from lightning_moe_ckpt.strategy import MoEStrategy
from lightning_moe_ckpt.testing import Kill, Life, LifeFailed, run_lives
from lightning_moe_ckpt.tiers import shared_directory

Loss = Literal["node", "cluster"]
Pair = tuple[int, int]
"""Experts per layer that each generation takes to memory, and to storage."""

PAIRS: tuple[Pair, ...] = ((1, 1), (2, 1), (4, 1), (8, 1), (12, 1), (2, 2), (4, 2), (12, 2))
_EXPERTS_PER_NODE = 4
_STEPS_BETWEEN = 7
"""From the start to the first fault, and from one to the next."""
_PATIENCE = 60.0
"""Seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TwoLevelFigure:
    """One pair, after the last fault."""

    num_nodes: int
    num_experts: int
    """Per layer."""
    num_faults: int
    snapshot_k: int
    """Experts per layer that each generation takes to memory."""
    k: int
    """Of them, those that it takes to storage."""
    plt: float
    """Portion of lost tokens, with the memory of nodes that survived."""
    storage_plt: float
    """The same faults, all from storage."""


@dataclass(frozen=True, kw_only=True)
class PartialFit:
    """A run that meets faults; picklable."""

    pair: Pair
    loss: Loss
    size: ModelSize
    max_steps: int
    memory: str
    """Folder on a tmpfs with a folder per node, which is that node's shared memory."""
    accelerator: Accelerator

    def __call__(self, life: Life) -> dict[str, Any]:
        """What a life runs; gives PLT over all faults until now."""
        node = Path(self.memory) / f"node{life.rank}"
        if life.index and (self.loss == "cluster" or life.rank == lost_rank(life.index - 1, life.world_size)):
            shutil.rmtree(node)
        node.mkdir(exist_ok=True)
        os.environ["MOE_CKPT_SHARED_MEMORY"] = str(node)
        torch.manual_seed(0)
        snapshot_k, k = self.pair
        checkpoint = PartialExpertCheckpoint(life.url, k=k, snapshot_k=snapshot_k, plt_budget=None, replicas=0)
        with quiet_lightning():
            trainer = Trainer(
                accelerator=self.accelerator,
                devices=life.world_size,
                strategy=MoEStrategy(expert_parallel=life.world_size),
                callbacks=life.callbacks(_EachIsStored(), checkpoint),
                max_steps=self.max_steps,
                logger=False,
                enable_progress_bar=False,
                enable_model_summary=False,
            )
            trainer.fit(ShardedBenchModel(self.size), random_tokens(self.size, life.world_size * self.max_steps))
        lost = checkpoint.report.lost
        assert lost is not None
        return {"plt": lost.plt}


class _EachIsStored(Callback):
    """Waits for storage at every step, so that it gets each generation and runs differ in nothing else."""

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: object) -> None:
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        (own,) = (each for each in callbacks if isinstance(each, PartialExpertCheckpoint))
        if not own.wait_committed(_PATIENCE):
            raise CheckpointError(f"storage has not finished a generation of a tiny model within {_PATIENCE:g} s")


def lost_rank(fault: int, num_nodes: int) -> int:
    """Which node a fault takes: each in turn, the last one first."""
    return num_nodes - 1 - fault % num_nodes


def measure_two_levels(options: argparse.Namespace, progress: Progress) -> list[TwoLevelFigure]:
    """PLT of every pair, with the loss of a node at a time and of all."""
    nodes, faults, figures = options.partial_nodes, options.partial_faults, []
    accelerator = accelerator_for(options.accelerator, nodes)
    pairs = [pair for pair in options.pairs if pair[0] <= _EXPERTS_PER_NODE * nodes]
    for done, pair in enumerate(pairs):
        progress(f"killed and resumed: K {pair[0]} in memory, {pair[1]} in storage", done, len(pairs))
        figures.append(
            TwoLevelFigure(
                num_nodes=nodes,
                num_experts=_EXPERTS_PER_NODE * nodes,
                num_faults=faults,
                snapshot_k=pair[0],
                k=pair[1],
                plt=_plt(pair, "node", nodes, faults, accelerator),
                storage_plt=_plt(pair, "cluster", nodes, faults, accelerator),
            )
        )
    return figures


def _plt(pair: Pair, loss: Loss, nodes: int, faults: int, accelerator: Accelerator) -> float:
    size = ModelSize(
        num_blocks=2, model_dim=32, num_experts=_EXPERTS_PER_NODE * nodes, expert_dim=32, context=16, batch_size=4
    )
    steps = [_STEPS_BETWEEN * (fault + 1) for fault in range(faults)]
    kills = [
        Kill(phase="forward", step=step, rank=lost_rank(fault, nodes), settle=_PATIENCE)
        for fault, step in enumerate(steps)
    ]
    with (
        tempfile.TemporaryDirectory(prefix="moe-ckpt-bench-") as folder,
        tempfile.TemporaryDirectory(prefix="moe-ckpt-bench-", dir=shared_directory()) as memory,
    ):
        fit = PartialFit(
            pair=pair, loss=loss, size=size, max_steps=steps[-1] + 2, memory=memory, accelerator=accelerator
        )
        url = (Path(folder) / "run").as_uri()
        try:
            lives = run_lives(fit, url=url, workdir=Path(folder), world_size=nodes, kills=kills, timeout=300)
        except LifeFailed as failed:
            raise CheckpointError(f"K {pair[0]} in memory, {pair[1]} in storage, {loss} lost: {failed}") from failed
        return float(lives[-1].returned(0)["plt"])


def two_level_table(figures: Sequence[TwoLevelFigure]) -> Table:
    """Both PLTs side by side."""
    first = figures[0]
    title = (
        f"Portion of lost tokens after {first.num_faults} faults, each of which takes 1 of {first.num_nodes} nodes: "
        f"{first.num_experts} experts per layer, a generation per step"
    )
    columns = ["K in memory, in storage", "two levels", "storage alone", "less"]
    table = table_of(title, columns, [_row(figure) for figure in figures])
    table.caption = (
        "two levels: experts come from memory of nodes that survive, or from storage; storage alone: the same faults with "
        "every node's memory lost; no copies on other nodes"
    )
    return table


def _row(figure: TwoLevelFigure) -> list[str]:
    less = 1 - figure.plt / figure.storage_plt if figure.storage_plt else 0.0
    return [f"{figure.snapshot_k}, {figure.k}", f"{figure.plt:.1%}", f"{figure.storage_plt:.1%}", f"{less:.0%}"]


def pair_of(text: str) -> Pair:
    """Type of an option that names experts in memory and in storage, as `4,1`."""
    parts = text.split(",")
    if len(parts) != 2 or not all(part.strip().isdigit() for part in parts):
        raise argparse.ArgumentTypeError(f"{text} must be two numbers, such as 4,1")
    snapshot_k, k = (int(part) for part in parts)
    if not 1 <= k <= snapshot_k:
        raise argparse.ArgumentTypeError(
            f"{text}: what goes to storage goes to memory first, so give the larger one first"
        )
    return snapshot_k, k
