"""Measure what choosing experts by their load brings: real fits on two nodes, with experts in turns, by load and by budget.

All take equally many bytes. A generation is taken at each step, and a step waits until it is stored, so that the choice
depends on the policy and not on how busy the disk is. What is counted comes from the ledger that the engine itself keeps,
step by step, and from what copies on the other node took on the wire.

Sources: PEC (2024), Algorithm 1; MOETION (2024), Algorithms 1 and 3, Sec. 5.2 (experts stay chosen for a while) and 7.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from types import SimpleNamespace
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from rich.table import Table
from typing_extensions import override

from lightning_moe_ckpt._units import size_text
from lightning_moe_ckpt.benchmarks._benchmark import Progress, table_of
from lightning_moe_ckpt.benchmarks._fits import (
    BenchModel,
    ModelSize,
    bench_folders,
    bench_trainer,
    own_memory,
    patient_storage,
    quiet_lightning,
    random_tokens,
)
from lightning_moe_ckpt.callbacks import CheckpointArguments, PartialExpertCheckpoint, SelectiveExpertCheckpoint
from lightning_moe_ckpt.errors import CheckpointError, ConfigurationError
from lightning_moe_ckpt.strategy import MoEStrategy
from lightning_moe_ckpt.testing import Attempt, AttemptFailed, Kill, run_attempts

Choice = Literal["in turns", "load-aware", "selective"]
SYSTEMS: tuple[Choice, ...] = ("in turns", "load-aware", "selective")
NODES = 2
_STATE_NBYTES = 12
"""Bytes per parameter: fp32 weights with both moments."""
_SKIPPED = 10
"""Steps at the start that do not count: nothing has a copy then."""
_SKEWS = {"even": 0.0, "skewed": 0.15, "steep": 0.4}
"""By which a router's logits fall from one expert to the next; what tokens add to them deviates by about 0.6."""
_COLUMNS = (
    *("router", "experts taken", "chosen", "taken again", "at risk, memory", "at risk, storage", "of turns"),
    *("sent to the other node", "of whole bytes"),
)
_CAPTION = """\
taken again: part of the experts of a generation that the one before it had; a choice by chance has as many as are taken
at risk: tokens that only live weights have, mean over steps; losing the process costs those, or the node, where storage is all
of turns: tokens at risk of memory, relative to those of experts in turns
of whole bytes: sent as gradients where an expert stays chosen, relative to sending every state; in turns states are sent"""


@dataclass(frozen=True, kw_only=True, slots=True)
class SelectionFigure:
    """One policy, share and router."""

    system: Choice
    skew: str
    """Name of the router's."""
    k: int
    """Experts of each layer, or the bytes of so many."""
    taken: float
    """Experts of each layer that a generation takes, on average."""
    num_experts: int
    repeats: float
    """Part of these that the generation before took too."""
    at_risk: dict[str, float]
    """By level, mean tokens that are in live weights only."""
    wire_nbytes: float
    """Bytes per generation that a rank has sent to the other node."""
    wire_share: float
    """Relative to the bytes of the segments; 1 where no gradients are sent."""


def measure(options: SimpleNamespace, progress: Progress) -> list[SelectionFigure]:
    """Run the benchmark."""
    size = ModelSize(num_blocks=2, model_dim=64, num_experts=16, expert_dim=96, batch_size=4)
    ks = [max(1, round(share * size.num_experts)) for share in _shares(options.shares)]
    cases = list(product(options.routers, ks, SYSTEMS))
    figures = []
    for done, (skew, k, system) in enumerate(cases):
        progress(f"{skew}, {k} of {size.num_experts}, {system}", done, len(cases))
        fit = SelectionFit(system=system, skew=skew, k=k, size=size, steps=options.selection_steps)
        figures.append(figure_of(fit))
    return figures


