"""Trainings over nodes that are really apart: `training.py` under a launcher, or without one."""

from __future__ import annotations

import os
import re
import runpy
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from _forks import fork_ranks

from apart._cluster import Cluster, Node, Started
from lightning_moe_ckpt.launch.run_command import run

TRAINING = Path(__file__).with_name("training.py")
PORT = 29400


def supervised(node: Node, folder: Path, steps: int, *torchrun: str, nnodes: str = "2", **options: Any) -> Started:
    """Start `moe-ckpt run` with one rank there; the first node has the place where nodes meet."""
    meeting = (
        f"--nnodes {nnodes} --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint 10.77.0.1:{PORT} --rdzv-id apart"
    )

    def work() -> None:
        fork_ranks("apart")
        sys.exit(run([str(TRAINING), str(folder), str(steps)], torchrun=[*meeting.split(), *torchrun], **options))

    return node.fork(work, "supervised")


def unsupervised(
    cluster: Cluster, folder: Path, steps: int, *, seconds: float = 0.05, port: int = PORT
) -> list[Started]:
    """Start a rank on each node, without a launcher: the first one has the store."""
    size = len(cluster.nodes)
    return [
        node.fork(partial(_rank, rank, size, f"10.77.0.1:{port}", [str(folder), str(steps), str(seconds)]), "rank")
        for rank, node in enumerate(cluster.nodes)
    ]


def _rank(rank: int, size: int, address: str, arguments: Sequence[str]) -> None:
    host, _, port = address.partition(":")
    place: dict[str, object] = {
        "RANK": rank,
        "WORLD_SIZE": size,
        "GROUP_RANK": rank,
        "LOCAL_RANK": 0,
        "LOCAL_WORLD_SIZE": 1,
    }
    place |= {"MASTER_ADDR": host, "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "apart"}
    os.environ.update({name: str(value) for name, value in place.items()})
    sys.argv = [str(TRAINING), *arguments]
    runpy.run_path(str(TRAINING), run_name="__main__")


def step_of(folder: Path, rank: int = 0) -> int:
    """Return the newest step of a rank."""
    return int(_state(folder, rank)[0])


def copied_of(folder: Path, rank: int = 0) -> int:
    """Return the step of a rank's newest copy on another node."""
    return int(_state(folder, rank)[1])


def _state(folder: Path, rank: int) -> Sequence[str]:
    state = folder / f"rank{rank}"
    return state.read_text().split() if state.exists() else ("-1", "-1")


def begun(job: Started) -> list[tuple[int, int, str]]:
    """Return (number of ranks, first step, sources) of each start of a rank."""
    found = re.findall(r"rank \d+ of (\d+) from step (\d+) by (.*)$", job.output, re.MULTILINE)
    return [(int(size), int(step), sources) for size, step, sources in found]


def ended(job: Started) -> list[str]:
    """Return the digests of the state with which ranks ended."""
    return re.findall(r"rank \d+ ends at step \d+ with (\w+)$", job.output, re.MULTILINE)
