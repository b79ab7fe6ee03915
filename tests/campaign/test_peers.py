"""Nodes die with their memory: what ranks on them had comes back from copies on other nodes, bit for bit.

A node is a directory of shared memory. A life after the one that a node dies with finds another machine in its place,
whose memory is empty.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
from door import CheckpointCallback
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from campaign._campaign import Campaigns
from campaign._nodes import AwaitsCopies, Nodes, leave_only_copies
from campaign._training import Checkpointing, Setup, train
from lightning_moe_ckpt.testing import Attempt, Kill, Seam

Policy = Literal["dense", "sparse", "partial"]


def train_on_nodes(setup: Setup, nodes: Nodes, life: Attempt) -> Mapping[str, Any]:
    """What `setup` does, on nodes."""
    nodes.settle(life)
    return train(setup, life)


def two_nodes(policy: Policy, generations: int | str = "auto") -> Setup:
    """Four ranks that share 12 experts by twos."""
    return Setup(
        model="stacked",
        options=(("num_experts", 12),),
        world_size=4,
        expert_parallel=2,
        batches=6,
        checkpointing=Checkpointing(
            policy=policy, window=3, every_n_steps=2, arguments=(("memory_generations", generations),)
        ),
    )


@pytest.mark.parametrize(
    "policy", ["partial", *(pytest.param(each, marks=pytest.mark.soak) for each in ("sparse", "dense"))]
)
def test_a_run_with_copies_ends_the_same_and_leaves_nothing(campaigns: Campaigns, folder: Path, policy: Policy) -> None:
    """Replication beside expert-parallel training: every rank has generations on the other node, no bit differs."""
    setup, nodes = two_nodes(policy), Nodes(folder, (0, 0, 1, 1))
    lives = campaigns.check(setup, fit=partial(train_on_nodes, setup, nodes))
    for rank in range(4):
        assert "is replicated to ranks" in lives[-1].log(rank), rank
    assert nodes.files() == []


@pytest.mark.parametrize(
    ("policy", "generations"),
    [
        ("sparse", 2),
        *(pytest.param(*each, marks=pytest.mark.soak) for each in (("sparse", 3), ("dense", 2), ("dense", 3))),
    ],
)
def test_a_node_that_dies_comes_back_from_the_other_one(
    campaigns: Campaigns, folder: Path, policy: Policy, generations: int
) -> None:
    """Its ranks read copies on the node that lives, which reads its own memory, though storage has nothing but the start.

    Rank 2 is killed, the memory of its node is gone. Which generation is restored depends on how far copies had got.
    """
    setup, nodes = two_nodes(policy, generations), Nodes(folder, (0, 0, 1, 1), dies=1)
    kill = Kill(phase="forward", step=10, rank=2)
    lives = campaigns.check(setup, kill, may_complain=True, fit=partial(train_with_copies_only, setup, nodes))
    said = lives[-1].log()
    assert "epoch 2 begins from step 0" not in said
    assert re.search(r"ranks 0, 1: .* from host", said)
    assert re.search(r"ranks 2, 3: .* from peer \(ranks 0, 1\)", said)
    assert nodes.files() == []


def train_with_copies_only(setup: Setup, nodes: Nodes, life: Attempt) -> Mapping[str, Any]:
    """In the first life storage fails after its first generation, and step 9 begins when a generation has copies."""
    if life.index == 0:
        leave_only_copies(0, AwaitsCopies(lambda step: 0 if step == 9 else None))
    return train_on_nodes(setup, nodes, life)


@pytest.mark.parametrize(
    ("policy", "steps"),
    [("sparse", 20), *(pytest.param(policy, 500, marks=pytest.mark.soak) for policy in ("sparse", "dense"))],
)
def test_memory_of_two_nodes_is_what_was_reserved(
    campaigns: Campaigns, folder: Path, policy: Policy, steps: int
) -> None:
    """Slots for own generations and for copies, at every step, on each node, within 5 percent; statements do not add up."""
    setup = replace(two_nodes(policy), batches=steps // 2, validate_every=None)
    nodes = Nodes(folder, (0, 0, 1, 1))
    (life,) = campaigns.run(setup, fit=partial(train_measured, setup, nodes), timeout=280.0)
    found = [life.returned(rank) for rank in range(4)]
    for node in (0, 1):
        ranks = [rank for rank in range(4) if nodes.placed[rank] == node]
        assert all(set(found[rank]["reserved"]) == {"host", "peer"} for rank in ranks)
        reserved = sum(sum(found[rank]["reserved"].values()) for rank in ranks)
        slots, statements = (max(found[rank][kind] for rank in ranks) for kind in ("slots", "statements"))
        print(f"{policy}, {steps} steps, node {node}: {slots} bytes and {statements} beside them, reserved {reserved}")
        assert 1 <= slots / reserved <= 1.05
        # Records of this model have a few hundred bytes each, their rows in the statement half as many.
        assert statements <= reserved / 4, "of 500 steps all statements would take several times what is reserved"
    assert len(life.steps()) == steps
    assert nodes.files() == []


def train_measured(setup: Setup, nodes: Nodes, life: Attempt) -> Mapping[str, Any]:
    """Measures shared memory of the node at every step."""
    measure = Measure(nodes.shared_memory(life))
    Seam(module="campaign._training", attribute="Setup.callbacks", replacement=lambda *_: [measure]).apply()
    train_on_nodes(setup, nodes, life)
    return {"slots": measure.slots, "statements": measure.statements, "reserved": measure.reserved}


class Measure(Callback):
    """The most that files of a node took, and what this rank said it would take."""

    def __init__(self, memory: Path) -> None:
        self.memory, self.slots, self.statements = memory, 0, 0
        self.reserved: dict[str, int] = {}

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        (callback,) = (each for each in trainer.callbacks if isinstance(each, CheckpointCallback))  # type: ignore[attr-defined]
        self.reserved = callback.report.reserved_nbytes
        self.slots = max(self.slots, self._nbytes(lambda path: path.suffix in {".ring", ".replica"}))
        self.statements = max(self.statements, self._nbytes(lambda path: path.suffix not in {".ring", ".replica"}))

    def _nbytes(self, counts: Callable[[Path], bool]) -> int:
        nbytes = 0
        for path in filter(counts, self.memory.iterdir()):
            with contextlib.suppress(FileNotFoundError):  # statements come and go
                nbytes += path.stat().st_blocks * 512
        return nbytes
