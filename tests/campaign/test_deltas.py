"""Copies on other nodes told by gradients: a lost node comes back from them with its owner's bits. Real training, real kills."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from stored._outages import stop_storing_after

from campaign._campaign import Campaigns
from campaign._nodes import AwaitsCopies, Nodes, leave_only_copies
from campaign._partial_runs import Machines, train_partial
from campaign._promises import Restarts
from campaign._sharded import Sharded
from campaign._training import Setup, train
from campaign.test_selective import STORED, selective_setup
from lightning_moe_ckpt.session import Report
from lightning_moe_ckpt.testing import Attempt, Kill, Seam

KILL_STEP = 9
KILL = Kill(phase="forward", step=KILL_STEP, rank=1)
LOST = 1
"""Node of the killed rank."""
SENT = (("redundancy", False),)
"""Also what other nodes hold anyway, where every rank has every expert."""


def follows(life: Attempt) -> AwaitsCopies:
    """Each step waits until the copy of the boundary before it is on another node; what that took is written down."""

    def tell(report: Report) -> None:
        figures = report.deltas
        told = None if figures is None else {**dataclasses.asdict(figures), "share": figures.share}
        (life.workdir / f"deltas.{life.index}.{life.rank}").write_text(json.dumps(told))

    return AwaitsCopies(lambda step: step or None, tell, hands_over=True)


def train_followed(
    setup: Setup, machines: Machines, life: Attempt, *, optimizer: Callable[..., torch.optim.Optimizer] | None = None
) -> Mapping[str, Any]:
    """In the first life storage fails after a few generations, and every step waits for the copies of the one before."""
    if life.index == 0:
        leave_only_copies(STORED, follows(life))
    if optimizer is not None:
        Seam(module="campaign._training", attribute="make_optimizer", replacement=partial(_grouped, optimizer)).apply()
    return train_partial(setup, machines, life)


def _grouped(make: Callable[..., torch.optim.Optimizer], name: str, module: LightningModule) -> torch.optim.Optimizer:
    matrices = [parameter for parameter in module.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in module.parameters() if parameter.ndim <= 1]
    return make([{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=3e-3)


def followed_setup(world_size: int, expert_parallel: int, **options: Any) -> Setup:
    """Every expert stays chosen."""
    setup = selective_setup(world_size, expert_parallel)
    assert setup.checkpointing is not None
    everything = replace(setup.checkpointing, local_budget=10**8, remote_budget=10**8, arguments=SENT)
    return replace(setup, checkpointing=everything, **options)


def sent(setup: Setup, *, redundancy: bool = False) -> Setup:
    """With, or without, what other nodes hold anyway."""
    assert setup.checkpointing is not None
    return replace(setup, checkpointing=replace(setup.checkpointing, arguments=(("redundancy", redundancy),)))


def lost_and_restored(campaigns: Campaigns, setup: Setup, machines: Machines, **options: Any) -> Restarts:
    """Kill a rank, lose its node, and resume from copies."""
    lives = campaigns.run(setup, KILL, fit=partial(train_followed, setup, machines, **options))
    assert [life.outcome for life in lives] == ["killed", "finished"], lives[-1].log()
    assert re.search(r"ranks? [\d, ]+: [\d.]+ MiB from peer", lives[1].log()), lives[1].log()
    return Restarts(lives)


def figures_of(found: Restarts) -> dict[str, Any]:
    """What copies of the killed rank had taken until then."""
    figures: dict[str, Any] = json.loads((found.workdir / "deltas.0.1").read_text())
    return figures


ADAM = partial(torch.optim.Adam, amsgrad=True, maximize=True, foreach=False)
LISTS = followed_setup(3, 1, model="lists", strategy="ddp", options=(("num_experts", 6),))
CASES: dict[str, tuple[Setup, tuple[int, ...], dict[str, Any], float]] = {
    "every expert, spread over ranks": (followed_setup(3, 3), (0, 1, 2), {}, 0.6),
    "lists under DDP, amsgrad": (LISTS, (0, 1, 2), {"optimizer": ADAM}, 0.9),
    "four of six experts leave the node": (sent(selective_setup(3, 1, local=5, remote=4)), (0, 1, 2), {}, 0.8),
    "the dense part is there": (sent(followed_setup(3, 3), redundancy=True), (0, 1, 2), {}, 0.6),
    "four ranks": (followed_setup(4, 2), (0, 0, 1, 1), {}, 0.6),
}
LONG = {"every expert, spread over ranks", "lists under DDP, amsgrad", "the dense part is there", "four ranks"}
"""The first of them is trained with rounded gradients below."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.soak] if name in LONG else []) for name in CASES]
)
def test_a_lost_node_comes_back_from_copies_told_by_gradients(campaigns: Campaigns, folder: Path, name: str) -> None:
    """Every operator has the bits it had on the node that is gone: `require` compares with what was recorded there."""
    setup, placed, options, share = CASES[name]
    found = lost_and_restored(campaigns, setup, Machines(folder, placed, lost=((LOST,),)), **options)
    # Others need not have got as far as the rank that was killed.
    assert found.require(1).generation.step >= KILL_STEP - 1
    figures = figures_of(found)
    assert figures["refused"] == 0
    assert (figures["generations"], figures["whole_generations"]) == (KILL_STEP - 1, 1)
    assert figures["share"] < share, figures


