"""Runs whose checkpoints cost far more than they may, so that windows are kept apart and tiers rest: they end the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from campaign._campaign import Campaigns
from campaign._partial_runs import Machines, restarts, two_level_setup
from campaign._training import Checkpointing, Setup
from campaign.test_selective import selective_setup
from lightning_moe_ckpt.testing import Kill


@pytest.mark.parametrize(
    ("world_size", "policy", "window"),
    [
        pytest.param(1, "sparse", 2, marks=pytest.mark.soak),
        (1, "dense", 1),
        (3, "sparse", 2),
        pytest.param(3, "dense", 1, marks=pytest.mark.soak),
        pytest.param(3, "sparse", 4, marks=pytest.mark.soak),
    ],
)
def test_a_governed_run_ends_the_same_however_often_it_is_killed(
    campaigns: Campaigns, world_size: int, policy: Any, window: int
) -> None:
    """Killed while windows are apart, in what is replayed from before that, and when storage rests."""
    setup = Setup(
        model="stacked", world_size=world_size, batches=60, epochs=1, validate_every=None,
        checkpointing=Checkpointing(policy=policy, window=window, every_n_steps=1, target=0.03),
    )  # fmt: skip
    kills = [
        Kill(phase="forward", step=36, settle=10.0),
        Kill(phase="after_batch_end", batches=2),
        Kill(phase="batch_end", step=57, settle=10.0),
    ]
    lives = campaigns.check(setup, *kills)
    assert "(overhead_target=0.03): they now start every" in lives[0].log()
    assert all(life.steps()[0] > 1 for life in lives[1:])
    assert "of training's time (overhead_target=0.03), " in lives[-1].log()


@pytest.mark.parametrize(
    ("policy", "placed", "lost"),
    [
        ("partial", (0,), ()),
        pytest.param("selective", (0,), (), marks=pytest.mark.soak),
        pytest.param("partial", (0, 1, 1), ((1,),), marks=pytest.mark.soak),
        pytest.param("selective", (0, 1, 1), ((1,),), marks=pytest.mark.soak),
    ],
)
def test_experts_are_as_old_as_promised_where_generations_are_apart(
    campaigns: Campaigns, folder: Path, policy: str, placed: tuple[int, ...], lost: tuple[tuple[int, ...], ...]
) -> None:
    """On one node; and on two with copies on each other, of which one is lost: tokens are counted up to the newest generation."""
    ranks = len(placed)
    setup = two_level_setup(ranks, ranks) if policy == "partial" else selective_setup(ranks, ranks)
    assert setup.checkpointing is not None
    setup = replace(setup, batches=36, checkpointing=replace(setup.checkpointing, target=0.03))
    found = restarts(campaigns, setup, Machines(folder, placed, lost=lost), Kill(phase="forward", step=33))
    assert "they now start every" in found.lives[0].log()
    found.require(1)
    found.require_accounting()
