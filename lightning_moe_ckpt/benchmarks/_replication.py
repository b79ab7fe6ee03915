"""What copies in memory of other nodes cost in training speed: none, one and two of each rank's generations.

Three fits of the same model on three ranks each take turns, as in the overhead benchmark. Every rank is on a node of
its own, a directory of shared memory; the network is the loopback device, whose work is done by the processors that
train. So this shows what replication takes from training where nothing else carries it.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import shutil
import socket
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table
from typing_extensions import override

from lightning_moe_ckpt.benchmarks._benchmark import (
    Benchmark,
    Progress,
    accelerator_for,
    megabytes,
    milliseconds,
    positive,
    table_of,
)
from lightning_moe_ckpt.benchmarks._fits import FitOptions, StepCosts, Turn, train_replicated
from lightning_moe_ckpt.benchmarks._model import ModelSize
from lightning_moe_ckpt.benchmarks._turns import HandOver, TurnTaker
from lightning_moe_ckpt.tiers import shared_directory

REPLICAS = (0, 1, 2)
"""Copies besides the owner's."""
NUM_RANKS = 3
"""As many nodes: one more than the most copies."""

_FORK = multiprocessing.get_context("fork")


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicationFigure:
    """One number of copies; medians over the rounds unless said otherwise."""

    replicas: int
    num_params: int
    steps_per_second: float
    throughput: float
    """Steps per second relative to no copies in the same round."""
    throughput_range: tuple[float, float]
    """Least and most of the rounds."""
    by_median_step: float
    """As `throughput`, from median instead of mean steps."""
    process_seconds: float
    """CPU time of all threads of one rank in a step."""
    stall_seconds: dict[str, float]
    """Time training waited in a step, by cause."""
    overhead_seconds: float
    """Time of the training thread in hooks of checkpoints in a step, waits included."""
    nbytes_per_step: float
    """Mean bytes that one rank sends to others in a step."""
    generations_complete: int
    """Of the whole fit."""
    generations_skipped: int
    """Complete ones that found the ranks busy with an earlier one, of the whole fit."""
    rounds: list[StepCosts]

    @property
    def stall(self) -> float:
        """Seconds per step, all causes."""
        return sum(self.stall_seconds.values())


class ReplicationBench(Benchmark[ReplicationFigure]):
    """See the module."""

    name = "replication"
    summary = "training speed with none, one and two copies of every generation in memory of other nodes"

    @override
    def add_options(self, parser: argparse.ArgumentParser) -> None:
        def count(flag: str, default: int, text: str) -> None:
            parser.add_argument(flag, type=positive, default=default, help=f"{text} (default: {default})")

        count("--peer-rounds", 6, "turns of every fit of three ranks")
        count("--peer-steps", 16, "steps of such a turn that count")
        count("--peer-warm-up", 24, "steps before those of the first turn that count")
        count("--peer-dim", 64, "model dimension")
        count("--peer-window", 4, "steps of a window")

    @override
    def measure(self, options: argparse.Namespace, progress: Progress) -> list[ReplicationFigure]:
        turns: dict[int, list[Turn]] = {replicas: [] for replicas in REPLICAS}
        wanted = _fit_options(options)
        with tempfile.TemporaryDirectory(prefix="moe-ckpt-bench-") as folder, _nodes() as nodes, ExitStack() as stack:
            takers = {r: stack.enter_context(_world(r, f"{folder}/{r}", wanted, nodes)) for r in REPLICAS}
            order = [REPLICAS[(turn + place) % 3] for turn in range(wanted.turns) for place in range(3)]
            for index, replicas in enumerate(order):
                progress(f"training, copies: {replicas}", index, len(order))
                turns[replicas].append(takers[replicas].take())
        return [_figure(replicas, turns) for replicas in REPLICAS]

    @override
    def table(self, figures: Sequence[ReplicationFigure]) -> Table:
        first = figures[0]
        title = (
            f"Replicating {first.num_params / 1e6:.1f}M parameters over {NUM_RANKS} nodes of one rank on loopback, "
            f"medians of {len(first.rounds)} interleaved rounds"
        )
        columns = [
            "copies",
            "steps/s",
            "against none",
            "range",
            "by median step",
            "CPU of process",
            "in hooks per step",
        ]
        columns += ["stall per step", "sent per step", "skipped"]
        table = table_of(title, columns, [_row(figure) for figure in figures])
        table.caption = "\n".join(_causes(figure) for figure in figures)
        return table


