"""Runs whose checkpoints cost far more than they may, so that windows are kept apart and tiers rest: they end the same."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from campaign._campaign import Campaigns, require_near
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
        checkpointing=Checkpointing(policy=policy, window=window, every_n_steps=1, target=0.03, stretched=True),
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
    ("world_size", "checkpointing", "said"),
    [
        (1, {"policy": "dense", "every_n_steps": 2}, "every_n_steps=2"),
        pytest.param(3, {"policy": "sparse", "window": 2}, "window=2", marks=pytest.mark.soak),
        pytest.param(1, {"policy": "sparse", "window": 4}, "window=4", marks=pytest.mark.soak),
        pytest.param(3, {"policy": "dense", "every_n_steps": 1}, "every_n_steps=1", marks=pytest.mark.soak),
        pytest.param(1, {"policy": "dense", "every_n_steps": 5}, "every_n_steps=5", marks=pytest.mark.soak),
        pytest.param(3, {"policy": "partial", "every_n_steps": 1}, "every_n_steps=1", marks=pytest.mark.soak),
        pytest.param(1, {"policy": "selective", "every_n_steps": 2}, "every_n_steps=2", marks=pytest.mark.soak),
    ],
)
def test_a_number_of_steps_is_kept_whatever_it_costs(
    campaigns: Campaigns, world_size: int, checkpointing: dict[str, Any], said: str
) -> None:
    """Killed at random times: each restart begins within the number, and the log has another that would cost less, if any."""
    draw = random.Random(said + checkpointing["policy"])
    chosen = Checkpointing(target=0.001, **checkpointing)
    setup = Setup(
        model="stacked", world_size=world_size, batches=80, epochs=1, validate_every=None, checkpointing=chosen
    )
    kills = [
        Kill(phase=draw.choice(["forward", "batch_start", "batch_end", "after_batch_end"]), batches=draw.randint(8, 20))
        for _ in range(2)
    ]
    if chosen.policy in ("dense", "sparse"):
        lives = campaigns.check(setup, Kill(phase="forward", batches=30), *kills)
    else:
        lives = campaigns.run(setup, Kill(phase="forward", batches=30), *kills)
        require_near(lives, chosen)
    assert f"{said} costs " in lives[0].log()
    assert "of training's time; the target is 0.1%; " in lives[0].log()
    assert "they now start every" not in "".join(life.log() for life in lives)


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
    setup = replace(setup, batches=36, checkpointing=replace(setup.checkpointing, target=0.03, stretched=True))
    found = restarts(campaigns, setup, Machines(folder, placed, lost=lost), Kill(phase="forward", step=33))
    assert "they now start every" in found.lives[0].log()
    found.require(1)
    found.require_accounting()