def _shares(text: str) -> list[float]:
    try:
        found = [float(each) for each in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(0 < each <= 1 for each in found):
        raise ConfigurationError(f"`--shares {text}` must be parts of all experts from 0 to 1, such as 0.25,0.4.")
    return found


def table(figures: Sequence[SelectionFigure]) -> Table:
    """Return the figures for people."""
    turns = {(figure.skew, figure.k): figure for figure in figures if figure.system == "in turns"}
    rows = []
    for figure in figures:
        base = turns[figure.skew, figure.k].at_risk["memory"]
        rows.append([
            *(figure.skew, f"{figure.taken:.1f} of {figure.num_experts}", figure.system, f"{figure.repeats:.2f}"),
            *(f"{figure.at_risk[level]:.0f}" for level in ("memory", "storage")),
            *(f"{figure.at_risk['memory'] / base:.2f}", size_text(figure.wire_nbytes), f"{figure.wire_share:.0%}"),
        ])  # fmt: skip
    return table_of("Choosing experts by what is at risk", _COLUMNS, rows, _CAPTION)


@dataclass(frozen=True, kw_only=True)
class SelectionFit:
    """One fit on two nodes of one process each; picklable."""

    system: Choice
    skew: str
    k: int
    """Experts of each layer, or the bytes of so many."""
    size: ModelSize
    steps: int
    snapshot_k: int | None = None
    """Experts of each layer that memory gets, `k` if `None`; not of `selective`."""
    expert_parallel: int = 1
    delta: Literal["lossless"] | None = "lossless"
    """Whether gradients may be sent where an expert stays chosen; of `selective`."""
    replicas: int | Literal["auto"] = "auto"
    memory: str = ""
    """Folder on a tmpfs with a folder per node; that of one that is killed loses what it has."""

    def __call__(self, attempt: Attempt) -> dict[str, Any]:
        """Run it, and return what its ledger and its copies said."""
        own_memory(f"{self.memory}/node{attempt.rank}", lost=attempt.index > 0 and attempt.rank == NODES - 1)
        checkpoint = self._checkpoint(attempt.url)
        watch = _Watch(checkpoint)
        with quiet_lightning(), patient_storage():
            trainer = bench_trainer(
                devices=attempt.world_size,
                accelerator="cpu",
                strategy=MoEStrategy(expert_parallel=self.expert_parallel),
                callbacks=attempt.callbacks(watch, checkpoint) if attempt.kill is not None else [watch, checkpoint],
                max_steps=self.steps,
            )
            torch.manual_seed(0)
            model = _SkewedModel(self.size, _SKEWS[self.skew])
            trainer.fit(model, random_tokens(self.size, attempt.world_size * (self.steps + 1)))
        found, sent = checkpoint.report, checkpoint.report.deltas
        plt = found.lost.plt if found.lost is not None else 0.0
        wire = sent.nbytes + sent.whole_nbytes if sent is not None else 0
        whole = sent.segments_nbytes + sent.whole_nbytes if sent is not None else 0
        # Without gradients all of a segment goes to the other node.
        return {
            "wire": wire or found.nbytes_captured,
            "whole": whole or found.nbytes_captured,
            "plt": plt,
            **watch.figures(),
        }

    def _checkpoint(self, url: str) -> PartialExpertCheckpoint | SelectiveExpertCheckpoint:
        # All of it is sent, as where experts are on one node each: what gradients save is told.
        shared: CheckpointArguments = {"replicas": self.replicas, "overhead_target": None, "redundancy": False}
        if self.system == "selective":
            budget = self._budget()
            return SelectiveExpertCheckpoint(url, local_budget=budget, remote_budget=budget, delta=self.delta, **shared)
        return PartialExpertCheckpoint(
            url,
            k=self.k,
            snapshot_k=self.snapshot_k,
            select="sequential" if self.system == "in turns" else "load_aware",
            plt_budget=None,
            **shared,
        )

    def _budget(self) -> int:
        """Return the bytes of one rank with the dense part and `k` experts per layer, of which each rank writes its share."""
        with torch.device("meta"):
            model = BenchModel(self.size)
        layers = [sum(p.numel() for _, p in layer.expert_parameters()) for layer in model.moe_layers()]
        expert = layers[0] // self.size.num_experts
        params = self.size.num_params() - sum(layers) + self.k * len(layers) * expert
        # Nearly two shares of an expert besides, for the journal and headers: with less, one was not taken.
        return _STATE_NBYTES * (params // NODES + expert * 9 // 10)


class _SkewedModel(BenchModel):
    """The logits of each router fall from expert to expert, from another one on in each layer."""

    def __init__(self, size: ModelSize, step: float) -> None:
        super().__init__(replace(size, num_blocks=0))
        self.size, self._step = size, step

    @override
    def configure_model(self) -> None:
        if len(self.blocks):
            return
        self.blocks = self.blocks_of(self.size)
        norms = [module for name, module in self.named_modules() if name.endswith("norm_moe")]
        with torch.no_grad():
            for i, (norm, layer) in enumerate(zip(norms, self.moe_layers(), strict=True)):
                logits_E = -self._step * torch.arange(layer.num_experts).roll(3 * i)
                # Of a normalised token all but the bias adds up to nothing.
                dict(norm.named_parameters())["bias"].fill_(1.0)
                layer.gate.weight.add_(logits_E[:, None] / layer.d_model)


class _Watch(Callback):
    """Read the engine's ledger at every step, once what was taken is stored."""

    def __init__(self, checkpoint: PartialExpertCheckpoint | SelectiveExpertCheckpoint) -> None:
        self._checkpoint = checkpoint
        self._before = set[int]()
        self._taken: list[int] = []
        self._again: list[int] = []
        self._at_risk: dict[str, list[int]] = {"memory": [], "storage": []}

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: object) -> None:
        ledger = self._checkpoint.accounting
        if ledger is None or not ledger.generations or not self._checkpoint.wait_committed():
            return
        newest = set((ledger.taken == ledger.generations - 1).nonzero()[:, 0].tolist())
        if trainer.global_step > _SKIPPED:
            self._taken.append(len(newest))
            self._again.append(len(newest & self._before))
            for level, found in self._at_risk.items():
                found.append(int(ledger.unsaved(level).sum()))
        self._before = newest

    def figures(self) -> dict[str, Any]:
        """Return totals and means."""
        at_risk = {level: statistics.fmean(found) for level, found in self._at_risk.items()}
        return {"taken": sum(self._taken), "again": sum(self._again), "steps": len(self._taken), "at_risk": at_risk}


def run_fit(fit: SelectionFit, kill: Kill | None = None) -> list[dict[str, Any]]:
    """Run a fit, and again after `kill`; return what the last attempt said, by rank.

    Raises:
        CheckpointError: it did not end as scripted.
    """
    with bench_folders() as (folder, memory):
        (folder / "run").mkdir()
        try:
            *_, last = run_attempts(
                replace(fit, memory=str(memory)),
                url=(folder / "run").as_uri(),
                workdir=folder,
                world_size=NODES,
                kills=[] if kill is None else [kill],
                timeout=300,
            )
        except AttemptFailed as failed:
            raise CheckpointError(f"{fit.system}, {fit.skew}: {failed}") from failed
        return [last.returned(rank) for rank in range(NODES)]


def figure_of(fit: SelectionFit) -> SelectionFigure:
    """Run a fit, and return what was counted."""
    ranks = run_fit(fit)
    first, layers = ranks[0], fit.size.num_blocks
    generations = fit.steps * NODES
    return SelectionFigure(
        system=fit.system,
        skew=fit.skew,
        k=fit.k,
        taken=first["taken"] / first["steps"] / layers,
        num_experts=fit.size.num_experts,
        repeats=first["again"] / first["taken"],
        at_risk={level: number / layers for level, number in first["at_risk"].items()},
        wire_nbytes=sum(rank["wire"] for rank in ranks) / generations,
        wire_share=sum(rank["wire"] for rank in ranks) / sum(rank["whole"] for rank in ranks),
    )
