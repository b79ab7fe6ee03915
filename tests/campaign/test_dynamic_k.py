"""Fault after fault, with K doubled as it has to be, until nothing is lost any more; and one fault, after which it falls."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from campaign._campaign import Campaigns
from campaign._partial_runs import Machines, train_partial
from campaign._promises import Restarts
from campaign._training import Checkpointing, Setup
from lightning_moe_ckpt.policies import TokenLedger
from lightning_moe_ckpt.testing import Kill, Seam


@dataclass(frozen=True, kw_only=True)
class Story:
    """A run that is killed again and again; K begins at one expert."""

    num_experts: int
    first: int
    """Step of the first fault."""
    every: int
    """Steps from one fault to the next."""
    faults: int
    budget: float
    settle: float = 0.0
    """See `Kill`; else a fault meets generations under way."""
    nodes: int = 1
    """With one rank each, over which experts are spread; of several, each fault takes one with its memory."""

    def run(self, campaigns: Campaigns, folder: Path, **options: Any) -> Restarts:
        """Its lives, the last of which finished."""
        steps = [self.first + self.every * fault for fault in range(self.faults)]
        kills = [Kill(phase="forward", step=step, settle=self.settle) for step in steps]
        setup = Setup(
            model="stacked",
            options=(("num_experts", self.num_experts),),
            world_size=self.nodes,
            expert_parallel=self.nodes,
            batches=steps[-1] + self.every,
            epochs=1,
            validate_every=None,
            checkpointing=Checkpointing(policy="partial", keep=1000, k=1, plt_budget=self.budget),
        )
        turns = tuple((fault % self.nodes,) for fault in range(self.faults)) if self.nodes > 1 else ()
        machines = Machines(folder, tuple(range(self.nodes)), lost=turns, replicas=0)
        fit = partial(train_partial, setup, machines)
        return Restarts(campaigns.run(setup, *kills, fit=fit, patience=600.0, **options))


SHORT = Story(num_experts=4, first=12, every=1, faults=6, budget=0.2, settle=20.0)
LONG = Story(num_experts=8, first=28, every=2, faults=20, budget=0.2)
STRICT = Story(num_experts=8, first=16, every=2, faults=20, budget=0.05)
"""The paper's budget, which the first fault exceeds."""
NODES = Story(num_experts=6, first=16, every=2, faults=6, budget=0.06, nodes=3)


def k_after(k: int, last_k: int, plt: float, last_loss: float, story: Story) -> int:
    """The smallest of 1, 2, 4 and so on with which another such fault is within the budget; twice the last at most."""
    while k < min(2 * last_k, story.num_experts) and plt + last_loss * last_k / k > story.budget:
        k = min(2 * k, 2 * last_k, story.num_experts)
    return k


def require_counts(found: Restarts, life: int) -> TokenLedger:
    """What the first generation after a fault says is what counting one by one gives."""
    generation, said = next((g, accounting) for g, accounting in found.accountings.items() if g.incarnation == life + 1)
    tally = found.tally(restarts=life)
    since = [found.counted(life, step) for step in range(found.began_at(life) + 1, generation.step + 1)]
    routed = [found.counted(life, step, what="routed") for step in range(found.began_at(life) + 1, generation.step + 1)]
    tally = replace(
        tally,
        processed=tally.processed + sum(since),
        routed=tally.routed + sum(routed),
        progress=generation.step / found.planned,
    )
    assert torch.equal(said.lost, tally.lost)
    assert torch.equal(said.processed, tally.processed)
    assert (said.plt, said.mlt) == (tally.plt, tally.mlt)
    return said


def require_budget(found: Restarts, story: Story) -> list[int]:
    """K is what lost tokens lead to, and with all experts nothing is lost. Returns K after each fault."""
    ks, lost, last = [1], 0, (1, 0)
    for life in range(1, story.faults + 1):
        said, tally = require_counts(found, life), found.tally(restarts=life)
        lost_now = int(tally.lost.sum())
        if lost_now > lost:
            assert ks[-1] < story.num_experts, "generations that take all experts lose none"
            last = ks[-1], lost_now - lost
        lost = lost_now
        wanted = k_after(1, last[0], tally.plt, tally.share(last[1]), story) if last[1] else 1
        assert said.k == wanted, (life, ks)
        assert tally.plt <= story.budget or wanted == min(2 * last[0], story.num_experts)
        ks.append(wanted)
    return ks


@pytest.mark.parametrize(
    ("story", "least"),
    [
        (SHORT, 3),
        pytest.param(LONG, 3, marks=pytest.mark.soak),
        pytest.param(STRICT, 2, marks=pytest.mark.soak),
        pytest.param(NODES, 2, marks=pytest.mark.soak),
    ],
    ids=["short", "twenty faults", "the paper's budget", "three nodes"],
)
def test_k_doubles_until_nothing_is_lost_any_more(campaigns: Campaigns, folder: Path, story: Story, least: int) -> None:
    """PLT and MLT are counted rightly after every fault, and PLT stays at its budget plus one fault's loss at most."""
    found = story.run(campaigns, folder)
    for life in range(1, story.faults + 1):
        found.require(life)
    ks = require_budget(found, story)
    print(f"K: {ks}; PLT: {[round(found.tally(restarts=i).plt, 4) for i in range(1, story.faults + 1)]}")
    assert ks[-1] == story.num_experts
    assert len(set(ks)) >= least, "by and by, where the budget leaves room"
    found.require_accounting()


def _same_k(rule: object, k: int, ledger: TokenLedger) -> int:
    return k


@pytest.mark.soak
def test_without_dynamic_k_the_budget_is_passed(campaigns: Campaigns, folder: Path) -> None:
    """The check above can fail."""
    seam = Seam(module="lightning_moe_ckpt.policies", attribute="DynamicK.in_force", replacement=_same_k)
    found = SHORT.run(campaigns, folder, seams=[seam])
    with pytest.raises(AssertionError):
        require_budget(found, SHORT)
    assert found.tally(restarts=SHORT.faults).plt > SHORT.budget