def _fit_options(options: argparse.Namespace) -> FitOptions:
    dim = options.peer_dim
    size = ModelSize(num_blocks=2, model_dim=dim, num_experts=8, expert_dim=2 * dim, batch_size=4)
    return FitOptions(
        accelerator=accelerator_for(options.accelerator, NUM_RANKS),
        size=size,
        precision="32-true",
        window=options.peer_window,
        warm_up=options.peer_warm_up,
        settle=2 * options.peer_window,
        steps=options.peer_steps,
        turns=options.peer_rounds,
    )


@contextmanager
def _nodes() -> Iterator[Path]:
    """Holds the memory of every node; some ranks are killed, which leaves theirs behind."""
    folder = Path(tempfile.mkdtemp(prefix="moe-ckpt-bench-", dir=shared_directory()))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


@contextmanager
def _world(replicas: int, url: str, options: FitOptions, nodes: Path) -> Iterator[TurnTaker[Turn]]:
    """Three ranks, of which the first takes turns; the others wait for it in the first exchange of a step."""
    port = _free_port()

    def work(rank: int, hand_over: HandOver[Turn]) -> None:
        node = nodes / f"{replicas}-{rank}"
        node.mkdir()
        os.environ.update(_environment(rank, port, node))
        # The first rank ends as soon as nobody wants another turn, which the others would report as its death.
        logging.getLogger("lightning_moe_ckpt.tiers").setLevel(logging.ERROR)
        logging.getLogger("lightning.fabric").setLevel(logging.WARNING)
        train_replicated(replicas, url, options, hand_over, num_ranks=NUM_RANKS)

    def follow(rank: int) -> None:
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, 2)  # a fit without its first rank ends with an exception
        work(rank, lambda _: None)

    others = [_FORK.Process(target=follow, args=(rank,), daemon=True) for rank in range(1, NUM_RANKS)]
    for process in others:
        process.start()
    with TurnTaker[Turn](lambda hand_over: work(0, hand_over)) as taker:
        try:
            yield taker
        finally:
            for process in others:  # before the first rank, which would wait for their goodbyes
                process.kill()
                process.join()


def _environment(rank: int, port: int, node: Path) -> dict[str, str]:
    """As under torchrun, so that Lightning joins the world; without its agent's store."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(NUM_RANKS),
        "LOCAL_WORLD_SIZE": str(NUM_RANKS),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "forked",
        "MOE_CKPT_SHARED_MEMORY": str(node),
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _figure(replicas: int, turns: dict[int, list[Turn]]) -> ReplicationFigure:
    rounds = [turn.costs for turn in turns[replicas]]
    pairs = [(none.costs, own) for none, own in zip(turns[0], rounds, strict=True)]
    throughput = [none.mean_seconds / own.mean_seconds for none, own in pairs]
    causes = sorted({cause for each in rounds for cause in each.stall_seconds})
    last = turns[replicas][-1]
    assert last.report is not None
    skipped = last.report.generations_skipped.get("peer", 0)
    taken = 1 - skipped / max(1, last.report.generations_complete)
    return ReplicationFigure(
        replicas=replicas,
        num_params=last.num_params,
        steps_per_second=1 / statistics.median(each.mean_seconds for each in rounds),
        throughput=statistics.median(throughput),
        throughput_range=(min(throughput), max(throughput)),
        by_median_step=statistics.median(none.median_seconds / own.median_seconds for none, own in pairs),
        process_seconds=statistics.median(each.process_seconds for each in rounds),
        stall_seconds={c: statistics.median(each.stall_seconds.get(c, 0.0) for each in rounds) for c in causes},
        overhead_seconds=statistics.median(each.overhead_seconds for each in rounds),
        nbytes_per_step=replicas * taken * last.report.nbytes_per_step,
        generations_complete=last.report.generations_complete,
        generations_skipped=skipped,
        rounds=rounds,
    )


def _row(figure: ReplicationFigure) -> list[str]:
    low, high = figure.throughput_range
    return [
        str(figure.replicas),
        f"{figure.steps_per_second:.2f}",
        f"{figure.throughput:.3f}",
        f"{low:.2f}-{high:.2f}",
        f"{figure.by_median_step:.3f}",
        milliseconds(figure.process_seconds),
        milliseconds(figure.overhead_seconds),
        milliseconds(figure.stall),
        megabytes(figure.nbytes_per_step),
        f"{figure.generations_skipped} of {figure.generations_complete}",
    ]


def _causes(figure: ReplicationFigure) -> str:
    causes = sorted(figure.stall_seconds.items(), key=lambda item: -item[1])
    told = ", ".join(f"{cause} {milliseconds(seconds)}" for cause, seconds in causes)
    return f"stall, {figure.replicas} copies: {told}"
