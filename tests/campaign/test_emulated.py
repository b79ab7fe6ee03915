"""Killed and resumed runs whose snapshots and restores go through the compiled CUDA engine, on an emulated device."""

from __future__ import annotations

import pytest
from native.emulator.build import unavailable

from campaign._campaign import Campaigns, two_chains
from campaign._training import Checkpointing, Setup

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))
SPARSE = Checkpointing(policy="sparse", window=3)


@pytest.mark.parametrize(
    "setup",
    [
        Setup(emulated=True, checkpointing=SPARSE),
        Setup(emulated=True, checkpointing=Checkpointing(policy="dense")),
        pytest.param(Setup(emulated=True, checkpointing=SPARSE, world_size=3), marks=pytest.mark.soak),
    ],
    ids=["sparse", "dense", "3 ranks"],
)
def test_killed_runs_end_as_if_nothing_had_happened(campaigns: Campaigns, setup: Setup) -> None:
    """Snapshots arrive as they were at their step, and restored parameters as they were stored."""
    (chain, _) = two_chains(setup)
    (lives,) = campaigns.check_all(setup, [chain[1:3]])
    assert [life.outcome for life in lives] == ["killed", "killed", "finished"]
    assert lives[2].steps()[0] > 1, "nothing was restored"
