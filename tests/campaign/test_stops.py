"""SIGTERM, Ctrl-C and normal ends: clean, at the same boundary on all ranks, and the next start goes on exactly there."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import Any

import pytest

from campaign._campaign import Campaigns
from campaign._stops import looking_around, require_clean, seconds_to_end
from campaign._training import Checkpointing, Setup
from lightning_moe_ckpt.testing._lives import LifeResult
from lightning_moe_ckpt.testing._lives_kill import Kill

SPARSE = Setup(batches=4, checkpointing=Checkpointing(policy="sparse", window=3))
DENSE = replace(SPARSE, checkpointing=Checkpointing(policy="dense", every_n_steps=100))


def term(phase: Any, **place: Any) -> Kill:
    return Kill(phase=phase, signal=signal.SIGTERM, **place)


def check(campaigns: Campaigns, setup: Setup, *scripts: list[Kill], **options: Any) -> list[list[LifeResult]]:
    """Run every script; each stopped life must be clean, and the end that of the undisturbed run."""
    results = campaigns.check_all(setup, scripts, fit=looking_around(setup), **options)
    for lives in results:
        require_clean(lives)
        for life in lives[:-1]:
            print(f"signal to end, by rank: {[f'{seconds:.2f}' for seconds in seconds_to_end(life)]} s")
    return results


@pytest.mark.parametrize("setup", [DENSE, SPARSE], ids=["dense", "sparse"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_a_run_stopped_by_sigterm_goes_on_at_the_step_it_stopped_at(
    campaigns: Campaigns, setup: Setup, world_size: int
) -> None:
    """Sent to rank 0 only, in the forward pass of step 6: all ranks take that step, store it, and leave with 143."""
    setup = replace(setup, world_size=world_size)
    (lives,) = check(campaigns, setup, [term("forward", step=5)])
    assert set(lives[0].exit_codes.values()) == {143}
    for rank in range(world_size):
        assert lives[0].steps(rank)[-1] == 6
        assert lives[1].steps(rank)[0] == 7
