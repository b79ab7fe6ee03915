"""Runs whose checkpoints cost far more than they may, so that windows are kept apart and tiers rest: they end the same."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest

from campaign._campaign import Campaigns
from campaign._training import Checkpointing, Setup, train
from lightning_moe_ckpt.session._pacing import Governor
from lightning_moe_ckpt.testing import Seam
from lightning_moe_ckpt.testing._attempts import Attempt
from lightning_moe_ckpt.testing._kill import Kill


def train_governed(setup: Setup, life: Attempt) -> Mapping[str, Any]:
    """Decisions begin with the first steps, and not after seconds of training."""
    hasty = partial(Governor, least_seconds=0.0, least_steps=4)
    Seam(module="lightning_moe_ckpt.session._tiers", attribute="Governor", replacement=hasty).apply()
    return train(setup, life)


@pytest.mark.parametrize(
    ("world_size", "policy", "window"),
    [
        (1, "sparse", 2),
        (3, "sparse", 2),
        (3, "dense", 1),
        pytest.param(1, "dense", 1, marks=pytest.mark.soak),
        pytest.param(3, "sparse", 4, marks=pytest.mark.soak),
    ],
)
def test_a_governed_run_ends_the_same_however_often_it_is_killed(
    campaigns: Campaigns, world_size: int, policy: Any, window: int
) -> None:
    """Killed while windows are apart, in what is replayed from before that, and when storage rests."""
    setup = Setup(
        model="stacked", world_size=world_size, batches=60, epochs=1, validate_every=None,
        checkpointing=Checkpointing(policy=policy, window=window, every_n_steps=1),
    )  # fmt: skip
    kills = [
        Kill(phase="forward", step=36, settle=10.0),
        Kill(phase="after_batch_end", batches=2),
        Kill(phase="batch_end", step=57, settle=10.0),
    ]
    lives = campaigns.check(setup, *kills, fit=partial(train_governed, setup))
    assert "more than overhead_target=0.03: windows now start every" in lives[0].log()
    assert all(life.steps()[0] > 1 for life in lives[1:])
    assert "(overhead_target=0.03): " in lives[-1].log()
