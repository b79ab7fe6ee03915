"""Killed runs under a partial policy go on with the dense part of one boundary and each expert as of when it was taken last."""

from __future__ import annotations

import re
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from campaign._campaign import Campaigns
from campaign._partial_damage import Damage
from campaign._partial_runs import KILL, Machines, restarts, train_partial, two_level_setup
from campaign._promises import Restarts
from campaign.test_selective import selective_setup
from lightning_moe_ckpt.testing import Kill

TURN = 4
"""Generations within which memory gets every expert, where it takes two of at most eight at each step."""


@pytest.mark.parametrize(
    ("world_size", "expert_parallel", "select"),
    [
        (1, 1, "sequential"),
        *(pytest.param(*each, "sequential", marks=pytest.mark.soak) for each in ((3, 1), (4, 2))),
        *(pytest.param(*each, "load_aware", marks=pytest.mark.soak) for each in ((4, 1), (4, 2), (4, 4))),
    ],
)
def test_after_a_kill_every_operator_is_as_old_as_promised(
    campaigns: Campaigns, folder: Path, world_size: int, expert_parallel: int, select: str
) -> None:
    """From host memory: each expert as of its turn, the rest as of the last boundary; and tokens are counted rightly."""
    machines = Machines(folder, (0,) * world_size)
    setup = two_level_setup(world_size, expert_parallel, select=select)
    found = restarts(campaigns, setup, machines, KILL)
    promise = found.require(1)
    assert len(set(promise.experts.values())) > 1, "experts are of different ages"
    if select == "sequential":
        found.require_turns(1, within=TURN)
    assert found.require_accounting().plt > 0


@pytest.mark.parametrize("lost", ["a node", pytest.param("everything", marks=pytest.mark.soak)])
def test_two_levels_use_memory_of_surviving_nodes_and_lose_fewer_tokens(
    campaigns: Campaigns, folder: Path, lost: str
) -> None:
    """PEC, Figure 7: three nodes without copies of each other; storage gets every generation, and one expert of each.

    A node is lost, or all of them: what other nodes' memory has is not lost, and PLT is below that of storage alone.
    """
    nodes = (1,) if lost == "a node" else (0, 1, 2)
    machines = Machines(folder, (0, 1, 2), lost=(nodes,), replicas=0)
    # By load where one is lost: ranks of one position each, so that loads and ranks decide together. One expert of each node
    # then goes to memory: with fewer, those that storage lacks may all be of the node that is lost, whatever the loads.
    by_load = {"select": "load_aware", "snapshot_k": 3} if lost == "a node" else {}
    found = restarts(campaigns, two_level_setup(3, 3, **by_load), machines, KILL)
    promise = found.require(1)
    plt, stored_only = found.require_accounting().plt, found.tally(memory=False).plt
    print(f"PLT after the loss of {lost}: two levels {plt:.2%}, storage alone {stored_only:.2%}")
    if lost == "everything":
        assert promise == found.promised(1, memory=False)
        assert plt == stored_only
    else:
        assert promise != found.promised(1, memory=False)
        assert plt < stored_only


@pytest.mark.soak
def test_copies_on_other_nodes_keep_a_lost_node_as_new(campaigns: Campaigns, folder: Path) -> None:
    """With copies nothing comes from storage but what memory never had."""
    machines = Machines(folder, (0, 0, 1, 1), lost=((1,),))
    found = restarts(campaigns, two_level_setup(4, 2), machines, KILL)
    found.require(1)
    found.require_accounting()


def test_lost_tokens_of_several_layers_are_told_apart(campaigns: Campaigns, folder: Path) -> None:
    """MLT adds up what each layer has lost of its own tokens: layers weigh the same, whatever they drop."""
    setup = replace(two_level_setup(1, 1, snapshot_k=1), model="layers", options=(("num_experts", 4),))
    found = restarts(campaigns, setup, Machines(folder, (0,)), Kill(phase="forward", step=6), KILL)
    for life in (1, 2):
        found.require(life)
    tally = found.require_accounting()
    assert len(tally.num_experts) == 3
    assert tally.mlt == pytest.approx(3 * tally.plt), "as many tokens are routed in each layer"
    assert int((tally.routed - tally.processed).sum()) > 0, "of which some are dropped"
    by_layer = [int(tally.lost[4 * i : 4 * i + 4].sum()) for i in range(3)]
    assert all(by_layer)
    assert len(set(by_layer)) > 1, "each is told from the other"


@pytest.mark.parametrize("policy", ["partial", pytest.param("selective", marks=pytest.mark.soak)])
def test_loss_after_loss_is_counted_once(campaigns: Campaigns, folder: Path, policy: str) -> None:
    """A node, and then everything, in two lives of one run; under K, experts are modules with a step count of their own."""
    machines = Machines(folder, (0, 1, 1), lost=((1,), (0, 1)), replicas=0)
    setup = replace(two_level_setup(3, 1), model="lists") if policy == "partial" else selective_setup(3, 1)
    kills = [Kill(phase="forward", step=step) for step in (5, 9)]
    found = restarts(campaigns, setup, machines, *kills)
    for life in (1, 2):
        found.require(life)
    found.require_accounting()
    assert found.stored_accounting().faults == 2


