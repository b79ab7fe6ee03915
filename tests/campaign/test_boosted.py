"""Experts that a real partial recovery has put back get more capacity, through a further crash, until they have made up for it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from campaign._boosted import BoostedSetup, Boosting, logged
from campaign._campaign import Campaigns
from campaign._partial_runs import Machines, train_partial
from campaign._promises import Restarts
from campaign._training import Checkpointing
from lightning_moe_ckpt.boosting import WATCHED_STEPS
from lightning_moe_ckpt.testing import Kill

BASE, BATCH = 0.75, 16
KILLS = [Kill(phase="forward", step=step, settle=20.0) for step in (6, 9)]
"""Experts that overflow were not in the newest generation then, and have made up for little of the first loss at the second."""


def boosted_setup(world_size: int, scope: str) -> BoostedSetup:
    """Most tokens want the first three experts, which overflow; four of six are taken at each step."""
    options = {"num_experts": 6, "capacity_factor": BASE, "one_capacity": scope == "layer", "shift_every": 1000}
    return BoostedSetup(
        model="stacked",
        options=tuple(options.items()),
        world_size=world_size,
        expert_parallel=world_size,
        batch_size=BATCH,
        batches=32,
        epochs=1,
        validate_every=None,
        checkpointing=Checkpointing(policy="partial", keep=100, k=4),
    )


def run_boosted(campaigns: Campaigns, folder: Path, world_size: int, scope: str, **options: Any) -> Restarts:
    setup = boosted_setup(world_size, scope)
    machines = Machines(folder, (0,) * world_size)
    return Restarts(campaigns.run(setup, *KILLS, fit=partial(train_partial, setup, machines), **options))


def require_boosted(found: Restarts, boosting: Boosting, scope: str) -> None:
    """Experts in debt, and no others, get a tenth more, of what others leave empty, until they have repaid it."""
    steps = list(boosting.steps())
    for at, now in enumerate(steps):
        factors = now.before.factors
        for rank in found.ranks:
            assert boosting.capacity(now.life, now.step, rank) == pytest.approx(factors), (rank, now)
        if scope == "expert":
            raised = [i for i, factor in enumerate(factors) if factor > 1]
            assert raised == ([i for i, debt in enumerate(steps[at - 1].after.debts) if debt] if at else [])
            assert [factors[i] for i in raised] == pytest.approx([1.1] * len(raised))
            if now.before.watched >= WATCHED_STEPS:
                assert sum(factors) <= len(factors) + 0.1 * len(raised) + 1e-9
    raised_in = [now.life for now in steps if max(now.before.factors) > 1]
    assert set(raised_in) == {1, 2}, "there were debts before the second crash and after it"
    assert not any(steps[-1].after.debts)
    assert set(boosting.capacity(2, steps[-1].step, 0)) == {1.0}
    lost = sum(steps[-1].after.lost)
    assert f"of {lost} lost tokens are made up for, and {steps[-1].after.displaced} others" in found.lives[2].log()


def require_logged(found: Restarts, boosting: Boosting) -> None:
    """Lightning's logger has what was lost, as a number and as PLT and MLT, and the debts that are open."""
    rows, routed = logged(found), {0: 0}
    for now in boosting.steps():
        row, lost = rows[now.step], sum(now.before.lost)
        assert row["moe/lost_tokens"] == lost
        assert row["moe/partial_faults"] == now.life
        before = routed[now.step - 1]  # a step's own tokens are exchanged when it is over
        assert row["moe/mlt"] == pytest.approx(lost / before if before else 0.0)
        assert row["moe/plt"] == pytest.approx(row["moe/mlt"] * (now.step - 1) / found.planned)
        routed[now.step] = before + int(found.counted(now.life, now.step, what="routed").sum())
        indebted = any(now.before.debts)
        assert row.get("moe/boost_debt") == (sum(now.after.debts) if indebted else None)
        assert row.get("moe/boost_repaid") == (sum(now.after.repaid) if indebted else None)
        assert row.get("moe/boost_displaced") == (now.after.displaced if indebted else None)


@pytest.mark.parametrize(
    ("world_size", "scope"),
    [
        *(pytest.param(*each, marks=pytest.mark.soak) for each in ((3, "expert"), (3, "layer"))),
        (1, "expert"),
        pytest.param(1, "layer", marks=pytest.mark.soak),
    ],
)
def test_lost_tokens_are_made_up_for_through_a_second_crash(
    campaigns: Campaigns, folder: Path, world_size: int, scope: str
) -> None:
    """Kill, resume, boost; kill again before the debts are paid, which are then those of both faults; until all is paid.

    The layer is the package's own, with a capacity per expert, or one like it with a single one.
    """
    found = run_boosted(campaigns, folder, world_size, scope)
    for life in (1, 2):
        found.require(life)
        lost = found.tally(restarts=life).lost
        assert 0 < int((lost > 0).sum()) < len(lost)
    found.require_accounting()
    boosting = Boosting(found, BASE, BATCH, scope)
    require_boosted(found, boosting, scope)
    require_logged(found, boosting)
