"""Trainings that break themselves by a `FaultInjector`, on nodes that are folders in shared memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lightning.pytorch import Callback
from typing_extensions import Self, override

from campaign._training import Setup
from lightning_moe_ckpt.testing import Attempt, Fault, FaultInjector, RandomFaults
from lightning_moe_ckpt.testing._fault_record import read_ranks
from lightning_moe_ckpt.testing._records import Record


@dataclass(frozen=True, kw_only=True)
class Breaking(Setup):
    """A training with faults."""

    faults: tuple[Fault, ...] = ()
    random: RandomFaults | None = None
    nodes: tuple[int, ...] = ()
    """Node of each rank; empty for one node."""
    racks: tuple[str, ...] = ()
    """Rack of each rank."""

    @override
    def callbacks(self, life: Attempt) -> Sequence[Callback]:
        if not self.faults and self.random is None:
            return super().callbacks(life)
        self._settle_on_node(life)
        injector = FaultInjector(list(self.faults), random=self.random, folder=record_of(life.workdir))
        return [injector, *super().callbacks(life)]

    @override
    def fault_free(self) -> Self:
        return replace(self, checkpointing=None, faults=(), random=None, nodes=(), racks=())

    def _settle_on_node(self, life: Attempt) -> None:
        """Give this process the environment of its node."""
        if self.nodes:
            os.environ["MOE_CKPT_SHARED_MEMORY"] = str(memory_of(life.workdir, self.nodes[life.rank]))
        if self.racks:
            os.environ["MOE_CKPT_RACK"] = self.racks[life.rank]


def record_of(workdir: Path) -> Path:
    """Where the injector of a run keeps its record."""
    return workdir / "faults"


def memory_of(workdir: Path, node: int) -> Path:
    """Shared memory of a node; scratch folders are in a tmpfs themselves."""
    folder = workdir / f"node{node}"
    folder.mkdir(exist_ok=True)
    return folder


def lines_of(workdir: Path, event: str) -> list[Record]:
    """What happened, in order of time."""
    found = [line for _, lines in read_ranks(record_of(workdir)) for line in lines if line["event"] == event]
    return sorted(found, key=lambda line: float(line["time"]))
