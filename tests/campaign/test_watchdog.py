"""Faults of one rank of three, one after the other: each costs its own tiers while it lasts, and none for good.

Every rank is a node, so each has copies of another. While memory of one rank is full, neither what it captures nor the
copies that it keeps can be stated; what the other two have is of no use then, and must not stay in their memory.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
from door import CheckpointCallback
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from campaign._campaign import Campaigns
from campaign._nodes import Nodes
from campaign._training import Checkpointing, Setup, train
from lightning_moe_ckpt.errors import StorageError
from lightning_moe_ckpt.storage import RunStore
from lightning_moe_ckpt.testing import Attempt, Seam
from lightning_moe_ckpt.tiers import HostTier, SegmentRing

Policy = Literal["dense", "sparse", "partial"]

STRICKEN = 1
"""Rank with the faults. The one that commits is another."""
FULL, REMOVED, DOWN = range(5, 12), range(18, 19), range(25, 32)
"""Steps in which its memory is full, in which names are removed from it, and in which its storage fails."""
STEPS = 38
PATIENCE = 30.0


@dataclass
class Stricken:
    """The faults of a rank."""

    step: int = 0
    struck: dict[str, int] = field(default_factory=dict)

    def apply(self) -> None:
        """In this process, for good."""
        publish, put = SegmentRing.publish, RunStore.put_segment

        def publish_unless_full(*args: Any) -> None:
            if self.step in FULL:
                self._count("full")
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            publish(*args)

        def put_unless_down(*args: Any) -> str:
            if self.step in DOWN:
                self._count("down")
                raise StorageError("this store does not answer.")
            return put(*args)

        Seam(module=SegmentRing.__module__, attribute="SegmentRing.publish", replacement=publish_unless_full).apply()
        Seam(module=RunStore.__module__, attribute="RunStore.put_segment", replacement=put_unless_down).apply()

    def remove_names(self, folder: Path) -> None:
        for path in folder.iterdir():
            path.unlink(missing_ok=True)
            self._count("removed")

    def _count(self, name: str) -> None:
        self.struck[name] = self.struck.get(name, 0) + 1


class Watch(Callback):
    """Lets tiers catch up in each step, but for storage while one rank has none; writes down how far they are behind."""

    def __init__(self, memory: Path, faults: Stricken, *, window: int) -> None:
        self._memory, self._faults = memory, faults
        # Until ranks have told each other of the last generation that failed, the coordinator waits for the marker of it.
        self._without_storage = range(DOWN.start, DOWN.stop + window)
        self.behind: list[dict[str, int]] = []

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        step = self._faults.step = trainer.global_step
        (callback,) = (each for each in trainer.callbacks if isinstance(each, CheckpointCallback))  # type: ignore[attr-defined]
        assert callback._run is not None
        for worker in callback._run.session._run.tiers.workers:
            assert (worker.name == "storage" and step in self._without_storage) or worker.drain(PATIENCE), worker.name
        if step in REMOVED and trainer.global_rank == STRICKEN:
            self._faults.remove_names(self._memory)
        found = HostTier(str(callback.memory_tag), self._memory).holdings()
        mine = [each.generation.step for each in found if each.owner == trainer.global_rank]
        copied = [each.generation.step for each in found if each.owner != trainer.global_rank]
        newest = {"host": max(mine, default=0), "peer": max(copied, default=0)}
        newest["storage"] = callback.report.generations.get("storage", 0)
        self.behind.append({tier: step - at for tier, at in newest.items()})


def train_stricken(setup: Setup, nodes: Nodes, life: Attempt) -> Mapping[str, Any]:
    """Prints what struck, and how far tiers were behind at each step."""
    nodes.settle(life)
    faults = Stricken()
    if life.rank == STRICKEN:
        faults.apply()
    watch = Watch(nodes.shared_memory(life), faults, window=window_of(setup))
    Seam(module="campaign._training", attribute="Setup.callbacks", replacement=lambda *_: [watch]).apply()
    returned = train(setup, life)
    print("watched " + json.dumps({"struck": faults.struck, "behind": watch.behind}))
    return returned


def window_of(setup: Setup) -> int:
    assert setup.checkpointing is not None
    return int(setup.checkpointing.window) if setup.checkpointing.policy == "sparse" else 1


@pytest.mark.parametrize(
    "policy", [pytest.param("dense", marks=pytest.mark.soak), "sparse", pytest.param("partial", marks=pytest.mark.soak)]
)
def test_no_tier_of_any_rank_stays_behind_when_faults_of_one_rank_are_over(
    campaigns: Campaigns, folder: Path, policy: Policy
) -> None:
    """From two windows after each fault until the next one, what every tier holds on every rank is that new."""
    setup = Setup(
        model="stacked", world_size=3, batches=STEPS, epochs=1, validate_every=None,
        checkpointing=Checkpointing(policy=policy, window=2),
    )  # fmt: skip
    window, nodes = window_of(setup), Nodes(folder, (0, 1, 2))
    (life,) = campaigns.check(setup, fit=partial(train_stricken, setup, nodes), may_complain=True)
    for rank in range(3):
        (line,) = (line for line in life.log(rank).splitlines() if line.startswith("watched "))
        told = json.loads(line.removeprefix("watched "))
        assert sorted(told["struck"]) == (["down", "full", "removed"] if rank == STRICKEN else []), told["struck"]
        for begin, end in ((FULL.stop, REMOVED.start), (REMOVED.stop, DOWN.start), (DOWN.stop, STEPS)):
            for step in range(begin + 2 * window, end):
                assert max(told["behind"][step].values()) <= 2 * window, (rank, step, told["behind"])
    assert nodes.files() == []
