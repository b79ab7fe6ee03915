"""Where a restart takes its bytes from: own memory, another node's, storage; and the run ends in the same bits.

Where storage must not be needed it has no room from the first step on, so that only memory can be ahead of step 0.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import Self, override

from campaign._campaign import Campaigns
from campaign._faults import Breaking
from campaign._training import Checkpointing
from lightning_moe_ckpt.callbacks import DenseCheckpoint, SparseCheckpoint
from lightning_moe_ckpt.testing import Attempt, AttemptResult, fail_at

_PATIENCE_SECONDS = 30.0
STRIKES = 8
"""Step at which the first life ends."""
FULL = fail_at("all", 1, kind="full_disk")


def checkpoint_of(trainer: Trainer) -> DenseCheckpoint | SparseCheckpoint:
    (found,) = (callback for callback in trainer.callbacks if isinstance(callback, (DenseCheckpoint, SparseCheckpoint)))  # type: ignore[attr-defined]
    return found


class Patience(Callback):
    """Holds the first life up before its end until the tiers that a test is about hold a generation."""

    def __init__(self, tiers: Sequence[str], life: Attempt) -> None:
        self._tiers, self._life = tiers, life

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if self._life.index or trainer.global_step != STRIKES - 1:
            return
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while any(checkpoint_of(trainer).report.generations.get(tier, 0) < 1 for tier in self._tiers):
            assert time.monotonic() < deadline, checkpoint_of(trainer).report.generations
            time.sleep(0.005)


@dataclass(frozen=True, kw_only=True)
class Watched(Breaking):
    """Tells where a life came from."""

    patient_for: tuple[str, ...] = ()

    @override
    def callbacks(self, life: Attempt) -> Sequence[Callback]:
        patience = [Patience(self.patient_for, life)] if self.patient_for else []
        return [*patience, *super().callbacks(life)]

    @override
    def fault_free(self) -> Self:
        return replace(super().fault_free(), patient_for=())

    @override
    def returned(self, life: Attempt, trainer: Trainer) -> dict[str, Any]:
        if self.checkpointing is not None:
            report = checkpoint_of(trainer).report
            told = {"from": report.resumed_from, "restored": report.restored_from}
            told_by(life.workdir, life.index, life.rank).write_text(json.dumps(told))
        return super().returned(life, trainer)


def told_by(workdir: Path, index: int, rank: int) -> Path:
    """What a rank that finished said of where its life came from."""
    return workdir / f"from-attempt{index}.rank{rank}.json"


def told(life: AttemptResult, rank: int = 0) -> dict[str, Any]:
    return dict(json.loads(told_by(life.workdir, life.index, rank).read_text()))


def on_two_nodes(world_size: int, policy: Any, **options: Any) -> Watched:
    """Three or four ranks; the last ones are on the second node."""
    return Watched(
        world_size=world_size,
        nodes=(0, 0, 1) if world_size == 3 else (0, 0, 1, 1),
        batches=6,
        validate_every=None,
        checkpointing=Checkpointing(policy=policy, window=2, every_n_steps=2),
        **options,
    )


def sources(life: AttemptResult) -> list[set[str]]:
    """Kinds of places each rank had bytes from, which its log says too."""
    found: list[set[str]] = []
    for rank in range(life.world_size):
        found.append(set(told(life, rank)["restored"]))
        lines = [line for line in life.log(rank).splitlines() if "MiB from" in line]
        own = [line for line in lines if str(rank) in line.partition(": rank")[2].partition(":")[0]]
        assert len(own) == 1, lines
        assert all(f"MiB from {source}" in own[0] for source in found[-1]), own
    said = "".join(line for line in life.log(0).splitlines() if "MiB from" in line)
    assert all(source in said for each in found for source in each), "the coordinator says it of all ranks"
    return found


FOUR_SPARSE, THREE_DENSE = (4, "sparse"), (3, "dense")


def worlds(one: tuple[int, str], other: tuple[int, str]) -> pytest.MarkDecorator:
    """One in every test run, the other in campaigns."""
    rows = [pytest.param(*one), pytest.param(*other, marks=pytest.mark.soak)]
    return pytest.mark.parametrize(("world_size", "policy"), rows)


@worlds(THREE_DENSE, FOUR_SPARSE)
def test_after_a_process_is_lost_all_ranks_restore_from_their_own_memory(
    campaigns: Campaigns, world_size: int, policy: str
) -> None:
    """Storage was never needed: it has nothing but the beginning."""
    faults = (FULL, fail_at(world_size - 1, STRIKES, "forward"))
    lives = campaigns.check_faults(on_two_nodes(world_size, policy, faults=faults, patient_for=("host",)))
    assert len(lives) == 2
    assert sources(lives[-1]) == [{"host"}] * world_size
    assert told(lives[-1])["from"] > 0


@worlds(THREE_DENSE, FOUR_SPARSE)
def test_after_a_node_is_lost_its_ranks_restore_from_the_other(
    campaigns: Campaigns, world_size: int, policy: str
) -> None:
    """The ranks of the node that is there still have theirs."""
    faults = (FULL, fail_at(2, STRIKES, kind="node_loss"))
    lives = campaigns.check_faults(on_two_nodes(world_size, policy, faults=faults, patient_for=("host", "peer")))
    assert len(lives) == 2
    assert sources(lives[-1]) == [{"host"}, {"host"}, *[{"peer"}] * (world_size - 2)]
    assert told(lives[-1])["from"] > 0


@pytest.mark.soak
@pytest.mark.parametrize(("world_size", "policy"), [THREE_DENSE, FOUR_SPARSE])
def test_after_all_nodes_are_lost_storage_is_restored(campaigns: Campaigns, world_size: int, policy: str) -> None:
    """With its newest generation."""
    faults = (fail_at(0, STRIKES, kind="rack_loss", settle=20.0),)
    setup = on_two_nodes(world_size, policy, faults=faults, racks=("a",) * world_size, patient_for=("storage",))
    lives = campaigns.check_faults(setup)
    assert len(lives) == 2
    assert sources(lives[-1]) == [{"storage"}] * world_size
    assert told(lives[-1])["from"] > 0


def test_one_failure_after_the_other_meets_every_source(campaigns: Campaigns) -> None:
    """A process, a node in the life after, and then everything: the log of the run forbids what each left behind."""
    faults = (
        fail_at(1, 5, "forward"),
        fail_at(2, 8, kind="node_loss"),
        fail_at(0, 10, kind="rack_loss", settle=20.0),
    )
    lives = campaigns.check_faults(on_two_nodes(3, "sparse", faults=faults, racks=("a",) * 3))
    assert [life.outcome for life in lives] == ["killed"] * 3 + ["finished"]
    assert sources(lives[-1]) == [{"storage"}] * 3
