"""Trainings whose steps are all audited end in the bits of those without audits, however often ranks die, and raise no alarm."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from campaign._campaign import Campaigns
from campaign._in_place import no_place, train_and_die
from campaign._training import Checkpointing, Setup
from campaign.test_in_place import check_killed
from campaign.test_stages_alone import TOPOLOGIES, Counted, Editing, chain
from lightning_moe_ckpt.testing import Kill

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]

AUDITED = (("audit_every_n_steps", 1),)
KILLS = [Kill(phase="after_backward", batches=4, rank=1), Kill(phase="batch_end", batches=3, rank=0)]
"""While roles are played, and behind a step."""


@pytest.mark.parametrize(
    "setup",
    [
        Setup(world_size=3, checkpointing=Checkpointing(policy="sparse", window=3, arguments=AUDITED)),
        Setup(world_size=3, model="lists", checkpointing=Checkpointing(policy="dense", arguments=AUDITED)),
        Setup(checkpointing=Checkpointing(policy="differential", every_n_steps=4, batch=2, arguments=AUDITED)),
        Setup(
            world_size=4,
            expert_parallel=2,
            model="layers",
            accumulate=2,
            checkpointing=Checkpointing(policy="sparse", window=2, arguments=AUDITED),
        ),
    ],
    ids=["3 sparse", "3 dense", "1 differential", "4 experts"],
)
def test_killed_trainings_are_audited(campaigns: Campaigns, setup: Setup) -> None:
    """Nothing is audited while steps are repeated; a warning, or a finding, would fail this."""
    campaigns.check(setup, *(replace(kill, rank=min(kill.rank, setup.world_size - 1)) for kill in KILLS))


@pytest.mark.parametrize(
    ("setup", "places"),
    [
        (TOPOLOGIES["2x2x1"], ["in_forward", "in_backward", "commit>"]),
        (Editing(world_size=2), ["after_backward", "seal"]),
    ],
    ids=["2x2x1", "2x1x1, edits"],
)
def test_audited_stages_recover_alone(campaigns: Campaigns, setup: Counted, places: list[str]) -> None:
    """A step is watched anew once a rank is new, by all ranks."""
    checkpointing = Checkpointing(policy="sparse", window=3, order="popularity", arguments=AUDITED)
    setup = replace(setup, batches=24, checkpointing=checkpointing)
    deaths = chain(places, [(at + 1) % setup.world_size for at in range(len(places))])
    fit = partial(train_and_die, setup, deaths, no_place)
    check_killed(campaigns, setup, fit=fit, deaths=len(deaths), same_seed=True, timeout=300.0)
