"""Bytes of the rank that writes most in a partial generation, dense state shared equally and adaptively; and tokens lost.

For what the loss of nodes costs see `_two_level`. For bytes the model is the paper's: GPT-2 small with experts in every other layer, one expert of each layer per rank, 12 bytes per
parameter. Every rank writes its pieces of the experts whose turn it is; checkpoints take as long as the rank with most
bytes does. The paper reports 11.7 % less time.

Source: PEC (2024), Sec. 4.2.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table
from typing_extensions import override

from lightning_moe_ckpt.benchmarks._benchmark import Benchmark, Progress, megabytes, positive, table_of
from lightning_moe_ckpt.benchmarks._two_level import (
    PAIRS,
    TwoLevelFigure,
    measure_two_levels,
    pair_of,
    two_level_table,
)
from lightning_moe_ckpt.operators import ParamSlice
from lightning_moe_ckpt.policies import (
    LEVELS,
    Accounting,
    ExpertLayout,
    PartialPolicy,
    RecordPiece,
    Selection,
    WrittenPart,
    assign_adaptively,
    assign_writers,
)

NBYTES = 12
"""Per parameter: fp32 weights with two moments."""
_DIM, _VOCABULARY, _CONTEXT = 768, 50_257, 1024
_BLOCKS, _MOE_LAYERS = 12, 6
_FEED_FORWARD = ((_DIM, 4 * _DIM), (4 * _DIM,), (4 * _DIM, _DIM), (_DIM,))
_ATTENTION = ((_DIM, 3 * _DIM), (3 * _DIM,), (_DIM, _DIM), (_DIM,), (_DIM,), (_DIM,), (_DIM,), (_DIM,))


@dataclass(frozen=True, kw_only=True, slots=True)
class PartialFigure:
    """One K."""

    num_ranks: int
    num_experts: int
    """Per layer."""
    k: int
    """Experts per layer and generation."""
    average_nbytes: float
    """Per rank and generation."""
    equal_nbytes: int
    """Of the rank that writes most, median over generations of a round; dense state in equal shares (EDPS)."""
    adaptive_nbytes: int
    """The same with ADPS."""

    @property
    def saved(self) -> float:
        """Part of the time that adaptive sharding saves, as far as bytes are time."""
        return 1 - self.adaptive_nbytes / self.equal_nbytes


class PartialBench(Benchmark[PartialFigure | TwoLevelFigure]):
    """See the module."""

    name = "partial"
    summary = "partial generations: peak bytes per rank, and tokens lost with two levels and with storage alone"

    @override
    def add_options(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--partial-ranks", type=positive, default=8, help="of the job (default: %(default)s)")
        parser.add_argument("--partial-experts", type=positive, default=8, help="per layer (default: %(default)s)")
        parser.add_argument(
            "--pairs",
            nargs="+",
            type=pair_of,
            default=PAIRS,
            metavar="M,S",
            help=f"experts per layer in memory and in storage (default: {' '.join(f'{m},{s}' for m, s in PAIRS)})",
        )
        parser.add_argument(
            "--partial-nodes", type=positive, default=3, help="processes that are killed (default: %(default)s)"
        )
        parser.add_argument("--partial-faults", type=positive, default=2, help="kills of each (default: %(default)s)")

    @override
    def measure(self, options: argparse.Namespace, progress: Progress) -> list[PartialFigure | TwoLevelFigure]:
        ks = [2**i for i in range(options.partial_experts.bit_length()) if 2**i <= options.partial_experts]
        figures: list[PartialFigure | TwoLevelFigure] = []
        for done, k in enumerate(ks):
            progress(f"sharding with K = {k}", done, len(ks))
            figures.append(_figure(options.partial_ranks, options.partial_experts, k))
        return figures + measure_two_levels(options, progress)

    @override
    def table(self, figures: Sequence[PartialFigure | TwoLevelFigure]) -> Table:
        tables = Table.grid(padding=(1, 0))
        tables.add_row(_sharding([each for each in figures if isinstance(each, PartialFigure)]))
        tables.add_row(two_level_table([each for each in figures if isinstance(each, TwoLevelFigure)]))
        return tables


def _sharding(figures: Sequence[PartialFigure]) -> Table:
    title = f"Bytes per rank and generation, {figures[0].num_ranks} ranks, {figures[0].num_experts} experts per layer"
    columns = ["K", "average", "equal shares, peak", "adaptive, peak", "less"]
    return table_of(title, columns, [_row(figure) for figure in figures])


def _figure(num_ranks: int, num_experts: int, k: int) -> PartialFigure:
    dense, layouts = _dense(num_experts), _layouts(num_ranks, num_experts)
    ranks = range(num_ranks)
    equal_parts = assign_writers(dense, ranks)
    averages, equal, adaptive = [], [], []
    for selection in _round(layouts, k):
        experts = dict.fromkeys(ranks, 0)
        for row, layout in zip(selection.memory, layouts, strict=True):
            for expert in row:
                experts[layout.rank_of[expert]] += layout.nbytes
        totals = _totals(equal_parts, experts)
        equal.append(max(totals))
        adaptive.append(max(_totals(assign_adaptively(dense, ranks, experts), experts)))
        averages.append(sum(totals) / num_ranks)
    return PartialFigure(
        num_ranks=num_ranks,
        num_experts=num_experts,
        k=k,
        average_nbytes=statistics.mean(averages),
        equal_nbytes=int(statistics.median(equal)),
        adaptive_nbytes=int(statistics.median(adaptive)),
    )


def _round(layouts: Sequence[ExpertLayout], k: int) -> list[Selection]:
    """The generations in which every expert has its turn once."""
    policy, found = PartialPolicy(k=k), []
    accounting = Accounting.start([each.num_experts for each in layouts]).take(0, Selection.everything(layouts))
    for step in range(1, -(-layouts[0].num_experts // k) + 1):
        selection = policy.select(step, accounting.tables(layouts), {})
        accounting = accounting.take(step, selection)
        for level in LEVELS:
            accounting = accounting.complete(level, step)
        found.append(selection)
    return found


def _totals(parts: Sequence[WrittenPart[str]], experts: dict[int, int]) -> list[int]:
    totals = dict(experts)
    for part in parts:
        totals[part.writer] += part.piece.numel * NBYTES
    return list(totals.values())


def _layouts(num_ranks: int, num_experts: int) -> list[ExpertLayout]:
    nbytes = NBYTES * sum(_numel(shape) for shape in _FEED_FORWARD)
    ranks = tuple(expert * num_ranks // num_experts for expert in range(num_experts))
    return [ExpertLayout(layer=f"moe{i}", rank_of=ranks, nbytes=nbytes) for i in range(_MOE_LAYERS)]


def _dense(num_experts: int) -> list[RecordPiece[str]]:
    shapes: list[tuple[int, ...]] = [(_VOCABULARY, _DIM), (_CONTEXT, _DIM)]
    for block in range(_BLOCKS):
        shapes += _ATTENTION
        shapes += _FEED_FORWARD if block % 2 else [(num_experts, _DIM)]
    pieces = []
    for i, shape in enumerate(shapes):
        numel = _numel(shape)
        piece = ParamSlice(fqn=f"p{i}", start=0, stop=numel, global_shape=shape, global_start=0)
        pieces.append(RecordPiece(record=f"p{i}", piece=piece, nbytes_per_element=NBYTES))
    return pieces


def _numel(shape: tuple[int, ...]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product


def _row(figure: PartialFigure) -> list[str]:
    sizes = (figure.average_nbytes, figure.equal_nbytes, figure.adaptive_nbytes)
    return [str(figure.k), *(megabytes(nbytes) for nbytes in sizes), f"{figure.saved:.1%}"]
