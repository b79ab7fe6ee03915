"""Tokens that a fault costs, with experts chosen in turns, by load, and by popularity within a budget, side by side.

A router as the papers show it: a few experts of each layer have most tokens, and which they are drifts. Every step has a
generation with the same number of experts for all, and every step could be the last. Tokens at risk are those that no
copy has.

Sources: MOETION (2024), Figure 11: round robin has twice as many tokens at risk; skew drawn as in MoEvement (2024),
Appendix D.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from rich.table import Table
from torch import Tensor
from typing_extensions import override

from lightning_moe_ckpt.benchmarks._benchmark import Benchmark, Progress, positive, table_of
from lightning_moe_ckpt.metrics import load_skew
from lightning_moe_ckpt.policies import (
    LEVELS,
    Accounting,
    ExpertLayout,
    ExpertPolicy,
    PartialPolicy,
    Selection,
    SelectivePolicy,
)

_LAYERS, _TOKENS, _WARM_UP = 4, 4096, 20
_ALPHAS = (10.0, 0.3, 0.1)
"""Of the Dirichlet distribution from which shares are drawn: even, skewed, very skewed."""
_DRIFT_STEPS = 50
"""Steps in which one popularity turns into another."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SelectionFigure:
    """One way to choose, with one router."""

    selection: str
    skew: float
    """Normalised HHI of the tokens of one step, mean over layers and steps."""
    k: int
    """Experts per layer and generation."""
    num_experts: int
    """Per layer."""
    at_risk: float
    """Tokens that a fault would lose, mean over steps, as multiples of the tokens of one step."""
    worst: float
    """The same of the worst step."""
    relative: float
    """`at_risk` against that of round robin."""


class SelectionBench(Benchmark[SelectionFigure]):
    """See the module."""

    name = "selection"
    summary = "tokens that a fault costs, with experts saved in turns, by load and by popularity"

    @override
    def add_options(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--selection-experts", type=positive, default=16, help="per layer (default: %(default)s)")
        parser.add_argument("--selection-k", type=positive, default=4, help="per generation (default: %(default)s)")
        parser.add_argument("--selection-steps", type=positive, default=200, help="to train (default: %(default)s)")

    @override
    def measure(self, options: argparse.Namespace, progress: Progress) -> list[SelectionFigure]:
        figures = []
        for done, alpha in enumerate(_ALPHAS):
            progress(f"choosing with Dirichlet({alpha})", done, len(_ALPHAS))
            figures += compare(options.selection_experts, options.selection_k, options.selection_steps, alpha)
        return figures

    @override
    def table(self, figures: Sequence[SelectionFigure]) -> Table:
        first = figures[0]
        title = f"Tokens at risk in steps' worth, {first.k} of {first.num_experts} experts per layer and generation"
        return table_of(title, ["selection", "skew", "mean", "worst", "of round robin"], [_row(f) for f in figures])


def compare(num_experts: int, k: int, steps: int, alpha: float) -> list[SelectionFigure]:
    """All selections with the same tokens, round robin first."""
    tokens = _tokens(num_experts, steps, alpha)
    skew = statistics.mean(float(load_skew(row_E)) for step in tokens for row_E in torch.split(step, num_experts))
    policies: dict[str, tuple[ExpertPolicy, Mapping[str, int]]] = {
        "round robin": (PartialPolicy(k=k), {}),
        "load-aware (PEC)": (PartialPolicy(k=k, order="load_aware"), {}),
        "popularity (MOETION)": (SelectivePolicy(), dict.fromkeys(LEVELS, k * _LAYERS)),
    }
    risks = {name: _at_risk(policy, budgets, tokens, num_experts) for name, (policy, budgets) in policies.items()}
    baseline = statistics.mean(risks["round robin"])
    return [
        SelectionFigure(
            selection=name,
            skew=skew,
            k=k,
            num_experts=num_experts,
            at_risk=statistics.mean(found),
            worst=max(found),
            relative=statistics.mean(found) / baseline if baseline else 1.0,
        )
        for name, found in risks.items()
    ]


def _at_risk(
    policy: ExpertPolicy, budgets: Mapping[str, int], tokens: Sequence[Tensor], num_experts: int
) -> list[float]:
    """After each generation but the first ones: tokens that no copy has, in tokens of one step."""
    layouts = [ExpertLayout(layer=f"moe{i}", rank_of=(0,) * num_experts, nbytes=1) for i in range(_LAYERS)]
    accounting = Accounting.start([num_experts] * _LAYERS).take(0, Selection.everything(layouts))
    found = []
    for step, tokens_E in enumerate(tokens, start=1):
        accounting = accounting.add(tokens_E)
        chosen = policy.select(accounting.generations, accounting.tables(layouts), budgets)
        accounting = accounting.take(step, chosen)
        for level in LEVELS:
            accounting = accounting.complete(level, step)
        if step > _WARM_UP:
            found.append(float(accounting.unsaved("storage").sum()) / float(tokens_E.sum()))
    return found


def _tokens(num_experts: int, steps: int, alpha: float) -> list[Tensor]:
    """By step, int64 over all experts: shares that go from one draw to the next, each step drawn from them."""
    generator = torch.Generator().manual_seed(0)
    gamma = torch.full((_LAYERS, num_experts), alpha, dtype=torch.float64)
    draws = [torch._standard_gamma(gamma, generator=generator) for _ in range(-(-steps // _DRIFT_STEPS) + 1)]  # noqa: SLF001  # the public one takes no generator
    shares = [draw.clamp(min=1e-9) / draw.clamp(min=1e-9).sum(dim=1, keepdim=True) for draw in draws]
    found = []
    for step in range(steps):
        turn, part = step // _DRIFT_STEPS, (step % _DRIFT_STEPS) / _DRIFT_STEPS
        share_LE = (1 - part) * shares[turn] + part * shares[turn + 1]
        drawn_LT = torch.multinomial(share_LE, _TOKENS, replacement=True, generator=generator)
        counts_LE = torch.zeros(_LAYERS, num_experts, dtype=torch.int64)
        found.append(counts_LE.scatter_add_(1, drawn_LT, torch.ones_like(drawn_LT)).flatten())
    return found


def _row(figure: SelectionFigure) -> list[str]:
    numbers = [f"{figure.skew:.3f}", f"{figure.at_risk:.3f}", f"{figure.worst:.3f}", f"{figure.relative:.2f}"]
    return [figure.selection, *numbers]
