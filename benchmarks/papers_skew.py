"""Experts whose popularity is as uneven as a Dirichlet distribution makes it: what a window saves, what partial checkpoints lose.

Routers draw each token's expert from the distribution, by noise on their logits: real fits are killed, and the products of
matrices in the steps that are taken again are counted, operation by operation, as torch runs them.

Source: MoEvement (2026), Appendix D, Figs. 15 and 16.
"""

from __future__ import annotations

import multiprocessing
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from benchmarks.papers_plans import Rows, Way
from benchmarks.steps import lines_of, write_line
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
from lightning_moe_ckpt.callbacks import CheckpointArguments, PartialExpertCheckpoint, SparseCheckpoint
from lightning_moe_ckpt.metrics import load_skew
from lightning_moe_ckpt.policies import Popularity
from lightning_moe_ckpt.process import compute_alone
from lightning_moe_ckpt.testing import Attempt, Kill, run_attempts
from lightning_moe_ckpt.testing._records import JsonLines, Record

# Shape suffixes: T tokens, E experts.

ALPHAS = {0.0: None, 0.25: 0.0469, 0.5: 0.0156, 0.75: 0.0052, 0.99: 0.000158}
"""Parameter of the Dirichlet distribution by the skew that it has on average, as the paper has them."""
_PAPER_SLOTS, _PAPER_EXPERTS = 512 * 2048 * 8, 64
_DRAWS = 200
_SIZE = ModelSize(num_blocks=2, model_dim=32, num_experts=32, expert_dim=128, context=32, batch_size=16, balance=0.0)
_WINDOW, _REORDER = 6, 10
_KILL = 34
"""Batch of the kill: two looks at the order are over."""
_FAULTS = 6
ReplayOrder = Literal["fixed", "popularity", "partial"]


