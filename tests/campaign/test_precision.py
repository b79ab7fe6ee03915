"""What precision adds to resuming: overflows inside frozen experts, fp32 islands, and noise drawn in the forward."""

from __future__ import annotations

from typing import Any

import pytest

from campaign._campaign import Campaigns, one_kill_per_step
from campaign._training import Checkpointing, Setup
from lightning_moe_ckpt.testing._kill import Kill

SPARSE = Checkpointing(policy="sparse", window=3)
PRECISIONS = ["32-true", "bf16-mixed", "bf16-true", "16-mixed"]


def by_precision(*steps: int) -> list[Any]:
    """A step to be killed at for each; of the true ones runs are drawn in `test_configurations.py` too."""
    return [
        pytest.param(precision, step, marks=[pytest.mark.soak] if precision.endswith("true") else [])
        for precision, step in zip(PRECISIONS, steps, strict=True)
    ]


@pytest.mark.parametrize("model", ["lists", pytest.param("stacked", marks=pytest.mark.soak)])
def test_an_overflow_inside_a_frozen_expert_skips_the_same_steps(campaigns: Campaigns, model: Any) -> None:
    """A frozen expert computes no gradient, so the journal has to say that its overflow skipped the step.

    The one model is killed at steps 5 and 7, the other at 6 and 8.
    """
    setup = Setup(model=model, precision="16-mixed", overflow_steps=(4, 5, 8), checkpointing=SPARSE)
    scripts = one_kill_per_step(setup, offset=int(model == "stacked"), every=2)[2:4]
    lives = campaigns.check_all(setup, scripts)
    assert lives[0][-1].end()["precision/scale"] < 2.0**14, "steps were skipped"


@pytest.mark.parametrize(("precision", "step"), by_precision(3, 8, 6, 7))
def test_an_fp32_gate_with_noise_survives(campaigns: Campaigns, precision: Any, step: int) -> None:
    """A router that runs in fp32 under autocast needs its weights in fp32, and its noise from the restored generator."""
    setup = Setup(precision=precision, checkpointing=SPARSE).with_options(gate_fp32=True, noisy=True)
    campaigns.check(setup, Kill(phase="after_batch_end", step=step))


@pytest.mark.parametrize(("precision", "step"), by_precision(4, 5, 6, 9))
def test_an_expert_that_never_gets_a_token_survives(campaigns: Campaigns, precision: Any, step: int) -> None:
    """It has no optimizer state, which is a state of its own, and no weight seen by the probe of dtypes."""
    setup = Setup(precision=precision, checkpointing=SPARSE).with_options(never_routed=True)
    lives = campaigns.check(setup, Kill(phase="forward", step=step))
    state = [key for key in lives[-1].end() if key.startswith("optimizer/0/state/model.moe.experts.3.")]
    assert state == [], "no expert without tokens has optimizer state"
