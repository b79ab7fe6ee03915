"""Measure the cost of a lost rank with torchft, where it is installed, beside that under `moe-ckpt run --spares 1`.

Every rank is a replica of torchft, started by torchrun, beside its lighthouse. The others go on without the dead replica,
so their result differs; a replica that comes back is sent their state.

Source of the options: torchft's README at version 0.2.0.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

from rich.console import Group, RenderableType
from typing_extensions import override

from benchmarks import in_place
from benchmarks.failure import MeasuredFailure, step_seconds_of
from benchmarks.in_place import FailingJob, FailureFigure
from benchmarks.replicas_fit import REPLICA
from lightning_moe_ckpt.benchmarks._benchmark import Progress
from lightning_moe_ckpt.testing._attempts import free_port

TORCHFT = "torchft, a replica per rank"
_LIGHTHOUSE = """\
import signal, sys
from torchft.coordination import LighthouseServer
server = LighthouseServer(bind=sys.argv[1], min_replicas=1, join_timeout_ms=10000, quorum_tick_ms=100)
signal.pause()
"""


def measure(options: SimpleNamespace, progress: Progress) -> list[FailureFigure]:
    """Run the benchmark."""
    others = {TORCHFT: ReplicaJob} if find_spec("torchft") is not None else {}
    given = {"launchers": ["spare"], "in_place_ranks": options.replica_ranks, "in_place_kills": options.replica_kills}
    return in_place.measure(SimpleNamespace(**given, in_place_folder=options.replica_folder), progress, others)


def table(figures: Sequence[FailureFigure]) -> RenderableType:
    """Return the figures for people."""
    lacks = TORCHFT not in {figure.launcher for figure in figures}
    said = (
        "torchft is not there: `pip install torchft` puts it into the table"
        if lacks
        else "of torchft: until the replica is back"
    )
    return Group(in_place.table(figures), said)


class ReplicaJob(FailingJob):
    """A training with torchft."""

    @override
    def commands(self, memory: Path, script: Sequence[str]) -> list[tuple[list[str], dict[str, str]]]:
        python, port = [sys.executable, "-m"], free_port()
        lighthouse = [sys.executable, "-c", _LIGHTHOUSE, f"[::]:{port}"]
        replica = [
            *(*python, "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", "1", "--max-restarts", "1000"),
            *("--master-port", "{port}", "-m", "benchmarks.replicas_fit", str(self.folder), str(memory)),
        ]
        return [
            (lighthouse, {}),
            *(
                (
                    [each.format(port=free_port()) for each in replica],
                    {REPLICA: str(rank), "TORCHFT_LIGHTHOUSE": f"http://localhost:{port}"},
                )
                for rank in range(self.num_ranks)
            ),
        ]

    @override
    def is_complete(self) -> bool:
        # A replica that was late to join is there again.
        return all(lines[-1].get("ranks") == self.num_ranks for lines in self.lines())

    @override
    def failure(self, at: float, killed: int, *, alone: bool) -> MeasuredFailure | None:
        ranks = self.lines()
        lines = [[line for line in each if line["what"] == "step"] for each in ranks]
        lost = max(line["step"] for each in lines for line in each if line["at"] < at)
        # A step that had been added up when the other died is still finished.
        new = [[line["at"] for line in each if line["at"] > at and line["step"] > lost + 1] for each in lines]
        others = [each for rank, each in enumerate(new) if rank != killed]
        if not all(new) or not any(
            line["at"] > new[killed][0] and line["ranks"] == self.num_ranks for line in lines[0]
        ):
            return None
        return MeasuredFailure(
            noticed_seconds=None,
            begin_seconds=new[killed][0] - at,
            rerun_seconds=0.0,
            rerun_steps=0,
            total_seconds=max(each[0] for each in others) - at,
            step_seconds=step_seconds_of([line for line in lines[killed] if line["at"] < at]),
        )
