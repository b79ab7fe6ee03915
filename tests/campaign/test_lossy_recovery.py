"""Killed runs under a lossy policy go on with the dense part of one boundary and each expert as of when it was taken last."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from campaign._campaign import Campaigns
from campaign._lossy import Machines, Restarts, train_lossy
from campaign._training import Checkpointing, Setup
from lightning_moe_ckpt.policies import Accounting
from lightning_moe_ckpt.testing._lives import Fit
from lightning_moe_ckpt.testing._lives_kill import Kill

KILL = Kill(phase="forward", step=9)


def lossy_setup(world_size: int, expert_parallel: int, **options: object) -> Setup:
    """Twelve steps with a generation after each, all of which stay in storage; six or eight experts."""
    num_experts = 8 if world_size == 4 else 6
    policy = Checkpointing(policy="partial", keep=100, k=1, snapshot_k=2)
    return Setup(
        model="stacked",
        options=(("num_experts", num_experts),),
        world_size=world_size,
        expert_parallel=expert_parallel,
        batches=12,
        epochs=1,
        validate_every=None,
        checkpointing=replace(policy, **options),  # type: ignore[arg-type]
    )


def restarts(campaigns: Campaigns, setup: Setup, machines: Machines, *kills: Kill, fit: Fit | None = None) -> Restarts:
    lives = campaigns.run(setup, *kills, fit=fit or partial(train_lossy, setup, machines))
    assert [life.outcome for life in lives] == [*["killed"] * len(kills), "finished"], lives[-1].log()
    return Restarts(lives)


def require_accounting(found: Restarts) -> float:
    """What the run says of its tokens is what counting one by one gives. Returns PLT."""
    processed, lost = found.accounted()
    said = found.stored_accounting()
    assert torch.equal(said["processed"], processed)
    assert torch.equal(said["lost"], lost)
    plt = portion((processed, lost))
    accounting = Accounting.from_journal(said)
    assert accounting.plt == plt
    assert accounting.mlt == plt, "there is one layer"
    return plt


@pytest.mark.parametrize(
    ("world_size", "expert_parallel"), [(1, 1), pytest.param(3, 1, marks=pytest.mark.soak), (4, 2)]
)
def test_after_a_kill_every_operator_is_as_old_as_promised(
    campaigns: Campaigns, folder: Path, world_size: int, expert_parallel: int
) -> None:
    """From host memory: each expert as of its turn, the rest as of the last boundary; and tokens are counted rightly."""
    machines = Machines(folder, (0,) * world_size)
    found = restarts(campaigns, lossy_setup(world_size, expert_parallel), machines, KILL)
    promise = found.require(1)
    assert len(set(promise.experts.values())) > 1, "experts are of different ages"
    assert require_accounting(found) > 0


@pytest.mark.parametrize("lost", ["a node", pytest.param("everything", marks=pytest.mark.soak)])
def test_two_levels_use_memory_of_surviving_nodes_and_lose_fewer_tokens(
    campaigns: Campaigns, folder: Path, lost: str
) -> None:
    """PEC, Figure 7: three nodes without copies of each other; storage gets every generation, and one expert of each.

    A node is lost, or all of them: what other nodes' memory has is not lost, and PLT is below that of storage alone.
    """
    nodes = (1,) if lost == "a node" else (0, 1, 2)
    machines = Machines(folder, (0, 1, 2), lost=(nodes,), replicas=0)
    found = restarts(campaigns, lossy_setup(3, 3), machines, KILL)
    promise = found.require(1)
    plt, stored_only = require_accounting(found), portion(found.accounted(memory=False))
    print(f"PLT after the loss of {lost}: two levels {plt:.2%}, storage alone {stored_only:.2%}")
    if lost == "everything":
        assert promise == found.promised(1, memory=False)
        assert plt == stored_only
    else:
        assert promise != found.promised(1, memory=False)
        assert plt < stored_only


def portion(accounted: tuple[torch.Tensor, torch.Tensor]) -> float:
    processed, lost = accounted
    return int(lost.sum()) / int(processed.sum())


@pytest.mark.soak
def test_copies_on_other_nodes_keep_a_lost_node_as_new(campaigns: Campaigns, folder: Path) -> None:
    """With copies nothing comes from storage but what memory never had."""
    machines = Machines(folder, (0, 0, 1, 1), lost=((1,),))
    found = restarts(campaigns, lossy_setup(4, 2), machines, KILL)
    found.require(1)
    require_accounting(found)


def test_loss_after_loss_is_counted_once(campaigns: Campaigns, folder: Path) -> None:
    """A node, and then everything, in two lives of one run; experts are modules with a step count of their own."""
    machines = Machines(folder, (0, 1, 1), lost=((1,), (0, 1)), replicas=0)
    setup = replace(lossy_setup(3, 1), model="lists")
    kills = [Kill(phase="forward", step=step) for step in (5, 9)]
    found = restarts(campaigns, setup, machines, *kills)
    for life in (1, 2):
        found.require(life)
    require_accounting(found)
    assert found.stored_accounting()["faults"] == 2


@pytest.mark.soak
def test_a_bad_expert_in_storage_is_restored_from_its_next_older_copy(campaigns: Campaigns, folder: Path) -> None:
    """All memory is lost; one bit of one expert is wrong on one rank."""
    machines = Machines(folder, (0, 0, 0), lost=((0,),), flip="model.moe.layer/expert.3")
    found = restarts(campaigns, lossy_setup(3, 1), machines, KILL)
    promise = found.require(1)
    assert promise.experts["model.moe.layer/expert.3"] < min(
        generation for name, generation in promise.experts.items() if not name.endswith(".3")
    )
    require_accounting(found)


@pytest.mark.parametrize(("world_size", "expert_parallel"), [pytest.param(1, 1, marks=pytest.mark.soak), (3, 3)])
def test_with_all_experts_in_every_generation_nothing_is_lost(
    campaigns: Campaigns, world_size: int, expert_parallel: int
) -> None:
    """The end has the bits of a run that was never interrupted: only experts ever go back."""
    setup = lossy_setup(world_size, expert_parallel, k=6, snapshot_k=6)
    campaigns.check(setup, KILL)
