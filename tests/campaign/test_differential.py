"""Differentials: killed at any step, the run ends as if nothing had happened, from memory and from storage."""

from __future__ import annotations

from dataclasses import replace

import pytest

from campaign._campaign import Campaigns, two_chains
from campaign._training import Checkpointing, Setup
from lightning_moe_ckpt.testing._kill import Kill

CHAINED = Checkpointing(policy="differential", every_n_steps=6, batch=2)


def test_killed_at_every_other_step_the_run_ends_the_same(campaigns: Campaigns) -> None:
    """Each life resumes from a difference that memory has, or from what the one before it was."""
    setup = Setup(checkpointing=CHAINED, validate_every=None, batches=10, epochs=1)
    for lives in campaigns.check_all(setup, two_chains(setup)):
        assert len(lives) >= setup.steps // 2