def drawn(alpha: float | None, experts: int, draw: np.random.Generator) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return logarithms of shares: equal ones without `alpha`, else of a symmetric Dirichlet distribution."""
    if alpha is None:
        return np.full(experts, -np.log(experts))
    # log of Gamma(alpha), as Gamma(alpha + 1) * U ** (1 / alpha): by itself it would be 0 for nearly all experts.
    logs = np.log(draw.standard_gamma(alpha + 1, experts)) + np.log(draw.random(experts)) / alpha
    top = logs.max()
    return np.asarray(logs - top - np.log(np.exp(logs - top).sum()))


def activated(way: Way) -> Rows:
    """Experts with a token, by skew, at the paper's tokens per step: MoEvement, Fig. 15."""
    rows, draw = Rows(), np.random.default_rng(way.seed)
    for skew, alpha in ALPHAS.items():
        counts = [draw.multinomial(_PAPER_SLOTS, np.exp(drawn(alpha, _PAPER_EXPERTS, draw))) for _ in range(_DRAWS)]
        rows[f"skew, S={skew:g}"] = statistics.fmean(float(load_skew(torch.from_numpy(each))) for each in counts)
        active = sorted(int((each > 0).sum()) for each in counts)
        for name, part in (("first quartile", 4), ("median", 2)):
            rows[f"experts with a token, S={skew:g}, {name}"] = float(active[len(active) // part])
    return rows


class _Forced(nn.Module):
    """Draws each token's expert: logarithms of shares with Gumbel noise have them in the place of logits."""

    def __init__(self, logs_E: Tensor) -> None:
        super().__init__()
        self.logs_E = logs_E

    @override
    def forward(self, logits_TE: Tensor) -> Tensor:
        noise_TE = -torch.log(-torch.log(torch.rand_like(logits_TE).clamp(1e-20, 1 - 1e-7)))
        # The router stays in the graph.
        return 0.0 * logits_TE + self.logs_E + noise_TE


class _SkewModel(BenchModel):
    """`BenchModel` with one expert per token, drawn."""

    def __init__(self, size: ModelSize, alpha: float | None) -> None:
        super().__init__(size)
        draw = np.random.default_rng(1)
        for layer in self.moe_layers():
            layer.top_k = 1
            layer.normalize_gate = False
            logs_E = torch.from_numpy(drawn(alpha, size.num_experts, draw)).float().clamp(min=-1e4)
            forced = _Forced(logs_E)
            layer.gate.register_forward_hook(lambda _, __, out, forced=forced: forced(out))


class CountedProducts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts multiplications in products of matrices."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in _PRODUCTS:
            self.count += out.numel() * args[_PRODUCTS[func]].shape[-1]
        return out


_PRODUCTS: dict[Any, int] = {
    torch.ops.aten.mm.default: 0,
    torch.ops.aten.bmm.default: 0,
    torch.ops.aten.addmm.default: 1,
}
"""Products, and which argument is the left factor."""


class _Counts(Callback):
    """Writes a line per batch, with the multiplications since the line before."""

    def __init__(
        self, record: str, mode: CountedProducts, checkpoint: PartialExpertCheckpoint | SparseCheckpoint
    ) -> None:
        self._lines, self._mode, self._checkpoint = JsonLines(record), mode, checkpoint

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        write_line(self._lines, "begin", step=trainer.global_step)

    @override
    def on_train_batch_start(self, *_: object) -> None:
        self._mode.count = 0

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: object) -> None:
        lost = self._checkpoint.report.lost
        more = {} if lost is None else {"plt": lost.plt, "k": lost.k}
        write_line(self._lines, "step", step=trainer.global_step, count=self._mode.count, **more)


@dataclass(frozen=True, kw_only=True)
class SkewFit:
    """A fit that is killed; picklable."""

    order: ReplayOrder
    """Order of capture of windows, or `partial` checkpoints."""
    skew: float
    steps: int
    kills: tuple[int, ...]
    """Batches of each attempt that is killed."""
    memory: str = ""
    record: str = ""

    def __call__(self, attempt: Attempt) -> Record:
        """Run an attempt."""
        own_memory(self.memory, lost=False)
        seed_everything(1, verbose=False)
        checkpoint, mode = self._checkpoint(attempt.url), CountedProducts()
        with quiet_lightning(), patient_storage(), mode:
            trainer = bench_trainer(
                accelerator="cpu",
                strategy="auto",
                callbacks=attempt.callbacks(_Counts(self.record, mode, checkpoint), checkpoint),
                max_steps=self.steps,
            )
            trainer.fit(_SkewModel(_SIZE, ALPHAS[self.skew]), random_tokens(_SIZE, self.steps + 1))
        return {}

    def _checkpoint(self, url: str) -> PartialExpertCheckpoint | SparseCheckpoint:
        shared: CheckpointArguments = {"overhead_target": None, "untouched": ["callback.*"]}
        if self.order == "partial":
            return PartialExpertCheckpoint(url, k=4, select="sequential", plt_budget=0.0375, **shared)
        if self.order == "fixed":
            return SparseCheckpoint(url, window=_WINDOW, order="fixed", **shared)
        popularity = Popularity(reorder_every_n_steps=_REORDER)
        return SparseCheckpoint(url, window=_WINDOW, order="popularity", popularity=popularity, **shared)

    def run(self) -> tuple[SkewFit, list[list[Record]]]:
        """Run all attempts, in a process of its own; return lines by attempt."""
        with bench_folders() as (folder, memory):
            (folder / "run").mkdir()
            record = folder / "lines"
            fit = replace(self, memory=str(memory), record=str(record))
            kills = [Kill(phase="after_backward", batches=batch, settle=60.0) for batch in self.kills]
            run_attempts(fit, url=(folder / "run").as_uri(), workdir=folder, kills=kills, timeout=300)
            attempts = list[list[Record]]()
            for line in lines_of(record, "begin", "step"):
                if line["what"] == "begin":
                    attempts.append([])
                else:
                    attempts[-1].append(line)
        return self, attempts


def repeated(attempts: Sequence[Sequence[Record]], window: int) -> tuple[float, float]:
    """Return the multiplications of replay, in whole steps, and its part of what as many whole steps have.

    Args:
        attempts: lines of the attempt that was killed, and of the next one.
        window: steps of a window, of which all but the last are replayed with frozen operators.
    """
    before, after = attempts
    whole = statistics.median(line["count"] for line in before)
    replayed = [line["count"] for line in after[: window - 1]]
    return sum(replayed) / whole, sum(replayed) / (whole * len(replayed))


@cache
def _all(skews: tuple[float, ...] = tuple(ALPHAS)) -> dict[tuple[float, ReplayOrder], list[list[Record]]]:
    fits = [
        SkewFit(order=order, skew=skew, steps=_KILL + _WINDOW, kills=(_KILL,))
        for skew in skews
        for order in ("fixed", "popularity")
    ]
    steps = 20 * _FAULTS
    fits += [SkewFit(order="partial", skew=skew, steps=steps, kills=(17,) * _FAULTS) for skew in (skews[0], skews[-1])]
    with multiprocessing.get_context("fork").Pool(2, initializer=compute_alone) as pool:
        return {(fit.skew, fit.order): lines for fit, lines in pool.imap_unordered(SkewFit.run, fits)}


def recomputation(_: Way) -> Rows:
    """Work of replay by skew and order, and what partial checkpoints lose: MoEvement, Fig. 16."""
    found, rows = _all(), Rows({"least possible": 100 * 2 / 3})
    for skew in ALPHAS:
        parts = {order: 100 * repeated(found[skew, order], _WINDOW)[1] for order in ("fixed", "popularity")}
        rows |= {f"work of replay, S={skew:g}, {order}": part for order, part in parts.items()}
        rows[f"less by reordering, S={skew:g}"] = 100 * (1 - parts["popularity"] / parts["fixed"])
    for skew in (0.0, 0.99):
        last = found[skew, "partial"][-1][-1]
        rows[f"MoC's K at the end, S={skew:g}"] = 100 * last["k"] / _SIZE.num_experts
        rows[f"MoC's PLT at the end, S={skew:g}"] = 100 * last["plt"]
    return rows
