"""What gradients that are summed in rank order cost beside a plain all-reduce and DistributedDataParallel."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from rich.table import Table
from typing_extensions import override

from lightning_moe_ckpt.benchmarks._benchmark import Benchmark, Progress, megabytes, milliseconds, positive, table_of
from lightning_moe_ckpt.parallel._bench import ReductionCost, bench_reduction


class ReductionBench(Benchmark[ReductionCost]):
    """See the module. Forks gloo ranks from this process, so it runs before anything that starts threads."""

    name = "reduction"
    summary = "ordered reduction of gradients against a plain all-reduce and DDP, on gloo ranks of this machine"

    @override
    def add_options(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--ranks", type=positive, nargs="+", default=[3, 4], help="world sizes (default: 3 4)")
        parser.add_argument("--width", type=positive, default=512, help="of a linear layer (default: %(default)s)")
        parser.add_argument("--depth", type=positive, default=16, help="linear layers (default: %(default)s)")
        parser.add_argument("--turns", type=positive, default=15, help="of every variant (default: %(default)s)")

    @override
    def measure(self, options: argparse.Namespace, progress: Progress) -> list[ReductionCost]:
        figures = []
        for done, world_size in enumerate(options.ranks):
            progress(f"reducing over {world_size} ranks", done, len(options.ranks))
            figures += bench_reduction([world_size], width=options.width, depth=options.depth, repeats=options.turns)
        return figures

    @override
    def table(self, figures: Sequence[ReductionCost]) -> Table:
        rows = [row for cost in figures for row in _rows(cost)]
        columns = ["reduction", "ranks", "gradients", "collective alone", "against all-reduce", "step", "against DDP"]
        return table_of("Gradient reduction: forward, backward and reduction is a step; medians", columns, rows)


def _rows(cost: ReductionCost) -> list[list[str]]:
    rows = []
    for name, step in cost.step.items():
        alone = cost.collective.get(name)
        collective = ["", ""]
        if alone is not None:
            collective = [milliseconds(alone), f"{alone / cost.collective['allreduce']:.2f}"]
        of_ddp = f"{step / cost.step['ddp']:.2f}"
        rows.append([name, str(cost.world_size), megabytes(cost.nbytes), *collective, milliseconds(step), of_ddp])
    return rows
