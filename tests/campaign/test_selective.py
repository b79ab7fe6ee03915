"""Killed runs under budgets of bytes go on with each expert as of its newest copy, and count what it has forgotten."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from door import Fit

from campaign._campaign import Campaigns
from campaign._nodes import AwaitsCopies, leave_only_copies
from campaign._partial_runs import KILL, Machines, restarts, train_partial
from campaign._promises import Restarts
from campaign._training import Checkpointing, Setup
from lightning_moe_ckpt.testing import Attempt, Kill

EXPANSION = 48
EXPERT_NBYTES = 310_000
"""Of one expert: so many that the size of the journal decides nothing."""
REST_NBYTES = 220_000
"""Most of what a rank writes besides experts."""


def budget(setup: Setup, experts: int) -> int:
    """Bytes per rank for so many experts of each position."""
    holders = setup.world_size // setup.expert_parallel
    return REST_NBYTES + (10 * experts + 4) * EXPERT_NBYTES // 10 // holders


def selective_setup(world_size: int, expert_parallel: int, local: int = 3, remote: int = 1) -> Setup:
    """Twelve steps with a generation after each, all of which stay in storage; numbers of experts per position."""
    setup = Setup(
        model="stacked",
        options=(("num_experts", 8 if world_size == 4 else 6), ("expansion", EXPANSION)),
        world_size=world_size,
        expert_parallel=expert_parallel,
        batches=12,
        epochs=1,
        validate_every=None,
    )
    checkpointing = Checkpointing(
        policy="selective", keep=100, local_budget=budget(setup, local), remote_budget=budget(setup, remote)
    )
    return replace(setup, checkpointing=checkpointing)


def restarts_with_room(
    campaigns: Campaigns, setup: Setup, machines: Machines, *kills: Kill, fit: Fit | None = None
) -> Restarts:
    found = restarts(campaigns, setup, machines, *kills, fit=fit)
    assert "no room for an expert" not in "".join(life.log() for life in found.lives)
    return found


@pytest.mark.parametrize(
    ("world_size", "expert_parallel"),
    [(1, 1), *(pytest.param(*each, marks=pytest.mark.soak) for each in ((3, 1), (4, 2)))],
)
def test_after_a_kill_every_operator_is_as_old_as_promised(
    campaigns: Campaigns, folder: Path, world_size: int, expert_parallel: int
) -> None:
    """From host memory: each expert as of when it was taken, the rest as of the last boundary; and tokens are counted rightly."""
    machines = Machines(folder, (0,) * world_size)
    found = restarts_with_room(campaigns, selective_setup(world_size, expert_parallel), machines, KILL)
    promise = found.require(1)
    assert len(set(promise.experts.values())) > 1, "experts are of different ages"
    assert found.require_accounting().plt > 0


def test_a_lost_node_comes_back_from_copies_that_have_less_than_memory(campaigns: Campaigns, folder: Path) -> None:
    """Three nodes with two experts each; memory takes both at every step, copies on other nodes one of them.

    Storage fails after a few steps. The lost node's experts are from its copies, of different ages, the others' are as of the
    last boundary, from their own memory.
    """
    machines = Machines(folder, (0, 1, 2), lost=((1,),))
    setup = replace(selective_setup(3, 3, local=2, remote=1), batches=16)
    fit = partial(train_with_copies, setup, machines)
    found = restarts_with_room(campaigns, setup, machines, Kill(phase="forward", step=13, rank=1), fit=fit)
    promise = found.require(1)
    assert found.require_accounting().plt > 0
    experts = [promise.experts[name] for name in found.sizes]
    assert {*experts[:2], *experts[4:]} == {promise.generation}, "their nodes live"
    assert promise.generation.step > STORED
    assert min(experts[2:4]) < max(experts[2:4]) == promise.generation
    said = found.lives[1].log()
    assert re.search(r"6 experts .*from memory: 4, peer: [12]", said), said
    assert re.search(r"rank 1: [\d.]+ MiB from peer", said), said


STORED = 3
"""The last generation that storage takes."""


def train_with_copies(setup: Setup, machines: Machines, life: Attempt) -> Mapping[str, Any]:
    """In the first life storage fails after a few generations, and the last steps wait for copies of new ones."""
    if life.index == 0:
        leave_only_copies(STORED, AwaitsCopies(lambda step: step - 4 if step > 6 else None))
    return train_partial(setup, machines, life)


def test_with_the_loss_of_memory_storage_has_every_expert(campaigns: Campaigns, folder: Path) -> None:
    """Its share is smaller than that of memory, so experts are older and more tokens are lost, which is counted too."""
    machines = Machines(folder, (0,), lost=((0,),))
    found = restarts_with_room(campaigns, selective_setup(1, 1), machines, KILL)
    promise = found.require(1)
    assert promise == found.promised(1, memory=False)
    assert len(set(promise.experts.values())) > 2, "one expert goes to storage at a time"
    assert found.require_accounting().plt > 0