def test_rounded_gradients_bring_a_lost_node_back_near_to_what_it_was(campaigns: Campaigns, folder: Path) -> None:
    """Its experts differ by little, and nothing else does; an audit told how little before."""
    setup = followed_setup(3, 3)
    assert setup.checkpointing is not None
    arguments = (*setup.checkpointing.arguments, ("delta", "bf16"), ("resync_every", 5))
    setup = replace(setup, checkpointing=replace(setup.checkpointing, arguments=arguments))
    found = lost_and_restored(campaigns, setup, Machines(folder, (0, 1, 2), lost=((LOST,),)))
    figures = figures_of(found)
    assert (figures["audits"], figures["refused"]) == (1, 0)
    assert 0 < figures["drift"] < 1e-2
    assert figures["share"] < 0.45, figures
    promise, differing = found.promised(1), set()
    for rank in found.ranks:
        restored, recorded = found.load(1, rank, "restored"), found.state(rank, promise.generation)
        assert restored.keys() == recorded.keys()
        for (operator, fqn, key), (_, value) in recorded.items():
            near = restored[operator, fqn, key][1]
            if not torch.equal(near, value):
                differing.add(operator)
                assert (near - value).abs().max() <= 0.01 * value.abs().max(), (operator, key)
    assert differing == {"model.moe.layer/expert.2", "model.moe.layer/expert.3"}


SHARDS = Sharded(
    world_size=2,
    batches=12,
    epochs=1,
    validate_every=None,
    checkpointing=sent(followed_setup(2, 1), redundancy=True).checkpointing,
)


def train_in_shards(nodes: Nodes, life: Attempt) -> Mapping[str, Any]:
    """As `train_followed`, on nodes."""
    nodes.settle(life)
    if life.index == 0:
        own = [follows(life)]
        stop_storing_after(STORED)
        Seam(module="campaign._variants", attribute="Variant.callbacks", replacement=lambda *_: own).apply()
    return train(SHARDS, life)


@pytest.mark.soak
def test_shards_that_no_other_node_holds_are_told_by_gradients(campaigns: Campaigns, folder: Path) -> None:
    """Whatever redundancy could leave out: without expert parallelism ranks hold the same only where parameters are whole."""
    nodes = Nodes(folder, (0, 1), dies=LOST)
    lives = campaigns.check(SHARDS, KILL, may_complain=True, fit=partial(train_in_shards, nodes))
    assert re.search(r"ranks? [^\n]*\b1\b[^\n]*: [^\n]*from peer", lives[-1].log()), lives[-1].log()
    figures = figures_of(Restarts(lives))
    assert figures["refused"] == 0
    assert (figures["generations"], figures["whole_generations"]) == (KILL_STEP - 1, 1)
    assert figures["share"] < 0.8, figures
