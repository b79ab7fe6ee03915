"""`make bench`: what checkpoints cost in throughput, how fast windows are planned, what ordered gradients cost.

The figures hold for this machine: a few processes over gloo that share its cores. Ratios travel better than seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lightning_moe_ckpt.parallel._bench import bench_reduction
from lightning_moe_ckpt.policies import PlanItem, plan_window

WORKER = Path(__file__).with_name("bench_worker.py")
FULL_NBYTES, COMPUTE_NBYTES = 12, 2
"""Per parameter: fp32 weights with two moments, and 16-bit weights."""

Figures = dict[str, Any]


def throughput(out: Path, ranks: int, worker: Sequence[str]) -> Table:
    """Steps per second with sparse checkpoints, dense ones at every step, and none."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += [str(WORKER), "--out", str(out), *worker]
    with (out / "log.txt").open("wb") as log:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, env=environment, check=True)
    return rates(json.loads((out / "throughput.json").read_text()))


def rates(figures: list[Figures]) -> Table:
    """A row per variant. A ratio is taken within each turn, where the variants met the same machine."""
    by_variant: dict[str, list[Figures]] = defaultdict(list)
    for turn in figures:
        by_variant[turn["variant"]].append({**turn, "step": statistics.median(turn["seconds"])})
    rows = Table("checkpoints", "steps/s", "against none", "stall per step", "bytes per step", "window")
    rows.title = "Training, medians on rank 0, variants taking turns"
    for variant, turns in by_variant.items():
        pairs = zip(by_variant["none"], turns, strict=True)
        rows.add_row(
            variant,
            f"{1 / statistics.median(turn['step'] for turn in turns):.2f}",
            f"{statistics.median(none['step'] / turn['step'] for none, turn in pairs):.3f}",
            *(_costs(turns) if "stall" in turns[0] else []),
        )
    return rows


def _costs(turns: list[Figures]) -> list[str]:
    stall = statistics.median(turn["stall"] for turn in turns)
    taken, dense = turns[-1]["nbytes"], turns[-1]["dense_nbytes"]
    return [f"{stall * 1e3:.2f} ms", f"{taken / 1e6:.2f} MB ({taken / dense:.0%})", str(turns[-1]["window"])]


def planning(num_operators: int) -> Table:
    """Window and planning time at several byte budgets, experts and dense blocks of a large model."""
    # One dense block, as large as eight experts, to every 64 experts.
    sizes = [8_000_000 if index % 65 == 64 else 1_000_000 for index in range(num_operators)]
    items = [
        PlanItem(f"operator {index}", FULL_NBYTES * size, COMPUTE_NBYTES * size, order_key=float(index % 97))
        for index, size in enumerate(sizes)
    ]
    rows = Table("bytes per parameter", "packed W", "packed time", "algorithm1 W", "algorithm1 time")
    for budget in (2.5, 3.0, 4.0, 6.0):
        cells = [f"{budget}"]
        for planner in ("packed", "algorithm1"):
            started = time.perf_counter()
            plan = plan_window(items, budget_nbytes=int(budget * sum(sizes)), planner=planner, max_window=None)
            cells += [str(plan.window), f"{(time.perf_counter() - started) * 1e3:.1f} ms"]
        rows.add_row(*cells)
    rows.title = (
        f"Planning {num_operators} operators, {FULL_NBYTES} bytes per parameter full and {COMPUTE_NBYTES} compute"
    )
    return rows


def reduction(world_sizes: Sequence[int], width: int, repeats: int) -> Table:
    """The ordered reduction beside a plain all-reduce and DistributedDataParallel."""
    costs = bench_reduction(world_sizes, width=width, repeats=repeats)
    rows = Table("ranks", "gradients", *(f"{name}" for name in costs[0].step))
    for cost in costs:
        steps = (f"{seconds * 1e3:.1f} ms" for seconds in cost.step.values())
        rows.add_row(str(cost.world_size), f"{cost.nbytes / 1e6:.1f} MB", *steps)
    rows.title = "Forward, backward and gradient reduction, median"
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    args, worker = _parse(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    console = Console()
    # First, while this process has run nothing: it forks.
    console.print(reduction(args.world_sizes, args.width, args.repeats))
    console.print(planning(args.operators))
    console.print(throughput(args.out.resolve(), args.ranks, worker))
    return 0


def _parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__, epilog="Other options go to bench_worker.py.")
    parser.add_argument("--out", type=Path, default=Path("out/bench"))
    parser.add_argument("--ranks", type=int, default=3, help="of the throughput measurement")
    parser.add_argument("--operators", type=int, default=15_000)
    parser.add_argument("--world-sizes", type=int, nargs="+", default=[3, 4], help="of the reduction measurement")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=15)
    return parser.parse_known_args(argv)


if __name__ == "__main__":
    sys.exit(main())
