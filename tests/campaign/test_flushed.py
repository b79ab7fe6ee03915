"""When nobody starts again on a node: everybody is killed, memory is flushed and gone, and another place goes on with the same bits."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from campaign._campaign import Campaigns, kill_at_every_step
from campaign._flushed import train_elsewhere
from campaign._training import Checkpointing, Setup
from lightning_moe_ckpt.testing import Kill

SPARSE = Setup(model="stacked", batches=6, checkpointing=Checkpointing(policy="sparse", window=3))
DENSE = replace(SPARSE, checkpointing=Checkpointing(policy="dense"))
EVERY_OTHER = replace(SPARSE, checkpointing=Checkpointing(policy="dense", every_n_steps=2))
DIFFERENTIAL = replace(SPARSE, clip=None, checkpointing=Checkpointing(policy="differential", every_n_steps=4, batch=2))
THREE = replace(SPARSE, world_size=3, options=(("num_experts", 6),), expert_parallel=3)


def check(campaigns: Campaigns, setup: Setup, *kills: Kill, stored_until: int = 0) -> list[list[int]]:
    """Every life but the first resumes from what was flushed; the steps of each life."""
    kills = tuple(replace(kill, everyone=True, settle=0.0) for kill in kills)
    fit = partial(train_elsewhere, setup, stored_until, len(kills) + 1)
    lives = campaigns.check(setup, *kills, fit=fit, may_complain=True)
    return [life.steps() for life in lives]


@pytest.mark.parametrize("setup", [SPARSE, DENSE, DIFFERENTIAL], ids=["sparse", "dense", "differential"])
def test_where_memory_was_flushed_another_node_goes_on(campaigns: Campaigns, setup: Setup) -> None:
    """Storage had the first generation only; twice in a row."""
    first, second, last = check(
        campaigns, setup, Kill(phase="forward", step=7), Kill(phase="before_optimizer_step", step=10)
    )
    assert min(second[0], last[0]) > 3
