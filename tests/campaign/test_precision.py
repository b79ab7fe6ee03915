"""What precision adds to resuming: overflows inside frozen experts, fp32 islands, and noise drawn in the forward."""

from __future__ import annotations

from typing import Any

import pytest

from campaign._campaign import Campaigns, one_kill_per_step
from campaign._training import Checkpointing, Setup
from lightning_moe_ckpt.testing._lives_kill import Kill

SPARSE = Checkpointing(policy="sparse", window=3)
PRECISIONS = ["32-true", "bf16-mixed", "bf16-true", "16-mixed"]


@pytest.mark.parametrize("model", ["lists", "stacked"])
def test_an_overflow_inside_a_frozen_expert_skips_the_same_steps(campaigns: Campaigns, model: Any) -> None:
    """A frozen expert computes no gradient, so the journal has to say that its overflow skipped the step.

    The one model is killed at the odd steps, the other at the even ones.
    """
    setup = Setup(model=model, precision="16-mixed", overflow_steps=(4, 5, 8), checkpointing=SPARSE)
    lives = campaigns.check_all(setup, one_kill_per_step(setup, offset=int(model == "stacked"), every=2))
    assert lives[0][-1].end()["precision/scale"] < 2.0**14, "steps were skipped"


@pytest.mark.parametrize("precision", PRECISIONS)
def test_an_fp32_gate_with_noise_survives(campaigns: Campaigns, precision: Any) -> None:
    """A router that runs in fp32 under autocast needs its weights in fp32, and its noise from the restored generator."""
    setup = Setup(precision=precision, checkpointing=SPARSE).with_options(gate_fp32=True, noisy=True)
    steps = (3, 7) if precision in PRECISIONS[::2] else (6, 8)
    campaigns.check_all(setup, [[Kill(phase="after_batch_end", step=step)] for step in steps])


@pytest.mark.parametrize("precision", PRECISIONS)
def test_an_expert_that_never_gets_a_token_survives(campaigns: Campaigns, precision: Any) -> None:
    """It has no optimizer state, which is a state of its own, and no weight seen by the probe of dtypes."""
    setup = Setup(precision=precision, checkpointing=SPARSE).with_options(never_routed=True)
    steps = (4, 6) if precision in PRECISIONS[::2] else (5, 9)
    lives = campaigns.check_all(setup, [[Kill(phase="forward", step=step)] for step in steps])
    state = [key for key in lives[0][-1].end() if key.startswith("optimizer/0/state/model.moe.experts.3.")]
    assert state == [], "no expert without tokens has optimizer state"