@pytest.mark.parametrize(
    ("place", "placed", "lost", "policy"),
    [
        ("ring", (0,), (), "partial"),
        ("replica", (0, 1), ((1,),), "partial"),
        ("storage", (0,), ((0,),), "partial"),
        pytest.param("ring", (0, 0, 0), (), "partial", marks=pytest.mark.soak),
        pytest.param("storage", (0, 0, 0), ((0,),), "partial", marks=pytest.mark.soak),
        ("ring", (0,), (), "selective"),
        pytest.param("storage", (0, 0, 0), ((0,),), "selective", marks=pytest.mark.soak),
    ],
    ids=["ring", "replica", "storage", "ring-3", "storage-3", "ring-selective", "storage-3-selective"],
)
def test_a_bad_record_makes_its_own_expert_older_and_no_other(
    campaigns: Campaigns,
    folder: Path,
    *,
    place: Damage,
    placed: tuple[int, ...],
    lost: tuple[tuple[int, ...], ...],
    policy: str,
) -> None:
    """A bit of an expert turns between two lives: in memory of a dead process, in a copy of a dead node's, or in a file.

    Its next older copy is taken; all others, and the dense part, are as new as without the damage.
    """
    machines = Machines(folder, placed, lost=lost, damaged=place)
    setup = two_level_setup(len(placed), 1) if policy == "partial" else selective_setup(len(placed), 1)
    found = restarts(campaigns, setup, machines, replace(KILL, settle=10.0))
    promise, undamaged = found.require(1), found.promised(1, spoilt=False)
    expert = found.spoilt.expert
    assert promise.experts[expert] < undamaged.experts[expert] == found.spoilt.generation
    others = {name: each for name, each in undamaged.experts.items() if name != expert}
    assert promise.experts.items() - {(expert, promise.experts[expert])} == others.items()
    assert promise.generation == undamaged.generation
    said = "".join(found.lives[1].log(rank) for rank in found.ranks)
    assert re.search(rf"{re.escape(expert)} of .*an older copy of the expert is used", said)
    found.require_accounting()


@pytest.mark.parametrize(("world_size", "expert_parallel"), [(1, 1), pytest.param(3, 3, marks=pytest.mark.soak)])
def test_with_all_experts_in_every_generation_nothing_is_lost(
    campaigns: Campaigns, world_size: int, expert_parallel: int
) -> None:
    """The end has the bits of a run that was never interrupted: only experts ever go back."""
    setup = two_level_setup(world_size, expert_parallel, k=6, snapshot_k=6)
    campaigns.check(setup, KILL)


@pytest.mark.soak
def test_memory_that_cannot_keep_every_expert_promises_what_it_has(campaigns: Campaigns, folder: Path) -> None:
    """Forty experts, of which sixteen generations hold thirty-two: the rest comes from storage, and the book knows."""
    setup = replace(two_level_setup(1, 1), options=(("num_experts", 40),), batches=22)
    found = restarts(campaigns, setup, Machines(folder, (0,)), Kill(phase="forward", step=21, settle=60.0))
    promise = found.require(1)
    found.require_accounting()
    said = found.accountings[promise.generation].saved["memory"].step.tolist()
    given = [promise.experts[name].step for name in sorted(promise.experts, key=lambda name: int(name.split(".")[-1]))]
    assert -1 in said
    assert max(said) > promise.generation.step - 3
    assert all(promised <= step for promised, step in zip(said, given, strict=True))
    assert min(given) < promise.generation.step - 16


def test_memory_with_newer_copies_stays_though_storage_has_the_generation(campaigns: Campaigns, folder: Path) -> None:
    """Two experts to memory, one to storage, and Ctrl-C once that is committed: the next life takes them from memory."""
    setup, machines = two_level_setup(1, 1), Machines(folder, (0,))
    kill = Kill(phase="forward", step=9, signal=signal.SIGINT, settle=30.0)
    lives = campaigns.run(setup, kill, fit=partial(train_partial, setup, machines))
    assert [life.outcome for life in lives] == ["stopped", "finished"]
    found = Restarts(lives)
    promise = found.require(1)
    assert promise.generation == found.promised(1, memory=False).generation, "storage has it too"
    assert promise != found.promised(1, memory=False)
    found.require_accounting()


def test_a_stop_that_was_stored_leaves_no_memory_behind(campaigns: Campaigns, folder: Path) -> None:
    """After SIGTERM storage has everything as of the last step, which is as new as anything in memory."""
    setup, machines = two_level_setup(1, 1), Machines(folder, (0,))
    kill = Kill(phase="forward", step=8, signal=signal.SIGTERM)
    lives = campaigns.run(setup, kill, fit=partial(train_partial, setup, machines))
    assert [life.outcome for life in lives] == ["stopped", "finished"]
    found = Restarts(lives)
    assert found.load(1, 0, "held") == []
    promise = found.require(1)
    assert set(promise.experts.values()) == {promise.generation}
    assert list((folder / "node0.0").iterdir()) == [], "nor does the end of the run"
